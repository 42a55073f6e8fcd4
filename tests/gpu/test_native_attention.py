"""Attention by the C++ core's kernels, of all keys, causal and in windows: against its definition, and who runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_compile.kernels import native
from te_compile.kernels.native_attention import backward, forward
from te_compile.ops import native_implementations
from te_compile.ops.window_attention import (
    window_attention_backward_flash,
    window_attention_backward_reference,
    window_attention_reference,
)
from te_compile.passes import manager
from tests.compiling import compiled, relative_error
from tests.needs import HOPPER_CORE

pytestmark = [
    HOPPER_CORE,
    pytest.mark.usefixtures("fresh_dynamo"),
]
CLOSE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
SIGHTS = [
    (-1, -1),
    (-1, 0),
    (100, 0),
    (128, 0),
    (1, 0),
    (0, 0),
    (64, 64),
    (5, 300),
    (300, -1),
    (-1, 40),
    (10000, 10000),
]


def drawn(
    length: int, heads: int, key_heads: int, width: int, dtype: torch.dtype, packed: bool = False
) -> list[Tensor]:
    """q, k, v and the gradient of the result, [2, S, H, D]; packed: as parts of what one projection writes."""
    counts = (heads, key_heads, key_heads, heads)
    if packed:
        return [*torch.randn(2, length, sum(counts), width, device="cuda", dtype=dtype).split(counts, 2)]
    return [torch.randn(2, length, count, width, device="cuda", dtype=dtype) for count in counts]


def assert_close_by_columns(got: Tensor, wanted: Tensor, bound: float) -> None:
    assert got.is_contiguous() and got.dtype == wanted.dtype and got.shape == wanted.shape
    assert relative_error(got, wanted) < bound
    norms = wanted.float().norm(dim=(0, 1))
    columns = (got.float() - wanted.float()).norm(dim=(0, 1)) / norms
    assert columns[norms > 0.1 * norms.mean()].max() < 3 * bound


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(("left", "right"), SIGHTS)
@pytest.mark.parametrize(
    ("length", "heads", "key_heads", "width"),
    [
        (128, 3, 3, 128),
        (384, 4, 2, 96),
        (577, 6, 1, 128),
        (1000, 2, 2, 72),
        (70, 2, 1, 128),
        (1, 2, 2, 128),
        (384, 3, 3, 64),  # by blocks of 192 queries, and of 128 where many of 192 are not there
        (577, 6, 2, 64),
        (1000, 2, 1, 48),
        (197, 4, 4, 40),
        (1, 2, 2, 64),
        (200, 96, 96, 64),  # more heads than there are blocks
        (300, 128, 32, 64),
        (130, 140, 70, 96),
    ],
)
def test_both_passes_compute_the_definition(
    length: int, heads: int, key_heads: int, width: int, left: int, right: int, dtype: torch.dtype
) -> None:
    q, k, v, grad = drawn(length, heads, key_heads, width, dtype, packed=heads != key_heads)
    window = (left, right, 1.5 * width**-0.5)
    wide = [x.float() for x in (q, k, v)]
    wanted, sums = window_attention_reference(*wide, *window)
    out, logsumexp = forward(q, k, v, *window)
    assert_close_by_columns(out, wanted.to(dtype), CLOSE[dtype])
    torch.testing.assert_close(logsumexp, sums, rtol=1e-4, atol=1e-4)
    expected = window_attention_backward_reference(grad.float(), *wide, wanted, sums, *window)
    for got, one in zip(backward(grad, q, k, v, out, logsumexp, *window), expected, strict=True):
        if one.norm() > 1e-3 * grad.float().norm():  # a query that sees itself alone has no gradient, but of roundings
            assert_close_by_columns(got, one.to(dtype), 1.5 * CLOSE[dtype])
        else:
            assert got.float().norm() < 1e-2 * grad.float().norm()


@pytest.mark.parametrize(("left", "right"), SIGHTS)
@pytest.mark.parametrize("length", [1, 70, 130, 197, 333, 560])
@pytest.mark.parametrize("width", [64, 128])
def test_what_is_hidden_or_not_there_is_not_the_largest(width: int, length: int, left: int, right: int) -> None:
    """Where scores lie so far below 0 that 2 to the power of their sum's negative is infinite."""
    q, k, v, grad = drawn(length, 4, 2, width, torch.float16)
    q, k = q + 6, k - 6
    window = (left, right, 6.4 / width)
    out, sums = forward(q, k, v, *window)
    wanted, wanted_sums = window_attention_reference(q, k, v, *window)
    assert wanted_sums.max() < -100 and relative_error(out, wanted) < 2e-3
    torch.testing.assert_close(sums, wanted_sums, rtol=1e-3, atol=1e-3)
    expected = window_attention_backward_reference(grad, q, k, v, wanted, wanted_sums, *window)
    for got, one in zip(backward(grad, q, k, v, out, sums, *window), expected, strict=True):
        assert got.isfinite().all() and (got.float() - one.float()).norm() < 5e-3 * one.float().norm() + 2e-2


