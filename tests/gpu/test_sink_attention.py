"""Attention with sinks on PyTorch's flash and memory-efficient kernels and the core's, beside float64, and in compiled
models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_compile.ops.sink_attention import SINK_ATTENTION, runs_on_the_efficient_kernel
from te_compile.ops.window_attention import EVERYTHING, WINDOW_ATTENTION, visible_within
from te_compile.passes import manager
from tests.compiling import compiled, cosine, relative_error
from tests.needs import HAS_HOPPER_CORE
from tests.sink_attention import plain

HAS_FLASH = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_FLASH, reason="needs a CUDA device that runs flash attention"),
    pytest.mark.usefixtures("fresh_dynamo"),
]


def drawn(
    rows: int, heads: int, keys: int, length: int, width: int, dtype: torch.dtype, value: int = 0
) -> list[Tensor]:
    """q, k, v [B, H, S, D] and sinks [B, H, S, 1]; value: features of v, if not those of k."""
    shapes = [(rows, count, length, width) for count in (heads, keys)]
    shapes += [(rows, keys, length, value or width), (rows, heads, length, 1)]
    return [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]


def agree(got: Tensor, wanted: Tensor, leaves: list[Tensor]) -> None:
    assert got.dtype == leaves[0].dtype and relative_error(got, wanted) < 1e-2
    grad = torch.randn_like(got)
    gradients = (torch.autograd.grad(y, leaves, grad.to(y.dtype)) for y in (got, wanted))
    for one, other in zip(*gradients, strict=True):
        assert one.shape == other.shape
        assert (one.double() - other.double()).norm() <= 1e-2 * other.double().norm() + 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [(40, 0), (EVERYTHING, 0), (EVERYTHING, EVERYTHING), (9, 30)])
@pytest.mark.parametrize(
    "size", [(2, 4, 2, 391, 64), (1, 2, 2, 128, 128), (1, 4, 1, 200, 80), (2, 2, 2, 250, 32)], ids=str
)
def test_kernels_take_them_in(size: tuple[int, ...], window: tuple[int, int], dtype: torch.dtype) -> None:
    """The core's, where there is one for these heads, or flash."""
    leaves = drawn(*size, dtype)
    q, k, v, sinks = leaves
    got = WINDOW_ATTENTION(q, k, v, *window, size[4] ** -0.5, sinks)
    agree(got, plain(*leaves, visible_within(size[3], *window, torch.device("cuda"))), leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [0, 32], ids=["alike", "narrow_values"])
@pytest.mark.parametrize("length", [384, 136])
def test_the_efficient_kernel_takes_them_in(length: int, value: int, dtype: torch.dtype) -> None:
    leaves = drawn(2, 4, 4, length, 64, dtype, value)
    q, k, v, sinks = leaves
    shown = torch.rand(2, 1, 1, length, device="cuda") < 0.7
    bias = torch.randn(1, 4, length, length, device="cuda", dtype=dtype).requires_grad_()
    assert runs_on_the_efficient_kernel(q, k, v, bias)
    agree(SINK_ATTENTION(q, k, v, shown, sinks=sinks), plain(*leaves, shown), leaves)
    agree(SINK_ATTENTION(q, k, v, bias, sinks=sinks), plain(*leaves, bias), [*leaves, bias])
    causal = torch.ones(length, length, device="cuda", dtype=torch.bool).tril()
    agree(SINK_ATTENTION(q, k, v, is_causal=True, sinks=sinks), plain(*leaves, causal), leaves)


@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(torch.bfloat16).min])
def test_queries_without_keys_get_nothing(hidden: float) -> None:
    leaves = drawn(2, 4, 4, 256, 64, torch.bfloat16)
    q, k, v, sinks = leaves
    padding = torch.zeros(2, 1, 256, 256, device="cuda", dtype=torch.bfloat16)
    padding[1, :, 100:] = hidden
    out = SINK_ATTENTION(q, k, v, padding, sinks=sinks)
    assert not out[1, :, 100:].any()
    agree(out, plain(*leaves, padding), leaves)


class Block(nn.Module):
    """GPT-OSS's attention between linears. window: how many keys a query sees, 0 for all before it; padded: the mask
    is one that is given."""

    def __init__(self, width: int = 512, heads: int = 8, keys: int = 2, window: int = 0, padded: bool = False) -> None:
        super().__init__()
        self.window, self.padded, self.shared, self.size = window, padded, heads // keys, width // heads
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, keys * self.size), nn.Linear(width, keys * self.size)
        self.sinks = nn.Parameter(torch.randn(heads))

    def mask(self, x: Tensor, padding: Tensor | None) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        shown = at[None, :] <= at[:, None]
        if self.window:
            shown = shown & (at[None, :] > at[:, None] - self.window)
        if padding is not None:
            shown = shown & padding[:, None, None, :]
        return torch.where(shown, 0.0, torch.finfo(x.dtype).min).to(x.dtype)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(self.shared, 1) for each in (k, v))
        scores = q @ k.mT * self.size**-0.5 + self.mask(x, padding)
        ends = self.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], -1)
        logits = torch.cat([scores, ends], dim=-1)
        weights = F.softmax(logits - logits.max(dim=-1, keepdim=True).values, dim=-1)[..., :-1]
        return self.out((weights.to(v.dtype) @ v).transpose(1, 2).flatten(2))


def kernels_of(call: Any) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return " ".join(each.key for each in profile.key_averages())


@pytest.mark.parametrize(
    ("given", "padded", "chosen"),
    [({"window": 100}, False, "window"), ({}, False, "sinks"), ({}, True, "")],
    ids=["window", "causal", "padded"],
)
@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("exclude", [["*"], []], ids=["bf16", "fp8"])
def test_a_model_trains_as_it_is_written(
    given: dict[str, int], padded: bool, chosen: str, exclude: list[str], heads: int
) -> None:
    model = Block(heads=heads, **given).to("cuda", torch.bfloat16)
    x = torch.randn(2, 384, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    padding = torch.arange(384, device="cuda")[None] < torch.tensor([[384], [201]], device="cuda") if padded else None
    with manager.recording() as records:
        fast = compiled(model, exclude=exclude, cost_model=False, compiler="inductor")
        y = fast(x, padding)
    (attention,) = (each for record in records for each in record.plan.attentions)
    assert (attention.status, attention.kernel) == ("sinks", chosen)
    wanted, dy = model(x, padding), torch.randn_like(y)
    least = 0.998 if exclude else 0.97
    assert cosine(y, wanted) > least
    leaves = [x, *model.parameters()]
    got, expected = (torch.autograd.grad(out, leaves, dy, retain_graph=True) for out in (y, wanted))
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype and (other.norm() <= 1 or cosine(one, other) > least)
    names = kernels_of(lambda: fast(x, padding).backward(dy))
    runs = "attention::backward_kernel" if HAS_HOPPER_CORE and heads == 8 else "flash_bwd"  # of 64 features, or of 32
    assert ("fmha_cutlass" if padded else runs) in names and "softmax" not in names, names


def test_lengths_may_be_symbols() -> None:
    model = Block().to("cuda", torch.bfloat16)
    fast = compiled(model, exclude=["*"], compiler="inductor")
    for length in (384, 391):  # the second one makes it a symbol
        x = torch.randn(2, length, 512, device="cuda", dtype=torch.bfloat16)
        padding = torch.rand(2, length, device="cuda") < 0.7
        padding[:, 0] = True
        assert cosine(fast(x), model(x)) > 0.998
        assert cosine(fast(x, padding), model(x, padding)) > 0.998
