"""Pruning: a layout is written exactly if somebody reads it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from te_compile.ops.quantize import QUANTIZE
from te_compile.passes.arguments import arguments_of
from te_compile.passes.prune_outputs import prune_outputs
from te_compile.recipe import ScaleRule
from tests.capturing import traced

RULE = ScaleRule().text()


def reading(*wanted: int) -> GraphModule:
    """A graph that quantises and reads the given outputs, of (q, qt, amax, scale_inv)."""

    def run(x: Tensor) -> list[Tensor]:
        outputs = QUANTIZE(x, None, torch.float8_e4m3fn, True, True, RULE)
        return [outputs[i].float() for i in wanted]

    return traced(run, torch.randn(7, 32))


def only_quantize(gm: GraphModule) -> Node:
    (node,) = gm.graph.find_nodes(op="call_function", target=QUANTIZE)
    return node


@pytest.mark.parametrize(
    ("wanted", "rowwise", "columnwise"),
    [((0, 1), True, True), ((0, 3), True, False), ((1, 3), False, True), ((2,), False, False)],
)
def test_what_is_read_is_written(wanted: tuple[int, ...], rowwise: bool, columnwise: bool) -> None:
    gm = reading(*wanted)
    x = torch.randn(7, 32)
    expected = gm(x)
    dropped = prune_outputs(gm.graph)
    gm.graph.lint()
    gm.recompile()
    arguments = arguments_of(only_quantize(gm))
    assert (arguments["rowwise"], arguments["columnwise"]) == (rowwise, columnwise)
    assert dropped == 2 - rowwise - columnwise
    assert all(torch.equal(got, other) for got, other in zip(gm(x), expected, strict=True))


def test_the_values_on_the_graph_follow() -> None:
    gm = reading(0)
    prune_outputs(gm.graph)
    q, qt, *_ = only_quantize(gm).meta["val"]
    assert tuple(q.shape) == (7, 32) and tuple(qt.shape) == (0,)


def test_a_reader_that_is_dead_itself_does_not_count() -> None:
    gm = reading(0, 1)
    (kept, _) = gm.graph.output_node().args[0]
    gm.graph.output_node().args = ([kept],)
    assert prune_outputs(gm.graph) == 1
    assert arguments_of(only_quantize(gm))["columnwise"] is False


def test_a_second_run_finds_nothing() -> None:
    gm = reading(0)
    prune_outputs(gm.graph)
    assert prune_outputs(gm.graph) == 0
