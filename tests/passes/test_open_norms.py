"""A norm that nothing fused is Inductor's again: the operators and the bits it would have had without us."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from te_compile.ops import registry
from te_compile.ops.norm import KINDS
from te_compile.ops.norm_backward import (
    NORM_BACKWARD,
    norm_backward_reference,
    norm_input_gradient,
    norm_weight_gradient,
)
from te_compile.passes.open_norms import open_norms
from te_compile.passes.text import ops_text
from tests.capturing import traced

EPS = 1e-5
COLUMNS = 64


class Opened(CustomGraphPass):
    """Runs ``open_norms`` on the joint graph, and remembers what happened."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.text = ""
        self.metas: list[dict[str, Any]] = []

    def __call__(self, graph: Graph) -> None:
        self.counts.append(open_norms(graph))
        graph.lint()
        self.text = ops_text(graph)
        self.metas = [node.meta for node in graph.nodes if node.op == "call_function"]

    def uuid(self) -> None:
        return None  # never from a cache: the pass must run


def inductor(function: Callable[..., Any], opened: Opened | None = None) -> Callable[..., Any]:
    torch._dynamo.reset()
    patches = {} if opened is None else {"joint_custom_pre_pass": opened}
    return torch.compile(
        function, backend=lambda module, inputs: compile_fx(module, inputs, config_patches=patches), fullgraph=True
    )


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (COLUMNS,), w, b, EPS)


def normalised(x: Tensor) -> Tensor:
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)


ORIGINALS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "layer": layer,
    "rms": lambda x, w, b: w * normalised(x).to(x.dtype),
    "rms_offset": lambda x, w, b: (normalised(x) * (1.0 + w.float())).type_as(x),
    "rms_float": lambda x, w, b: (w * normalised(x)).to(x.dtype),
    "rms_mixed": lambda x, w, b: w * normalised(x).to(w.dtype),
}


