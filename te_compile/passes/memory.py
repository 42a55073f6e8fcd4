"""Tell the partitioner what must be saved between forward and backward, and what may change in between.

Facts that it cannot know. A recomputed scale would be the *updated* one: with activation checkpointing, gradients
would be wrong by several per cent, silently. And a backward state is meant to change between two backward passes that
share it (two forwards, then two backwards), which autograd's version check would refuse. And a ticket for a gradient
made anew would have another number.

Compiled autograd hands a backward pass nothing of what was saved without such a check. Where it is turned on the states
are saved like any tensor, and of several forwards in a row the last one alone can be differentiated; autograd says so.

What the backward pass quantises anew, of a weight say, needs no gradient for it, and so could be made in the forward
pass, and saved. It is made anew in order not to be: it must stay in the backward pass.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._prims.rng_prims import run_and_save_rng_state
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from te_compile.passes.arguments import is_te
from te_compile.passes.prune_outputs import PRODUCERS

_LEAST_BUDGET = 1e-9  # of the memory that activations would take: as good as none
_UNCHECKED = "saved_tensor_with_no_vc_check"  # PyTorch's name for what may change, in a node's meta
_ADDS_GENERATOR_STATES = "functionalize_rng_ops"  # of the partitioner's


def is_tangent(node: Node) -> bool:
    """Is ``node`` a gradient that the backward pass is given?"""
    return node.op == "placeholder" and "tangents" in str(node.target)


def autograd_is_compiled() -> bool:
    """Will compiled autograd run the backward passes of what is compiled now, as far as that can be known?"""
    return bool(torch._dynamo.config.compiled_autograd)


@contextmanager
def tags_count() -> Iterator[None]:
    """In here the partitioner reads the tags of :func:`tag_memory` whatever the user's memory budget is.

    At a budget of exactly 0 it saves what the graph got, and looks at nothing else. And where a checkpoint draws random
    numbers it saves the generator's states, behind all other tensors. What may change is known by its number from the
    end: without a tag on the generator's as well these would be taken for it, and our states be checked.
    """
    budget = functorch_config.activation_memory_budget or _LEAST_BUDGET
    with functorch_config.patch(activation_memory_budget=budget), _generator_states_tagged():
        yield


@contextmanager
def _generator_states_tagged() -> Iterator[None]:
    """In here the partitioner's generator states get a tag, where it adds them by the function that we know."""
    add_states = getattr(partitioners, _ADDS_GENERATOR_STATES, None)
    if add_states is None:
        yield
        return

    def add_tagged_states(*args: Any, **kwargs: Any) -> Any:
        directions = add_states(*args, **kwargs)
        _tag_generator_states(directions[0].graph)
        return directions

    setattr(partitioners, _ADDS_GENERATOR_STATES, add_tagged_states)
    try:
        yield
    finally:
        setattr(partitioners, _ADDS_GENERATOR_STATES, add_states)


def _tag_generator_states(forward: Graph) -> None:
    """Tag the generator's states that ``forward`` saves as free to change, if it saves others that are."""
    results = forward.output_node().all_input_nodes
    if any(_UNCHECKED in result.meta for result in results):
        for result in results:
            if result.target is operator.getitem and result.all_input_nodes[0].target is run_and_save_rng_state:
                result.meta[_UNCHECKED] = True


def tag_memory(graph: Graph) -> int:
    """Mark snapshots and tickets as saved, updated states as free to change, and what backward makes anew as its own.

    Returns the number of nodes marked.
    """
    marked = 0
    of_gradients: set[Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or not of_gradients.isdisjoint(node.all_input_nodes):
            of_gradients.add(node)
        elif node.meta.get("partitioner_tag") == "is_backward" and any(is_te(node, name) for name in PRODUCERS):
            node.meta["partitioner_tag"] = "must_be_in_backward"
            marked += 1
        if is_te(node, "snapshot") or is_te(node, "gradient_ticket"):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            marked += 1
        elif is_te(node, "update_scales_"):
            for state in node.all_input_nodes:
                if state.op == "placeholder" and not autograd_is_compiled():
                    state.meta[_UNCHECKED] = True
                    marked += 1
    return marked
