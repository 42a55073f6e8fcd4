"""Columns' sums that a backward pass returns are added up at once, and no others."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from te_compile.ops.fused_quantize import FUSED_QUANTIZE
from te_compile.passes import manager
from te_compile.passes.arguments import arguments_of, is_te
from te_compile.passes.new_nodes import call_like
from te_compile.passes.sum_columns_late import sum_columns_late
from te_compile.recipe import ScaleRule
from tests.compiling import compiled

module = sys.modules[sum_columns_late.__module__]
pytestmark = pytest.mark.usefixtures("fresh_dynamo")
WIDTH, ROWS = 32, 80  # rows that do not fill the last partial row


@pytest.fixture(autouse=True)
def _the_reference_sums_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KERNELS", {"reference"})


class Block(nn.Module):
    """A norm, two linears with biases and a residual stream."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm, bias: bool = True) -> None:
        super().__init__()
        self.norm = norm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64, bias=bias), nn.Linear(64, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def trained(model: nn.Module, x: Tensor, **options: Any) -> tuple[Graph, dict[str, Tensor]]:
    """The joint graph, and the gradients of two steps."""
    torch._dynamo.reset()
    with manager.recording() as records:
        fast = compiled(model, **options)
        for _ in range(2):
            fast(x).square().mean().backward()
    gradients = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    graph = records[0].joint
    assert graph is not None
    graph.lint()
    return graph, gradients


def te_nodes(graph: Graph, name: str) -> list[Any]:
    return [node for node in graph.nodes if is_te(node, name)]


@pytest.fixture
def x(seed: int) -> Tensor:
    return torch.randn(ROWS, WIDTH)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_biases_and_norms_get_their_gradients_from_one_operator(
    compiler: str, recipe: str, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(Block(), Block())
    graph, gradients = trained(model, x, compiler=compiler, recipe=recipe)
    (total,) = te_nodes(graph, "column_sums")
    sums = len(arguments_of(total)["partials"])
    assert sums == len(arguments_of(total)["dtypes"].split()) >= 4
    parts = [node for name in ("fused_quantize", "norm_backward") for node in te_nodes(graph, name)]
    assert sum(arguments_of(node)["partial_sums"] for node in parts) >= 4
    monkeypatch.setattr(module, "KERNELS", set())
    other, wanted = trained(model, x, compiler=compiler, recipe=recipe)
    assert not te_nodes(other, "column_sums")
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-6, msg=name)


def test_no_more_wait_than_one_launch_adds_up_and_memory_is_for(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(Block() for _ in range(6)))
    graph, _ = trained(model, x)
    together = [len(arguments_of(node)["partials"]) for node in te_nodes(graph, "column_sums")]
    assert len(together) > 1 and max(together) <= module.AT_ONCE
    monkeypatch.setattr(module, "MOST_BYTES", 4)
    graph, _ = trained(model, x)
    assert not te_nodes(graph, "column_sums")


def test_one_sum_alone_is_its_operators(x: Tensor) -> None:
    graph, _ = trained(Block(nn.Identity, bias=False), x)  # type: ignore[arg-type]
    assert not te_nodes(graph, "column_sums")
    graph, _ = trained(Block(lambda width: nn.LayerNorm(width, elementwise_affine=False)), x)
    partial = [node for node in te_nodes(graph, "fused_quantize") if arguments_of(node)["partial_sums"]]
    assert len(te_nodes(graph, "column_sums")) == (len(partial) > 1)


class Shared(nn.Module):
    """Two blocks of one bias, whose two sums are added in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(nn.Identity), Block(nn.Identity)  # type: ignore[arg-type]
        self.second.up.bias = self.first.up.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


def test_a_sum_that_something_reads_is_there_when_it_is_read(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Shared()
    _, gradients = trained(model, x)
    monkeypatch.setattr(module, "KERNELS", set())
    _, wanted = trained(model, x)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-6, msg=name)


def test_sizes_that_are_not_known_have_no_partial_rows(x: Tensor) -> None:
    torch._dynamo.mark_dynamic(x, 0)
    graph, _ = trained(nn.Sequential(Block(), Block()), x)
    assert te_nodes(graph, "fused_quantize") and not te_nodes(graph, "column_sums")


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")])
def test_sums_of_different_devices_stay_apart(devices: tuple[str, str]) -> None:
    graph, outputs = Graph(), []
    with FakeTensorMode():
        for device in devices:
            x = graph.placeholder("x")
            x.meta["val"] = torch.empty(ROWS, WIDTH, device=device)
            spec = "x0: float32[M, K]; quantize x0; sum x0: float32"
            given = ([x], None, spec, torch.float8_e5m2, True, True, ScaleRule().text())
            producer = call_like(FUSED_QUANTIZE, given, x)
            outputs.append(call_like(operator.getitem, (producer, 4), x))
        graph.output(tuple(outputs))
        together = len(set(devices)) == 1
        assert sum_columns_late(graph) == (2 if together else 0)
    graph.lint()
    assert len(te_nodes(graph, "column_sums")) == together


def test_without_a_kernel_nothing_changes(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KERNELS", {"triton"})
    graph, _ = trained(nn.Sequential(Block(), Block()), x)
    assert not te_nodes(graph, "column_sums")
