"""``te::gemms``: several FP8 products that read one first operand, as those of q, k and v do, in one launch.

    y_i[M, N_i] = (a[M, K] · b_i[N_i, K]ᵀ) · a_scale_inv · b_scale_inv_i + bias_i[N_i]

Each is the ``te::gemm`` of its operands, with a scale of its own for its weight. With few rows a product takes what
reading its weight takes, and beside that what it costs to start and to end a launch, which these pay once.
``label`` has those of the products, in order (:func:`joined`). A pass makes it (passes/join_products.py), where a
kernel runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.gemm import gemm_reference
from te_compile.ops.library import define

AT_ONCE = 4
"""Products that one launch makes: TE_SKINNY_PARTS of csrc/include/te_compile.h."""
_BETWEEN = " | "


def joined(labels: Sequence[str]) -> str:
    """The labels of products as ``te::gemms`` takes them."""
    return _BETWEEN.join(labels)


def labels_in(label: str) -> list[str]:
    """The labels of the products that a label names: of a ``te::gemm`` one."""
    return label.split(_BETWEEN)


@registry.register("gemms", registry.REFERENCE)
def gemms_reference(
    a: Tensor,
    b: Sequence[Tensor],
    a_scale_inv: Tensor,
    b_scale_inv: Sequence[Tensor],
    bias: Sequence[Tensor | None],
    out_dtype: torch.dtype,
    accumulation: str,
) -> list[Tensor]:
    """See the module. a: [M, K], each b: [N, K] FP8; scales: [] fp32; results: [M, N] of ``out_dtype``."""
    parts = zip(b, b_scale_inv, bias, strict=True)
    return [gemm_reference(a, each, a_scale_inv, scale, added, out_dtype, accumulation) for each, scale, added in parts]


def _gemms(
    a: Tensor,
    b: list[Tensor],
    a_scale_inv: Tensor,
    b_scale_inv: list[Tensor],
    bias: list[Tensor | None],
    out_dtype: torch.dtype,
    accumulation: str,
    label: str,
    implementation: str = registry.REFERENCE,
) -> list[Tensor]:
    function = registry.function_of("gemms", implementation)
    made: list[Tensor] = function(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, accumulation)
    return made


def _mismatch(a: Tensor, b: Tensor, label: str) -> str:
    return f"te::gemms contracts {a.shape[1]} with {b.shape[1]} ({label})"


def _gemms_fake(
    a: Tensor,
    b: list[Tensor],
    a_scale_inv: Tensor,
    b_scale_inv: list[Tensor],
    bias: list[Tensor | None],
    out_dtype: torch.dtype,
    accumulation: str,
    label: str,
    implementation: str = registry.REFERENCE,
) -> list[Tensor]:
    for each in b:
        torch._check(a.shape[1] == each.shape[1], partial(_mismatch, a, each, label))
    return [a.new_empty((a.shape[0], each.shape[0]), dtype=out_dtype) for each in b]


GEMMS = define(
    "gemms(Tensor a, Tensor[] b, Tensor a_scale_inv, Tensor[] b_scale_inv, Tensor?[] bias, ScalarType out_dtype, "
    'str accumulation, str label, str implementation="reference") -> Tensor[]',
    _gemms,
    _gemms_fake,
)
