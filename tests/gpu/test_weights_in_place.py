"""Weights that are another each time they are read are quantised by the GPU's kernels where they are read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from tests.compiling import compiled, cosine, error_but_for_ties, step_from, train_step
from tests.emulation import emulated_linear
from tests.needs import FP8_GPU

pytestmark = [
    *FP8_GPU,
    pytest.mark.usefixtures("fresh_dynamo"),
]

Linear = Callable[..., Tensor]


def _dropped(linear: Linear, x: Tensor, w: Tensor) -> Tensor:
    return linear(x, F.dropout(w, 0.25))


def _written_before(linear: Linear, x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        w.clamp_(-1.5, 1.5)
    return linear(x, w)


class Made(nn.Module):
    """Multiplies by what ``function`` makes of its parameter."""

    def __init__(self, function: Callable[..., Tensor], n: int, k: int) -> None:
        super().__init__()
        self.function, self.linear = function, F.linear
        self.weight = nn.Parameter(torch.randn(n, k, device="cuda", dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear, x, self.weight)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("function", [_dropped, _written_before])
def test_values_and_gradients_are_the_textbooks(
    function: Callable[..., Tensor], recipe: str, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step, for which delayed scaling measures; PyTorch's random numbers, so that both drop the same."""
    monkeypatch.setattr("torch._inductor.config.fallback_random", True)
    n, k, rows = (16 * int(torch.randint(2, 40, ())) for _ in range(3))
    model = Made(function, n, k)
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16)
    fast = compiled(model, strict=True, recipe=recipe, compiler=compiler, cost_model=False)
    stored = model.weight.detach().clone()
    results = []
    for linear, call in ((F.linear, fast), (emulated_linear, model)):
        with torch.no_grad():
            model.weight.copy_(stored)
        model.linear, x.grad = linear, None
        torch.manual_seed(0)
        y, got = step_from(model, call, dy, x)
        results.append((y, x.grad, got["weight"], model.weight.detach().clone()))
    for found, wanted in zip(*results, strict=True):
        assert error_but_for_ties(found, wanted) < 1e-2


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_spectral_norm_trains_beside_high_precision(recipe: str) -> None:
    """Each forward moves the vectors that its weights are divided by."""
    model = nn.Sequential(spectral_norm(nn.Linear(256, 512)), nn.GELU(), spectral_norm(nn.Linear(512, 256)))
    model = model.to("cuda", torch.bfloat16)
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    fast = compiled(model, strict=True, recipe=recipe, compiler="inductor", cost_model=False)
    for _ in range(3):
        stored = {name: each.clone() for name, each in model.state_dict().items()}
        y, got = train_step(model, fast, x)
        moved = {name: each.clone() for name, each in model.named_buffers()}
        model.load_state_dict(stored)
        expected, wanted = train_step(model, model, x)
        assert cosine(y, expected) > 0.997
        assert all(cosine(got[name], wanted[name]) > 0.99 for name in wanted)
        assert all(cosine(each, moved[name]) > 0.999 for name, each in model.named_buffers())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)  # steps that scales of earlier ones fit
