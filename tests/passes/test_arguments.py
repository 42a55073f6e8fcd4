"""Arguments by name: of operators as they are, with defaults, and wrapped by functionalization."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

from te_compile.ops.quantize import QUANTIZE
from te_compile.ops.scaling import UPDATE_SCALES
from te_compile.passes import manager
from te_compile.passes.arguments import (
    arguments_of,
    is_te,
    operator_of,
    refresh_value,
    result,
    set_arguments,
    values_of,
)
from te_compile.recipe import DelayedScaling, ScaleRule
from tests.capturing import traced
from tests.compiling import compiled, te_nodes, train_step

RULE = ScaleRule().text()


def quantized() -> tuple[GraphModule, Node]:
    """A graph with one te::quantize, and that node."""
    gm = traced(lambda x: QUANTIZE(x, None, torch.float8_e4m3fn, True, True, RULE)[1].float(), torch.randn(8, 32))
    (node,) = gm.graph.find_nodes(op="call_function", target=QUANTIZE)
    return gm, node


def updated() -> Node:
    """A te::update_scales_ as functionalization leaves it."""
    model = nn.Sequential(nn.Linear(32, 16))
    with manager.recording() as records:
        train_step(model, compiled(model), torch.randn(4, 32))
    wrapped = [node for node in te_nodes(records[0], "update_scales_") if node.target is not UPDATE_SCALES]
    (forward,) = [node for node in wrapped if node.kwargs["direction"] == "forward"]
    return forward


def test_arguments_have_their_schema_names_and_defaults() -> None:
    _, node = quantized()
    arguments = arguments_of(node)
    assert arguments["dtype"] == torch.float8_e4m3fn and arguments["scale"] is None
    assert arguments["implementation"] == "reference"
    assert arguments["x"].op == "placeholder"


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_wrapped_mutating_operator_is_seen_through() -> None:
    node = updated()
    assert operator_of(node) is UPDATE_SCALES and is_te(node, "update_scales_")
    arguments = arguments_of(node)
    assert arguments["direction"] == "forward" and arguments["recipe"] == DelayedScaling().key()
    set_arguments(node, direction="backward")
    assert arguments_of(node)["direction"] == "backward"


def test_a_node_of_another_operator_is_not_ours() -> None:
    gm = traced(lambda x: x.sin(), torch.randn(3))
    (node,) = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert not is_te(node, "quantize") and operator_of(node) is torch.ops.aten.sin.default


@pytest.mark.parametrize("name", ["rowwise", "implementation"])
def test_a_changed_argument_reads_back_and_leaves_the_others(name: str) -> None:
    _, node = quantized()
    before = arguments_of(node)
    set_arguments(node, **{name: "changed"})
    assert arguments_of(node) == {**before, name: "changed"}


def test_a_name_that_the_schema_does_not_have_is_an_error() -> None:
    _, node = quantized()
    with pytest.raises(ValueError, match="colour"):
        set_arguments(node, colour="red")


def test_values_follow_a_change_of_arguments() -> None:
    _, node = quantized()
    set_arguments(node, columnwise=False)
    refresh_value(node)
    assert tuple(node.meta["val"][1].shape) == (0,)
    assert tuple(node.meta["val"][0].shape) == (8, 32)


def test_results_are_found_by_their_index() -> None:
    gm, node = quantized()
    gm.graph.eliminate_dead_code()
    (qt,) = result(node, 1)
    assert qt.args == (node, 1) and not result(node, 0)


def test_values_of_replaces_nodes_at_any_depth() -> None:
    _, node = quantized()
    x = node.args[0]
    values = values_of({"a": [x, 3], "b": (None, {"c": x})})
    assert values["a"][0] is x.meta["val"] and values["a"][1] == 3
    assert values["b"][1]["c"] is x.meta["val"] and values["b"][0] is None
