"""Attention in a window on PyTorch's flash kernels: results and gradients of the reference, and no mask in compiled
models, whoever runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_compile.ops.window_attention import (
    window_attention_backward_flash,
    window_attention_backward_reference,
    window_attention_flash,
    window_attention_reference,
)
from te_compile.passes import manager
from tests.compiling import compiled, cosine, relative_error
from tests.needs import HAS_HOPPER_CORE

HAS_FLASH = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_FLASH, reason="needs a CUDA device that runs flash attention"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

SIZES = [  # rows, heads, heads of keys, length, features, left, right
    (2, 4, 4, 384, 64, 40, 0),
    (2, 4, 2, 391, 128, 100, 0),
    (1, 2, 2, 512, 80, 64, 64),
    (1, 2, 1, 200, 256, 16, 3),
    (1, 3, 3, 130, 32, 1, 0),
    (1, 4, 4, 257, 64, 1000, 5),
    (1, 4, 4, 257, 64, 5, 1000),
    (3, 2, 2, 1, 64, 2, 0),
]


def drawn(size: tuple[int, ...], dtype: torch.dtype, packed: bool = False) -> list[Tensor]:
    """q, k, v and the gradient of the result, [B, S, H, D]. packed: as parts of one tensor, which projections write."""
    rows, heads, keys, length, width, *_ = size
    counts = (heads, keys, keys, heads)
    if packed:
        return [*torch.randn(rows, length, sum(counts), width, device="cuda", dtype=dtype).split(counts, 2)]
    return [torch.randn(rows, count, length, width, device="cuda", dtype=dtype).transpose(1, 2) for count in counts]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_the_reference(size: tuple[int, ...], dtype: torch.dtype, packed: bool) -> None:
    q, k, v, grad = drawn(size, dtype, packed)
    window = (*size[-2:], size[4] ** -0.5)
    out, logsumexp = window_attention_flash(q, k, v, *window)
    wanted, wanted_sums = window_attention_reference(q, k, v, *window)
    assert out.is_contiguous() and out.dtype == dtype and logsumexp.dtype == torch.float32
    assert relative_error(out, wanted) < 5e-3
    torch.testing.assert_close(logsumexp, wanted_sums, rtol=1e-4, atol=1e-4)
    got = window_attention_backward_flash(grad, q, k, v, out, logsumexp, *window)
    expected = window_attention_backward_reference(grad, q, k, v, wanted, wanted_sums, *window)
    for one, other, operand in zip(got, expected, (q, k, v), strict=True):
        assert one.shape == operand.shape and one.dtype == dtype and one.is_contiguous()
        assert (one.float() - other.float()).norm() <= 1e-2 * other.float().norm() + 1e-2


def test_features_that_lie_apart_are_laid_out() -> None:
    q, k, v = (torch.randn(2, 4, 64, 96, device="cuda", dtype=torch.bfloat16).permute(0, 3, 1, 2) for _ in range(3))
    assert q.stride(3) != 1
    out, _ = window_attention_flash(q, k, v, 7, 0, 0.125)
    assert relative_error(out, window_attention_reference(q, k, v, 7, 0, 0.125)[0]) < 5e-3


class Block(nn.Module):
    """Grouped heads under a sliding window as Hugging Face builds it, or if they have a ``reach``, that both ways."""

    def __init__(self, width: int = 512, heads: int = 8, keys: int = 2, window: int = 100, reach: int = 0) -> None:
        super().__init__()
        self.window, self.reach, self.shared = window, reach, heads // keys
        size = width // heads
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, keys * size), nn.Linear(width, keys * size)
        self.size = size

    def mask(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        if self.reach:
            return (at[:, None] - at[None, :]).abs() <= self.reach
        return (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - self.window)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(self.shared, 1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x))
        return self.out(y.transpose(1, 2).flatten(2))


class Checkpointed(nn.Module):
    """A block that runs again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def gradients(y: Tensor, model: nn.Module, dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, list(model.parameters()), dy)


@pytest.mark.parametrize("options", [{"window": 100}, {"reach": 31}], ids=str)
@pytest.mark.parametrize("wrap", [lambda block: block, Checkpointed], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("exclude", [["*"], []], ids=["bf16", "fp8"])
def test_a_model_trains_as_under_the_mask(options: dict[str, int], wrap: Any, exclude: list[str]) -> None:
    model = wrap(Block(**options)).to("cuda", torch.bfloat16)
    x = torch.randn(2, 384, 512, device="cuda", dtype=torch.bfloat16)
    with manager.recording() as records:
        fast = compiled(model, exclude=exclude, cost_model=False, compiler="inductor")
        y = fast(x)
    assert [each.kernel for record in records for each in record.plan.attentions] == ["window"]
    wanted, dy = model(x), torch.randn_like(y)
    least = 0.999 if exclude else 0.98
    assert cosine(y, wanted) > least
    got, expected = gradients(y, model, dy), gradients(wanted, model, dy)
    assert all(cosine(one, other) > least for one, other in zip(got, expected, strict=True) if other.norm() > 1)


@pytest.mark.parametrize("heads", [8, 16])
def test_lengths_may_be_symbols_and_nobody_reads_a_mask(heads: int) -> None:
    model = Block(heads=heads).to("cuda", torch.bfloat16)
    fast = compiled(model, exclude=["*"], compiler="inductor")
    for length in (384, 391):  # the second one makes it a symbol
        x = torch.randn(2, length, 512, device="cuda", dtype=torch.bfloat16)
        assert cosine(fast(x), model(x)) > 0.999
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fast(x).sum().backward()
        torch.cuda.synchronize()
    names = [each.key for each in profile.key_averages()]
    core = HAS_HOPPER_CORE and heads == 8  # heads of 64 features, or of 32
    for kernel in ("attention::forward", "attention::backward") if core else ("flash_fwd", "flash_bwd"):
        assert any(kernel in name for name in names)
    assert not any("cudnn" in name or "efficient" in name or "fmha_cutlass" in name for name in names)


def test_under_autocast_no_mask_is_read_either() -> None:
    model = Block().to("cuda")
    x = torch.randn(2, 384, 512, device="cuda")
    with torch.autocast("cuda", torch.bfloat16), manager.recording() as records:
        y = compiled(model, exclude=["*"], cost_model=False, compiler="inductor")(x)
        wanted = model(x)
    assert [each.kernel for record in records for each in record.plan.attentions] == ["window"]
    assert y.dtype == wanted.dtype == torch.bfloat16 and cosine(y, wanted) > 0.999
    dy = torch.randn_like(y)
    pairs = zip(gradients(y, model, dy), gradients(wanted, model, dy), strict=True)
    assert all(cosine(one, other) > 0.999 for one, other in pairs if other.norm() > 1)


def test_cuda_graphs_replay_it() -> None:
    model = Block().to("cuda", torch.bfloat16)
    fast = compiled(model, mode="reduce-overhead", compiler="inductor")
    x = torch.randn(2, 384, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(4):
            y = fast(x)
        assert cosine(y, model(x)) > 0.98
