"""Attention on cuDNN where PyTorch's order would run flash, and after a mask was folded: the same results and
gradients, by the kernels that were chosen."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from te_compile.passes import manager
from tests.compiling import compiled, cosine
from tests.kernel_order import CUDNN_FIRST, FLASH_FIRST, order_of_kernels
from tests.needs import FAST_CUDNN, HAS_HOPPER_CORE

pytestmark = [*FAST_CUDNN, pytest.mark.usefixtures("fresh_dynamo")]


@pytest.fixture(autouse=True)
def flash_comes_first() -> Iterator[None]:
    """As where PyTorch finds an older cuDNN."""
    with order_of_kernels(FLASH_FIRST):
        yield


class Attention(nn.Module):
    """Packed projection, causal attention, and the heads joined by a view."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_and_gradients_are_those_of_flash(dtype: torch.dtype) -> None:
    model = Attention(512, 4).to("cuda", dtype)
    x = torch.randn(2, 256, 512, device="cuda", dtype=dtype, requires_grad=True)
    dy = torch.randn_like(x)
    with manager.recording() as compilations:
        fast = compiled(model, exclude=["*"], cost_model=False)
        y = fast(x)
    assert [each.kernel for compilation in compilations for each in compilation.plan.attentions] == ["cudnn"]
    expected = model(x)
    got, wanted = (torch.autograd.grad(each, [x, *model.parameters()], dy) for each in (y, expected))
    assert cosine(y, expected) > 0.9999
    assert all(cosine(one, other) > 0.999 for one, other in zip(got, wanted, strict=True))


