"""The graph that is rewritten is a copy, what it holds is the user's: an optimizer's parameters, buffers of modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.config
from torch import Tensor, nn

from te_compile.backend import te_fp8
from tests.compiling import compiled

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01),
    "AdamW one by one": lambda parameters: torch.optim.AdamW(parameters, 0.01, foreach=False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_compiled_optimizers_step_moves_the_parameters(name: str, compiler: str) -> None:
    model = nn.Linear(32, 32)
    other = copy.deepcopy(model)
    optimizers = [OPTIMIZERS[name](list(each.parameters())) for each in (model, other)]
    run = torch.compile(lambda: optimizers[0].step(), backend=te_fp8, options={"compiler": compiler})
    for _ in range(3):
        x = torch.randn(8, 32)
        for each in (model, other):
            each.zero_grad()
            each(x).square().mean().backward()
        before = model.weight.detach().clone()
        run()
        optimizers[1].step()
        assert not torch.equal(model.weight, before)
        for moved, wanted in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(moved, wanted)


def test_a_whole_training_step_that_is_compiled_trains() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    @torch.compile(backend=te_fp8, options={"compiler": "aot_eager", "cost_model": False})
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x, y = torch.randn(64, 32), torch.randn(64, 32)
    losses = [float(step(x, y)) for _ in range(12)]
    assert losses[-1] < 0.9 * losses[0]


class Counting(nn.Module):
    """Counts its calls in a buffer, and knows the mean of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 32)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.b(self.norm(self.a(x)))


# A module's parameters and buffers are inputs of the graph, or its attributes: from PyTorch 2.13 on always inputs.
INLINED: list[dict[str, bool]] = [{}]
if torch.__version__ < "2.13":
    INLINED = [{"inline_inbuilt_nn_modules": inlined} for inlined in (True, False)]


@pytest.mark.parametrize("settings", INLINED, ids=str)
def test_buffers_and_gradients_are_the_models(settings: dict[str, bool]) -> None:
    with torch._dynamo.config.patch(settings):
        model = Counting()
        run = compiled(model)
        for _ in range(2):
            run(torch.randn(16, 32)).square().mean().backward()
    assert float(model.calls) == 2 and int(model.norm.num_batches_tracked) == 2
    assert bool(model.norm.running_mean.any())
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    assert bool(model.a.weight.grad.any()) and bool(model.b.weight.grad.any())


def test_dynamos_own_graph_stays_as_it_is() -> None:
    graphs: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append((gm, str(gm.graph)))
        return te_fp8(gm, inputs, options={"compiler": "aot_eager"})

    torch.compile(Counting(), backend=backend)(torch.randn(16, 32)).sum().backward()
    assert graphs and all(str(gm.graph) == before for gm, before in graphs)
