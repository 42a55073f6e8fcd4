"""Quantizes of one value in different checkpointed regions are one, with all that is taken from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from te_compile.ops.quantize import QUANTIZE
from te_compile.passes.share_across_regions import share_across_regions
from te_compile.recipe import ScaleRule
from tests.capturing import traced
from tests.compiling import compiled, relative_error, train_step

RULE = ScaleRule().text()


def quantize(x: Tensor, scale: Tensor | None = None) -> Tensor:
    return QUANTIZE(x.reshape(-1, 32), scale, torch.float8_e4m3fn, True, True, RULE)[0].float()


def regions(run: Callable[..., Tensor], *numbers: int | None) -> tuple[GraphModule, list[Node]]:
    """The graph of ``run``, and its quantizes, each with all that it alone reads or is read by in the region given."""
    gm = traced(run, torch.randn(2, 4, 32), torch.rand(2))
    found = gm.graph.find_nodes(op="call_function", target=QUANTIZE)
    for node, number in zip(found, numbers, strict=True):
        if number is not None:
            for each in (node, *node.users, *(read for read in node.all_input_nodes if read.op == "call_function")):
                each.meta |= {"ac_graph_id": number, "recompute": CheckpointPolicy.PREFER_RECOMPUTE}
    return gm, found


def twice(x: Tensor, _: Tensor) -> Tensor:
    return quantize(x).sin() + quantize(x).cos()


@pytest.mark.parametrize("numbers", [(None, 1), (1, 2), (1, None)])
def test_equal_ones_become_the_first_and_so_do_their_results(numbers: tuple[int | None, ...]) -> None:
    gm, (first, _) = regions(twice, *numbers)
    x = torch.randn(2, 4, 32), torch.rand(2)
    expected = gm(*x)
    assert share_across_regions(gm.graph) == 1
    gm.graph.lint()
    gm.recompile()
    assert gm.graph.find_nodes(op="call_function", target=QUANTIZE) == [first]
    assert {user.meta.get("ac_graph_id") for user in first.users} == {numbers[0]}
    assert {user.meta.get("recompute") for user in first.users} == {first.meta.get("recompute")}
    assert torch.equal(gm(*x), expected)


@pytest.mark.parametrize(
    ("run", "numbers"),
    [
        (twice, (None, None)),  # nothing is recomputed
        (twice, (1, 1)),  # one region
        (lambda x, s: quantize(x) + quantize(x + 1), (None, 1)),
        (lambda x, s: quantize(x, s[0]) + quantize(x, s[1]), (None, 1)),
        (lambda x, s: quantize(x) + quantize(x, s[1]), (1, 2)),
        (lambda x, s: quantize(x) + quantize(x.add_(1)), (None, 1)),
        (lambda x, s: quantize(torch.rand_like(x)) + quantize(torch.rand_like(x)), (None, 1)),
        (lambda x, s: quantize(F.dropout(x, 0.5)) + quantize(F.dropout(x, 0.5)), (1, 2)),
    ],
)
def test_others_stay_apart(run: Callable[..., Any], numbers: tuple[int | None, ...]) -> None:
    gm, found = regions(run, *numbers)
    regions_before = [[user.meta.get("ac_graph_id") for user in node.users] for node in found]
    assert share_across_regions(gm.graph) == 0
    assert gm.graph.find_nodes(op="call_function", target=QUANTIZE) == found
    assert [[user.meta.get("ac_graph_id") for user in node.users] for node in found] == regions_before


def test_what_a_body_makes_is_another_value_each_time() -> None:
    gm, (first, second) = regions(twice, None, 1)
    gm.body = torch.fx.symbolic_trace(nn.Dropout())
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        body = gm.graph.get_attr("body")
    for node in (first, second):
        (x,) = node.all_input_nodes
        with gm.graph.inserting_before(node):
            call = gm.graph.call_function(torch.ops.higher_order.invoke_subgraph, (body, "body", x))
        node.replace_input_with(x, call)
    assert share_across_regions(gm.graph) == 0


def test_what_is_written_to_in_between_is_another_value() -> None:
    gm, (_, second) = regions(lambda x, s: quantize(x) + quantize(x), None, 1)
    (x, _) = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_before(second):
        gm.graph.call_function(torch.ops.aten.add_.Tensor, (x, 1.0))
    assert share_across_regions(gm.graph) == 0


@pytest.mark.parametrize("numbers", [(None, 1), (1, 2)])
def test_pytorch_finds_none_of_them_to_merge_afterwards(numbers: tuple[int | None, ...]) -> None:
    gm, _ = regions(twice, *numbers)
    share_across_regions(gm.graph)
    gm.graph.eliminate_dead_code()
    before = len(gm.graph.find_nodes(op="call_function", target=QUANTIZE))
    assert len(fx_graph_cse(gm.graph).find_nodes(op="call_function", target=QUANTIZE)) == before == 1


class Model(nn.Module):
    """Two linears that read one input, the second of them in a checkpointed region, and the first, too, or not."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.first, self.second, self.both = nn.Linear(32, 64), nn.Linear(32, 32), both

    def gated(self, x: Tensor) -> Tensor:
        y, z = self.first(x).chunk(2, -1)
        return F.silu(y) * z

    def forward(self, x: Tensor) -> Tensor:
        first = checkpoint(self.gated, x, use_reentrant=False) if self.both else self.gated(x)
        return torch.cat([first, checkpoint(self.second, x, use_reentrant=False)], -1)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("both", [False, True])
def test_a_model_whose_regions_read_one_input_trains(both: bool, recipe: str) -> None:
    model, x = Model(both), torch.randn(2, 16, 32)
    fast = compiled(model, recipe=recipe)
    for _ in range(2):
        (expected, wanted), (got, found) = train_step(model, model, x), train_step(model, fast, x)
        assert relative_error(got, expected) < 0.1
        for name, gradient in wanted.items():
            assert relative_error(found[name], gradient) < 0.15, name
