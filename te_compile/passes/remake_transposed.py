"""Make the transposed copies of activations in the backward pass, from what that has in high precision anyway.

The gradient of a weight reads its input transposed, so a producer writes both layouts and qᵀ waits for the backward
pass: one byte for each element of each linear's input. Most of these inputs are computed from tensors that wait there
as well: GELU's and a gate's from what their own backward reads, a norm's result from the norm's input, attention's
output from itself. For such a producer, qᵀ is dropped from the forward pass and made where it is read, by the same
operator from the same tensors with the scale of the same snapshot. It costs a second read. Which kernel runs may depend
on the layouts that are wanted, and one that adds up a norm's rows in another order may find another amax: so the codes
are read by the multiplier that was made with them.

Where a tensor would have to be kept for this alone, qᵀ is the smaller thing to keep, and stays; in a region that is
recomputed as a whole nothing is kept to begin with.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from torch._functorch.partitioners import must_recompute
from torch.fx import Graph, Node

from te_compile.ops.pointwise import Place, Spec, grouped
from te_compile.passes.arguments import arguments_of, is_te, ordered_arguments, result
from te_compile.passes.new_nodes import call_like
from te_compile.passes.prune_outputs import layouts_of
from te_compile.passes.views import is_view

_PRODUCERS = ("quantize", "norm_quantize", "fused_quantize")
_TO_SCALE_INV = 2  # from where qᵀ is among a producer's results


def remake_transposed(graph: Graph) -> int:
    """Give each qᵀ that can be made in the backward pass a producer there; returns how many."""
    producers = [node for node in graph.nodes if any(is_te(node, name) for name in _PRODUCERS)]
    # All are judged before one is changed: that one is made anew keeps no tensor alive for another.
    remade = [node for node in producers if _waits_for_backward(node) and all(map(_is_kept, matrices_read_by(node)))]
    for node in remade:
        remake(node)
    return len(remade)


def is_in_backward(node: Node) -> bool:
    """Was ``node`` traced in the backward pass?"""
    return node.meta.get("partitioner_tag") == "is_backward"


def _waits_for_backward(producer: Node) -> bool:
    """Is qᵀ of a forward's ``producer`` read in the backward pass, and nowhere else?"""
    if is_in_backward(producer) or must_recompute(producer):
        return False
    readers = [reader for qt in result(producer, layouts_of(producer)["columnwise"]) for reader in qt.users]
    return bool(readers) and all(map(is_in_backward, readers))


def matrices_read_by(producer: Node) -> list[Node]:
    """The whole matrices that ``producer`` reads; rows, columns and scalars are small."""
    arguments = arguments_of(producer)
    if "spec" not in arguments:
        return [arguments["x"]]
    found: list[Node] = []
    for given, tensors in grouped(Spec.parse(arguments["spec"]), arguments["inputs"]):
        found += tensors if given.place is Place.FULL else []
    return found


def _is_kept(source: Node) -> bool:
    """Does the backward pass read the elements of ``source`` already, in whatever shape?"""
    while is_view(source):
        source = source.all_input_nodes[0]
    family = [source]
    for member in family:
        family += (user for user in member.users if is_view(user) and user not in family)
    return any(is_in_backward(user) and not is_view(user) for member in family for user in member.users)


def remake(producer: Node) -> None:
    """A second producer of qᵀ alone, before the first node that reads it."""
    index = layouts_of(producer)["columnwise"]
    transposed = result(producer, index)
    first = min(reader for qt in transposed for reader in qt.users)
    changes: dict[str, Any] = {"rowwise": False, "columnwise": True}
    if is_te(producer, "norm_quantize"):
        changes["emit"] = False
    elif is_te(producer, "fused_quantize"):
        spec = Spec.parse(arguments_of(producer)["spec"])
        changes["spec"] = replace(spec, emitted=(), sums=()).text()
    assert callable(producer.target)
    with producer.graph.inserting_before(first):
        again = call_like(producer.target, ordered_arguments(producer, **changes), first)
        new, scale_inv = (call_like(operator.getitem, (again, at), first) for at in (index, index + _TO_SCALE_INV))
    for qt in transposed:
        for reader in list(qt.users):
            for before in result(producer, index + _TO_SCALE_INV):
                reader.replace_input_with(before, scale_inv)
        qt.replace_all_uses_with(new)
        producer.graph.erase_node(qt)
    if not scale_inv.users:
        producer.graph.erase_node(scale_inv)
