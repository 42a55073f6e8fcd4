"""FP8 attention in fp64, and how far a computation in fp32 or on tensor cores may lie from it.

Written from the formulas of docs/numerics.md, with nothing of te_compile's own arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Sizes:
    """B, Sq, Sk, H, Hk and D."""

    batch: int
    queries: int
    keys: int
    heads: int
    shared: int
    width: int


@dataclass(frozen=True)
class Operands:
    """What ``te::fp8_attention`` reads: codes in its layouts, and the three scale_inv."""

    q: Tensor
    k: Tensor
    vt: Tensor
    scales: tuple[Tensor, Tensor, Tensor]

    def all(self) -> tuple[Tensor, ...]:
        """In the order of the operator's arguments."""
        return self.q, self.k, self.vt, *self.scales


def drawn(sizes: Sizes, device: str = "cpu", spread: float = 2.0, rising: bool = False) -> Operands:
    """Random codes; scores have about ``spread`` for their deviation, and later keys higher ones if ``rising``.

    What follows the values of the last key in ``vt`` is NaN: nothing may be read of it, as of another batch's values.
    """
    b, sq, sk, h, hk, d = vars(sizes).values()
    q, k, v = (torch.randn(shape, device=device) for shape in ((b, sq, h, d), (b, sk, hk, d), (hk * d, b * sk)))
    if rising:
        q, k = q.abs(), k.abs() * torch.linspace(0.1, 2, sk, device=device)[:, None, None]
    vt = torch.full((hk * d, (b * sk + 15) // 16 * 16), torch.nan, device=device)
    vt[:, : b * sk] = v
    scales = torch.rand(3, device=device) + 0.5
    scales[0] = spread / scales[1] / 16  # codes below are 4 · x
    q_scale_inv, k_scale_inv, v_scale_inv = scales.unbind()
    return Operands(*((4 * x).to(E4M3) for x in (q, k, vt)), (q_scale_inv, k_scale_inv, v_scale_inv))


@dataclass(frozen=True)
class Expected:
    """The result in fp64 [B, Sq, H, D], the logarithms of sums [B, H, Sq], and what each may be off by."""

    out: Tensor
    out_limit: Tensor
    logsumexp: Tensor
    logsumexp_limit: Tensor


def _per_query_head(x: Tensor, heads: int) -> Tensor:
    """[B, S, Hk, D] → [B, H, S, D]."""
    return x.double().permute(0, 2, 1, 3).repeat_interleave(heads // x.shape[2], 1)


def expected(operands: Operands, sizes: Sizes, causal: bool, scale: float, out_dtype: torch.dtype) -> Expected:
    """The definition and its limits.

    A score is off by a little, and with it p by a factor; codes may then be any between those of the smallest and of
    the largest p. Codes of p below the normal E4M3 numbers may be rounded at twice the scale or at any finer one. The
    maximum that sets the scale may fall on either side of a whole number. Sums are off as sums in fp32 are; tensor
    cores line products up with the largest of them and drop what lies below some 2^-13 of it.
    """
    is_cuda = operands.q.is_cuda
    factor = math.log2(math.e) * scale * float(operands.scales[0].double() * operands.scales[1].double())
    q, k = (_per_query_head(x, sizes.heads) for x in (operands.q, operands.k))
    rows = operands.vt[:, : sizes.batch * sizes.keys].t().reshape(sizes.batch, sizes.keys, sizes.shared, sizes.width)
    v = _per_query_head(rows, sizes.heads)
    scores, magnitudes = q @ k.mT * factor, (q.abs() @ k.abs().mT) * abs(factor)
    if causal:
        hidden = torch.ones(sizes.queries, sizes.keys, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    off = magnitudes * (2.0**-10 if is_cuda else (sizes.width + 4) * 2.0**-24) + 2.0**-20
    m = scores.amax(-1, keepdim=True).ceil()
    p = torch.exp2(scores - m + 8)
    codes, low, high = ((p * torch.exp2(shift)).float().to(E4M3).double() for shift in (0 * off, -off, off))
    loose = (high - low) + 2.0**-8 * ((p < 2.0**-5) & (p > 0))
    total = p.sum(-1, keepdim=True)
    total_off = (p * (torch.exp2(off) - 1)).sum(-1, keepdim=True) / total + sizes.keys * 2.0**-24
    summing = (2.0**-10 if is_cuda else 0.0) + 2 * sizes.keys * 2.0**-24
    v_scale = operands.scales[2].double()
    out = codes @ v / total * v_scale
    limit = (loose @ v.abs() + summing * (high @ v.abs())) / total * v_scale
    limit = (limit + out.abs() * total_off) * (1 + total_off) + torch.finfo(out_dtype).eps * out.abs() + 1e-7
    logsumexp = (math.log(2) * (m - 8 + total.log2())).squeeze(-1)
    logsumexp_limit = total_off.squeeze(-1) + 2.0**-22 * (1 + logsumexp.abs() + m.squeeze(-1).abs())
    return Expected(out.permute(0, 2, 1, 3), limit.permute(0, 2, 1, 3), logsumexp, logsumexp_limit)


def looseness(wanted: Expected) -> float:
    """The limits as a share of the result. It is the draw's, whoever computes."""
    return float(wanted.out_limit.norm() / wanted.out.norm())


def assert_is(got: tuple[Tensor, Tensor], wanted: Expected, most_loose: float) -> None:
    """Within the limits, which themselves must be no more than ``most_loose`` of the result."""
    out, logsumexp = got
    assert out.shape == wanted.out.shape and out.is_contiguous()
    assert logsumexp.shape == wanted.logsumexp.shape and logsumexp.dtype == torch.float32
    assert looseness(wanted) <= most_loose
    assert bool(((out.double() - wanted.out).abs() <= wanted.out_limit).all())
    assert bool(((logsumexp.double() - wanted.logsumexp).abs() <= wanted.logsumexp_limit).all())
