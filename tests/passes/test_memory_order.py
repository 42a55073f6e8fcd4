"""In which order elements lie in memory is kept where it shows, and no copy is made where it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_compile.passes.captured_nodes import value_of
from te_compile.passes.memory_order import order_shows
from tests.capturing import captured

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BATCH, LENGTH, WIDTH = 3, 5, 16
WEIGHT = torch.ones(WIDTH)

HIDDEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "put in order": lambda y, x: y.transpose(0, 1).reshape(-1, WIDTH).contiguous().cos(),
    "added to a residual": lambda y, x: (x + y.transpose(0, 1)).cos(),
    "added to a residual behind an activation": lambda y, x: x + F.gelu(y.transpose(0, 1)) * 2.0,
    "normalised": lambda y, x: F.layer_norm(x - y.transpose(0, 1).to(torch.float32), (WIDTH,), WEIGHT).sin(),
    "met by itself": lambda y, x: x + (y.transpose(0, 1) + torch.relu(y).transpose(0, 1)),
}
SHOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "returned": lambda y, x: y.transpose(0, 1),
    "returned behind an activation": lambda y, x: torch.relu(y),
    "viewed": lambda y, x: y.view(-1, WIDTH),
    "added to what is broadcast": lambda y, x: x[:1].expand(BATCH, -1, -1) + y.transpose(0, 1),
    "added to by a residual": lambda y, x: y.transpose(0, 1) + x,
    "dropped": lambda y, x: x + F.dropout(y.transpose(0, 1), 0.5),
    "written to": lambda y, x: x + y.transpose(0, 1).add_(1.0),
}


def shows(read: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """For a result [length, batch, width] in that order, which may lie as [batch, length, width]."""

    def run(x: Tensor) -> Tensor:
        return read(x.transpose(0, 1).sin().clone(memory_format=torch.contiguous_format), x)

    gm, _ = captured(run, torch.randn(BATCH, LENGTH, WIDTH))
    (node,) = gm.graph.find_nodes(op="call_method", target="clone")
    value = value_of(node)
    with value.fake_mode:
        otherwise = value.transpose(0, 1).contiguous().transpose(0, 1)
    assert not order_shows(node, value), "nothing shows if nothing is otherwise"
    return order_shows(node, otherwise)


@pytest.mark.parametrize("read", HIDDEN.values(), ids=HIDDEN)
def test_an_order_does_not_show_where_something_else_says_how_results_lie(
    read: Callable[[Tensor, Tensor], Tensor],
) -> None:
    assert not shows(read)


@pytest.mark.parametrize("read", SHOWN.values(), ids=SHOWN)
def test_an_order_shows_in_views_results_random_numbers_and_what_is_written(
    read: Callable[[Tensor, Tensor], Tensor],
) -> None:
    assert shows(read)


def test_beside_what_has_no_example_anything_shows() -> None:
    gm, _ = captured(lambda x: x + torch.relu(x.sin().transpose(0, 1)).transpose(0, 1), torch.randn(5, 5, WIDTH))
    (node,) = gm.graph.find_nodes(op="call_method", target="sin")
    value = value_of(node)
    with value.fake_mode:
        otherwise = value.transpose(0, 1).contiguous().transpose(0, 1)
    assert not order_shows(node, otherwise)
    del gm.graph.find_nodes(op="placeholder")[0].meta["example_value"]
    assert order_shows(node, otherwise)


def test_of_sizes_that_change_nothing_is_asked() -> None:
    def run(x: Tensor) -> Tensor:
        return x + torch.sin(x.transpose(0, 1)).transpose(0, 1)

    x = torch.randn(BATCH, LENGTH, WIDTH)
    torch._dynamo.mark_dynamic(x, 0)
    gm, _ = captured(run, x)
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.sin)
    assert order_shows(node, value_of(node))
