"""On a GPU: how much less memory a step takes, and that its numbers are the same ones."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compiling import BACKEND, train_step
from tests.needs import FP8_GPU
from tests.test_save_memory import Gated, Layer

pytestmark = [
    *FP8_GPU,
    pytest.mark.usefixtures("fresh_dynamo"),
]

WIDTH, TOKENS = 1024, 4096
UNCACHED = {"cache_weights": False}
LEAN = {"save_memory": True}


def stack(make: type[Layer] | type[Gated], layers: int = 3) -> nn.Module:
    return nn.Sequential(*(make(WIDTH) for _ in range(layers))).to("cuda", torch.bfloat16)


def data() -> Tensor:
    return torch.randn(2, TOKENS // 2, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def fast(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend=BACKEND, options={"cost_model": False, **options})


def peak_of(model: nn.Module, x: Tensor, **options: Any) -> int:
    """Bytes beyond model and input, copies of weights among them, in a step whose kernels are compiled."""
    model.zero_grad(set_to_none=True)
    x.grad = None
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    run = fast(model, **options)
    for _ in range(3):
        train_step(model, run, x)
    model.zero_grad(set_to_none=True)
    x.grad = None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    output = run(x)
    output.float().square().mean().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("make", [Layer, Gated])
def test_each_option_lowers_the_peak(make: type[Layer] | type[Gated]) -> None:
    peaks = []
    for options in ({}, UNCACHED, LEAN):
        torch._dynamo.reset()
        peaks.append(peak_of(stack(make), data(), **options))  # a model of its own: copies live as long as weights do
    cached, uncached, lean = peaks
    weights = sum(parameter.numel() for parameter in stack(make).parameters() if parameter.dim() == 2)
    assert uncached < cached - weights, "a copy of each weight at the least"
    # The codes of a layer's inputs: of two norms and attention, or of one norm, and of the activation.
    codes = (3 + 4 if make is Layer else 1 + 2) * WIDTH * TOKENS
    assert lean < uncached - codes, "those of one layer of three at the least"


def decibels(expected: Tensor, got: Tensor) -> float:
    """Signal over difference."""
    noise = (got.double() - expected.double()).square().sum().clamp_min(1e-300)
    return 10 * float((expected.double().square().sum() / noise).log10())


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("options", [UNCACHED, LEAN], ids=["uncached", "save_memory"])
@pytest.mark.parametrize("make", [Layer, Gated])
def test_numbers_are_the_same(make: type[Layer] | type[Gated], options: dict[str, Any], recipe: str) -> None:
    """To the bit where the same kernels run. A norm that writes one layout under delayed scaling is another kernel than
    one that writes both, and its sums round otherwise; attention's backward repeats itself no closer than that. A wrong
    scale is worse by far: a factor of two is 6 dB."""
    model = stack(make, layers=2)
    other, x = copy.deepcopy(model), data()
    one, two = fast(model, recipe=recipe), fast(other, recipe=recipe, **options)
    for _ in range(3):
        y, expected = train_step(model, one, x)
        z, got = train_step(other, two, x)
        if make is Gated and (options == UNCACHED or recipe == "current"):
            assert torch.equal(y, z)
            assert all(torch.equal(got[name], gradient) for name, gradient in expected.items())
            continue
        assert decibels(y, z) > 25
        apart = {name: decibels(gradient, got[name]) for name, gradient in expected.items()}
        assert min(apart.values()) > 15, apart
