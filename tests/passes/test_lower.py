"""Lowering: what the Dynamo graph looks like afterwards, and which inputs it then wants."""

from __future__ import annotations

import operator
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from te_compile.ops.gradient_slots import GRADIENT_SLOTS
from te_compile.ops.linear import LINEAR, LinearConfig
from te_compile.ops.scaling import SNAPSHOT, UPDATE_SCALES
from te_compile.ops.weights import QUANTIZE_WEIGHTS
from te_compile.passes.lower import Signature, lower_linears
from te_compile.passes.plan import Plan
from te_compile.passes.regions import Region
from te_compile.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from tests.capturing import regions_and_plan
from tests.compiling import compiled, gradients, relative_error, train_step
from tests.emulation import emulated

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def lowered(
    run: Callable[..., Any],
    *inputs: Any,
    recipe: Recipe | None = None,
    training: bool = True,
    cache_weights: bool = False,
) -> tuple[Graph, Signature, Plan, list[Region]]:
    """The root graph with every linear lowered."""
    regions, plan = regions_and_plan(run, *inputs)
    signature = lower_linears(regions[0].graph, plan, recipe or DelayedScaling(), training, cache_weights)
    for region in reversed(regions):
        region.graph.lint()
    return regions[0].graph, signature, plan, regions


def calls(graph: Graph, target: Any) -> list[Node]:
    return graph.find_nodes(op="call_function", target=target)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))


def placeholders(graph: Graph) -> list[str]:
    return [node.name for node in graph.find_nodes(op="placeholder")]


def test_training_adds_a_state_each_way_a_token_and_one_of_each_operator() -> None:
    graph, signature, plan, _ = lowered(mlp(), torch.randn(5, 32))
    assert placeholders(graph)[:5] == ["te_forward_0", "te_forward_1", "te_backward_0", "te_backward_1", "te_token"]
    assert (len(signature.weights), signature.training, signature.slots, signature.stateful) == (2, True, 2, True)
    counts = Counter(node.target for node in graph.nodes if node.op == "call_function")
    assert counts[LINEAR] == 2
    assert counts[SNAPSHOT] == counts[UPDATE_SCALES] == counts[GRADIENT_SLOTS] == 1
    assert counts[QUANTIZE_WEIGHTS] == 0
    assert counts[torch._C._nn.linear] == 0
    assert [site.node.target for site in plan.sites] == [LINEAR, LINEAR]


def test_the_update_stands_last_so_that_every_scale_is_read_before() -> None:
    graph, *_ = lowered(mlp(), torch.randn(5, 32))
    order = [node.target for node in graph.nodes]
    assert order.index(SNAPSHOT) < order.index(LINEAR) < order.index(UPDATE_SCALES)
    assert order[-2] is UPDATE_SCALES


def test_inference_reads_the_scales_and_updates_nothing() -> None:
    graph, signature, *_ = lowered(mlp(), torch.randn(5, 32), training=False)
    assert placeholders(graph)[:2] == ["te_forward_0", "te_forward_1"] and "te_token" not in placeholders(graph)
    assert len(calls(graph, SNAPSHOT)) == 1
    assert not calls(graph, UPDATE_SCALES) and not calls(graph, GRADIENT_SLOTS)
    assert not signature.training and signature.slots == 0


@pytest.mark.parametrize("training", [True, False])
def test_a_recipe_without_state_adds_no_input(training: bool) -> None:
    graph, signature, *_ = lowered(mlp(), torch.randn(5, 32), recipe=Float8CurrentScaling(), training=training)
    assert not any(name.startswith("te_") for name in placeholders(graph))
    assert not calls(graph, SNAPSHOT) and not calls(graph, UPDATE_SCALES)
    assert not signature.stateful and len(calls(graph, LINEAR)) == 2


def test_a_graph_with_nothing_selected_is_left_as_it_is() -> None:
    graph, signature, *_ = lowered(lambda x: x.relu(), torch.randn(5, 32))
    assert not signature.weights and placeholders(graph) == ["l_x_"]


def test_each_linear_carries_its_name_its_formats_and_its_layout() -> None:
    graph, *_ = lowered(mlp(), torch.randn(5, 32))
    configs = [LinearConfig.parse(node.args[10]) for node in calls(graph, LINEAR)]
    assert [config.name for config in configs] == ["0", "2"]
    assert {(config.forward, config.backward) for config in configs} == {(torch.float8_e4m3fn, torch.float8_e5m2)}
    assert not any(config.transposed for config in configs)


