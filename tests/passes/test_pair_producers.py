"""pair_producers: which producers become one, which stay two, and that the numbers stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import te_compile
from te_compile.ops.fused_quantize import FUSED_QUANTIZE
from te_compile.ops.fused_quantize_pair import FUSED_QUANTIZE_PAIR
from te_compile.ops.pointwise import Spec
from te_compile.ops.quantize import QUANTIZE
from te_compile.passes.fuse_producers import fuse_producers
from te_compile.passes.pair_producers import pair_producers
from te_compile.recipe import ScaleRule
from tests.compiling import compiled, relative_error, train_step

RULE = ScaleRule().text()
ROWS, COLUMNS = 24, 32
Quantized = tuple[Tensor, Tensor, Tensor, Tensor]


def quantized(x: Tensor, dtype: torch.dtype = torch.float8_e5m2, scale: Tensor | None = None) -> Quantized:
    return QUANTIZE(x.reshape(-1, x.shape[-1]), scale, dtype, True, True, RULE)


def matrices(count: int = 3) -> list[Tensor]:
    return [torch.randn(ROWS, COLUMNS).bfloat16() for _ in range(count)]


def after(function: Callable[..., Any], *inputs: Tensor, expected: int) -> Graph:
    """The graph after the pass, with the same numbers to the bit."""
    traced: GraphModule = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    fuse_producers(traced.graph)
    traced.recompile()
    before = traced(*inputs)
    assert pair_producers(traced.graph) == expected
    traced.graph.lint()
    traced.recompile()
    for a, b in zip(before, traced(*inputs), strict=True):
        a, b = (x.view(torch.uint8) if x.element_size() == 1 else x for x in (a, b))
        assert torch.equal(a, b)
    assert len(traced.graph.find_nodes(op="call_function", target=FUSED_QUANTIZE_PAIR)) == expected
    return traced.graph


def gate_gradients(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    return *quantized(dy * F.silu(gate)), *quantized(dy * up * (gate > 0))


# ---------------------------------------------------------------------------------------------------------------- fires


def test_what_two_producers_share_is_read_once() -> None:
    graph = after(gate_gradients, *matrices(), expected=1)
    (pair,) = graph.find_nodes(op="call_function", target=FUSED_QUANTIZE_PAIR)
    assert len(pair.args[0]) == 3 and len(Spec.parse(pair.args[3]).roots) == 2
    assert not graph.find_nodes(op="call_function", target=FUSED_QUANTIZE)


def test_other_shapes_of_one_tensor_are_the_same_tensor() -> None:
    def function(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return *quantized(dy.view(4, 6, COLUMNS) * gate.view(4, 6, COLUMNS)), *quantized(
            dy.view(8, 3, -1) * up.view(8, 3, -1)
        )

    graph = after(function, *matrices(), expected=1)
    (pair,) = graph.find_nodes(op="call_function", target=FUSED_QUANTIZE_PAIR)
    assert len(pair.args[0]) == 3


def test_scales_go_along_each_with_its_own_value() -> None:
    def function(dy: Tensor, gate: Tensor, up: Tensor, one: Tensor, two: Tensor) -> tuple[Tensor, ...]:
        return *quantized(dy * gate, scale=one), *quantized(dy * up, scale=two)

    after(function, *matrices(), torch.tensor(2.0), torch.tensor(16.0), expected=1)


def test_four_make_two_pairs() -> None:
    def function(*x: Tensor) -> tuple[Tensor, ...]:
        return *gate_gradients(*x[:3]), *gate_gradients(*x[3:])

    after(function, *matrices(6), expected=2)


def test_a_pair_stands_where_all_is_there_that_it_reads() -> None:
    """The second one's own operand is computed after the first quantize; nobody reads a result before."""

    def function(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        first = quantized(dy * gate)
        return *first, *quantized(dy * (up @ up.t() @ up))

    after(function, *matrices(), expected=1)


# -------------------------------------------------------------------------------------------------------- does not fire


def test_producers_of_different_tensors_stay_two() -> None:
    def function(*x: Tensor) -> tuple[Tensor, ...]:
        return *quantized(x[0] * x[1]), *quantized(x[2] * x[3])

    after(function, *matrices(4), expected=0)


def test_a_vector_in_common_is_no_reason() -> None:
    def function(a: Tensor, b: Tensor, row: Tensor) -> tuple[Tensor, ...]:
        return *quantized(a * row), *quantized(b * row)

    after(function, *matrices(2), torch.randn(COLUMNS), expected=0)


def test_what_needs_a_result_of_the_first_comes_after_it() -> None:
    def function(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        first = quantized(dy * gate)
        return *first, *quantized(dy * up * first[0].float().sum())

    after(function, *matrices(), expected=0)


def test_other_codes_other_sizes_and_other_results_stay_two() -> None:
    def codes(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return *quantized(dy * gate), *quantized(dy * up, torch.float8_e4m3fn)

    def sizes(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return *quantized(dy * gate), *quantized((dy * up).view(2 * ROWS, -1))

    def sums(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        z = dy * up
        return *quantized(dy * gate), *quantized(z), z.sum(0, dtype=torch.float32)

    for function in (codes, sizes, sums):
        after(function, *matrices(), expected=0)


def test_too_many_matrices_stay_two() -> None:
    def function(*x: Tensor) -> tuple[Tensor, ...]:
        return *quantized(x[0] * x[1] * x[2]), *quantized(x[0] * x[3] * x[4] * x[5])

    after(function, *matrices(6), expected=0)


# ------------------------------------------------------------------------------------------------------------- numerics


class Gated(nn.Module):
    """A gated MLP: what Llama, Gemma and T5 have."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((32, 64), (32, 64), (64, 32)))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("activation", [F.silu, F.gelu, F.relu], ids=lambda f: f.__name__)
def test_a_gated_mlp_trains_as_in_high_precision(activation: Callable[[Tensor], Tensor], recipe: str) -> None:
    model = Gated(activation).bfloat16()
    x = torch.randn(4, 16, 32).bfloat16()
    fast = compiled(model, recipe=recipe)
    wanted_output, wanted = train_step(model, model, x)
    output, got = train_step(model, fast, x)
    assert relative_error(output, wanted_output) < 0.1
    assert all(relative_error(got[name], wanted[name]) < 0.2 for name in wanted)


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_report_says_so() -> None:
    report = te_compile.explain(Gated(F.silu).bfloat16(), torch.randn(4, 16, 32).bfloat16())
    told = {row.name: row.fused for row in report.rows}
    assert any("in one pass with another gradient" in text for text in told["gate"])
    assert any("in one pass with another gradient" in text for text in told["up"])
    assert not any("in one pass" in text for text in told["down"])
