"""The first operators of a graph launched before it is called: the bits are the same, and the launches come earlier."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_compile import head_start, runtime
from te_compile.head_start import HeadStart
from te_compile.kernels import native

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if reason := native.missing(cuda=True):
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
BF16, WIDTH = torch.bfloat16, 256


class Block(nn.Module):
    """A feed-forward block, with a norm before it or none."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HeadStart]]:
    """What graphs are called by, as they are compiled."""
    found: list[HeadStart] = []

    def noted(*arguments: Any, **named: Any) -> HeadStart:
        found.append(HeadStart(*arguments, **named))
        return found[-1]

    monkeypatch.setattr(runtime, "HeadStart", noted)
    yield found


def trained(model: nn.Module, steps: int, options: dict[str, Any]) -> list[Tensor]:
    """The outputs and gradients of each step, and the parameters after all."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="te_fp8", options={"cost_model": False, **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, seen = torch.Generator("cuda").manual_seed(3), []
    for _ in range(steps):
        x = torch.randn(4, 64, WIDTH, device="cuda", dtype=BF16, generator=generator, requires_grad=True)
        y = compiled(x)
        y.float().square().mean().backward()
        assert x.grad is not None
        seen += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("options", [{}, {"recipe": "current"}, {"cache_weights": False}], ids=str)
@pytest.mark.parametrize("norm", [True, False])
def test_a_training_gives_the_same_bits(
    made: list[HeadStart], norm: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Block(norm).to("cuda", BF16)
    other = copy.deepcopy(model)
    got = trained(model, 12, options)
    assert made[0].steps and made[0].misses == 0
    monkeypatch.setattr(head_start, "MOST_LOOKS", 0)
    wanted = trained(other, 12, options)
    assert not made[-1].steps
    assert len(got) == len(wanted) and all(map(torch.equal, got, wanted))


def test_in_inference_as_well(made: list[HeadStart], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Block().to("cuda", BF16).eval()
    inputs = [torch.randn(64, WIDTH, device="cuda", dtype=BF16) for _ in range(10)]
    results = []
    for looks in (head_start.MOST_LOOKS, 0):
        monkeypatch.setattr(head_start, "MOST_LOOKS", looks)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="te_fp8", options={"cost_model": False, "recipe": "current"})
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                results.append([compiled(x).clone() for x in inputs])
        assert bool(made[-1].steps) == bool(looks) and made[-1].misses == 0
    first, second, *wanted = results
    assert all(map(torch.equal, [*first, *second], [*wanted[0], *wanted[1]]))


def launches(call: Callable[[], Any], compiled: HeadStart, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many places are played before the graph is called."""
    early = 0
    run = compiled.compiled

    def noted(*inputs: Any) -> Any:
        nonlocal early
        early = sum(step.place.forget() for step in compiled.steps)
        return run(*inputs)

    monkeypatch.setattr(compiled, "compiled", noted)
    call()
    monkeypatch.setattr(compiled, "compiled", run)
    return early


def test_the_first_product_is_launched_before_the_graph_is_called(
    made: list[HeadStart], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Block().to("cuda", BF16)
    trained(model, 8, {})
    x = torch.randn(4, 64, WIDTH, device="cuda", dtype=BF16, requires_grad=True)
    compiled = torch.compile(model, backend="te_fp8", options={"cost_model": False})
    for _ in range(6):
        compiled(x)
    assert launches(lambda: compiled(x), made[-1], monkeypatch) == 2


def test_another_stream_and_a_captured_graph(made: list[HeadStart]) -> None:
    model = Block().to("cuda", BF16)
    compiled = torch.compile(model, backend="te_fp8", options={"cost_model": False, "recipe": "current"})
    x = torch.randn(4, 64, WIDTH, device="cuda", dtype=BF16)
    with torch.no_grad():
        wanted = [compiled(x).clone() for _ in range(8)][-1]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            elsewhere = [compiled(x).clone() for _ in range(4)][-1]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = compiled(x)
        graph.replay()
        torch.cuda.synchronize()
    assert made[-1].steps and made[-1].misses == 0
    assert torch.equal(elsewhere, wanted) and torch.equal(captured, wanted)
