"""A loss's backward may write over logits that only its graph has, and that its backward pass reads once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from te_compile.ops.cross_entropy import (
    CROSS_ENTROPY_BACKWARD,
    CROSS_ENTROPY_BACKWARD_DEFERRED,
    CROSS_ENTROPY_BACKWARD_DEFERRED_WITH_SUMS,
    CROSS_ENTROPY_BACKWARD_WITH_SUMS,
)
from te_compile.ops.deferred_gradient import GRADIENT_TICKET
from te_compile.passes.arguments import arguments_of
from te_compile.passes.overwrite_logits import keep_read_logits, overwrite_logits
from tests.capturing import traced

CLASSES, ROWS = 40, 6
aten = torch.ops.aten
Rest = Callable[[Tensor], Any]
"""What else a graph returns of its logits, [2, ROWS // 2, CLASSES]."""


def step(rest: Rest = lambda logits: (), defers: bool = False, sums: bool = False) -> Callable[..., Any]:
    """A head and the gradient of its loss, as a joint graph has them."""

    def function(x: Tensor, w: Tensor, targets: Tensor, gradients: Tensor) -> Any:
        logits = aten.view(aten.mm(x, w), [2, ROWS // 2, CLASSES])
        matrix = aten.view(logits, [ROWS, CLASSES])
        lse = matrix.logsumexp(1)
        other = GRADIENT_TICKET(lse) if defers else None
        backwards = {
            (False, False): CROSS_ENTROPY_BACKWARD, (False, True): CROSS_ENTROPY_BACKWARD_WITH_SUMS,
            (True, False): CROSS_ENTROPY_BACKWARD_DEFERRED, (True, True): CROSS_ENTROPY_BACKWARD_DEFERRED_WITH_SUMS,
        }  # fmt: skip
        operands = (matrix, targets, lse, gradients, -100, other)
        found = backwards[defers, sums](*operands, *([torch.float32] * sums))
        return rest(logits), (found[0] if sums else found).mm(w.t())

    return function


def inputs() -> list[Tensor]:
    return [torch.randn(ROWS, 8), torch.randn(8, CLASSES), torch.randint(0, CLASSES, (ROWS,)), torch.randn(ROWS)]


def permitted(graph: Graph) -> list[bool]:
    return [arguments_of(node)["overwrite"] for node in graph.nodes if "cross_entropy_backward" in str(node.target)]


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("defers", [False, True])
def test_logits_of_the_graphs_own_may_be_overwritten(defers: bool, sums: bool) -> None:
    rest: Rest = (lambda logits: logits.detach()) if defers else (lambda logits: logits.sum())
    graph = traced(step(rest, defers, sums), *inputs()).graph
    assert overwrite_logits(graph) == 1 and permitted(graph) == [True]


@pytest.mark.parametrize(
    "rest",
    [
        lambda logits: logits,
        lambda logits: logits.detach(),
        lambda logits: logits.view(ROWS, CLASSES),
        lambda logits: logits[:, -1],
        lambda logits: logits.split(1)[1],
        lambda logits: logits.transpose(1, 2),
    ],
)
@pytest.mark.parametrize("defers", [False, True])
def test_logits_that_a_result_shows_may_not(defers: bool, rest: Rest) -> None:
    """But for those that are detached for a ticket's sake, and once."""

    def results(logits: Tensor) -> Any:
        return (logits.detach(), rest(logits)) if defers else rest(logits)

    graph = traced(step(results, defers), *inputs()).graph
    assert overwrite_logits(graph) == 0 and permitted(graph) == [False]


def test_logits_that_are_returned_twice_may_not() -> None:
    graph = traced(step(lambda logits: (shown := logits.detach(), shown), defers=True), *inputs()).graph
    assert overwrite_logits(graph) == 0


def test_logits_that_the_caller_gave_may_not() -> None:
    def function(logits: Tensor, targets: Tensor, gradients: Tensor) -> Tensor:
        matrix = logits.view(ROWS, CLASSES)
        return CROSS_ENTROPY_BACKWARD(matrix, targets, matrix.logsumexp(1), gradients, -100)

    graph = traced(function, torch.randn(2, 3, CLASSES), *inputs()[2:]).graph
    assert overwrite_logits(graph) == 0 and permitted(graph) == [False]


def test_compiled_autograd_permits_nothing() -> None:
    graph = traced(step(), *inputs()).graph
    with torch._dynamo.config.patch(compiled_autograd=True):
        assert overwrite_logits(graph) == 0


def backward(logits: Tensor, targets: Tensor, lse: Tensor, gradients: Tensor) -> Tensor:
    return CROSS_ENTROPY_BACKWARD(logits, targets, lse, gradients, -100, None, True)


def of_saved() -> list[Tensor]:
    return [torch.randn(ROWS, CLASSES), *inputs()[2:], torch.randn(ROWS)]


def test_a_backward_that_reads_saved_logits_once_keeps_its_permission() -> None:
    graph = traced(lambda x, t, g, lse: backward(x, t, lse, g), *of_saved()).graph
    assert keep_read_logits(graph) == 0 and permitted(graph) == [True]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, t, g, lse: (backward(x, t, lse, g), x.tanh()),
        lambda x, t, g, lse: (backward(x, t, lse, g), x.view(-1).tanh()),
        lambda x, t, g, lse: backward(x * 2, t, lse, g),
        lambda x, t, g, lse: backward(x.view(-1).view(ROWS, CLASSES), t, lse, g),
    ],
    ids=["read again", "read through a view", "computed", "a view"],
)
def test_a_backward_that_reads_more_loses_it(function: Callable[..., Any]) -> None:
    graph = traced(function, *of_saved()).graph
    assert keep_read_logits(graph) == 1 and permitted(graph) == [False]
