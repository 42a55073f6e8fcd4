"""sums_along: which tensors come from sums along a dimension by way of pointwise nodes, and which go into some."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from te_compile.passes.sums_along import comes_from_sums, goes_into_sums

CHANNELS, LENGTH = 12, 35


def traced(function: Any) -> Graph:
    x = torch.randn(2, CHANNELS, LENGTH)
    graph: Graph = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(x).graph
    return graph


def first(graph: Graph) -> Node:
    return graph.find_nodes(op="placeholder")[0]


def last(graph: Graph) -> Node:
    (node,) = graph.output_node().all_input_nodes
    return node


def test_a_norm_of_each_channel_sums_along_the_length() -> None:
    graph = traced(lambda x: F.gelu(F.group_norm(x, 4)))
    assert comes_from_sums(last(graph), LENGTH) and goes_into_sums(first(graph), LENGTH)


def test_a_norm_of_each_place_does_not() -> None:
    graph = traced(lambda x: F.layer_norm(x.transpose(1, 2), [CHANNELS]).transpose(1, 2).exp())
    assert not comes_from_sums(last(graph), LENGTH) and not goes_into_sums(first(graph), LENGTH)
    assert comes_from_sums(last(graph), CHANNELS)


def test_a_product_is_in_between() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.softmax(x, -1) @ torch.ones(LENGTH, LENGTH)

    graph = traced(function)
    assert goes_into_sums(first(graph), LENGTH) and not comes_from_sums(last(graph), LENGTH)


def test_what_the_backward_pass_sums_does_not_count() -> None:
    graph = traced(lambda x: (x * 2).sum(2))
    assert goes_into_sums(first(graph), LENGTH)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList):
        node.meta["partitioner_tag"] = "is_backward"
    assert not goes_into_sums(first(graph), LENGTH)
