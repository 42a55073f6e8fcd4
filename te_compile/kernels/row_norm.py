"""What a norm is to a kernel: its parameters, and in what its kind differs from the others.

The kinds are those of te_compile/ops/norm.py. Does the row's mean go, is the normalised value rounded before the weight
meets it (to the dtype of "x" or "weight"), and what is added to the weight?
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_compile.kernels.quantize import TRITON_DTYPES
from te_compile.ops.norm_quantize import Norm

CENTRED = {"layer"}
ROUNDED_TO = {"rms": "x", "rms_mixed": "weight"}
WEIGHT_OFFSET = {"rms_offset": 1.0}


def rounding_of(kind: str, x: Tensor, weight: Tensor | None) -> torch.dtype | None:
    """The dtype that x · rstd is rounded to before the weight meets it; None where it is not."""
    dtypes = {"x": x.dtype, "weight": None if weight is None else weight.dtype}
    return dtypes.get(ROUNDED_TO.get(kind, ""))


class RowNorm(NamedTuple):
    """What a norm does to rows of K elements.

    weight, bias: [K], contiguous, or None. y_dtype: what it rounds to. rounding: what x · rstd is rounded to before the
    weight meets it; offset: what is added to the weight; centred: does the mean go?
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    y_dtype: torch.dtype
    rounding: torch.dtype | None
    offset: float
    centred: bool

    @staticmethod
    def of(norm: Norm, x: Tensor) -> RowNorm:
        """What ``norm`` does to the rows of ``x``."""
        weight, bias = (None if each is None else each.contiguous() for each in (norm.weight, norm.bias))
        y_dtype, rounding = norm.y_dtype(x.dtype), rounding_of(norm.kind, x, weight)
        return RowNorm(
            weight, bias, norm.eps, y_dtype, rounding, WEIGHT_OFFSET.get(norm.kind, 0.0), norm.kind in CENTRED
        )

    def constants(self) -> dict[str, Any]:
        """The same as constants of a kernel."""
        rounding = None if self.rounding is None else TRITON_DTYPES[self.rounding]
        return {"Y": TRITON_DTYPES[self.y_dtype], "ROUND": rounding, "OFFSET": self.offset, "CENTRE": self.centred}
