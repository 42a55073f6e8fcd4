"""``te_compile.stats``: is the scaling healthy?

Two kinds of figures. What delayed scaling remembers costs a copy of a few numbers and no model run: amax, scale,
headroom and skipped amaxes of every x, w and gradient; and of the weights, which are at hand, how quantising them errs.
Given an example call, one step runs beside the real ones and every tensor that is quantised is measured:
``te_compile.inspect.measurement``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from te_compile.ops.quantize import amax_reference, cast_reference

MEASURED = ("elements", "nonzero", "underflow", "overflow", "error", "power")
"""What :func:`figures` adds up, in its order: counts and sums of squares, so that several tensors add up, too."""


@dataclass(frozen=True)
class TensorStatistics:
    """One tensor that is quantised. What is not known is None.

    name, role: the weight's name in the model, and which of its linear's tensors: "x", "w" or "gradient".
    amax: the largest magnitude, in the last step or in what was measured; scale: what multiplies the tensor.
    headroom: by how many powers of two the amax may still grow before it saturates; well below 0 it does.
    skipped: how many amaxes were not finite so far and never entered the history.
    elements: how many numbers were measured. underflow: the share of the nonzero ones that became 0.
    overflow: the share of all that saturating cuts by more than rounding would.
    relative_error: mean squared error over mean square; sqnr: the same in decibels, None where nothing was lost.
    """

    name: str
    role: str
    amax: float | None
    scale: float | None
    headroom: float | None
    skipped: int
    elements: int = 0
    underflow: float | None = None
    overflow: float | None = None
    relative_error: float | None = None
    sqnr: float | None = None


@dataclass(frozen=True)
class Statistics:
    """What :func:`te_compile.stats` found: ``rows``, whether a step was ``measured``, and ``notes``."""

    rows: tuple[TensorStatistics, ...]
    recipe: str
    measured: bool = False
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(_text(self))

    def to_json(self) -> str:
        """Everything as JSON."""
        return json.dumps(asdict(self), indent=1)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw headroom, error and underflow of every tensor into an image or PDF. Needs matplotlib: ImportError."""
        from te_compile.inspect.plot import draw

        draw(self, path)


# --- measuring one tensor ------------------------------------------------------------------------------------------


def figures(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What quantising ``x`` with ``scale`` loses: fp64 [1 + 6], the amax and ``MEASURED``; on x's device, no waiting.

    x: any shape, bf16, fp16 or fp32. Only finite values count: what is not cannot be quantised.
    """
    with torch.no_grad():
        value = x.detach().float()
        finite = value.isfinite()
        value = torch.where(finite, value, 0.0)
        back = cast_reference(value, scale, dtype).float() / scale
        nonzero = value != 0
        found = (
            finite.sum(),
            nonzero.sum(),
            (nonzero & (back == 0)).sum(),
            (value.abs() * scale >= _first_lost(dtype)).sum(),
            (back - value).square().sum(dtype=torch.float64),
            value.square().sum(dtype=torch.float64),
        )
        return torch.stack([each.double() for each in (amax_reference(value), *found)])


def _first_lost(dtype: torch.dtype) -> float:
    """Where saturating starts to lose more than rounding: half a step above the largest number."""
    information = torch.finfo(dtype)
    step = information.eps * 2.0 ** math.floor(math.log2(information.max))
    return information.max + step / 2


def summed(several: Sequence[Tensor]) -> Tensor:
    """The figures of several tensors as of one."""
    every = torch.stack(list(several))
    return torch.cat([every[:, :1].amax(0), every[:, 1:].sum(0)])


def statistics_of(
    name: str, role: str, scale: float | None, fp8_max: float, skipped: int, amax: float | None, found: Tensor | None
) -> TensorStatistics:
    """One row; ``found`` is what :func:`figures` returned, if the tensor was measured, and its amax then counts."""
    measured: dict[str, Any] = {}
    if found is not None:
        amax, *values = found.tolist()
        measured = _shares(dict(zip(MEASURED, values, strict=True)))
    scale = scale if scale and math.isfinite(scale) else None
    known = scale is not None and amax is not None and amax > 0
    headroom = math.log2(fp8_max / (amax * scale)) if known and amax is not None and scale is not None else None
    return TensorStatistics(name, role, amax, scale, headroom, skipped, **measured)


def _shares(sums: dict[str, float]) -> dict[str, Any]:
    elements, nonzero = int(sums["elements"]), int(sums["nonzero"])
    error = sums["error"] / sums["power"] if sums["power"] else 0.0
    return {
        "elements": elements,
        "underflow": sums["underflow"] / nonzero if nonzero else 0.0,
        "overflow": sums["overflow"] / elements if elements else 0.0,
        "relative_error": error,
        "sqnr": -10 * math.log10(error) if error else None,
    }


# --- as text -------------------------------------------------------------------------------------------------------

_HEADINGS = ("tensor", "", "amax", "scale", "headroom", "skipped", "underflow", "overflow", "SQNR")


def _text(statistics: Statistics) -> Iterator[str]:
    what = "from the FP8 state; weights measured" if statistics.rows else "nothing known"
    what = "a step measured beside the real ones" if statistics.measured else what
    yield f"te_fp8 statistics, recipe {statistics.recipe}: {what}"
    table = [_HEADINGS, *map(_cells, statistics.rows)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(_HEADINGS))]
    for cells in table:
        first, second, *numbers = (
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        yield "  ".join([first, second, *numbers]).rstrip()
    for note in statistics.notes:
        yield f"note: {note}"


def _cells(row: TensorStatistics) -> tuple[str, ...]:
    return (
        row.name,
        row.role,
        _number(row.amax, ".3g"),
        _number(row.scale, ".3g"),
        _number(row.headroom, "+.1f", " bit"),
        str(row.skipped) if row.skipped else "",
        _share(row.underflow),
        _share(row.overflow),
        _number(row.sqnr, ".1f", " dB"),
    )


def _number(value: float | None, form: str, unit: str = "") -> str:
    if value is None:
        return "–"
    text = f"{value:{form}}"
    return (text.replace("-", "+") if text.strip("-+0.") == "" else text) + unit


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2g}%"
