"""Masks of attention that are built from positions, for x [B, S, …], up to [B, 1, S, S], and what is proved of one."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from te_compile.passes.plain_operators import plain_operators
from te_compile.passes.prove_masks import proven_meaning
from tests.capturing import captured

Mask = Callable[[Tensor], Tensor]


def grid(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Indices of batch [B, 1, 1, 1], queries [1, 1, S, 1] and keys [1, 1, 1, S]."""
    batch, at = torch.arange(x.shape[0]), torch.arange(x.shape[1])
    return batch[:, None, None, None], (at + 0)[None, None, :, None], at[None, None, None, :]


def causal(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return (k <= q).expand(x.shape[0], -1, -1, -1)


def filled_triangle(x: Tensor) -> Tensor:
    return torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(diagonal=1)


def everything(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return (q >= 0).expand(-1, -1, -1, x.shape[1]) & (k > -1)


def one_later(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return k <= q + 1


def window(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return (k <= q) & (k > q - 4)


def by_batch(x: Tensor) -> Tensor:
    batch, q, k = grid(x)
    return (k <= q) & (k >= batch)


def from_data(x: Tensor) -> Tensor:
    return causal(x) & (x[:, None, None, :, 0] < 1e9)


def upper_triangle(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu()


def all_but_a_window(x: Tensor) -> Tensor:
    """Before it or behind it, an alternative."""
    _, q, k = grid(x)
    return ~((k <= q) & (k > q - 3))


def attention_mask(mask: Mask, dynamic: bool, queries: int | None = None) -> Node:
    """The mask of the one attention of a graph; ``queries``: how many of the last there are."""

    def run(x: Tensor) -> Tensor:
        k = x[:, None]
        q = k if queries is None else k[:, :, -queries:]
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask(x))

    x = torch.randn(2, 12, 8)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
    gm, _ = captured(run, x)
    plain_operators(gm.graph)  # as in the pipeline
    (attention,) = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    found = attention.kwargs["attn_mask"]
    assert isinstance(found, Node)
    return found


def proof(mask: Mask, dynamic: bool, queries: int | None = None) -> str | None:
    """What the mask is proved to mean."""
    return proven_meaning(attention_mask(mask, dynamic, queries))