def test_linears_of_one_input_share_its_scale_and_others_do_not() -> None:
    a, b, c = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
    graph, *_ = lowered(lambda x: (a(x), b(x), c(x.sin())), torch.randn(5, 32))
    rows = [node.args[6].args[2] for node in calls(graph, LINEAR)]
    assert rows[0] == rows[1] != rows[2]


@pytest.mark.parametrize("cache_weights", [True, False])
def test_a_weight_used_twice_has_one_amax_and_its_inputs_the_larger_one(cache_weights: bool) -> None:
    weight = nn.Parameter(torch.randn(32, 32))

    def run(x: Tensor) -> Tensor:
        return F.linear(F.linear(x, weight).tanh(), weight)

    graph, signature, *_ = lowered(run, torch.randn(5, 32), cache_weights=cache_weights)
    assert len(signature.weights) == 1 and signature.slots == 2
    assert len(signature.groups) == cache_weights and not calls(graph, QUANTIZE_WEIGHTS)
    (largest,) = calls(graph, torch.maximum)
    (update,) = calls(graph, UPDATE_SCALES)
    assert largest in update.args[1]
    (slots,) = calls(graph, GRADIENT_SLOTS)
    assert slots.args[2] == [0, 0]


def test_weights_of_several_dtypes_are_quantised_in_groups_and_each_gets_its_own_codes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.c = nn.Linear(32, 48), nn.Linear(16, 32)
            self.b = nn.Linear(48, 16, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x).bfloat16()).float())

    model, x = Mixed(), torch.randn(random.randrange(3, 20), 32)
    _, signature, *_ = lowered(model, x, cache_weights=True)
    assert [len(group.weights) for group in signature.groups] == [2, 1]
    reference = emulated(model, lambda name, module: True)
    y, got = train_step(model, compiled(model), x)
    expected_y, expected = train_step(reference, reference, x)
    assert relative_error(y, expected_y) < 2e-2
    assert all(relative_error(got[name], gradient) < 5e-2 for name, gradient in expected.items())


def test_a_body_gets_its_operands_from_the_root_and_gives_its_amax_back() -> None:
    model = mlp()
    graph, _, _, (_, body) = lowered(lambda x: checkpoint(model, x, use_reentrant=False), torch.randn(5, 32))
    assert not calls(graph, LINEAR) and len(calls(body.graph, LINEAR)) == 2
    assert all(len(calls(graph, target)) == 1 for target in (SNAPSHOT, UPDATE_SCALES))
    (update,) = calls(graph, UPDATE_SCALES)
    from_body = [node for node in update.args[1] if node.target is operator.getitem and node.args[0] is body.call]
    assert len(from_body) == 4, "of two inputs and two weights"


def test_a_linear_without_copies_gets_the_scale_of_its_weight_and_gives_its_amax_back() -> None:
    graph, signature, plan, _ = lowered(mlp(), torch.randn(5, 32))
    assert not signature.groups and not plan.groups
    linears = calls(graph, LINEAR)
    assert all(linear.args[3:6] == (None, None, None) for linear in linears)
    assert [linear.args[11].args[2] for linear in linears] == [1, 3], "their rows of the snapshot"
    (update,) = calls(graph, UPDATE_SCALES)
    assert [amax.args for amax in update.args[1]] == [(linear, i) for linear in linears for i in (1, 2)]


def test_copies_of_weights_are_inputs_behind_the_states_and_are_sliced_like_a_quantizes_result() -> None:
    graph, signature, plan, _ = lowered(mlp(), torch.randn(5, 32), cache_weights=True)
    names = placeholders(graph)
    assert names[5:9] == [f"te_weights_0_{part}" for part in ("codes", "transposed", "amax", "scale_inv")]
    assert signature.added == 9 and not calls(graph, QUANTIZE_WEIGHTS)
    (group,) = signature.groups
    assert plan.groups == [group] and group.weights == signature.weights and group.owners == [0, 1]
    assert group.layout.shapes == ((48, 32), (16, 48)) and group.layout.rowwise == (True, True)
    first, second = calls(graph, LINEAR)
    for linear, start in ((first, 0), (second, 48 * 32)):
        assert linear.args[3].args[0].args == (
            graph.find_nodes(op="placeholder")[5],
            0,
            start,
            start + linear_size(linear),
        )
    (update,) = calls(graph, UPDATE_SCALES)
    assert {node.args[0].name for node in update.args[1] if node.target is torch.select} == {"te_weights_0_amax"}
    new = graph.find_nodes(op="placeholder")[:9]
    assert all(node.meta["tensor_dict"]["_dynamo_static_input_type"] == "unguarded" for node in new)


def linear_size(linear: Node) -> int:
    """Elements of the copy that a lowered linear reads."""
    rows, columns = linear.args[3].args[1]
    return int(rows * columns)


