"""What tests of attention with dropout share: operands, and the definition in fp64 by autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from te_compile.ops.dropout_bits import kept_share, unpacked


@dataclass(frozen=True)
class Sizes:
    """Batch, queries, keys, heads and features of an attention."""

    batch: int
    queries: int
    keys: int
    heads: int
    width: int


@dataclass(frozen=True)
class Operands:
    """q, k, v and the gradient of the result, [B, S, H, D] each."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor


def drawn(sizes: Sizes, device: str, dtype: torch.dtype, packed: bool = False, shift: float = 0.0) -> Operands:
    """Random operands; ``packed``: q, k and v as views of what one projection writes, where they are as long.

    shift: added to the queries, and taken from the keys, so that all scores are far below 0, and about as far: where
    one key had all the weight, queries would have no gradient to compare.
    """
    of_queries = (sizes.batch, sizes.queries, sizes.heads, sizes.width)
    of_keys = (sizes.batch, sizes.keys, sizes.heads, sizes.width)
    q, k, v, grad = (torch.randn(shape, device=device) for shape in (of_queries, of_keys, of_keys, of_queries))
    if shift:
        q, k = (x - x.mean(3, keepdim=True) + sign * shift for x, sign in ((q, 1), (k, -1)))
    if packed:
        q, k, v = torch.stack([q, k, v], 3).to(dtype).unbind(3)
    return Operands(q.to(dtype), k.to(dtype), v.to(dtype), grad.to(dtype))


def expected(
    operands: Operands, bits: Tensor, probability: float, causal: bool, scale: float
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The result, logsumexp and the gradients of q, k and v, in fp64."""
    q, k, v = (x.double().transpose(1, 2).detach().requires_grad_() for x in (operands.q, operands.k, operands.v))
    scores = q @ k.transpose(2, 3) * scale
    if causal:
        hidden = torch.ones(scores.shape[2:], device=scores.device).triu(1).bool()
        scores = scores.masked_fill(hidden, -torch.inf)
    keep = unpacked(bits, k.shape[2]).view(scores.shape)
    out = (scores.softmax(3) * keep * (65536 / kept_share(probability))) @ v
    gradients = torch.autograd.grad(out, (q, k, v), operands.grad.double().transpose(1, 2))
    return out.transpose(1, 2).detach(), scores.logsumexp(3).detach(), [x.transpose(1, 2) for x in gradients]
