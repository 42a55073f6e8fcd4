"""``te::norm_quantize``: a norm and the quantize of its result, in one pass over the data.

    y          = norm(x)                                  ops/norm.py
    q, qt, amax, scale_inv = quantize(y)                  ops/quantize.py

Apart they cost a write and a read of y, which in a pre-norm transformer nobody but the linears reads. ``y`` is returned
when ``emit`` asks for it: a residual or a linear in high precision may use the norm too. The values quantised are those
of y in its own dtype, so merging changes no bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.library import define
from te_compile.ops.norm import LAYER, norm_reference, output_dtype
from te_compile.ops.quantize import padded, quantize_reference
from te_compile.recipe import ScaleRule

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""y, q, qᵀ, amax, 1 / scale, mean and rstd: what was not asked for, and the mean of an rms kind, has shape [0]."""


class Norm(NamedTuple):
    """The norm of rows of K elements: weight and bias [K], or None; ``kind`` and ``eps`` as in ops/norm.py.

    A tuple, as :class:`Wanted` is: a call that is not replayed makes both, and frozen data classes take longer.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    kind: str

    def y_dtype(self, x: torch.dtype) -> torch.dtype:
        """What the norm of rows of dtype ``x`` is rounded to."""
        return output_dtype(x, None if self.weight is None else self.weight.dtype, self.kind)


class Wanted(NamedTuple):
    """What is made of a norm's result y.

    scale: fp32 []; where it is None or 0, ``rule`` makes one of the amax. dtype: of the codes.
    rowwise, columnwise, emit: are q, qᵀ and y itself wanted?
    """

    scale: Tensor | None
    dtype: torch.dtype
    rowwise: bool
    columnwise: bool
    emit: bool
    rule: ScaleRule


@registry.register("norm_quantize", registry.REFERENCE)
def norm_quantize_reference(x: Tensor, norm: Norm, wanted: Wanted) -> Outputs:
    """See the module. x: [M, K]. A result that was not asked for has shape [0]."""
    scale, dtype, rowwise, columnwise, emit, rule = wanted
    y, mean, rstd = norm_reference(x, *norm)
    q, qt, amax, scale_inv = quantize_reference(y, scale, dtype, rowwise, columnwise, rule)
    return (y if emit else y.new_empty(0)), q, qt, amax, scale_inv, mean, rstd


def _norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    scale: Tensor | None,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    emit: bool,
    rule: str,
    implementation: str = registry.REFERENCE,
) -> Outputs:
    wanted = Wanted(scale, dtype, rowwise, columnwise, emit, ScaleRule.parse(rule))
    return registry.function_of("norm_quantize", implementation)(x, Norm(weight, bias, eps, kind), wanted)


def _norm_quantize_fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    scale: Tensor | None,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    emit: bool,
    rule: str,
    implementation: str = registry.REFERENCE,
) -> Outputs:
    rows, columns = x.shape
    y_dtype = output_dtype(x.dtype, None if weight is None else weight.dtype, kind)
    y = x.new_empty((rows, columns) if emit else (0,), dtype=y_dtype)
    q = x.new_empty((rows, columns) if rowwise else (0,), dtype=dtype)
    qt = x.new_empty((columns, padded(rows)) if columnwise else (0,), dtype=dtype)
    amax, scale_inv = (x.new_empty((), dtype=torch.float32) for _ in range(2))
    mean = x.new_empty((rows, 1) if kind == LAYER else (0,), dtype=torch.float32)
    return y, q, qt, amax, scale_inv, mean, x.new_empty((rows, 1), dtype=torch.float32)


NORM_QUANTIZE = define(
    "norm_quantize(Tensor x, Tensor? weight, Tensor? bias, float eps, str kind, Tensor? scale, ScalarType dtype, "
    'bool rowwise, bool columnwise, bool emit, str rule, str implementation="reference") '
    "-> (Tensor y, Tensor q, Tensor qt, Tensor amax, Tensor scale_inv, Tensor mean, Tensor rstd)",
    _norm_quantize,
    _norm_quantize_fake,
)