def operator_norm(kind: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.ops.te.norm(x, w, b if kind == "layer" else None, EPS, kind)

    return function


@pytest.mark.parametrize("kind, dtype", [*((kind, torch.bfloat16) for kind in ORIGINALS), ("layer", torch.float32)])
def test_inductor_computes_what_it_would_for_the_original(kind: str, dtype: torch.dtype) -> None:
    x, w, b = (torch.randn(shape).to(dtype).requires_grad_() for shape in ((3, 5, COLUMNS), COLUMNS, COLUMNS))
    dy = torch.randn(3, 5, COLUMNS).to(dtype)
    leaves = (x, w, b) if kind == "layer" else (x, w)
    opened = Opened()
    results = []
    for run in (inductor(ORIGINALS[kind]), inductor(operator_norm(kind), opened)):
        y = run(x, w, b)
        results.append((y, torch.autograd.grad(y, leaves, dy)))
    assert opened.counts == [2] and "te." not in opened.text  # its forward and its backward
    (want, wanted), (got, gradients) = results
    assert torch.equal(got, want)
    for gradient, other in zip(gradients, wanted, strict=True):
        error = (gradient - other).float().norm() / other.float().norm()
        assert error < (1e-5 if dtype is torch.float32 else 1e-2)


def test_only_what_has_a_reader_is_traced_in() -> None:
    opened = Opened()
    with torch.no_grad():
        inductor(operator_norm("rms"), opened)(torch.randn(4, COLUMNS), torch.randn(COLUMNS), torch.randn(COLUMNS))
    assert [line.partition(" = ")[2].partition("(")[0] for line in opened.text.splitlines()[:-1]] == [
        "aten.view",
        "aten.pow.Tensor_Scalar",
        "aten.mean.dim",
        "aten.add.Tensor",
        "aten.rsqrt",
        "aten.mul.Tensor",
        "aten.mul.Tensor",
        "aten.view",
    ]


def test_every_new_node_has_a_value_and_says_where_it_came_from() -> None:
    opened = Opened()
    x, w, b = torch.randn(4, COLUMNS, requires_grad=True), torch.randn(COLUMNS), torch.randn(COLUMNS)
    inductor(operator_norm("layer"), opened)(x, w, b).sum().backward()
    assert all("val" in meta for meta in opened.metas)
    assert sum("torch.ops.te.norm" in (meta.get("stack_trace") or "") for meta in opened.metas) > 5


def test_many_norms_of_one_shape_and_one_of_another_all_open() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        for eps in (EPS, EPS, 1e-2):
            x = torch.ops.te.norm(x, w, b, eps, "layer") + x
        return torch.ops.te.norm(x[:2], None, None, EPS, "rms")

    opened = Opened()
    x, w, b = torch.randn(4, COLUMNS), torch.randn(COLUMNS), torch.randn(COLUMNS)
    with torch.no_grad():
        got, want = inductor(function, opened)(x, w, b), function(x, w, b)
    assert opened.counts == [4] and "te." not in opened.text
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_sizes_that_are_symbols_stay_symbols() -> None:
    opened = Opened()
    run = inductor(operator_norm("layer"), opened)
    w, b = torch.randn(COLUMNS), torch.randn(COLUMNS)
    for rows in (4, 9, 2):
        x = torch.randn(rows, COLUMNS, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(run(x, w, b), layer(x, w, b), rtol=1e-5, atol=1e-5)
    assert opened.counts == [2]


def test_autocast_around_the_call_leaves_the_statistics_in_float32() -> None:
    x, w, b = (torch.randn(shape).bfloat16() for shape in ((4, COLUMNS), COLUMNS, COLUMNS))
    graphs, results = [], []
    for enabled in (True, False):
        opened = Opened()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            results.append(inductor(operator_norm("layer"), opened)(x, w, b))
        graphs.append(opened.text)
    assert graphs[0] == graphs[1] and "te." not in graphs[0]
    assert torch.equal(*results)


def computed(graph: Graph) -> Any:
    """What each result of ``graph`` is computed from, whatever the names and the order of its nodes."""
    inputs = {node: f"input {i}" for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    known: dict[Node, Any] = {}

    def meaning(value: Any) -> Any:
        if isinstance(value, Node):
            return inputs.get(value) or known[value]
        return tuple(map(meaning, value)) if isinstance(value, (list, tuple)) else repr(value)

    for node in graph.nodes:
        if node.op == "call_function":
            options = sorted((name, meaning(value)) for name, value in node.kwargs.items())
            known[node] = (str(node.target), meaning(node.args), *options)
    return meaning(graph.output_node().args[0])


def backward_inputs(kind: str, columns: int = COLUMNS) -> tuple[Tensor, ...]:
    """dy, x, weight, mean and rstd of a norm in bf16."""
    dy, x, weight = (torch.randn(shape).bfloat16() for shape in ((6, columns), (6, columns), columns))
    mean = torch.randn(6, 1) if kind == "layer" else torch.empty(0)
    return dy, x, weight, mean, torch.rand(6, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_an_opened_backward_is_the_formulas_and_nothing_else(kind: str) -> None:
    def operator(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> Any:
        return NORM_BACKWARD(dy, x, weight, mean, rstd, None, kind, True, True, torch.bfloat16)

    def formulas(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> Any:
        task = (dy, x, weight, mean, rstd, kind)
        return norm_input_gradient(*task), norm_weight_gradient(*task), dy.float().sum(0).to(torch.bfloat16)

    given = backward_inputs(kind)
    gm = traced(operator, *given)
    assert open_norms(gm.graph) == 1
    plain = make_fx(formulas, tracing_mode="fake", decomposition_table=select_decomp_table())(*given)
    assert computed(gm.graph) == computed(plain.graph)


@pytest.mark.parametrize("wanted", [(True, False, None), (False, True, None), (False, False, torch.float32)], ids=str)
def test_of_a_backward_only_what_is_wanted_is_traced_in(wanted: tuple[bool, bool, torch.dtype | None]) -> None:
    def operator(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> Any:
        results = NORM_BACKWARD(dy, x, weight, mean, rstd, None, "layer", *wanted)
        return [result for result, is_wanted in zip(results, wanted, strict=True) if is_wanted]

    gm = traced(operator, *backward_inputs("layer"))
    wide = len([node for node in gm.graph.nodes if node.op == "call_function"])
    assert open_norms(gm.graph) == 1 and wide > 1
    used = {node for node in gm.graph.nodes if node.users}
    assert all(node in used for node in gm.graph.nodes if node.op == "call_function")
    assert ("aten.mean" in ops_text(gm.graph)) is wanted[0]


def test_a_backward_that_a_kernel_runs_stays_and_others_open() -> None:
    def check(target: registry.Target, arguments: dict[str, Any]) -> None:
        if arguments["x"].shape[1] < COLUMNS:
            raise registry.Unsupported("too narrow")

    def operator(*given: Tensor) -> Any:
        both = (given[:5], given[5:])
        return [NORM_BACKWARD(*each, None, "rms", True, False, None)[0] for each in both]

    given = (*backward_inputs("rms"), *backward_inputs("rms", COLUMNS // 2))
    registry.register("norm_backward", "wide", priority=1000, check=check)(norm_backward_reference)
    try:
        gm = traced(operator, *given)
        assert open_norms(gm.graph) == 1
        (left,) = gm.graph.find_nodes(op="call_function", target=NORM_BACKWARD)
        assert left.meta["val"][0].shape == (6, COLUMNS)
    finally:
        del registry._TABLE["norm_backward", "wide"]


def test_one_tensor_given_twice_is_not_taken_for_two() -> None:
    def operator(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return [torch.ops.te.norm_forward(x, w, bias, EPS, "layer")[0] for bias in (w, b)]

    given = (torch.randn(4, COLUMNS), torch.randn(COLUMNS), torch.randn(COLUMNS))
    gm = traced(operator, *given)
    want = gm(*given)
    assert open_norms(gm.graph) == 2
    gm.recompile()
    for got, wanted in zip(gm(*given), want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
