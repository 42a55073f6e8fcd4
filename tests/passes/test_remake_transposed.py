"""qᵀ is made again in the backward pass exactly where that has what it is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from te_compile.ops.quantize import QUANTIZE
from te_compile.passes import manager
from te_compile.passes.arguments import arguments_of, result
from te_compile.passes.manager import Compilation
from te_compile.passes.prune_outputs import PRODUCERS, layouts_of
from te_compile.passes.remake_transposed import remake_transposed
from te_compile.recipe import ScaleRule
from tests.capturing import traced
from tests.compiling import compiled, te_nodes, train_step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def of(function: Callable[[nn.ModuleDict, Tensor], Tensor], *inputs: Tensor, **options: Any) -> Compilation:
    """The record of one step of a model with two linears, ``a`` [64, 32] and ``b`` [32, 64], and a ``norm``."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"a": nn.Linear(32, 64), "b": nn.Linear(64, 32), "norm": nn.LayerNorm(32)})

        def forward(self, x: Tensor) -> Tensor:
            return function(self.parts, x)

    model = Model()
    with manager.recording() as records:
        train_step(model, compiled(model, save_memory=True, **options), *(inputs or (torch.randn(24, 32),)))
    (record,) = records
    return record


def made_again(record: Compilation) -> list[Node]:
    """What writes a transposed copy of an input, and no other one, in the order of the graph."""
    nodes = [node for name in PRODUCERS for node in te_nodes(record, name)]
    inputs = [node for node in nodes if arguments_of(node)["dtype"] == torch.float8_e4m3fn]
    alone = [node for node in inputs if arguments_of(node)["columnwise"] and not arguments_of(node)["rowwise"]]
    return [node for node in sorted(alone) if node.args[0] not in node.graph.find_nodes(op="placeholder")]


def count(record: Compilation) -> int:
    return next(each.count for each in record.passes if each.name == "remake_transposed")


@pytest.mark.parametrize("activation", [F.gelu, F.silu, torch.tanh, lambda x: F.relu(x).square()])
def test_an_activation_is_quantised_again_from_what_its_backward_reads(activation: Callable[[Tensor], Tensor]) -> None:
    record = of(lambda parts, x: parts["b"](activation(parts["a"](x))))
    assert count(record) == 1
    (again,) = made_again(record)
    first = next(each for each in te_nodes(record, "fused_quantize") if each.args[0] == again.args[0])
    assert first is not again and arguments_of(first)["rowwise"] and not arguments_of(first)["columnwise"]
    assert [arguments_of(each)["spec"] for each in (first, again)].count(arguments_of(again)["spec"]) == 2
    assert arguments_of(first)["scale"] is arguments_of(again)["scale"]


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("between", [F.gelu, lambda x: x + F.scaled_dot_product_attention(x, x, x)])
def test_codes_are_read_by_the_multiplier_that_was_made_with_them(
    between: Callable[[Tensor], Tensor], recipe: str
) -> None:
    """Two kernels may find two amaxes, where they add up in another order."""

    def run(parts: nn.ModuleDict, x: Tensor) -> Tensor:
        return parts["b"](between(parts["a"](parts["norm"](x.sin()))))

    record = of(run, torch.randn(2, 24, 32), recipe=recipe)
    remade = made_again(record)
    assert remade
    for again in remade:
        index = layouts_of(again)["columnwise"]
        (qt,) = result(again, index)
        (product,) = qt.users
        given = arguments_of(product)
        (multiplier,) = [given[f"{name}_scale_inv"] for name in "ab" if given[name] is qt]
        assert multiplier.args[0] is again and multiplier.args[1] == index + 2


def test_a_norm_is_quantised_again_from_its_input() -> None:
    record = of(lambda parts, x: parts["b"](parts["a"](parts["norm"](x.sin()))))
    (again,) = made_again(record)
    assert again in te_nodes(record, "norm_quantize") and not arguments_of(again)["emit"]


def test_a_norm_that_others_read_too_is_given_to_them_once() -> None:
    def run(parts: nn.ModuleDict, x: Tensor) -> Tensor:
        y = parts["norm"](x.sin())
        return y + parts["b"](F.gelu(parts["a"](y)))

    record = of(run)
    emitting = [arguments_of(node)["emit"] for node in sorted(te_nodes(record, "norm_quantize"))]
    assert emitting == [True, False] and count(record) == 2


def test_what_attention_gives_is_quantised_again_from_itself() -> None:
    def run(parts: nn.ModuleDict, x: Tensor) -> Tensor:
        heads = parts["a"](x).unflatten(-1, (4, 16)).transpose(1, 2)
        return parts["b"](F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2))

    record = of(run, torch.randn(2, 24, 32))
    assert [node.args[2] for node in made_again(record)] == [torch.float8_e4m3fn]


def half_kept(x: Tensor) -> Tensor:
    """Of two matrices, the second of which nothing keeps."""
    return F.gelu(x) + x.flip(0)


@pytest.mark.parametrize(
    ("why", "run"),
    [
        ("it is handed in", lambda parts, x: parts["a"](x)),
        ("nobody's backward reads a sum", lambda parts, x: parts["b"](parts["a"](x) + 1)),
        ("GELU's backward reads one addend alone", lambda parts, x: parts["b"](half_kept(parts["a"](x)))),
    ],
)
def test_what_nobody_else_keeps_is_kept_transposed(why: str, run: Callable[[nn.ModuleDict, Tensor], Tensor]) -> None:
    record = of(run)
    assert count(record) == 0 and not made_again(record), why
    both = [node for name in PRODUCERS for node in te_nodes(record, name) if arguments_of(node)["columnwise"]]
    assert any(arguments_of(node)["rowwise"] for node in both)


@pytest.mark.parametrize("forward_reads", [False, True])
def test_a_transposed_copy_that_the_forward_pass_reads_too_is_made_there(forward_reads: bool) -> None:
    def step(x: Tensor, scale: Tensor) -> list[Tensor]:
        q, qt, _, _ = QUANTIZE(x, scale, torch.float8_e4m3fn, True, True, ScaleRule().text())
        in_forward = [q.clone(), *([qt.clone()] if forward_reads else [])]
        return [*in_forward, qt.clone(), x.cos()]

    graph = traced(step, torch.randn(16, 32), torch.ones(())).graph
    for node in graph.output_node().all_input_nodes[-2:]:
        node.meta["partitioner_tag"] = "is_backward"
    assert remake_transposed(graph) == (not forward_reads)
    graph.lint()
    assert len(graph.find_nodes(op="call_function", target=QUANTIZE)) == 1 + (not forward_reads)


def test_a_frozen_weight_wants_no_transposed_copy() -> None:
    def run(parts: nn.ModuleDict, x: Tensor) -> Tensor:
        parts["b"].weight.requires_grad_(False)
        return parts["b"](F.gelu(parts["a"](x)))

    assert count(of(run)) == 0


def test_a_region_that_is_recomputed_as_a_whole_is_left() -> None:
    def run(parts: nn.ModuleDict, x: Tensor) -> Tensor:
        return checkpoint(lambda x: parts["b"](F.gelu(parts["a"](x))), x, use_reentrant=False)

    assert count(of(run)) == 0
