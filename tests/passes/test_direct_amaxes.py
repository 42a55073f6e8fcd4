"""Amaxes that autograd stacked reach their update as they are; whatever else was stacked stays a tensor of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from te_compile.ops.scaling import UPDATE_SCALES
from te_compile.passes import manager
from te_compile.passes.arguments import arguments_of
from te_compile.passes.direct_amaxes import direct_amaxes
from te_compile.passes.text import op_name
from te_compile.recipe import DelayedScaling, remember
from tests.compiling import compiled, joint_of, te_nodes, train_step

RECIPE = remember(DelayedScaling(amax_history_len=4))
aten = torch.ops.aten


def traced(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """The ATen graph of ``function``, decomposed as Inductor wants it."""
    return make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)


def updated(*stacked: Tensor) -> Tensor:
    """New states of as many tensors, of which the amaxes are stacked on the way."""
    states = torch.zeros(len(stacked), 6)
    amaxes = torch.stack([x.abs().amax() for x in stacked])
    UPDATE_SCALES([states[i : i + 1] for i in range(len(stacked))], list(amaxes.unbind(0)), "backward", RECIPE)
    return states


@pytest.mark.parametrize("number", [1, 2, 5])
def test_an_update_gets_what_was_stacked(number: int) -> None:
    inputs = [torch.randn(random.randrange(1, 9)) for _ in range(number)]
    gm = traced(updated, *inputs)
    assert direct_amaxes(gm.graph) == number
    gm.graph.lint()
    gm.recompile()
    names = {op_name(node) for node in gm.graph.nodes if node.op == "call_function"}
    assert not names & {"aten.unbind.int", "aten.cat", "aten.unsqueeze"}
    assert torch.equal(gm(*inputs), updated(*inputs))


def test_the_larger_of_two_is_taken_of_the_scalars_themselves() -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        first, second = torch.stack([x.amax(), y.amax()]).unbind(0)
        state = torch.zeros(1, 6)
        UPDATE_SCALES([state], [torch.maximum(first, second)], "backward", RECIPE)
        return state

    inputs = torch.rand(3), torch.rand(4)
    gm = traced(run, *inputs)
    assert direct_amaxes(gm.graph) == 2
    gm.recompile()
    assert torch.equal(gm(*inputs), run(*inputs))


@pytest.mark.parametrize(
    "run",
    [
        lambda x, y: torch.stack([x.amax(), y.amax()]).unbind(0),  # the model's own
        lambda x, y: [each + 1 for each in torch.stack([x.amax(), y.amax()]).unbind(0)],
    ],
)
def test_what_the_model_stacks_is_left_alone(run: Callable[..., Any]) -> None:
    gm = traced(run, torch.randn(3), torch.randn(3))
    before = len(gm.graph.nodes)
    assert direct_amaxes(gm.graph) == 0 and len(gm.graph.nodes) == before


@pytest.mark.parametrize("joined", ["rows", "dtypes", "columns"])
def test_another_join_is_no_stack_of_scalars(joined: str) -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        if joined == "rows":
            whole = torch.cat([x[:1].abs(), y[:1].abs()])
        elif joined == "dtypes":
            whole = torch.cat([x.amax().unsqueeze(0).bfloat16(), y.amax().bfloat16().unsqueeze(0).float()]).float()
        else:
            whole = torch.stack([torch.stack([x.amax(), y.amax()])], 1)[:, 0]
        states = torch.zeros(2, 6)
        UPDATE_SCALES([states[:1], states[1:]], list(whole.unbind(0)), "backward", RECIPE)
        return states

    assert direct_amaxes(traced(run, torch.randn(3), torch.randn(3)).graph) == 0


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("tied", [False, True])
def test_in_a_real_joint_graph_both_updates_read_amaxes_of_quantizes(tied: bool) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    if tied:
        model[2].weight = model[0].weight
    with manager.recording() as records:
        train_step(model, compiled(model), torch.randn(5, 32))
    forward, backward = te_nodes(records[0], "update_scales_")
    if arguments_of(forward)["direction"] == "backward":
        forward, backward = backward, forward
    amaxes = arguments_of(backward)["amaxes"]
    assert len(amaxes) == (1 if tied else 2)
    sources = amaxes[0].all_input_nodes if tied else amaxes
    assert all("quantize" in op_name(source.args[0]) for source in sources)
    assert not joint_of(records[0]).find_nodes(op="call_function", target=aten.unbind.int)
