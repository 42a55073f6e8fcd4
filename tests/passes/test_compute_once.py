"""Costly values that are broadcast are computed once: where readers are larger and many, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from te_compile import compilers
from te_compile.backend import te_fp8
from te_compile.ops.once import ONCE
from te_compile.options import Options
from te_compile.passes.compute_once import compute_once

module = sys.modules[compute_once.__module__]
HEADS, LENGTH, WIDTH = 8, 16, 8
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _small_and_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ON", {"cpu"})
    monkeypatch.setattr(module, "MUCH", HEADS * LENGTH * WIDTH)


def traced(function: Callable[..., Tensor], *inputs: Tensor, dynamic: bool = False) -> GraphModule:
    graph = make_fx(function, tracing_mode="symbolic" if dynamic else "fake")(*inputs)
    assert isinstance(graph, GraphModule)
    return graph


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """x: [heads, length, width], angles: [length, width]."""
    cos, sin = angles.cos().to(x.dtype)[None], angles.sin().to(x.dtype)[None]
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], -1) * sin


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(HEADS, LENGTH, WIDTH, dtype=dtype), 100 * torch.rand(LENGTH, WIDTH)


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_cosine_and_the_sine_of_a_rotation_are_computed_once_as_they_were_cast(dynamic: bool) -> None:
    graph = traced(rotated, *operands(torch.bfloat16), dynamic=dynamic)
    assert compute_once(graph.graph) == 2
    graph.graph.lint()
    for kept in graph.graph.find_nodes(op="call_function", target=ONCE):
        assert kept.meta["val"].shape[-2:] == (LENGTH, WIDTH) and kept.meta["val"].dtype == torch.bfloat16
        assert kept.args[0].target not in (aten.cos.default, aten.sin.default)
    given = operands(torch.bfloat16)
    assert torch.equal(graph(*given), rotated(*given))
    assert compute_once(graph.graph) == 0, "what is in memory costs no reader anything"


def test_who_reads_a_value_at_its_own_size_computes_it_where_it_is() -> None:
    def read_twice(x: Tensor, angles: Tensor) -> Tensor:
        cos = angles.cos()
        return x * cos + (cos + 1).sum()

    graph = traced(read_twice, *operands())
    assert compute_once(graph.graph) == 1
    (cos,) = graph.graph.find_nodes(op="call_function", target=aten.cos.default)
    assert {user.target for user in cos.users} == {ONCE, aten.add.Tensor}


@pytest.mark.parametrize(
    "function",
    [
        lambda x, angles: x * (2 * angles + 1),  # cheap
        lambda x, angles: (x * angles).cos(),  # as large as what it is computed from
        lambda x, angles: x[0] * angles.cos(),
        lambda x, angles: x[:3] * angles.cos(),  # three times is not much
        lambda x, angles: x + angles.cos().sum(),  # reductions are in memory
        lambda x, angles: x + torch.mm(angles.cos(), angles.t())[:, :WIDTH],  # and so are products
    ],
)
def test_what_is_not_costly_or_not_broadcast_stays(function: Callable[..., Tensor]) -> None:
    graph = traced(function, *operands())
    assert compute_once(graph.graph) == 0


def test_small_readers_and_other_devices_compute_it_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MUCH", HEADS * LENGTH * WIDTH + 1)
    graph = traced(lambda x, angles: x * angles.cos(), *operands())
    assert compute_once(graph.graph) == 0
    monkeypatch.setattr(module, "MUCH", 1)
    monkeypatch.setattr(module, "ON", {"cuda"})
    assert compute_once(graph.graph) == 0
    monkeypatch.setattr(module, "ON", {"cpu"})
    assert compute_once(graph.graph) == 1


class Rotating(nn.Module):
    """Two linears, the results of which are rotated and multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(2))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        heads = [each(x).unflatten(-1, (HEADS, WIDTH)).transpose(0, 1) for each in (self.first, self.second)]
        first, second = (rotated(each, angles) for each in heads)
        return first @ second.mT


@pytest.mark.usefixtures("fresh_dynamo")
def test_inductor_keeps_it_in_memory_and_the_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, angles = Rotating(), torch.randn(LENGTH, HEADS * WIDTH, requires_grad=True), operands()[1]
    results = []
    for much in (1, 1 << 40):
        monkeypatch.setattr(module, "MUCH", much)
        torch._dynamo.reset()
        fast = torch.compile(model, backend=te_fp8, options={"cost_model": False, "recipe": "current"})
        y, codes = run_and_get_code(fast, x, angles)
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        results.append((y, gradient, codes[0].count(f"empty_strided_cpu(({LENGTH}, {WIDTH}), ({WIDTH}, 1)")))
    (y, gradient, kept), (wanted, wanted_gradient, others) = results
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-5, atol=1e-5)
    assert kept == others + 2, "the cosine and the sine"


def test_under_cuda_graphs_it_runs_as_well() -> None:
    graphs = compilers.direction_passes(Options.resolve({"mode": "reduce-overhead"}))
    assert compute_once in graphs and compute_once in compilers.direction_passes(Options.resolve())
