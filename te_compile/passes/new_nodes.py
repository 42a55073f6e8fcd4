"""Where a node of the joint graph stands, its phase and region, and new nodes that stand where another one does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._inductor import inductor_prims
from torch.fx import Node
from torch.fx.node import map_arg

from te_compile.passes.sizes import all_same, same

aten = torch.ops.aten


def reshaped(node: Node, shape: list[int] | None, like: Node) -> Node:
    """``node``, or a view of it, in ``shape`` (-1 for one size that follows from the others)."""
    assert shape is not None
    have = tuple(node.meta["val"].shape)
    if len(have) == len(shape) and all(new == -1 or same(new, old) for new, old in zip(shape, have, strict=True)):
        return node
    return call_like(aten.view.default, (node, shape), like)


def in_shape_of(node: Node, other: Node, like: Node) -> Node:
    """``node``, or a view of it, in the shape of ``other``, which is asked for its sizes where the symbolic ones do not
    follow from the rest."""
    sizes = other.meta["val"].shape
    shape = [size if isinstance(size, int) else -1 for size in sizes]
    have = node.meta["val"].shape
    if shape.count(-1) == 0 or (shape.count(-1) == 1 and 0 not in shape) or _are_the_same(have, sizes):
        return reshaped(node, shape, like)
    asked = [
        call_like(aten.sym_size.int, (other, dimension), like) if size == -1 else size
        for dimension, size in enumerate(shape)
    ]
    return call_like(aten.view.default, (node, asked), like)


def _are_the_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all_same(a, b)


def call_like(target: Any, arguments: tuple[Any, ...], like: Node, **options: Any) -> Node:
    """A new node with the metadata of ``like`` (checkpoint region, phase, stack trace) and its own value."""
    name = getattr(target, "_opname", None)
    node = like.graph.create_node("call_function", target, arguments, options, name=name)
    node.meta = place_of(like)
    with _fake_mode_of(arguments, like):
        node.meta["val"] = target(*map_arg(arguments, lambda argument: argument.meta["val"]), **options)
    return node


def held(x: Node, strides: Sequence[int], like: Node) -> Node:
    """``x`` as Inductor must lay it out, which copies nothing if its own kernel writes it. ``strides``: those that it
    has, in whose order alone Inductor takes an interest; other compilers take them as they are."""
    node = like.graph.call_function(inductor_prims.force_stride_order, (x, list(strides)))
    node.meta = {**place_of(like), "val": x.meta["val"]}
    return node


def place_of(node: Node) -> dict[str, Any]:
    """The metadata that say where ``node`` stands, without those that speak of its value or its implementation."""
    return {key: value for key, value in node.meta.items() if key not in _OF_A_VALUE}


_OF_A_VALUE = {"val", "tensor_meta", "eager_input_vals", "te_declined"}


def _fake_mode_of(arguments: tuple[Any, ...], like: Node) -> AbstractContextManager[Any]:
    """The mode under which the operands were traced; of a constant, which has none, that of ``like``."""
    values: list[Any] = []
    map_arg(arguments, lambda argument: values.append(argument.meta["val"]))
    return detect_fake_mode(values or [like.meta["val"]]) or nullcontext()


def same_phase(node: Node, other: Node) -> bool:
    """Are both of the forward or both of the backward, and of one checkpoint region or of none?

    One must not compute what the other gives away: what it gave for a region would be recomputed without it.
    """
    where = ("partitioner_tag", "recompute", "ac_graph_id")
    return all(node.meta.get(key) == other.meta.get(key) for key in where)


def keep_in_backward(nodes: Iterable[Node]) -> None:
    """Have those of ``nodes`` that stand in the backward pass be computed there. Of what a forward pass could compute
    as well the partitioner might save the results."""
    for node in nodes:
        if node.meta.get("partitioner_tag") == "is_backward":
            node.meta["partitioner_tag"] = "must_be_in_backward"
