"""Quantise two matrices beside each other where both are computed, from the same tensors, in one pass over those.

Where one linear computes gate and up of a gated MLP, as in Phi-3, GLM or ModernBERT, the gradient that its backward
quantises is a cat of theirs. Both follow from the gradient of their product and from gate and up themselves. A producer
of the cat would read each of its halves after somebody has written it: 18 bytes an element of a half, where one that
computes both reads six and writes four (te::fused_quantize_cat). The bias's gradient, their sum over rows, comes along.

What is done to the cat as a whole, row by row, is done to each half: experts' gradients are set to 0 in rows that are
none of theirs.

Heads of up to 1024 columns, in which rotary embeddings join halves, are fuse_producers.py's business.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from te_compile.ops.fused_quantize_cat import FIRST_SUM, FUSED_QUANTIZE_CAT
from te_compile.ops.quantize import QUANTIZE
from te_compile.passes.arguments import arguments_of
from te_compile.passes.closures import Closure, find_closure
from te_compile.passes.column_shifts import WIDEST
from te_compile.passes.index_space import IndexSpace, behind_views
from te_compile.passes.merged_specs import Reading, merged, share_matrices
from te_compile.passes.new_nodes import call_like, reshaped
from te_compile.passes.pointwise_nodes import CASTS, VIEWS, is_pointwise, tensor_arguments, value_of
from te_compile.passes.producer_inputs import erase_dead, input_node
from te_compile.passes.producer_readers import Readers, readers_of
from te_compile.passes.row_sums import constant_shape
from te_compile.passes.sizes import all_same, same

aten = torch.ops.aten


def cat_producers(graph: Graph) -> int:
    """Replace each quantize of such a cat by a producer of both halves; returns how many."""
    return sum(_replaced(quantize) for quantize in graph.find_nodes(op="call_function", target=QUANTIZE))


@dataclass(frozen=True)
class Halves:
    """What a quantize reads, of ``columns`` columns each, and who else reads both together."""

    nodes: tuple[Node, Node]
    columns: int
    readers: Readers


def _replaced(quantize: Node) -> bool:
    """Put a producer of both halves in the place of ``quantize`` and the sums, if it has halves that gain by it."""
    halves = _halves_of(quantize)
    found = None if halves is None else _closures(quantize, halves)
    if halves is None or found is None:
        return False
    sums = halves.readers.sums
    with quantize.graph.inserting_before(min([quantize, *sums])):
        one, other = (
            Reading.of(each.spec, [input_node(leaf, each.columns, quantize) for leaf in each.leaves]) for each in found
        )
        both = merged(one, other, [total.meta["val"].dtype for total in sums]) if share_matrices(one, other) else None
        if both is not None:
            _put(quantize, both, sums)
    joined = {item.node for closure in found for item in closure.joined}
    inputs = {*one.inputs, *other.inputs}
    erase_dead({*halves.readers.views, halves.readers.root, *joined, *inputs})
    return both is not None


def _halves_of(quantize: Node) -> Halves | None:
    """Its halves, if what it reads is a cat of two for it alone, and for sums over rows."""
    x = value_of(quantize.args[0])
    if x is None or not isinstance(x.shape[1], int) or x.shape[1] <= WIDEST:
        return None
    root, (rows, columns) = _as_cat(behind_views(quantize.args[0])), x.shape
    value = value_of(root)
    if root.target is not aten.cat.default or value is None:
        return None
    readers = readers_of(quantize, IndexSpace(rows, columns, x.device))
    given = arguments_of(root)
    sources, last = list(given["tensors"]), value.dim() - 1
    values = [value_of(source) for source in sources]
    if len(sources) != 2 or given["dim"] % value.dim() != last or not same(value.shape[last], columns):
        return None
    alike = all(each is not None and same(each.shape[-1] * 2, columns) and each.dtype == value.dtype for each in values)
    alone = not readers.others and all(set(source.users) == {root} for source in sources)
    return Halves((sources[0], sources[1]), columns // 2, readers) if alike and alone else None


def _as_cat(root: Node) -> Node:
    """``root``, or, where that does something to each row of a cat of two for it alone, the cat of what that makes of
    each half."""
    cats = [each for each in root.all_input_nodes if each.target is aten.cat.default]
    if not is_pointwise(root) or root.target in VIEWS or len(cats) != 1 or set(cats[0].users) != {root}:
        return root
    (cat,), value = cats, value_of(root)
    given = arguments_of(cat)
    last = cat.meta["val"].dim() - 1
    if len(given["tensors"]) != 2 or given["dim"] % (last + 1) != last or value is None:
        return root
    alike = all(half.meta["val"].dtype == cat.meta["val"].dtype for half in given["tensors"])
    if not alike or not all_same(value.shape, cat.meta["val"].shape):
        return root
    others = (each.meta["val"] for each in root.all_input_nodes if each is not cat)
    if not all(other.dim() == 0 or same(other.shape[-1], 1) for other in others):
        return root
    with root.graph.inserting_before(root):
        halves = [
            call_like(root.target, tuple(half if each is cat else each for each in root.args), root, **root.kwargs)
            for half in given["tensors"]
        ]
        new = call_like(aten.cat.default, (halves, last), root)
    root.replace_all_uses_with(new)
    for node in (root, cat):
        root.graph.erase_node(node)
    return new


def _closures(quantize: Node, halves: Halves) -> list[Closure] | None:
    """How each half is computed where it is quantised; None if one only has to be read."""
    x = value_of(quantize.args[0])
    assert x is not None
    space = IndexSpace(x.shape[0], halves.columns, x.device)
    found = []
    for node in halves.nodes:
        closure = find_closure(node, space, quantize, False, [])
        if closure is None or not closure.joined or closure.spec.tensors_in_pieces:
            return None
        found.append(closure)
    return found


def _put(quantize: Node, both: Reading, sums: tuple[Node, ...]) -> None:
    """The producer in the place of ``quantize``, and what it sums in the place of ``sums``."""
    _, scale, *rest = quantize.args
    new = call_like(FUSED_QUANTIZE_CAT, (both.inputs, scale, both.spec.text(), *rest), quantize)
    for index, total in enumerate(sums):
        parts = [call_like(operator.getitem, (new, FIRST_SUM + 2 * index + half), total) for half in range(2)]
        joined = call_like(aten.cat.default, (parts,), total)
        total.replace_all_uses_with(reshaped(joined, constant_shape(total.meta["val"]), total))
    quantize.replace_all_uses_with(new)
    behind_casts = [tensor_arguments(total)[0] for total in sums if total.target in CASTS]
    for node in (quantize, *sums, *behind_casts):
        quantize.graph.erase_node(node)
