"""cat_producers: which cats are quantised where their halves are computed, which stay, and that numbers are equal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import te_compile
from te_compile.ops.fused_quantize_cat import FUSED_QUANTIZE_CAT
from te_compile.ops.pointwise import Spec
from te_compile.passes import JOINT_PASSES, manager
from te_compile.passes.cat_producers import cat_producers
from te_compile.passes.closures import MOST_NODES
from te_compile.passes.fuse_producers import fuse_producers
from te_compile.passes.merged_specs import MOST_MATRICES
from tests.compiling import compiled, relative_error, train_step
from tests.passes.test_column_shifts import traced_with_symbols
from tests.passes.test_pair_producers import matrices, quantized

ROWS, COLUMNS = 24, 32


@pytest.fixture(autouse=True)
def _of_few_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[cat_producers.__module__], "WIDEST", COLUMNS)


def traced(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    graph: GraphModule = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    graph.graph.eliminate_dead_code()
    return graph


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def after(function: Callable[..., Any], *inputs: Tensor, expected: int) -> Graph:
    """The graph after the pass, with the same codes as before."""
    module = traced(function, *inputs)
    module.recompile()
    before = module(*inputs)
    assert cat_producers(module.graph) == expected
    module.graph.lint()
    module.recompile()
    for a, b in zip(before, module(*inputs), strict=True):
        assert a.stride() == b.stride()
        if a.dtype == torch.bfloat16:  # sums, by parts
            torch.testing.assert_close(a, b)
        else:
            assert torch.equal(bits(a), bits(b))
    assert len(module.graph.find_nodes(op="call_function", target=FUSED_QUANTIZE_CAT)) == expected
    return module.graph


def producer(graph: Graph) -> Any:
    (found,) = graph.find_nodes(op="call_function", target=FUSED_QUANTIZE_CAT)
    return found


def targets(graph: Graph) -> set[Any]:
    return {node.target for node in graph.nodes if node.op == "call_function"}


def gradients(dy: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return torch.cat([dy * up * (gate > 0), dy * F.silu(gate)], -1)


def both(dy: Tensor, gate: Tensor, up: Tensor) -> Any:
    return quantized(gradients(dy, gate, up))


# ---------------------------------------------------------------------------------------------------------------- fires


def test_what_both_halves_share_is_read_once_and_neither_is_written() -> None:
    graph = after(both, *matrices(), expected=1)
    node = producer(graph)
    assert len(node.args[0]) == 3 and len(Spec.parse(node.args[2]).roots) == 2
    assert not targets(graph) & {torch.ops.aten.cat.default, torch.ops.aten.mul.Tensor}
    assert fuse_producers(graph) == 0


def of_two_tensors(dy: Tensor, gated: Tensor) -> Any:
    return both(dy, *gated.chunk(2, -1))


def two_tensors() -> list[Tensor]:
    return [torch.randn(2, 12, width).bfloat16() for width in (COLUMNS, 2 * COLUMNS)]


def test_of_several_dimensions_halves_of_one_tensor() -> None:
    graph = after(of_two_tensors, *two_tensors(), expected=1)
    assert len(producer(graph).args[0]) == 3


def test_of_symbolic_lengths() -> None:
    module = traced_with_symbols(of_two_tensors, (0, 1), *two_tensors())
    assert cat_producers(module.graph) == 1
    module.graph.lint()
    module.recompile()
    inputs = two_tensors()
    for a, b in zip(module(*inputs), of_two_tensors(*inputs), strict=True):
        assert torch.equal(bits(a), bits(b))


def test_the_scale_goes_along() -> None:
    def function(scale: Tensor, *x: Tensor) -> Any:
        return quantized(gradients(*x), scale=scale)

    after(function, torch.tensor(8.0), *matrices(), expected=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_of_a_bias_comes_along(dtype: torch.dtype) -> None:
    def function(*x: Tensor) -> Any:
        both = gradients(*x)
        return *quantized(both), both.sum(0, dtype=torch.float32).to(dtype).to(torch.bfloat16)

    graph = after(function, *matrices(), expected=1)
    assert len(Spec.parse(producer(graph).args[2]).sums) == 2
    assert torch.ops.aten.sum.dim_IntList not in targets(graph)


def test_what_is_done_to_rows_of_the_cat_is_done_to_each_half() -> None:
    """As with experts, whose last rows belong to none."""

    def function(last: Tensor, *x: Tensor) -> Any:
        inside = torch.arange(ROWS)[:, None] < last
        return quantized(torch.where(inside, gradients(*x), 0.0))

    graph = after(function, torch.tensor(17), *matrices(), expected=1)
    assert len(producer(graph).args[0]) == 4
    after(lambda *x: quantized(-gradients(*x)), *matrices(), expected=1)


@pytest.mark.parametrize(
    "whole", [lambda cat, x: cat * torch.cat([x, x], 1), lambda cat, x: cat * x[:1].repeat(1, 2), torch.mm]
)
def test_what_is_done_to_more_than_rows_stays(whole: Callable[[Tensor, Tensor], Tensor]) -> None:
    def function(dy: Tensor, gate: Tensor, up: Tensor) -> Any:
        other = torch.ones(2 * COLUMNS, 2 * COLUMNS).bfloat16() if whole is torch.mm else gate
        return quantized(whole(gradients(dy, gate, up), other))

    after(function, *matrices(), expected=0)


def test_each_of_several_is_one() -> None:
    def function(*x: Tensor) -> Any:
        return *both(*x[:3]), *both(*x[3:])

    after(function, *matrices(6), expected=2)


# -------------------------------------------------------------------------------------------------------- does not fire


@pytest.mark.parametrize(
    "cat",
    [
        lambda dy, gate, up: torch.cat([dy * gate, dy], -1),
        lambda dy, gate, up: torch.cat([dy, gate], -1),
        lambda dy, gate, up: torch.cat([dy.exp(), gate * up], -1),
        lambda dy, gate, up: torch.cat([dy * gate, dy * up, dy * dy], -1),
        lambda dy, gate, up: torch.cat([dy * gate, (dy * up)[:, :16]], -1),
        lambda dy, gate, up: torch.cat([dy * gate, dy * up], 0).view(ROWS, -1),
        lambda dy, gate, up: torch.stack([dy * gate, dy * up], -1).flatten(1),
    ],
    ids=["one is read", "both are read", "nothing shared", "three", "one is narrower", "rows", "columns by turns"],
)
def test_what_gains_nothing_or_is_none_stays(cat: Callable[..., Tensor]) -> None:
    after(lambda *x: quantized(cat(*x)), *matrices(), expected=0)


def test_a_half_that_is_read_elsewhere_stays() -> None:
    def function(dy: Tensor, gate: Tensor, up: Tensor) -> Any:
        half = dy * gate
        return *quantized(torch.cat([half, dy * up], -1)), half

    after(function, *matrices(), expected=0)


def test_a_cat_that_is_read_elsewhere_stays() -> None:
    def function(*x: Tensor) -> Any:
        cat = gradients(*x)
        return *quantized(cat), cat @ cat.t()

    after(function, *matrices(), expected=0)


def test_too_many_matrices_stay() -> None:
    def function(dy: Tensor, *x: Tensor) -> Any:
        one, other = x[0] + x[1] + x[2], x[3] + x[4] + x[5]
        return quantized(torch.cat([dy * one, dy * other], -1))

    assert MOST_MATRICES < 7 < MOST_NODES
    after(function, *matrices(7), expected=0)


def test_what_is_no_wider_than_a_head_may_be_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[cat_producers.__module__], "WIDEST", 2 * COLUMNS)
    after(both, *matrices(), expected=0)


def test_a_cat_of_two_dtypes_stays() -> None:
    def function(dy: Tensor, gate: Tensor, up: Tensor) -> Any:
        return quantized(torch.cat([(dy * up).float(), dy * gate], -1).mul(dy[:, :1]).bfloat16())

    after(function, *matrices(), expected=0)


def test_equal_halves_stay() -> None:
    after(lambda dy, gate, up: quantized(torch.cat([dy * gate, dy * gate], -1)), *matrices(), expected=0)


# ----------------------------------------------------------------------------------------------------------- in models

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "sigmoid": torch.sigmoid}


class Gated(nn.Module):
    """An MLP whose gate and up are computed by one linear."""

    def __init__(self, activation: str, bias: bool, checkpointed: bool = False) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(COLUMNS, 2 * COLUMNS, bias=bias), nn.Linear(COLUMNS, COLUMNS, bias=bias)
        self.activation, self.checkpointed = ACTIVATIONS[activation], checkpointed

    def run(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        y: Tensor = self.down(self.activation(gate) * up)
        return y

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            y: Tensor = checkpoint(self.run, x, use_reentrant=False)
            return y
        return self.run(x)


def results_of(model: nn.Module, run: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
    """What a step computes, and the gradients."""
    y, found = train_step(model, run, x)
    return [y, *found.values()]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_gated_mlp_trains_as_without_the_pass(recipe: str, bias: bool, activation: str) -> None:
    model, x = Gated(activation, bias), torch.randn(2, 16, COLUMNS)
    results = []
    for skipped in ("", "cat_producers"):
        torch._dynamo.reset()
        with manager.recording() as records:
            run = compiled(model, recipe=recipe, skip_passes=skipped)
            results.append(results_of(model, run, x))
        counts = {each.name: each.count for each in records[0].passes}
        assert counts.get("cat_producers", 0) == (not skipped)
    for one, other in zip(*results, strict=True):
        assert relative_error(one, other) < 2e-2


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("options", [{"save_memory": True}, {"compiler": "inductor"}], ids=str)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_it_gets_along_with(options: dict[str, Any], checkpointed: bool) -> None:
    model, x = Gated("silu", False, checkpointed), torch.randn(2, 16, COLUMNS)
    with manager.recording() as records:
        got = results_of(model, compiled(model, **options), x)
    assert {each.name: each.count for each in records[0].passes}["cat_producers"] == 1
    for one, other in zip(got, results_of(model, model, x), strict=True):
        assert relative_error(one, other) < 0.2


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_report_says_what_stands_beside_each_other() -> None:
    report = te_compile.explain(Gated("silu", bias=True).bfloat16(), torch.randn(4, 16, COLUMNS).bfloat16())
    told = {row.name: row.fused for row in report.rows}
    assert any(" beside " in text and "bias gradient" in text for text in told["both"]), told
    assert not any(" beside " in text for text in told["down"])


@pytest.mark.usefixtures("fresh_dynamo")
def test_lengths_may_vary() -> None:
    model = Gated("silu", True)
    run = compiled(model, dynamic=True)
    for length in (16, 24, 31):
        x = torch.randn(2, length, COLUMNS)
        for one, other in zip(results_of(model, run, x), results_of(model, model, x), strict=True):
            assert relative_error(one, other) < 0.2


def test_it_runs_before_the_producers() -> None:
    names = [each.__name__ for each in JOINT_PASSES]
    assert names.index("fuse_norm_backward") < names.index("cat_producers") < names.index("fuse_producers")
