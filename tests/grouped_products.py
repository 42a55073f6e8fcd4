"""Operands of experts' products on a GPU, and how far a tensor core's results may lie from the reference."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = [(4096, 2048, 1536, 8), (4096, 1536, 2048, 64), (1000, 272, 144, 5), (33, 16, 16, 3)]
"""Rows, K, N, experts."""

# Relative errors of whole results. Hopper's accumulator keeps 14 bits and cuts the rest off, once an instruction of 32
# products; at worst all cuts add up. "split" promotes after 128 products: 4 cuts, 2^-12, and twice that is allowed
# for the sums after them. "fast" makes 64 cuts at K = 2048: 2^-8. bf16 rounds by 2^-9 at most.
LIMITS = {"split": 2.0**-11, "fast": 2.0**-8}
BF16 = 2.0**-9


def number(value: float) -> Tensor:
    return torch.tensor(value, device="cuda")


def codes(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.randn(shape, device="cuda").mul_(8).to(dtype)


def drawn_ends(rows: int, experts: int, rest: int) -> Tensor:
    """Few experts get most of the tokens, one gets none, and ``rest`` rows belong to nobody."""
    shares = torch.rand(experts, device="cuda") ** 4
    shares[torch.randint(experts, ())] = 0
    ends = (shares.cumsum(0) / shares.sum() * (rows - rest)).int().clamp(max=rows - rest)
    ends[-1] = rows - rest
    return ends


def experts_of(columns: int, length: int, experts: int, as_columns: bool, dtype: torch.dtype = E4M3) -> Tensor:
    """[E, N, K], as a view of the weight's codes as stored, or of its transposed copy."""
    if as_columns:
        return codes(columns, experts * length, dtype=dtype).unflatten(1, (experts, -1)).transpose(0, 1)
    return codes(experts, columns, length, dtype=dtype)
