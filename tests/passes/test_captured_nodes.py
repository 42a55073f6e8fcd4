"""A node is called by a name of PyTorch's if it is what everybody means by that."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.masked
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph

from te_compile.passes.captured_nodes import called, name_called
from te_compile.passes.grouped_linears import is_grouped_product
from tests.compiling import compiled, relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@torch.library.custom_op("te_compile_tests::softmax", mutates_args=())
def off_by_one(x: Tensor, dim: int) -> Tensor:
    """Whose chances add up to less than 1."""
    powers = (x - x.amax(dim, True)).exp()
    return powers / (1 + powers.sum(dim, True))


@off_by_one.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("te_compile_tests::contiguous", mutates_args=())
def squared(x: Tensor) -> Tensor:
    return x * x.abs()


@squared.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.compiler.allow_in_graph
def transpose(x: Tensor, one: int, other: int) -> Tensor:
    """Another thing than its name says."""
    return x.flip(-1).transpose(one, other)


@pytest.mark.parametrize(("function", "name"), [
    (torch.softmax, "softmax"), (F.softmax, "softmax"), (torch.ops.aten.softmax.int, "softmax"), (F.linear, "linear"),
    (operator.matmul, "matmul"), (torch.linalg.matmul, "linalg_matmul"), (torch.Tensor.softmax, "softmax"),
    (torch.ops.aten.numpy_T, "T"), (torch.ops.aten.mT.default, "mT"), (torch.ops.aten.matrix_H, "H"),
])  # fmt: skip
def test_what_is_pytorchs_is_called_by_its_name(function: Callable[..., Any], name: str) -> None:
    graph = Graph()
    assert called(graph.call_function(function, (graph.placeholder("x"),))) == name


@pytest.mark.parametrize(
    "function", [torch.masked.softmax, torch.ops.te_compile_tests.softmax.default, torch.masked.logsumexp, transpose]
)
def test_what_has_the_name_of_something_else_has_none(function: Callable[..., Any]) -> None:
    graph = Graph()
    node = graph.call_function(function, (graph.placeholder("x"),))
    assert called(node) == "" and name_called(node) in ("softmax", "logsumexp", "transpose")


@torch.library.custom_op("te_compile_tests::grouped_mm_fallback", mutates_args=())
def something_else(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    return x.clone()


@pytest.mark.parametrize(
    "function",
    [torch.ops.te_compile_tests.grouped_mm_fallback, torch.ops.te_compile_tests.grouped_mm_fallback.default],
)
def test_an_operator_of_hugging_faces_is_known_by_its_library_too(function: Callable[..., Any]) -> None:
    graph = Graph()
    assert not is_grouped_product(graph.call_function(function, tuple(graph.placeholder(name) for name in "xwo")))


def _masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    return torch.masked.softmax(q @ k.mT / 4, -1, mask=mask.expand(2, 2, 8, 8)) @ v


def _less_than_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return off_by_one(q @ k.mT / 4, -1) @ v


def _of_turned_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ transpose(k, -2, -1) / 4, -1) @ v


@pytest.mark.parametrize("run", [_masked, _less_than_one, _of_turned_keys])
def test_attention_by_such_functions_is_the_models(run: Callable[..., Tensor]) -> None:
    q, k, v = (torch.randn(2, 2, 8, 16) for _ in range(3))
    assert relative_error(compiled(run)(q, k, v), run(q, k, v)) < 1e-5


def test_a_weight_by_such_a_function_is_what_that_gives() -> None:
    weight, x = torch.nn.Parameter(torch.randn(48, 32)), torch.randn(64, 32)
    with torch.no_grad():  # it has no gradient
        y = compiled(lambda x: F.linear(x, squared(weight)), strict=True, recipe="current")(x)
    assert 1e-3 < relative_error(y, F.linear(x, squared(weight))) < 0.1