@pytest.mark.parametrize(("queries", "keys"), [(64, 384), (70, 130), (333, 50), (1, 700), (570, 260)])
@pytest.mark.parametrize("width", [64, 128])
def test_other_queries_than_keys_see_them_all(width: int, queries: int, keys: int) -> None:
    q, grad = (torch.randn(2, queries, 4, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(2, keys, 2, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    wide = [x.transpose(1, 2).float().requires_grad_() for x in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*wide, scale=0.1, enable_gqa=True)
    out, sums = forward(q, k, v, -1, -1, 0.1)
    assert relative_error(out, wanted.transpose(1, 2)) < CLOSE[torch.bfloat16]
    expected = torch.autograd.grad(wanted, wide, grad.transpose(1, 2).float())
    for got, one in zip(backward(grad, q, k, v, out, sums, -1, -1, 0.1), expected, strict=True):
        assert got.is_contiguous() and relative_error(got, one.transpose(1, 2)) < CLOSE[torch.bfloat16]


@pytest.mark.parametrize(("left", "right"), [(-1, 0), (40, 100)])
@pytest.mark.parametrize(("length", "heads"), [(190, 300), (2048, 70)])
def test_groups_that_run_ahead_of_others_take_nothing_from_them(length: int, heads: int, left: int, right: int) -> None:
    """Blocks of three groups walk over many items, of which the first groups leave out the last tile."""
    q, k, v, _ = drawn(length, heads, heads, 64, torch.bfloat16)
    first = forward(q, k, v, left, right, 0.125)
    wanted, _ = window_attention_reference(q[:1], k[:1], v[:1], left, right, 0.125)
    assert relative_error(first[0][:1], wanted) < CLOSE[torch.bfloat16]
    for _ in range(30):
        assert all(map(torch.equal, forward(q, k, v, left, right, 0.125), first))


def test_the_operator_is_a_flash_kernels_where_every_run_must_be_the_same() -> None:
    q, k, v, grad = drawn(512, 4, 2, 128, torch.bfloat16)
    out, sums = native_implementations.window_attention_forward(q, k, v, 100, 0, 0.1)
    given = (grad, q, k, v, out, sums, 100, 0, 0.1)
    torch.use_deterministic_algorithms(True)
    try:
        found = native_implementations.window_attention_backward(*given)
        wanted = window_attention_backward_flash(*given)
    finally:
        torch.use_deterministic_algorithms(False)
    for got, one in zip(found, wanted, strict=True):
        assert torch.equal(got, one)


@pytest.mark.parametrize("width", [64, 128])
def test_what_is_no_number_stays_in_its_window(width: int) -> None:
    q, k, v, grad = drawn(512, 2, 2, width, torch.bfloat16)
    k[0, 300, 0, 0] = torch.nan
    out, sums = forward(q, k, v, 50, 0, 0.1)
    seen = out[0, :, 0].isnan().all(1).nonzero().flatten().tolist()
    assert seen == list(range(300, 351)) and out[0, :, 1].isfinite().all() and out[1].isfinite().all()
    dq, dk, dv = backward(grad, q, k, v, out, sums, 50, 0, 0.1)
    assert dq[0, 300:351, 0].isnan().all() and dq[0, 448:, 0].isfinite().all()
    for gradient in (dq, dk, dv):
        assert gradient[0, :, 1].isfinite().all() and gradient[1].isfinite().all()


class Block(nn.Module):
    """Attention in a sliding window between two linears, heads of 128 features."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(512, 1024), nn.Linear(512, 512)
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 8, 128).transpose(1, 2).split([4, 2, 2], 1)
        place = torch.arange(x.shape[1], device=x.device)
        ahead = place[:, None] - place[None, :]
        mask = (ahead >= 0) & (ahead < self.window)
        y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_compiled_window_runs_on_them_and_so_do_its_replays(
    mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    call = native.call
    monkeypatch.setattr(native, "call", lambda function, *rest: (ran.append(function.__name__), call(function, *rest)))
    model = Block(100).cuda().bfloat16()
    options: Any = {"mode": mode} if mode else {}
    fast = compiled(model, compiler="inductor", exclude=["*"], **options)
    for _ in range(5):
        x = torch.randn(2, 512, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn_like(x)
        wanted = torch.autograd.grad(model(x), (x, *model.parameters()), grad)
        got = torch.autograd.grad(fast(x), (x, *model.parameters()), grad)
        for one, other in zip(got, wanted, strict=True):
            assert relative_error(one, other) < 2e-2
    assert {"cuda_attention", "cuda_attention_backward"} <= set(ran)


class Varying(nn.Module):
    """Causal attention between two linears, heads of 128 features, keys shared by two of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(512, 1024), nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 8, 128).transpose(1, 2).split([4, 2, 2], 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_lengths_that_vary_run_on_them_from_one_graph(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    call = native.call
    monkeypatch.setattr(native, "call", lambda function, *rest: (ran.append(function.__name__), call(function, *rest)))
    model = Varying().cuda().bfloat16()
    fast = compiled(model, compiler="inductor", dynamic=True, exclude=["*"], cost_model=False)
    with manager.recording() as records:
        for length in (500, 300, 77, 640, 129):
            x = torch.randn(2, length, 512, device="cuda", dtype=torch.bfloat16, requires_grad=trains)
            with torch.set_grad_enabled(trains):
                wanted, got = model(x), fast(x)
            assert relative_error(got, wanted) < 1e-2
            if trains:
                grad, leaves = torch.randn_like(wanted), (x, *model.parameters())
                pairs = zip(*(torch.autograd.grad(y, leaves, grad) for y in (got, wanted)), strict=True)
                assert all(relative_error(one, other) < 2e-2 for one, other in pairs)
    assert [each.kernel for record in records for each in record.plan.attentions] == ["core"]
    assert "cuda_attention" in ran and ("cuda_attention_backward" in ran) is trains
