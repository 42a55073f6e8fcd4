"""Let a checkpointed region read what another has quantised, where PyTorch would merge the two by half.

Before it partitions the joint graph PyTorch merges what computes the same, whatever region it is in. From 2.15 on it
keeps apart what the backward pass depends on and what it does not. Of an input that is quantised in two regions, or in
one and outside of all, the quantizes become one, for both are depended on. Their results, each of which a node of its
own takes from the quantize, may stay two: one is read by products that only the forward pass needs. Then the second
region recomputes what it takes from a quantize that is none of its own, which is saved for it, and a quantize cannot
be saved: its value is no tensor but several. The partitioner fails, with words about a bug in PyTorch.

So here the quantizes are merged, and the results go with them to the region of the first, as PyTorch had it before.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._functorch.partitioners import must_recompute
from torch._inductor.pattern_matcher import compute_mutation_region_ids
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from te_compile.ops.library import NAMESPACE

_REGION = ("recompute", "ac_graph_id")  # in a node's meta


def share_across_regions(graph: Graph) -> int:
    """Merge operators of ours that have several results and compute the same in different regions; returns how many."""
    if not any(map(must_recompute, graph.nodes)):
        return 0
    merged = 0
    for node, first in _equal_ones(graph).items():
        if first is node or not _has_several_results(node) or _region_of(first) == _region_of(node):
            continue
        for result in list(node.users):
            result.replace_input_with(node, first)
            for key in _REGION:
                result.meta.pop(key, None)
                if key in first.meta:
                    result.meta[key] = first.meta[key]
        graph.erase_node(node)
        merged += 1
    return merged


def _region_of(node: Node) -> tuple[Any, ...]:
    return tuple(node.meta.get(key) for key in _REGION)


def _has_several_results(node: Node) -> bool:
    called = node.target
    return isinstance(called, OpOverload) and called.namespace == NAMESPACE and len(called._schema.returns) > 1


def _is_a_function_of_its_operands(node: Node) -> bool:
    """Nothing is known of a body that a call runs, and what draws random numbers draws others the next time."""
    if node.op != "call_function" or node.is_impure():
        return False
    if isinstance(node.target, OpOverload):
        return torch.Tag.nondeterministic_seeded not in node.target.tags
    return node.target is operator.getitem


def _equal_ones(graph: Graph) -> dict[Node, Node]:
    """For each call that computes what one before it does, with no write in between, the first such call."""
    compute_mutation_region_ids(graph)
    firsts: dict[Any, Node] = {}
    same: dict[Node, Node] = {}
    for node in graph.nodes:
        if not _is_a_function_of_its_operands(node):
            continue
        operands = map_arg((node.args, node.kwargs), lambda each: same.get(each, each))
        key = node.target, _hashable(operands), node.meta["mutation_region_id"], node.meta.get("partitioner_tag")
        same[node] = firsts.setdefault(key, node)
    return same


def _hashable(value: Any) -> Any:
    """``value`` such that what is equal is the same: 1 is not 1.0, nor True."""
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((key, _hashable(each)) for key, each in sorted(value.items()))
    return value if isinstance(value, Node) else (type(value), str(value))
