"""Operators that were captured as methods become functions, with the same operands in the same order."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule

from te_compile.passes.fold_masks import FOLDED, fold_masks
from te_compile.passes.plain_operators import plain_operators
from te_compile.passes.regions import regions_of
from tests.capturing import captured

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
