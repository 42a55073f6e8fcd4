"""What counts as a view: all that shows elements of another tensor, and nothing that computes or writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from te_compile.passes.views import is_view
from tests.capturing import traced


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.view(32),
        lambda x: x.t(),
        lambda x: x.permute(1, 0),
        lambda x: x[1:],
        lambda x: x[0],
        lambda x: x.unsqueeze(1),
        lambda x: x.expand(2, 4, 8),
        lambda x: torch.ops.aten.reshape.default(x, [8, 4]),
        lambda x: x.detach(),
    ],
)
def test_what_shows_elements_is_a_view(look: Callable[[Tensor], Tensor]) -> None:
    graph = traced(look, torch.randn(4, 8)).graph
    assert [is_view(node) for node in graph.nodes if node.op == "call_function"] == [True]


@pytest.mark.parametrize(
    "compute", [lambda x: x.sin(), lambda x: x.clone(), lambda x: x.double(), lambda x: x.add_(1), torch.zeros_like]
)
def test_what_makes_or_writes_elements_is_none(compute: Callable[[Tensor], Tensor]) -> None:
    graph = traced(compute, torch.randn(4, 8)).graph
    assert not any(map(is_view, graph.nodes))


def test_a_split_shows_elements_and_its_parts_are_taken_out_by_what_is_no_operator() -> None:
    graph = traced(lambda x: x.split(2)[0] + 1, torch.randn(4, 8)).graph
    assert [str(node.target) for node in graph.nodes if is_view(node)] == ["aten.split.Tensor"]
