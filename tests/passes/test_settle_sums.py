"""A sum over rows that a cat takes has memory of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config, inductor_prims, ir
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from te_compile.passes.settle_sums import settle_sums
from tests.compiling import BACKEND, cosine, gradients
from tests.scale_tables import Modulated

module = sys.modules[settle_sums.__module__]
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ON", {"cpu"})


def traced(function: Callable[..., Tensor], *inputs: Tensor, dynamic: bool = False) -> GraphModule:
    graph = make_fx(function, tracing_mode="symbolic" if dynamic else "fake")(*inputs)
    assert isinstance(graph, GraphModule)
    return graph


SETTLED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], int]] = {
    "of a matrix": (lambda x, y: torch.cat([x.sum(0), y.sum(0)]), (24, 8), 2),
    "beside something else": (lambda x, y: torch.cat([x.sum(0), y[0]]), (24, 8), 1),
    "of all but the last dimension": (lambda x, y: torch.cat([x.sum((0, 1)), y[0, 0]]), (3, 24, 8), 1),
    "of one sequence": (lambda x, y: torch.cat([x.sum(1, keepdim=True), y[:, :1]], 1), (1, 24, 8), 1),
    "twice": (lambda x, y: torch.cat([z := x.sum(0), y[0], z]), (24, 8), 1),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", SETTLED)
def test_a_sum_over_rows_is_settled(case: str, dynamic: bool) -> None:
    function, shape, expected = SETTLED[case]
    inputs = torch.randn(shape), torch.randn(shape)
    graph = traced(function, *inputs, dynamic=dynamic)
    assert settle_sums(graph.graph) == expected
    graph.graph.lint()
    graph.recompile()
    held = graph.graph.find_nodes(op="call_function", target=inductor_prims.force_stride_order)
    assert len(held) == expected and settle_sums(graph.graph) == 0
    assert torch.equal(graph(*inputs), function(*inputs))


LEFT: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "over columns": (lambda x, y: torch.cat([x.sum(1), y.sum(1)]), (24, 8)),
    "over rows of each batch": (lambda x, y: torch.cat([x.sum(1), y.sum(1)]), (3, 24, 8)),
    "of all": (lambda x, y: torch.stack([x.sum(), y.sum()]), (24, 8)),
    "with something behind it": (lambda x, y: torch.cat([x.sum(0) * 2, y[0]]), (24, 8)),
    "without a cat": (lambda x, y: x.sum(0) + y[0], (24, 8)),
}


@pytest.mark.parametrize("case", LEFT)
def test_others_are_left_alone(case: str) -> None:
    function, shape = LEFT[case]
    graph = traced(function, torch.randn(shape), torch.randn(shape))
    assert settle_sums(graph.graph) == 0


def test_nor_is_anything_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ON", {"cuda"})
    graph = traced(SETTLED["of a matrix"][0], torch.randn(24, 8), torch.randn(24, 8))
    assert settle_sums(graph.graph) == 0


def sums_in_parts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Filled, while Inductor compiles, with whether each sum that it has for a ``cat`` is written into its part."""
    seen: list[bool] = []
    realize = ir.ConcatKernel.realize_into

    def watched(src: Any, dst: Any) -> Any:
        box = src.data if isinstance(src, ir.TensorBox) else src
        is_sum = isinstance(box, ir.StorageBox) and isinstance(getattr(box.data, "data", None), ir.Reduction)
        if is_sum:
            seen.append(ir.ConcatKernel.can_realize_into_without_copy(box, dst))
        return realize(src, dst)

    monkeypatch.setattr(ir.ConcatKernel, "realize_into", watched)
    return seen


@pytest.mark.parametrize("settles", [True, False])
def test_inductor_writes_no_sum_into_its_part(settles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ON", {"cpu" if settles else "cuda"})
    written = sums_in_parts(monkeypatch)
    model, x = Modulated(64), torch.randn(1, 128, 64)
    model(x).square().mean().backward()
    wanted = gradients(model)
    model.zero_grad()
    fast = torch.compile(model, backend=BACKEND, options={"cost_model": False})
    with config.patch(force_disable_caches=True):  # else what another run compiled is taken
        fast(x).square().mean().backward()
    assert cosine(gradients(model)["table"], wanted["table"]) > 0.99
    assert written and any(written) != settles
