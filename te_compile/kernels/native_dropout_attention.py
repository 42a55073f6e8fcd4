"""Attention with dropout by the C++ core, on Hopper: the kernels of native_attention.py, told of bits.

What Triton does not let one say is which products run while a program's other instructions do; and the backward pass
makes five products of a tile in place of the seven of kernels/dropout_attention_backward.py. Where every run must give
the same bits, Triton's backward runs. Heads of up to 64 features are left to Triton where keys are few: with 256 keys
it takes a tenth less time on an H200, with 512 as much, with 2048 a seventh more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_compile.kernels import dropout_attention_backward, native_attention
from te_compile.ops.dropout_bits import growth_of


def _constants(probability: float, causal: bool, scale: float, bits: Tensor) -> tuple[int, int, float, Tensor, float]:
    """What native_attention takes behind the tensors of every attention."""
    return -1, 0 if causal else -1, scale, bits, growth_of(probability)


def forward(
    q: Tensor, k: Tensor, v: Tensor, bits: Tensor, probability: float, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """See ``dropout_attention_reference`` in ops/dropout_attention.py. There is at least one query and one key."""
    return native_attention.forward(q, k, v, *_constants(probability, causal, scale, bits))


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bits: Tensor, out: Tensor, logsumexp: Tensor,
    probability: float, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See ``dropout_attention_backward_reference`` in ops/dropout_attention.py."""
    if torch.are_deterministic_algorithms_enabled():
        given = (grad, q, k, v, bits, out, logsumexp, probability, causal, scale)
        return dropout_attention_backward.backward(*given)
    constants = _constants(probability, causal, scale, bits)
    return native_attention.backward(grad, q, k, v, out, logsumexp, *constants)
