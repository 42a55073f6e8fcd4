"""Let FP8 products add what is added to their results: residual streams, and gradients of an input that linears share.

A product writes y, and an addition reads it, reads the other addend and writes the sum: three passes over memory, where
cuBLASLt reads the addend while it writes the result.

    add(x, view(gemm(...)))      becomes      view(gemm(..., addend=view(x)))

The merged product takes the addition's place, because the addend may come later than the product, and its metadata:
what was outside of a checkpointed region stays outside. A product from outside of the addition's region stays as it
was, or it would be computed again in the backward.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from te_compile.ops import registry
from te_compile.ops.gemm import GEMM
from te_compile.passes.arguments import arguments_of, is_te, ordered_arguments, values_of
from te_compile.passes.new_nodes import call_like, in_shape_of, reshaped
from te_compile.passes.pointwise_nodes import VIEWS, tensor_arguments, value_of
from te_compile.passes.sizes import all_same, same

aten = torch.ops.aten
_COPIES = {aten.clone.default, aten.alias.default}  # a dropout with probability 0, for one


def add_in_products(graph: Graph) -> int:
    """Merge each addition to a product's only result into the product; returns how many."""
    merged = 0
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        product = _added_product(node)
        if product is not None:
            _merge(node, *product)
            merged += 1
    return merged


def _added_product(add: Node) -> tuple[Node, Node] | None:
    """(the product, the other addend) of an addition that can be merged; the later product if both are."""
    operands = tensor_arguments(add)
    if len(operands) != 2 or operands[0] is operands[1] or add.kwargs.get("alpha", 1) != 1:
        return None
    pairs = [(_product_behind(operand, add), other) for operand, other in (operands, operands[::-1])]
    found = [(gemm, other) for gemm, other in pairs if gemm is not None and _fits(gemm, other, add)]
    return max(found, default=None, key=lambda pair: pair[0])


def _product_behind(node: Node, reader: Node) -> Node | None:
    """The product whose result ``node`` is, under any shape, read by nothing else than ``reader``."""
    while node.target in VIEWS | _COPIES and list(node.users) == [reader]:
        node, reader = tensor_arguments(node)[0], node
    return node if is_te(node, "gemm") and list(node.users) == [reader] else None


def _fits(gemm: Node, addend: Node, add: Node) -> bool:
    """Can ``gemm`` add ``addend`` in place of ``add``?"""
    result, product, added = value_of(add), value_of(gemm), value_of(addend)
    if result is None or product is None or added is None or arguments_of(gemm)["addend"] is not None:
        return False
    columns = product.shape[1]
    # The views between may not have changed what a row is: the last dimension is still the product's.
    alike = added.dim() == result.dim() > 1 and all_same(added.shape, result.shape)
    if not alike or not same(result.shape[-1], columns) or not added.is_contiguous():
        return False
    if not same(product.numel(), result.numel()):  # a shift for each sample is added to all of its rows
        return False
    if not product.dtype == added.dtype == result.dtype or added.device != product.device:
        return False
    return _may_move(gemm, add) and _is_supported(gemm, addend)


def _may_move(gemm: Node, add: Node) -> bool:
    region = add.meta.get("ac_graph_id")
    same_phase = gemm.meta.get("partitioner_tag") == add.meta.get("partitioner_tag")
    return same_phase and region in (None, gemm.meta.get("ac_graph_id"))


def _is_supported(gemm: Node, addend: Node) -> bool:
    """Does what would run the product add, too?"""
    arguments = values_of(arguments_of(gemm))
    target = registry.Target.of(arguments["a"].device)
    alone, _ = registry.choose("gemm", target, arguments)
    adding, _ = registry.choose("gemm", target, {**arguments, "addend": value_of(addend)})
    return alone == adding


def _merge(add: Node, gemm: Node, addend: Node) -> None:
    graph, columns = add.graph, gemm.meta["val"].shape[1]
    shown = next(operand for operand in tensor_arguments(add) if operand is not addend)
    views = [shown]  # from the product's result as it is added, to the product
    while views[-1] is not gemm:
        views.append(tensor_arguments(views[-1])[0])
    with graph.inserting_before(add):
        matrix = reshaped(addend, [-1, columns], add)
        total = call_like(GEMM, ordered_arguments(gemm, addend=matrix), add)
        add.replace_all_uses_with(in_shape_of(total, addend, add))
    for node in (add, *views):
        graph.erase_node(node)
