"""Several calls in a first step, on a GPU: by kernels, in CUDA graphs, and to the same bits each time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_compile.state_files import state_dict
from tests.compiling import compiled, gradients, relative_error
from tests.emulation import emulated
from tests.needs import FP8_GPU

pytestmark = [*FP8_GPU, pytest.mark.usefixtures("fresh_dynamo")]

GROWING = (1.0, 30.0, 4.0)


class Block(nn.Module):
    """Two linears and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def views() -> list[Tensor]:
    return [size * torch.randn(128, 256, device="cuda", dtype=torch.bfloat16) for size in GROWING]


def step(model: nn.Module, run: Any, inputs: list[Tensor]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    torch.compiler.cudagraph_mark_step_begin()
    losses = [(run(x).float() / size).square().mean().clone() for x, size in zip(inputs, GROWING, strict=True)]
    torch.stack(losses).sum().backward()
    return gradients(model)


@pytest.mark.parametrize("options", [{"compiler": "aot_eager"}, {"compiler": "inductor"}, {"mode": "reduce-overhead"}])
@pytest.mark.parametrize("cache_weights", [True, False])
def test_calls_of_a_first_step_are_cut_off_by_none_before_them(options: dict[str, Any], cache_weights: bool) -> None:
    model = Block().cuda().bfloat16()
    compiler = options.get("compiler", "inductor")
    fast = compiled(model, **{**options, "compiler": compiler}, cost_model=False, cache_weights=cache_weights)
    yardstick = emulated(copy.deepcopy(model), lambda name, module: True)
    for _ in range(3):
        inputs = views()
        expected, textbook = step(model, model, inputs), step(yardstick, yardstick, inputs)
        got = step(model, fast, inputs)
        for name, each in expected.items():
            assert relative_error(got[name], each) < 2 * relative_error(textbook[name], each) + 0.02, name


def test_what_is_measured_depends_on_no_clock() -> None:
    """The host learns of scales when the device has got there, which may be in the first step or long after it."""
    first = Block().cuda().bfloat16()
    batches = [views() for _ in range(3)]
    seen = []
    for waits in (True, False):
        model = copy.deepcopy(first)
        fast = compiled(model, compiler="inductor", cost_model=False)

        def run(x: Tensor, fast: Any = fast, waits: bool = waits) -> Tensor:
            if waits:
                torch.cuda.synchronize()
            else:
                torch.cuda._sleep(20_000_000)
            return fast(x)

        steps = [step(model, run, batch) for batch in batches]
        seen.append([*[each for found in steps for each in found.values()], *state_dict(model).values()])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))
