"""``te::dropout_mask`` and ``te::dropout``: which elements an ordinary dropout keeps, 32 drawn at a time.

The bits are those of ops/dropout_bits.py, on with the probability ``nearest_share(p)`` / 2¹⁶. The mask has a byte for
each element, True for one that is kept, because that is what pointwise kernels read. A thread draws a word and writes
its bits as two pieces of 16 bytes, each beside its neighbours', so that nothing is exchanged: of the elements in the
order of a contiguous tensor, number 1024 g + 512 h + 16 l + e, with h < 2, l < 32 and e < 16, has

    word 32 g + l        bit 16 h + e

``te::dropout`` is a composite: after AOTAutograd the joint graph holds a seed that PyTorch's generator draws, the mask
that is drawn from it, and products, which fuse as any do. The mask is all that is saved for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.dropout_attention import SEEDS
from te_compile.ops.dropout_bits import PLACES, drawn, nearest_share
from te_compile.ops.library import define, define_composite

LANES = 32  # words whose elements lie among each other
GROUP = 32 * LANES  # elements of these
PIECE = 16  # elements that a word has side by side


@registry.register("dropout_mask", registry.REFERENCE)
def dropout_mask_reference(seed: Tensor, size: Sequence[int], probability: float) -> Tensor:
    """See the module. seed: int64 [1]; probability: of dropping. Returns bool of this size, contiguous."""
    count = math.prod(size)
    words = drawn(seed, -(-count // GROUP) * LANES, nearest_share(probability))
    element = torch.arange(count, device=seed.device)
    word = element // GROUP * LANES + element % (GROUP // 2) // PIECE
    bit = element % GROUP // (GROUP // 2) * PIECE + element % PIECE
    return (words[word] >> bit & 1).bool().view(tuple(size))


def _dropout_mask(
    seed: Tensor, size: Sequence[int], probability: float, implementation: str = registry.REFERENCE
) -> Tensor:
    return registry.function_of("dropout_mask", implementation)(seed, size, probability)


def _dropout_mask_fake(seed: Tensor, size: Sequence[int], *_: Any, **__: Any) -> Tensor:
    return seed.new_empty(size, dtype=torch.bool)


DROPOUT_MASK = define(
    'dropout_mask(Tensor seed, SymInt[] size, float probability, str implementation="reference") -> Tensor',
    _dropout_mask,
    _dropout_mask_fake,
)


class _Dropout(torch.autograd.Function):
    """The same formula both ways, in operators of the joint graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probability: float) -> Tensor:
        seed = torch.randint(SEEDS, (1,), device=x.device)
        mask = DROPOUT_MASK(seed, x.shape, probability)
        ctx.save_for_backward(mask)
        ctx.growth = 2**PLACES / nearest_share(probability)
        return x * mask * ctx.growth

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return grad * mask * ctx.growth, None


def dropout(x: Tensor, probability: float) -> Tensor:
    """x with elements dropped, and the others grown so that the expectation stays. probability: one of dropping that
    ``nearest_share`` knows from 0 and 1."""
    result: Tensor = _Dropout.apply(x, probability)
    return result


DROPOUT = define_composite("dropout(Tensor x, float probability) -> Tensor", dropout)
