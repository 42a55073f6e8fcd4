"""Rows that repeat as one: layers that differ in nothing but the numbers in their names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from te_compile.inspect.attentions import AttentionRow
    from te_compile.inspect.report import Row

    AnyRow = TypeVar("AnyRow", Row, AttentionRow)

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole component of a dotted name


def folded(rows: Sequence[AnyRow]) -> Iterator[tuple[str, int, AnyRow]]:
    """(name, how many, one of them), in the order in which each first occurs."""
    groups: dict[tuple[str, AnyRow], list[AnyRow]] = {}
    for row in rows:
        groups.setdefault((_NUMBER.sub("*", row.name), replace(row, name="")), []).append(row)
    for (mask, _), members in groups.items():
        yield from _of_group(mask, members)


def _of_group(mask: str, rows: list[AnyRow]) -> Iterator[tuple[str, int, AnyRow]]:
    """One line if the numbers of ``rows`` are all combinations of some ranges, else a line for each name."""
    names: dict[str, list[AnyRow]] = {}
    for row in rows:
        names.setdefault(row.name, []).append(row)
    if len(names) == 1:
        yield rows[0].name, len(rows), rows[0]
        return
    numbers = [tuple(map(int, _NUMBER.findall(name))) for name in names]
    positions = [sorted(set(values)) for values in zip(*numbers, strict=True)]
    ranges = [_range_text(values) for values in positions]
    # Each is one of the combinations, so as many as there are of those are all of them.
    if None in ranges or math.prod(map(len, positions)) != len(set(numbers)):
        for name, of_name in names.items():
            yield name, len(of_name), of_name[0]
        return
    remaining = iter(ranges)
    parts = (next(remaining) if part == "*" else part for part in mask.split("."))
    yield ".".join(map(str, parts)), len(rows), rows[0]


def _range_text(values: list[int]) -> str | None:
    """``3``, ``0–11`` or ``0,2–11``; None for what no short text says."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    two = len(runs) > 1  # of several runs, one of two numbers is no range: 0,1,3,5
    parts = [part for run in runs for part in (map(str, run) if two and len(run) == 2 else [_run_text(run)])]
    return ",".join(parts) if len(parts) <= 6 else None


def _run_text(run: list[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}"
