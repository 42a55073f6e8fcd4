"""What writes into a tensor is found by whatever name a view of it has, in the bodies of checkpointed regions, where
``inplace`` is given by its place, and where a custom operator says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch.fx import Graph, Node
from torch.utils.checkpoint import checkpoint

from te_compile.passes.captured_nodes import called
from te_compile.passes.recognise_norms import recognise_norms
from te_compile.passes.side_effects import may_change, memory_of
from tests.capturing import captured
from tests.compiling import compiled

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
    "einsum": lambda x: torch.einsum("ij->ji", x),
    "einsum of a diagonal": lambda x: torch.einsum("ii->i", x),
}


@torch.library.custom_op("te_compile_tests::fill_with_ones", mutates_args={"x"})
def fill_with_ones(x: Tensor) -> None:
    x.fill_(1)


@fill_with_ones.register_fake
def _(x: Tensor) -> None:
    return None


@torch.library.custom_op("te_compile_tests::ones_like", mutates_args=())
def ones_like(x: Tensor) -> Tensor:
    return torch.ones_like(x)


@ones_like.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


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


def test_a_write_into_the_view_of_one_of_several_is_one() -> None:
    def function(x: Tensor) -> Tensor:
        made = x.cos()
        torch.atleast_2d([torch.ones(3), made])[1].fill_(1)
        return made + 1

    gm, _ = captured(function, torch.randn(4, 4))
    assert may_change(node_called(gm.graph, "cos"))


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


WRITERS: dict[str, Callable[[Tensor], object]] = {
    "relu": lambda x: F.relu(x, True),
    "relu by name": lambda x: F.relu(x, inplace=True),
    "hardtanh": lambda x: F.hardtanh(x, -1, 1, True),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1, True),
    "dropout": lambda x: F.dropout(x, 0.5, True, True),
    "of a view": lambda x: F.silu(x.moveaxis(0, 1), True),
    "out": lambda x: torch.sin(x, out=x),
    "custom operator": fill_with_ones,
    "custom operator by its packet": torch.ops.te_compile_tests.fill_with_ones,
    "custom operator by its overload": torch.ops.te_compile_tests.fill_with_ones.default,
}
NOT_WRITERS: dict[str, Callable[[Tensor], object]] = {
    "relu": lambda x: F.relu(x, False),
    "hardtanh": lambda x: F.hardtanh(x, -1, 1),
    "dropout": lambda x: F.dropout(x, 0.5, True),
    "custom operator by its packet": torch.ops.te_compile_tests.ones_like,
}


def _writing(write: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        made = x.cos()
        write(made)
        return made + 1

    return function


@pytest.mark.parametrize("write", WRITERS.values(), ids=list(WRITERS))
def test_whatever_asks_for_it_a_write_is_one(write: Callable[[Tensor], object]) -> None:
    gm, _ = captured(_writing(write), torch.randn(4, 4))
    assert may_change(node_called(gm.graph, "cos"))


@pytest.mark.parametrize("read", NOT_WRITERS.values(), ids=list(NOT_WRITERS))
def test_what_only_could_write_does_not(read: Callable[[Tensor], object]) -> None:
    gm, _ = captured(_writing(read), torch.randn(4, 4))
    assert not may_change(node_called(gm.graph, "cos"))


@pytest.mark.parametrize("name", ["relu", "hardtanh", "custom operator by its packet"])
def test_a_norm_whose_input_is_written_to_between_its_parts_stays(name: str) -> None:
    """With no gradients to compute, nothing else than this keeps it from being gathered behind the write."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        made = x.cos()
        square = made.float().pow(2).mean(-1, keepdim=True)
        WRITERS[name](made)
        return F.linear(made * torch.rsqrt(square + 0.1), weight)

    x, weight = torch.randn(4, 32), torch.randn(16, 32)
    with torch.no_grad():
        fast = compiled(function, exclude=["*"])
        torch.testing.assert_close(fast(x, weight), function(x, weight))
        gm, _ = captured(function, x, weight)
    assert recognise_norms(gm.graph) == 0


def test_a_triton_kernel_of_the_users_writes_to_what_it_is_given() -> None:
    graph = Graph()
    given, other = graph.placeholder("given"), graph.placeholder("other")
    of_the_call = {"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1,)], "tma_descriptor_metadata": {}}
    graph.call_function(triton_kernel_wrapper_mutation, kwargs={**of_the_call, "kwargs": {"pointer": given}})
    assert may_change(given) and not may_change(other)
