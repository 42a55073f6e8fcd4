"""``te::quantize_weights``: all weights of one dtype to FP8, in one call.

    for each weight w_i [R_i, C_i]:   q_i, q_iᵀ, amax_i, scale_inv_i = quantize(w_i)        ops/quantize.py

Weights change once per optimiser step and there are hundreds of them, so one launch for all beats one for each, and one
node on the graph is one place to cache or to recompute. The codes lie in two flat tensors, one for the row-major copies
and one for the transposed, rows padded to 16 as always; a graph cuts each weight's part out as a view. Parts start at
multiples of 16, in the order of the weights, and only what was asked for has one: :func:`places` says where.

A multiplier fills a row of four: cuBLASLt refuses a pointer to a scale that is not a multiple of 16 bytes, and so each
weight's can be read where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.library import define
from te_compile.ops.quantize import padded, quantize_reference
from te_compile.recipe import ScaleRule

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
SCALE_STRIDE = 4  # fp32 elements from one multiplier to the next


def places(lengths: Sequence[int], wanted: Sequence[bool]) -> tuple[list[int | None], int]:
    """Where each part of so many elements starts in a flat tensor, None for one that is not wanted, and its length."""
    starts: list[int | None] = []
    end = 0
    for length, asked in zip(lengths, wanted, strict=True):
        starts.append(end if asked else None)
        end += padded(length) if asked else 0
    return starts, end


def row_places(weights: Sequence[Tensor], rowwise: Sequence[bool]) -> tuple[list[int | None], int]:
    """``places`` of the row-major codes: R · C elements a weight."""
    return places([weight.shape[0] * weight.shape[1] for weight in weights], rowwise)


def column_places(weights: Sequence[Tensor], columnwise: Sequence[bool]) -> tuple[list[int | None], int]:
    """``places`` of the transposed codes: C · ceil16(R) elements a weight."""
    return places([weight.shape[1] * padded(weight.shape[0]) for weight in weights], columnwise)


def _flattened(parts: Sequence[Tensor], starts: Sequence[int | None], length: int, empty: Tensor) -> Tensor:
    """The parts at their places in one tensor, zeros in the gaps."""
    flat = empty.new_zeros(length)
    for part, start in zip(parts, starts, strict=True):
        if start is not None:
            flat[start : start + part.numel()].copy_(part.reshape(-1))
    return flat


@registry.register("quantize_weights", registry.REFERENCE)
def quantize_weights_reference(
    weights: list[Tensor],
    scales: Tensor | None,
    dtype: torch.dtype,
    rowwise: list[bool],
    columnwise: list[bool],
    rule: ScaleRule,
) -> Outputs:
    """See the module. weights: [R_i, C_i] bf16, fp16 or fp32, all of one dtype; scales: fp32 [n].

    Returns codes and transposed codes, flat, of ``dtype``; amax: fp32 [n]; scale_inv: fp32 [n, 4], equal along a row.
    """
    rows, columns, amaxes, multipliers = zip(
        *(
            quantize_reference(weight, None if scales is None else scales[i], dtype, rowwise[i], columnwise[i], rule)
            for i, weight in enumerate(weights)
        ),
        strict=True,
    )
    codes = _flattened(rows, *row_places(weights, rowwise), rows[0])
    transposed = _flattened(columns, *column_places(weights, columnwise), columns[0])
    return codes, transposed, torch.stack(amaxes), torch.stack(multipliers).unsqueeze(1).repeat(1, SCALE_STRIDE)


def _quantize_weights(
    weights: list[Tensor],
    scales: Tensor | None,
    dtype: torch.dtype,
    rowwise: list[bool],
    columnwise: list[bool],
    rule: str,
    implementation: str = registry.REFERENCE,
) -> Outputs:
    function = registry.function_of("quantize_weights", implementation)
    return function(weights, scales, dtype, rowwise, columnwise, ScaleRule.parse(rule))


def _quantize_weights_fake(
    weights: list[Tensor],
    scales: Tensor | None,
    dtype: torch.dtype,
    rowwise: list[bool],
    columnwise: list[bool],
    rule: str,
    implementation: str = registry.REFERENCE,
) -> Outputs:
    like = weights[0]
    amax = like.new_empty(len(weights), dtype=torch.float32)
    codes = like.new_empty(row_places(weights, rowwise)[1], dtype=dtype)
    transposed = like.new_empty(column_places(weights, columnwise)[1], dtype=dtype)
    return codes, transposed, amax, like.new_empty((len(weights), SCALE_STRIDE), dtype=torch.float32)


QUANTIZE_WEIGHTS: Any = define(
    "quantize_weights(Tensor[] weights, Tensor? scales, ScalarType dtype, bool[] rowwise, bool[] columnwise, str rule, "
    'str implementation="reference") -> (Tensor codes, Tensor transposed, Tensor amax, Tensor scale_inv)',
    _quantize_weights,
    _quantize_weights_fake,
)


def copies_of(
    weights: list[Tensor],
    rows: list[Tensor] | None,
    dtype: torch.dtype,
    rowwise: list[bool],
    columnwise: list[bool],
    rule: str,
    snapshot: str,
    implementation: str,
) -> tuple[Tensor, ...]:
    """``te::quantize_weights`` by the scales that stand in ``rows`` of states, [1, 2 + L] each, and these scales, fp32
    [n]; by its own amax if rows is None, and then nothing more.

    snapshot: what runs te::snapshot, which reads them.
    """
    how = dtype, rowwise, columnwise, rule, implementation
    if rows is None:
        return _quantize_weights(weights, None, *how)
    scales = registry.function_of("snapshot", snapshot)(rows)
    return *_quantize_weights(weights, scales, *how), scales