def test_the_kernels_are_cudnns() -> None:
    model = Attention(512, 4).to("cuda", torch.bfloat16)
    x = torch.randn(2, 256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    fast = compiled(model, exclude=["*"], cost_model=False)
    fast(x).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fast(x).sum().backward()
        torch.cuda.synchronize()
    names = [each.key for each in profile.key_averages()]
    assert any("cudnn" in name for name in names) and not any("flash" in name and "cudnn" not in name for name in names)


class SpelledOut(Attention):
    """The same with a softmax and a dropout of its own."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = F.dropout(torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1), 0.1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


OURS = "attention::backward_kernel" if HAS_HOPPER_CORE else "_keys_kernel"  # of heads as wide as these


@pytest.mark.parametrize("order", [FLASH_FIRST, CUDNN_FIRST], ids=["flash first", "cuDNN first"])
@pytest.mark.parametrize(
    ("options", "kernel", "other"),
    [({}, OURS, "flash"), ({"fallback_random": True}, "flash", OURS)],
    ids=["ours", "eager mode's draws"],
)
def test_a_dropout_that_was_spelled_out_never_runs_on_cudnn(
    order: list[int], options: dict[str, bool], kernel: str, other: str
) -> None:
    torch._C._set_sdp_priority_order(order)
    model = SpelledOut(512, 4).to("cuda", torch.bfloat16)
    x = torch.randn(2, 256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    fast = compiled(model, exclude=["*"], cost_model=False, **options)
    fast(x).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fast(x).sum().backward()
        torch.cuda.synchronize()
    names = [each.key for each in profile.key_averages()]
    assert any(kernel in name for name in names)
    assert not any("cudnn" in name or other in name for name in names)


class Biased(Attention):
    """One that is spelled out, with a dropout, and with a bias that does not learn."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.register_buffer("bias", torch.randn(1, heads, 256, 256))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / q.shape[-1] ** 0.5 + self.bias
        return self.out((F.dropout(torch.softmax(scores, dim=-1), 0.1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("order", [FLASH_FIRST, CUDNN_FIRST], ids=["flash first", "cuDNN first"])
def test_nor_does_one_under_a_bias(order: list[int]) -> None:
    torch._C._set_sdp_priority_order(order)
    model = Biased(512, 4).to("cuda", torch.bfloat16)
    x = torch.randn(2, 256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with manager.recording() as records:
        fast = compiled(model, exclude=["*"], cost_model=False)
        fast(x).sum().backward()
    assert [each.status for record in records for each in record.plan.attentions] == ["recognised"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fast(x).sum().backward()
        torch.cuda.synchronize()
    assert not any("cudnn" in each.key for each in profile.key_averages())


class WithRoom(Attention):
    """The queries of a prompt, and the keys of a cache with room for more, under the mask that says so."""

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        q, k, v = self.qkv(torch.cat([x, cache], dim=1)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        at = torch.arange(k.shape[2], device=x.device)
        shown = at[None, :] <= at[: x.shape[1], None]
        attended = F.scaled_dot_product_attention(q[:, :, : x.shape[1]], k, v, attn_mask=shown)
        return self.out(attended.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("order", [FLASH_FIRST, CUDNN_FIRST], ids=["flash first", "cuDNN first"])
@pytest.mark.parametrize(("queries", "room"), [(128, 256), (100, 211), (2, 4000)])
def test_a_folded_mask_counts_from_the_first_key_where_there_are_more(
    queries: int, room: int, order: list[int]
) -> None:
    torch._C._set_sdp_priority_order(order)
    model = WithRoom(512, 4).to("cuda", torch.bfloat16)
    x, cache = (
        torch.randn(2, n, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (queries, room)
    )
    dy = torch.randn_like(x)
    with manager.recording() as compilations:
        y = compiled(model, exclude=["*"])(x, cache)
    assert [each.mask for compilation in compilations for each in compilation.plan.attentions] == ["folded_causal"]
    expected = model(x, cache)
    got, wanted = (torch.autograd.grad(each, [x, *model.parameters()], dy) for each in (y, expected))
    assert cosine(y, expected) > 0.9999
    assert all(cosine(one, other) > 0.999 for one, other in zip(got, wanted, strict=True))


class MultiQuery(Attention):
    """All heads of queries share one of keys and values, which is left to broadcasting."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Encoder(Attention):
    """Attention under a mask that it is given."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(attended.transpose(1, 2).flatten(2))


def rows_of(length: int) -> Tensor:
    """A mask that hides the last rows of the second sequence, the same for all keys."""
    rows = torch.arange(length, device="cuda") < torch.tensor([[length], [length - 30]], device="cuda")
    return rows[:, None, :, None].expand(2, 1, length, length)


@pytest.mark.parametrize("order", [FLASH_FIRST, CUDNN_FIRST], ids=["flash first", "cuDNN first"])
@pytest.mark.parametrize("heads", [4, 7])
@pytest.mark.parametrize("form", ["one head of keys", "a mask of rows"])
def test_what_pytorch_would_store_all_scores_for_runs_fused(form: str, heads: int, order: list[int]) -> None:
    """Beside the kernel that stores them, in results and gradients."""
    torch._C._set_sdp_priority_order(order)
    width, length = 64 * heads, 256
    model = (MultiQuery if form == "one head of keys" else Encoder)(width, heads).to("cuda", torch.bfloat16)
    x = torch.randn(2, length, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    inputs = (x,) if form == "one head of keys" else (x, rows_of(length))
    dy = torch.randn_like(x)
    fast = compiled(model, exclude=["*"], cost_model=False)
    fast(*inputs).backward(dy)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        y = fast(*inputs)
        got = torch.autograd.grad(y, [x, *model.parameters()], dy)
        torch.cuda.synchronize()
    names = [each.key for each in profile.key_averages()]
    assert any("flash" in name or "cudnn" in name for name in names)
    assert not any("softmax" in name for name in names)
    expected = model(*inputs)
    wanted = torch.autograd.grad(expected, [x, *model.parameters()], dy)
    assert cosine(y, expected) > 0.9999
    assert all(cosine(one, other) > 0.999 for one, other in zip(got, wanted, strict=True))


ASKED_FIRST = """
import torch
from torch._subclasses import FakeTensorMode
from te_compile.passes.attention_kernels import order_of_kernels
with FakeTensorMode():
    found = order_of_kernels()
q = torch.empty(1, 1, 128, 64, device="cuda", dtype=torch.bfloat16)
torch._fused_sdp_choice(q, q, q)
assert found == torch._C._get_sdp_priority_order(), found
"""


def test_the_order_of_kernels_is_the_settled_one_in_a_process_that_ran_no_attention() -> None:
    subprocess.run([sys.executable, "-c", ASKED_FIRST], check=True, timeout=300)


def cudnn_backward(model: Attention, x: Tensor, dy: Tensor) -> None:
    """Have PyTorch keep cuDNN's plan for the backward of this attention, where its gradient lies as ``dy`` does."""
    q, k, v = model.qkv(x).unflatten(-1, (3, model.heads, -1)).permute(2, 0, 3, 1, 4)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    y.backward(dy)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 1, 3)], ids=["heads", "positions"])
def test_a_plan_that_was_made_for_a_gradient_in_another_order_is_not_taken(order: tuple[int, ...]) -> None:
    model = Attention(512, 4).to("cuda", torch.bfloat16)
    x = torch.randn(2, 384, 512, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(2, 4, 384, 128, device="cuda", dtype=torch.bfloat16)
    dy = dy.permute(order).contiguous().permute([order.index(place) for place in range(4)])
    cudnn_backward(model, x, dy)
    model.zero_grad()
    dy = torch.randn_like(x)
    fast = compiled(model, exclude=["*"], cost_model=False)
    grads = []
    for run, kernel in ((fast, None), (model, SDPBackend.MATH)):
        with nullcontext() if kernel is None else sdpa_kernel(kernel):
            run(x).backward(dy)
        grads.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        model.zero_grad()
    for got, want in zip(*grads, strict=True):
        assert cosine(want, got) > 0.999


class Normed(nn.Module):
    """torch.nn's attention behind a norm: nobody sees how its result lies."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.self_attn = nn.LayerNorm(width), nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.self_attn(h, h, h, need_weights=False)[0]


def test_attention_modules_of_one_size_have_right_gradients_whoever_comes_first() -> None:
    """Those of an encoder hand back gradients by positions, the one behind a norm by rows of the batch."""
    width, heads = 256, 4
    encoder = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True)
    models = [Normed(width, heads), encoder, Normed(width, heads)]
    for model in models:
        model.to("cuda", torch.bfloat16)
        x = torch.randn(2, 128, width, device="cuda", dtype=torch.bfloat16)
        dy = torch.randn_like(x)
        grads = []
        with sdpa_kernel(SDPBackend.MATH):
            model(x).backward(dy)
        for run in (None, compiled(model, cost_model=False)):
            if run is not None:
                run(x).backward(dy)
            attention: Any = model.self_attn
            grads.append(attention.in_proj_weight.grad.clone())
            model.zero_grad()
        assert cosine(*grads) > 0.97
