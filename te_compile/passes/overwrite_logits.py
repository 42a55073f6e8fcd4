"""Write the gradient of the logits over the logits, where these are seen by nobody any more.

Logits [tokens, vocabulary] are the largest tensor of a language model's step, and the backward pass begins with their
gradient, which is as large, while all that forward saved is still there: that is where such a step peaks. The kernel
that makes the gradient reads each logit once, for the element that it writes. So the two may share their memory:

    dlogits = te.cross_entropy_backward(logits, …)   becomes   te.cross_entropy_backward(logits, …, overwrite=True)

which asks, at each call, whether anything but this backward pass holds the memory (ops/last_holder.py). What that
cannot see is shown here. The logits must be a product's result, so they are no tensor that the caller gave. And no
result of the graph may show them, whose tensor might be the saved one itself; but for those that defer_logits_gradient
detached, which the runtime hands on as another tensor. That is decided on the joint graph, and written on the operator:
graphs that differ in what they return may have equal backward passes, which share their code.

Nor may the backward pass read the logits once more, for anything that the partitioner has it compute again, nor get
them from its own computation, in memory that Inductor has plans for: ``keep_read_logits`` takes the permission back.
PyTorch itself has buffers that forward saved written over, those that are no result of the graph ("donated buffers").
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from te_compile.ops.cross_entropy import (
    CROSS_ENTROPY_BACKWARD,
    CROSS_ENTROPY_BACKWARD_DEFERRED,
    CROSS_ENTROPY_BACKWARD_DEFERRED_WITH_SUMS,
    CROSS_ENTROPY_BACKWARD_WITH_SUMS,
)
from te_compile.passes.arguments import arguments_of, is_te, operator_of, set_arguments
from te_compile.passes.memory import autograd_is_compiled
from te_compile.passes.pointwise_nodes import VIEWS, tensor_arguments

aten = torch.ops.aten

_DEFERRED = (CROSS_ENTROPY_BACKWARD_DEFERRED, CROSS_ENTROPY_BACKWARD_DEFERRED_WITH_SUMS)
LOSS_BACKWARDS = (CROSS_ENTROPY_BACKWARD, CROSS_ENTROPY_BACKWARD_WITH_SUMS, *_DEFERRED)
"""All operators that write the gradient of logits."""

_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}


def overwrite_logits(graph: Graph) -> int:
    """Allow each backward of a loss to write over logits that the joint graph alone has; returns how many."""
    backwards = [] if autograd_is_compiled() else _backwards_in(graph)
    results = [_memory_behind(node) for node in _results_of(graph)] if backwards else []
    allowed = [each for each in backwards if _are_its_own(each, results)]
    for backward in allowed:
        set_arguments(backward, overwrite=True)
    return len(allowed)


def keep_read_logits(graph: Graph) -> int:
    """Take the permission back where a backward pass makes the logits or reads them elsewhere; returns how often."""
    permitted = [backward for backward in _backwards_in(graph) if arguments_of(backward)["overwrite"]]
    kept = [each for each in permitted if not _is_saved_for(arguments_of(each)["logits"], each)]
    for backward in kept:
        set_arguments(backward, overwrite=False)
    return len(kept)


def _backwards_in(graph: Graph) -> list[Node]:
    return [node for target in LOSS_BACKWARDS for node in graph.find_nodes(op="call_function", target=target)]


def _results_of(graph: Graph) -> list[Node]:
    """What ``graph`` returns, each as often as it does."""
    return [each for each in pytree.tree_leaves(graph.output_node().args) if isinstance(each, Node)]


def _are_its_own(backward: Node, results: list[Node]) -> bool:
    """Are the logits of ``backward`` memory of the graph's that no result shows? results: the memory behind each."""
    memory = _memory_behind(arguments_of(backward)["logits"])
    detached = 1 if backward.target in _DEFERRED else 0
    return (memory.target in _PRODUCTS or is_te(memory, "gemm")) and results.count(memory) <= detached


def _is_saved_for(logits: Node, backward: Node) -> bool:
    return logits.op == "placeholder" and list(logits.users) == [backward]


def _memory_behind(node: Node) -> Node:
    """What made, or gave, the memory that ``node`` shows."""
    while (source := _source_of(node)) is not None:
        node = source
    return node


def _source_of(node: Node) -> Node | None:
    """The tensor that ``node`` is a view or a part of."""
    if node.target is operator.getitem:
        return node.all_input_nodes[0]
    function = operator_of(node) if node.op == "call_function" else None
    shows = function is not None and any(result.alias_info is not None for result in function._schema.returns)
    return tensor_arguments(node)[0] if shows or node.target in VIEWS else None
