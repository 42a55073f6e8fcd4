"""What writes into a tensor is found by whatever name a view of it has, and in the bodies of checkpointed regions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils.checkpoint import checkpoint

from te_compile.passes.captured_nodes import called
from te_compile.passes.side_effects import may_change, memory_of
from tests.capturing import captured

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "getitem": lambda x: x[..., 1:],
    "data": lambda x: x.data,
    "mT": lambda x: x.mT,
    "moveaxis": lambda x: x.moveaxis(0, 1),
    "swapdims": lambda x: x.swapdims(0, 1),
    "as_strided": lambda x: x.as_strided((2,), (1,)),
    "tensor_split": lambda x: x.tensor_split(2)[1],
    "ravel": lambda x: x.ravel(),
    "atleast_3d": torch.atleast_3d,
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x)[0],
    "two in a row": lambda x: x.moveaxis(0, 1).adjoint(),
}


def node_called(graph: Graph, name: str) -> Node:
    (found,) = [node for node in graph.nodes if node.op in ("call_function", "call_method") and called(node) == name]
    return found


@pytest.mark.parametrize("view", VIEWS.values(), ids=list(VIEWS))
def test_a_write_into_a_view_is_one(view: Callable[[Tensor], Tensor]) -> None:
    def function(x: Tensor) -> Tensor:
        made = x.cos()
        view(made).fill_(1)
        return made + 1

    gm, _ = captured(function, torch.randn(4, 4))
    assert may_change(node_called(gm.graph, "cos"))
    assert memory_of(node_called(gm.graph, "fill_")) is node_called(gm.graph, "cos")


@pytest.mark.parametrize("copy", [lambda x: x.clone(), lambda x: x + 0, lambda x: x.mT.sin()])
def test_a_write_into_a_copy_is_none(copy: Callable[[Tensor], Tensor]) -> None:
    def function(x: Tensor) -> Tensor:
        made = x.cos()
        return copy(made).fill_(1) + made

    gm, _ = captured(function, torch.randn(4, 4))
    assert not may_change(node_called(gm.graph, "cos"))


@pytest.mark.parametrize("view", [VIEWS["itself"], VIEWS["moveaxis"]])
@pytest.mark.parametrize("writes", [False, True])
def test_a_write_in_a_checkpointed_region_is_one(writes: bool, view: Callable[[Tensor], Tensor]) -> None:
    def region(x: Tensor, made: Tensor) -> Tensor:
        shown = view(made)
        return x * (shown.fill_(1) if writes else shown)

    def function(x: Tensor) -> Tensor:
        made = torch.ones(4, 4).cos()
        return checkpoint(region, x, made, use_reentrant=False) + made

    gm, _ = captured(function, torch.randn(4, 4, requires_grad=True))
    assert may_change(node_called(gm.graph, "cos")) == writes
