"""Casts that change nothing go, all others stay."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from te_compile.passes.drop_noop_casts import drop_noop_casts
from te_compile.passes.text import ops_text


def captured(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """The graph that Dynamo hands to a backend."""
    graphs: list[GraphModule] = []
    torch._dynamo.reset()

    def keep(module: GraphModule, _: Any) -> Any:
        graphs.append(module)
        return module.forward

    torch.compile(function, backend=keep, fullgraph=True)(*inputs)
    return graphs[0]


def test_casts_to_the_dtype_that_is_there_already_go() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        a = x.to(torch.float32).float().type(torch.float32).to(device="cpu", dtype=torch.float32)
        return (a * 2).type_as(y) + y.to(y).to("cpu")

    graph = captured(function, torch.randn(3), torch.randn(3)).graph
    assert drop_noop_casts(graph) == 7
    graph.lint()
    assert ops_text(graph) == textwrap.dedent("""\
        mul = operator.mul(l_x_, 2)
        add = operator.add(mul, l_y_)
        return (add,)""").replace("operator.", "")


@pytest.mark.parametrize(
    "cast",
    (
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.bfloat16().clone().to(torch.bfloat16, copy=True),
        lambda x: x.to(torch.bfloat16, memory_format=torch.contiguous_format),
        lambda x: x.contiguous(),
    ),
)
def test_what_converts_or_copies_stays(cast: Callable[[Tensor], Tensor]) -> None:
    module = captured(lambda x: cast(x * 2), torch.randn(3, 3).bfloat16())
    before = ops_text(module.graph)
    drop_noop_casts(module.graph)
    kept = [line for line in before.splitlines() if ".bfloat16" not in line]
    assert len(ops_text(module.graph).splitlines()) == len(kept)


def test_a_tensor_changed_after_its_noop_cast_is_the_same_tensor() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        z = y.to(torch.float32)
        y.add_(1)
        return z * 3

    x = torch.randn(5)
    module = captured(function, x)
    assert drop_noop_casts(module.graph) == 1
    module.recompile()
    assert torch.equal(module(x)[0], function(x))
