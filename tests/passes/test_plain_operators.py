"""Operators that were captured as methods or are ATen's become functions, with the same operands in the same order."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from te_compile.passes import manager
from te_compile.passes.fold_masks import FOLDED, fold_masks
from te_compile.passes.plain_operators import plain_operators
from te_compile.passes.regions import regions_of
from tests.capturing import captured
from tests.compiling import compiled, cosine, train_step

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
