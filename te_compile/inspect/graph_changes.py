"""What a pass changed in a graph, as the lines that differ and a few around them."""

from __future__ import annotations

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
    start = _common(old, new)
    end = _common(old[start:][::-1], new[start:][::-1])
    # Passes change a place or two: without what is equal at both ends there is little left to match.
    matcher = SequenceMatcher(None, old[start : len(old) - end], new[start : len(new) - end], autojunk=False)
    whole = [(tag, a + start, b + start, c + start, d + start) for tag, a, b, c, d in matcher.get_opcodes()]
    whole.insert(0, ("equal", 0, start, 0, start))
    whole.append(("equal", len(old) - end, len(old), len(new) - end, len(new)))
    return list(_lines([each for each in whole if each[1] < each[2] or each[3] < each[4]], old, new))


def counts(found: list[Change]) -> tuple[int, int]:
    """(lines added, lines removed)."""
    return sum(each.mark == "+" for each in found), sum(each.mark == "-" for each in found)


def _common(old: list[str], new: list[str]) -> int:
    """How many lines two texts have in common at their start."""
    length = min(len(old), len(new))
    return next((i for i in range(length) if old[i] != new[i]), length)


_Step = tuple[str, int, int, int, int]


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
