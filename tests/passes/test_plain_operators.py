"""Operators that were captured as methods or are ATen's become functions, with the same operands in the same order, and
the first operand of a function is given by its position."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from te_compile.passes import manager
from te_compile.passes.fold_masks import FOLDED, fold_masks
from te_compile.passes.manager import Compilation
from te_compile.passes.plain_operators import plain_operators
from te_compile.passes.regions import regions_of
from tests.capturing import captured
from tests.compiling import compiled, cosine, relative_error, te_nodes, train_step

A, B = 7, 2
METHODS = {
    "__eq__": operator.eq, "__lt__": operator.lt, "__ge__": operator.ge, "__and__": operator.and_,
    "__sub__": operator.sub, "__truediv__": operator.truediv, "__pow__": operator.pow, "__lshift__": operator.lshift,
}  # fmt: skip
REFLECTED = {"__rsub__": operator.sub, "__rtruediv__": operator.truediv, "__rpow__": operator.pow}


def called(method: str, *arguments: object, **keywords: object) -> GraphModule:
    """A graph of one method of its input."""
    graph = Graph()
    graph.output(graph.call_method(method, (graph.placeholder("x"), *arguments), keywords))
    return GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("method", [*METHODS, *REFLECTED])
def test_a_method_becomes_the_function_that_it_stands_for(method: str) -> None:
    gm = called(method, B)
    before = gm(torch.tensor(A))
    assert plain_operators(gm.graph) == 1
    gm.graph.lint()
    gm.recompile()
    (node,) = gm.graph.find_nodes(op="call_function", target={**METHODS, **REFLECTED}[method])
    assert (node.args[0] == B) == (method in REFLECTED)
    assert torch.equal(gm(torch.tensor(A)), before)


def test_a_method_that_writes_stays_one_that_writes() -> None:
    gm = called("__iadd__", B)
    assert plain_operators(gm.graph) == 1
    gm.recompile()
    x = torch.tensor(A)
    gm(x)
    assert x == A + B and gm.graph.find_nodes(op="call_function", target=operator.iadd)


@pytest.mark.parametrize("method", ["add", "eq", "expand", "__len__", "__radd"])
def test_other_methods_stay(method: str) -> None:
    assert plain_operators(called(method, B).graph) == 0


def test_a_mask_whose_comparison_is_a_method_is_folded() -> None:
    def attend(q: Tensor) -> Tensor:
        positions = torch.arange(q.shape[2])
        same = torch.zeros(1, q.shape[2], dtype=torch.long).diff(dim=-1, prepend=torch.zeros(1, 1).long()).cumsum(-1)
        mask = (positions[None, :] <= positions[:, None]) & (same[:, None, :] == same[:, :, None])
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    gm, _ = captured(attend, torch.randn(1, 2, 8, 16))
    for node in gm.graph.nodes:  # as PyTorch 2.11 captures it
        if node.target is operator.eq:
            node.op, node.target = "call_method", "__eq__"
    (region,), _ = regions_of(gm)
    assert fold_masks([region]) == 0
    assert plain_operators(gm.graph) == 1
    assert fold_masks([region]) == 1
    assert [node.meta[FOLDED] for node in gm.graph.nodes if FOLDED in node.meta] == ["causal"]


aten = torch.ops.aten
ATEN: dict[str, tuple[Callable[..., Tensor], object]] = {
    "linear": (lambda x, w, b: aten.linear.default(x, w, b), F.linear),
    "linear by its packet": (lambda x, w, b: aten.linear(x, w, bias=b), F.linear),
    "mm by keyword": (lambda x, w, b: aten.mm.default(self=x, mat2=w), torch.mm),
    "addmm": (lambda x, w, b: aten.addmm.default(b, x, w, beta=0.5), torch.addmm),
    "einsum": (lambda x, w, b: aten.einsum.default("ab,cb->ac", [x, w], path=None), torch.einsum),
    "layer_norm": (lambda x, w, b: aten.layer_norm.default(x, [32], b, b, 1e-3, False), F.layer_norm),
    "softmax": (lambda x, w, b: aten.softmax.int(x, 0), torch.softmax),
    "conv1d": (lambda x, w, b: aten.conv1d.padding(x[None], w[..., None], b, [1], "same"), F.conv1d),
    "embedding": (lambda x, w, b: aten.embedding.default(w, x.argmax(1)), torch.embedding),
}  # fmt: skip


@pytest.mark.parametrize("name", ATEN)
def test_an_operator_of_atens_becomes_the_function_that_it_stands_for(name: str) -> None:
    run, function = ATEN[name]
    inputs = torch.randn(32, 32), torch.randn(32, 32), torch.randn(32)
    gm, _ = captured(run, *inputs)
    assert plain_operators(gm.graph) == 1
    gm.graph.lint()
    gm.recompile()
    assert len(gm.graph.find_nodes(op="call_function", target=function)) == 1
    places = gm.graph.find_nodes(op="placeholder")
    by_name = dict(zip(("l_x_", "l_w_", "l_b_"), inputs, strict=True))
    torch.testing.assert_close(gm(*(by_name[str(place)] for place in places))[0], run(*inputs))


def test_an_operator_that_writes_to_an_output_stays() -> None:
    gm, _ = captured(lambda x, y: aten.mm.out(x, x, out=y), torch.randn(4, 4), torch.randn(4, 4))
    assert plain_operators(gm.graph) == 0


Q = torch.arange(4) > 1
# The function, and what it is given by name beside its operand, a matrix [4, 4].
NAMED: dict[str, tuple[Callable[..., Tensor], dict[str, object]]] = {
    "mean": (torch.mean, {"dim": -1, "keepdim": True}),
    "rsqrt": (torch.rsqrt, {}),
    "pow": (torch.pow, {"exponent": 2}),
    "square": (torch.square, {}),
    "add": (torch.add, {"other": 3, "alpha": 2}),
    "matmul": (torch.matmul, {"other": torch.ones(4, 2)}),
    "softmax": (torch.softmax, {"dim": 0}),
    "masked_fill": (torch.masked_fill, {"mask": Q, "value": -1.0}),
    "reshape": (torch.reshape, {"shape": (2, 8)}),
    "unsqueeze": (torch.unsqueeze, {"dim": 1}),
    "le": (torch.le, {"other": 0.5}),
    "logical_and": (torch.logical_and, {"other": Q}),
    "logical_not": (torch.logical_not, {}),
    "linear": (F.linear, {"weight": torch.ones(3, 4), "bias": torch.ones(3)}),
    "gelu": (F.gelu, {"approximate": "tanh"}),
    "layer_norm": (F.layer_norm, {"normalized_shape": (4,), "eps": 1e-3}),
    "relu, in Python": (F.relu, {"inplace": False}),
}


def by_name(function: Callable[..., Tensor], operand: Tensor, others: dict[str, object]) -> tuple[GraphModule, Node]:
    """A graph that calls ``function`` with everything by name, and that call."""
    root, graph = nn.Module(), Graph()
    root.register_buffer("operand", operand)
    given: dict[str, object] = {}
    for name, other in others.items():
        if isinstance(other, Tensor):
            root.register_buffer(name, other)
        given[name] = graph.get_attr(name) if isinstance(other, Tensor) else other
    call = graph.call_function(function, (), {**given, "input": graph.get_attr("operand")})
    graph.output(call)
    return GraphModule(root, graph), call


@pytest.mark.parametrize("name", NAMED)
def test_the_operand_of_a_function_is_given_by_its_position(name: str) -> None:
    function, others = NAMED[name]
    gm, call = by_name(function, torch.rand(4, 4), others)
    before, named = gm(), dict(call.kwargs)
    assert plain_operators(gm.graph) == 0, "it is the same function"
    gm.graph.lint()
    gm.recompile()
    assert call.target is function and call.args == (named.pop("input"),) and call.kwargs == named
    assert torch.equal(gm(), before)


def test_dynamo_keeps_names_and_the_pass_takes_that_of_the_operand_alone() -> None:
    def run(x: Tensor) -> Tensor:
        return torch.mean(dim=-1, input=torch.pow(exponent=2, input=x), keepdim=True)

    x = torch.randn(3, 5)
    gm, _ = captured(run, x)
    plain_operators(gm.graph)
    gm.graph.lint()
    gm.recompile()
    (power,), (mean,) = (gm.graph.find_nodes(op="call_function", target=each) for each in (torch.pow, torch.mean))
    assert power.args == (gm.graph.find_nodes(op="placeholder")[0],) and power.kwargs == {"exponent": 2}
    assert mean.args == (power,) and mean.kwargs == {"dim": -1, "keepdim": True}
    assert torch.equal(gm(x)[0], run(x))


# In Python and in C++, each with something before the input.
def power_of(exponent: float, input: Tensor) -> Tensor:
    return input**exponent


INPUT_IS_LATER: dict[str, tuple[Callable[..., Tensor], dict[str, object]]] = {
    "where": (torch.where, {"condition": Q, "other": torch.zeros(4, 4)}),
    "polygamma": (torch.polygamma, {"n": 1}),
    "searchsorted": (torch.searchsorted, {"sorted_sequence": torch.arange(5) / 5}),
    "a function of the user's": (power_of, {"exponent": 2}),
}


@pytest.mark.parametrize("name", INPUT_IS_LATER)
def test_an_input_that_is_not_the_first_parameter_keeps_its_name(name: str) -> None:
    function, others = INPUT_IS_LATER[name]
    gm, call = by_name(function, torch.rand(4, 4), others)
    with gm.graph.inserting_after(call):
        square = gm.graph.call_function(torch.square, (), {"input": call})
    gm.graph.output_node().args = (square,)
    gm.recompile()
    before, named = gm(), dict(call.kwargs)
    plain_operators(gm.graph)
    gm.graph.lint()
    gm.recompile()
    assert call.args == () and call.kwargs == named
    assert square.args == (call,) and not square.kwargs, "the one beside it is placed"
    assert torch.equal(gm(), before)


class Named(nn.Module):
    """A norm, a linear and what else ``between`` does, before a linear."""

    def __init__(self, between: Callable[[Tensor, Tensor, nn.Linear], Tensor]) -> None:
        super().__init__()
        self.weight, self.between = nn.Parameter(torch.rand(64) + 0.5), between
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(x, self.weight, self.up))


def rms(x: Tensor, weight: Tensor, up: nn.Linear) -> Tensor:
    h = x + F.linear(input=x, weight=up.weight, bias=up.bias)
    variance = torch.mean(input=torch.pow(input=h, exponent=2), dim=-1, keepdim=True)
    return h * torch.rsqrt(input=variance + 1e-5) * weight


def rms_of_squares(x: Tensor, weight: Tensor, up: nn.Linear) -> Tensor:
    h = x + F.gelu(input=F.linear(input=x, weight=up.weight), approximate="tanh")
    variance = torch.mean(keepdim=True, dim=(-1,), input=torch.square(input=h))
    return h * torch.pow(exponent=-0.5, input=variance + 1e-5) * weight


def step_as_eager(model: nn.Module, x: Tensor) -> Compilation:
    """The record of a step in FP8 of all linears, whose numbers are close to those of eager mode."""
    expected, expected_gradients = train_step(model, model, x)
    with manager.recording() as records:
        got, gradients = train_step(model, compiled(model, cost_model=False), x)
    (record,) = records
    assert {site.name: site.status for site in record.plan.sites} == dict.fromkeys(("up", "down"), "fp8")
    assert 0 < relative_error(got, expected) < 0.1
    assert gradients.keys() == expected_gradients.keys()
    assert all(cosine(gradients[name], gradient) > 0.95 for name, gradient in expected_gradients.items())
    return record


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("between", [rms, rms_of_squares])
def test_a_norm_that_is_spelled_with_names_is_recognised(between: Callable[..., Tensor]) -> None:
    record = step_as_eager(Named(between), torch.randn(32, 64))
    assert len(te_nodes(record, "norm")) + len(te_nodes(record, "norm_quantize")) == 1


def masked_by_name(x: Tensor, weight: Tensor, up: nn.Linear) -> Tensor:
    """Causal attention in two heads, whose mask is made of functions that are given everything by name."""
    q = torch.reshape(input=up(x) * weight, shape=(2, 16, 2, 32)).transpose(1, 2)
    rows = torch.unsqueeze(input=torch.arange(16), dim=1)
    seen = torch.logical_and(input=torch.le(input=torch.arange(16), other=rows), other=torch.ones(16, 16).bool())
    scores = torch.masked_fill(input=q @ q.mT / 6, mask=torch.logical_not(input=seen), value=float("-inf"))
    return torch.reshape(input=(torch.softmax(input=scores, dim=-1) @ q).transpose(1, 2), shape=(2, 16, 64))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_mask_that_is_spelled_with_names_is_folded() -> None:
    record = step_as_eager(Named(masked_by_name), torch.randn(2, 16, 64))
    assert len(record.plan.attentions) == 1


class Block(nn.Module):
    """A norm, an MLP and an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.norm(F.gelu(self.up(x))))
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(x.shape))


@pytest.mark.usefixtures("fresh_dynamo")
def test_an_exported_program_runs_in_fp8_as_its_model_does() -> None:
    model, x = Block(), torch.randn(2, 6, 64)
    exported = torch.export.export(model, (x,)).module()
    expected = train_step(model, compiled(model), x)
    with manager.recording() as records:
        got = train_step(exported, compiled(exported), x)
    (record,) = records
    assert {site.name: site.status for site in record.plan.sites} == dict.fromkeys(("up", "down", "qkv", "out"), "fp8")
    assert len(record.plan.attentions) == 1
    assert cosine(got[0], expected[0]) > 0.9999
    assert got[1].keys() == expected[1].keys()
    assert all(cosine(got[1][name], gradient) > 0.999 for name, gradient in expected[1].items())