@pytest.mark.parametrize("training", [True, False])
def test_copies_that_nobody_reads_are_no_inputs(training: bool) -> None:
    with torch.set_grad_enabled(training):
        graph, signature, *_ = lowered(
            mlp(), torch.randn(5, 32), recipe=Float8CurrentScaling(), training=training, cache_weights=True
        )
    names = [name.removeprefix("te_weights_0_") for name in placeholders(graph) if name.startswith("te_")]
    assert names == (["codes", "transposed", "scale_inv"] if training else ["codes", "scale_inv"])
    assert (
        signature.states == 0 and signature.added == len(names) and signature.groups[0].layout.lasting is not training
    )


def test_weights_are_grouped_by_dtype_and_by_whether_they_train() -> None:
    a, b, c = nn.Linear(32, 32), nn.Linear(32, 32).requires_grad_(False), nn.Linear(32, 32, dtype=torch.bfloat16)
    _, signature, *_ = lowered(lambda x: c(b(a(x)).bfloat16()), torch.randn(5, 32), cache_weights=True)
    groups = [(group.dtype, group.layout.lasting, len(group.weights)) for group in signature.groups]
    assert sorted(groups, key=str) == sorted(
        [(torch.float32, False, 1), (torch.float32, True, 1), (torch.bfloat16, False, 1)], key=str
    )


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("an expression", lambda w: 1 + w),
        ("a cast", lambda w: w.bfloat16().float()),
        ("columns of a weight", lambda w: w[:, :32]),
        ("a copy", lambda w: w[:, :32].contiguous()),
        ("every other row", lambda w: w[::2]),
    ],
)
def test_what_is_no_contiguous_part_of_a_parameter_is_quantised_on_the_graph(
    name: str, weight: Callable[[Tensor], Tensor]
) -> None:
    parameter = nn.Parameter(torch.randn(64, 64))
    columns = weight(parameter).shape[1]
    graph, signature, *_ = lowered(
        lambda x: F.linear(x, weight(parameter)), torch.randn(5, columns), cache_weights=True
    )  # fmt: skip
    assert len(calls(graph, QUANTIZE_WEIGHTS)) == 1 and not signature.groups, name


def test_parts_of_a_parameter_are_found_where_they_lie() -> None:
    parameter = nn.Parameter(torch.randn(96, 32))

    def run(x: Tensor) -> Tensor:
        q, _, v = parameter.chunk(3)
        return F.linear(x, q) + x @ v.T + x @ parameter[16:48]

    graph, signature, *_ = lowered(run, torch.randn(5, 32), cache_weights=True)
    assert not calls(graph, QUANTIZE_WEIGHTS)
    (group,) = signature.groups
    assert len(group.weights) == 1 and group.layout.sources == (0, 0, 0)
    assert group.layout.offsets == (0, 64 * 32, 16 * 32)


def test_a_body_reads_copies_that_the_root_was_given() -> None:
    model = mlp()
    graph, _, _, (_, body) = lowered(
        lambda x: checkpoint(model, x, use_reentrant=False), torch.randn(5, 32), cache_weights=True
    )  # fmt: skip
    assert not calls(graph, QUANTIZE_WEIGHTS) and len(calls(body.graph, LINEAR)) == 2
    assert "te_weights_0_codes" in placeholders(graph)


def test_a_linear_that_reads_another_linears_result_reads_the_new_one() -> None:
    a, b = nn.Linear(32, 48), nn.Linear(48, 16)
    graph, *_ = lowered(lambda x: b(a(x)), torch.randn(5, 32))
    first, second = calls(graph, LINEAR)
    assert second.args[0].args == (first, 0)


def test_new_inputs_have_addresses_that_cuda_graphs_may_rely_on() -> None:
    graph, *_ = lowered(mlp(), torch.randn(5, 32))
    new = [node for node in graph.find_nodes(op="placeholder") if node.name.startswith("te_")]
    assert len(new) == 5
    assert all(node.meta["tensor_dict"]["_dynamo_static_input_type"] == "unguarded" for node in new)
    assert all(node._dynamo_source is None for node in new)


def test_a_trained_bias_beside_a_frozen_weight() -> None:
    """BitFit: only biases train."""
    model = mlp()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    reference = emulated(model, lambda name, module: True)
    x = torch.randn(7, 32)
    _, expected = train_step(reference, reference, x)
    train_step(model, compiled(model), x)
    got = gradients(model)
    assert got.keys() == {"0.bias", "2.bias"}
    assert all(relative_error(got[name], expected[name]) < 2e-2 for name in got)
