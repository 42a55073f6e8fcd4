"""What a pass changed in a graph, as the lines that differ and a few around them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

CONTEXT = 3  # unchanged lines shown around a change


@dataclass(frozen=True)
class Change:
    """One line of a comparison. mark: "-" only before, "+" only after, " " in both, "@" stands for lines left out."""

    mark: str
    text: str


def changes(before: str, after: str) -> list[Change]:
    """A unified comparison of two graphs; empty where they are equal."""
    if before == after:
        return []
    old, new = before.splitlines(), after.splitlines()
    return list(_lines(_steps(old, new), old, new))


def counts(found: list[Change]) -> tuple[int, int]:
    """(lines added, lines removed)."""
    return sum(each.mark == "+" for each in found), sum(each.mark == "-" for each in found)


_Step = tuple[str, int, int, int, int]


def _steps(old: list[str], new: list[str]) -> list[_Step]:
    """What to do to lines a to b of ``old``, to have lines c to d of ``new``, from the first line to the last.

    Passes change a place or two of every layer, and a matcher that sees the whole looks at all of it for each. Nearly
    all lines of a graph are the only ones of their kind, so it is asked about what lies between those.
    """
    steps: list[_Step] = []
    a = c = 0
    for i, j in [*_anchors(old, new), (len(old), len(new))]:
        if a < i or c < j:
            between = SequenceMatcher(None, old[a:i], new[c:j], autojunk=False).get_opcodes()
            steps += [(tag, start + a, end + a, first + c, last + c) for tag, start, end, first, last in between]
        steps.append(("equal", i, min(i + 1, len(old)), j, min(j + 1, len(new))))
        a, c = i + 1, j + 1
    joined: list[_Step] = []
    for step in steps:
        if joined and joined[-1][0] == step[0] == "equal":
            joined[-1] = ("equal", joined[-1][1], step[2], joined[-1][3], step[4])
        elif step[1] < step[2] or step[3] < step[4]:
            joined.append(step)
    return joined


def _anchors(old: list[str], new: list[str]) -> list[tuple[int, int]]:
    """Where the lines that both texts have once stand in each: as many as come in the same order in both."""
    in_old, in_new = Counter(old), Counter(new)
    places = {line: j for j, line in enumerate(new) if in_new[line] == in_old[line] == 1}
    pairs = [(i, places[line]) for i, line in enumerate(old) if line in places]
    # The longest rising sequence: for each length the pair that ends lowest, and for each pair the one before it.
    lowest: list[int] = []
    ending: list[int] = []
    before: list[int | None] = []
    for index, (_, j) in enumerate(pairs):
        length = bisect_left(lowest, j)
        lowest[length : length + 1], ending[length : length + 1] = [j], [index]
        before.append(ending[length - 1] if length else None)
    chain, last = [], ending[-1] if ending else None
    while last is not None:
        chain.append(pairs[last])
        last = before[last]
    return chain[::-1]


def _lines(steps: list[_Step], old: list[str], new: list[str]) -> Iterator[Change]:
    for index, (tag, a, b, c, d) in enumerate(steps):
        if tag == "equal":
            head = 0 if index == 0 else CONTEXT
            tail = 0 if index == len(steps) - 1 else CONTEXT
            left_out = b - a - head - tail
            if left_out > 1:
                yield from (Change(" ", text) for text in old[a : a + head])
                yield Change("@", f"{left_out} lines")
                yield from (Change(" ", text) for text in old[b - tail : b])
            else:
                yield from (Change(" ", text) for text in old[a:b])
        else:
            yield from (Change("-", text) for text in old[a:b])
            yield from (Change("+", text) for text in new[c:d])
