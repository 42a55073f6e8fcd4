"""Make products that read one operand in one launch, where there is a kernel for that: q, k and v of a decoding step.

    q = te.gemm(x, wq, …)                  q, k, v = te.gemms(x, [wq, wk, wv], …)
    k = te.gemm(x, wk, …)
    v = te.gemm(x, wv, …)

Each keeps its own scale and bias, and its result is a tensor of its own, so nothing else changes. Those are joined
whose kernel is the one for few rows: it takes several weights with a scale each, which cuBLASLt does not, and with
many rows there is little to gain. What is joined stands where the first of them stood: a product whose weight is
quantised only later stays by itself.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Graph, Node

from te_compile.ops import registry
from te_compile.ops.gemm import GEMM
from te_compile.ops.gemms import AT_ONCE, GEMMS, joined
from te_compile.ops.native_implementations import CUDA
from te_compile.passes.arguments import arguments_of, values_of
from te_compile.passes.new_nodes import call_like, same_phase
from te_compile.passes.set_names_aside import label_of

KERNELS = {CUDA}
"""The implementations of te::gemm that make several products at once as those of te::gemms of the same name."""

_ALIKE = ("a", "a_scale_inv", "out_dtype", "accumulation", "implementation")
"""What products must have in common."""


def join_products(graph: Graph) -> int:
    """Join products as far as one launch makes them; returns how many were joined."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    joined_now = 0
    groups: dict[tuple[Any, ...], list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=GEMM):
        given = arguments_of(node)
        if given["addend"] is not None or given["implementation"] not in KERNELS:
            continue
        group = groups.setdefault(tuple(given[name] for name in _ALIKE), [])
        if group and not _goes_with(node, group, place):
            joined_now += _join(group)
            group.clear()
        group.append(node)
    return joined_now + sum(map(_join, groups.values()))


def _goes_with(node: Node, group: list[Node], place: dict[Node, int]) -> bool:
    """Can ``node`` be computed where the first of ``group`` is, in one launch with them all?"""
    is_there = all(place[operand] < place[group[0]] for operand in node.all_input_nodes)
    return len(group) < AT_ONCE and same_phase(node, group[0]) and is_there


def _join(group: list[Node]) -> int:
    """Put one operator in the place of these products, if there is code for it; returns how many they are."""
    if len(group) < 2:
        return 0
    first, all_given = group[0], [arguments_of(node) for node in group]
    of_each = {name: [given[name] for given in all_given] for name in ("b", "b_scale_inv", "bias")}
    alike = {name: all_given[0][name] for name in ("a", "a_scale_inv", "out_dtype", "accumulation")}
    arguments = {**alike, **of_each, "label": joined([label_of(node) for node in group])}
    known = values_of(arguments)
    implementation, declined = registry.choose("gemms", registry.Target.of(known["a"].device), known)
    if implementation not in KERNELS:
        return 0
    with first.graph.inserting_before(first):
        names = [argument.name for argument in GEMMS._schema.arguments]
        given = tuple({**arguments, "implementation": implementation}[name] for name in names)
        together = call_like(GEMMS, given, first)
        together.meta["eager_input_vals"] = values_of((together.args, together.kwargs))  # which Inductor asks for
        together.meta["te_declined"] = declined
        for index, node in enumerate(group):
            node.replace_all_uses_with(call_like(operator.getitem, (together, index), node))
    for node in group:
        first.graph.erase_node(node)
    return len(group)
