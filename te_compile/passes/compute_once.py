"""Compute what is costly and broadcast once, and not for every element that it is broadcast to.

A rotary embedding multiplies q [B, H, S, D] and k by a cosine and a sine [1, 1, S, D]. Inductor takes pointwise values
into the kernels of their readers, so each of B · H heads computes them again, in every layer: for 4 × 32 heads of 2048
positions the rotation of q takes 133 µs of an H200, for bytes that take 31. ``te::once`` puts the value into memory.

    cos → cast → unsqueeze → mul(q, ·)    becomes    cos → cast → te.once → unsqueeze → mul(q, ·)

This is no linear's business, but the layer's time. It concerns values that a costly function made, and pointwise nodes
made of these, up to where a reader has several times as many elements. What is read at its own size alone stays with
its reader, and so does what small readers read, for which a launch more is no gain.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node

from te_compile.ops.once import ONCE
from te_compile.passes.new_nodes import call_like
from te_compile.passes.pointwise_nodes import CASTS, COPIES, VIEWS, value_of

aten = torch.ops.aten

ON = {"cuda"}
"""The types of device whose kernels compute such values again; Inductor itself computes them once for a CPU."""

COSTLY = {
    *(aten.cos.default, aten.sin.default, aten.tan.default, aten.tanh.default, aten.erf.default, aten.log.default),
    *(aten.pow.Tensor_Tensor, aten.pow.Scalar),
}
"""Functions that take tens of instructions an element."""

GROWTH = 4  # times as many elements as the value has: readers of fewer have it computed where they are
MUCH = 1 << 20  # elements of such readers together: a launch takes as long as a costly function of so many
_VIEWS = VIEWS | COPIES - {aten.clone.default} | {aten.permute.default, aten.slice.Tensor, aten.select.int}


def compute_once(graph: Graph) -> int:
    """Put ``te::once`` between costly values and readers that they are broadcast to; returns how many."""
    costly: set[Node] = set()
    made = 0
    for node in list(graph.nodes):
        value = value_of(node) if node.op == "call_function" else None
        if value is None or value.device.type not in ON or not _is_costly(node, costly):
            continue
        if node.target not in _VIEWS and (readers := _larger_readers(node, value)):
            _compute_once(node, readers)
            made += 1
        else:
            costly.add(node)
    return made


def _is_costly(node: Node, costly: set[Node]) -> bool:
    if node.target in COSTLY:
        return True
    return (node.target in _VIEWS or _is_pointwise(node)) and any(each in costly for each in node.all_input_nodes)


def _is_pointwise(node: Node) -> bool:
    if node.target in CASTS:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _larger_readers(node: Node, value: Tensor) -> set[Node]:
    """The users of ``node`` through which it gets to readers of several times its size, if these are large in all."""
    found: set[Node] = set()
    elements = 0
    for user in node.users:
        sizes = [_elements(reader) for reader in _readers(user)]
        larger = [size for size in sizes if size >= GROWTH * _count(value)]
        if larger:
            found.add(user)
            elements += sum(larger)
    return found if elements >= MUCH else set()


def _readers(user: Node) -> set[Node]:
    """The pointwise nodes that ``user`` is, or is a view for."""
    if user.target in _VIEWS:
        return {reader for each in user.users for reader in _readers(each)}
    return {user} if _is_pointwise(user) else set()


def _elements(node: Node) -> int:
    value = value_of(node)
    return 0 if value is None else _count(value)


def _count(value: Tensor) -> int:
    """How many elements; where that is not known, as many as there were when the graph was traced."""
    count: int | torch.SymInt = value.numel()
    return count if isinstance(count, int) else int(count.node.hint or 0)


def _compute_once(node: Node, readers: set[Node]) -> None:
    with node.graph.inserting_after(node):
        kept = call_like(ONCE, (node,), node)
    for reader in readers:
        reader.replace_input_with(node, kept)
