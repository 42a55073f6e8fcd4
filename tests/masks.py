"""Boolean masks as models have them, [M, Sq, Sk], drawn anew."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("padded", "left", "packed", "random", "all", "nothing", "shared", "one query sees nothing", "prefix")


def drawn_mask(kind: str, batch: int, queries: int, keys: int, device: str) -> Tensor:
    """One of ``KINDS``; "shared" has M = 1 and is expanded from a row for all queries."""
    query, key = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
    causal = key <= query
    ends = torch.randint(1, keys + 1, (batch, 1, 1), device=device)
    if kind == "padded":
        return causal & (key < ends)
    if kind == "left":
        return causal & (key >= ends - 1)
    if kind == "packed":
        documents = [torch.randint(0, 2, (batch, size), device=device).cumsum(1) // 20 for size in (queries, keys)]
        return causal & (documents[0][:, :, None] == documents[1][:, None])
    if kind == "prefix":
        return causal | (key < ends)
    if kind == "shared":
        return (torch.rand(1, 1, keys, device=device) < 0.5).expand(1, queries, keys)
    if kind in ("all", "nothing"):
        return torch.full((batch, queries, keys), kind == "all", device=device)
    mask = torch.rand(batch, queries, keys, device=device) < 0.3
    if kind == "one query sees nothing":
        mask[:, queries // 2] = False
    return mask
