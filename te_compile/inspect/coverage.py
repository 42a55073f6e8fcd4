"""Where the FLOPs of a model's linears run: the shares that a coverage bar draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from te_compile.inspect.report import Row

KINDS = {
    "fp8": "in FP8",
    "unsupported": "not supported",
    "rule": "kept by a rule that protects quality or speed",
    "user": "kept on your request",
}
"""What becomes of a linear, in the order of the bar, in words for its legend."""


@dataclass(frozen=True)
class Share:
    """All linears of one kind: how many, their forward FLOPs, and that as a fraction of all linears'."""

    kind: str
    count: int
    flops: int
    fraction: float


def kind_of(row: Row) -> str:
    """One of ``KINDS``; a kept row that does not say its cause counts as not supported."""
    return "fp8" if row.status == "fp8" else row.cause or "unsupported"


def shares(rows: Sequence[Row]) -> list[Share]:
    """The kinds that occur in ``rows``."""
    total = sum(row.flops for row in rows)
    found = []
    for kind in KINDS:
        members = [row for row in rows if kind_of(row) == kind]
        flops = sum(row.flops for row in members)
        if members:
            found.append(Share(kind, len(members), flops, flops / total if total else 0.0))
    return found


def flops_text(flops: float) -> str:
    """``1.5 GFLOP``."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if flops >= size:
            return f"{flops / size:.3g} {unit}FLOP"
    return f"{flops:.0f} FLOP"


def percent(fraction: float) -> str:
    """``12.3%``; what is not all or nothing is never rounded to either."""
    shown = f"{100 * fraction:.1f}"
    if shown == "100.0" and fraction < 1:
        shown = "99.9"
    if shown == "0.0" and fraction > 0:
        return "<0.1%"
    return f"{shown}%"
