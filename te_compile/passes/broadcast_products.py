"""Batches of products with a weight that has other batches beside it, or stands on the left.

    y[E, B, N, M] = weight[E, 1, N, K] @ x[E, B, K, M]          y[B, E, M, N] = x[B, E, M, K] @ weight[E, K, N]

So write models whose heads each have a matrix of their own, Zamba's state space layers among them. One dimension is the
experts' or heads'; in the weight all others before its matrices are of size one. For the products the experts come
first and the features last, and go back behind them. A plain batch of three dimensions is in batched_linears.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from torch.fx import Node

from te_compile.passes.batched_linears import PLAIN_PRODUCTS, keep_if_many, one_by_one
from te_compile.passes.captured_nodes import argument, called, is_tensor, size_hint, value_of
from te_compile.passes.plan import Site
from te_compile.passes.regions import Region
from te_compile.passes.weight_expressions import Weights
from te_compile.passes.writing import Writer


def is_plain_product(node: Node) -> bool:
    """May ``node`` be a product of batches of matrices, with nothing added?"""
    return node.op in ("call_function", "call_method") and node.target in PLAIN_PRODUCTS


def broadcast_site(region: Region, node: Node, weights: Weights) -> Site | None:
    """A site for a product of a batch of weights with batches of x; None for any other."""
    if len(node.args) + len(node.kwargs) != 2:
        return None
    left, right = argument(node, 0, "input"), argument(node, 1, "other") or node.kwargs.get("mat2")
    if not is_tensor(left) or not is_tensor(right):
        return None
    for x, weight in ((left, right), (right, left)):
        place = _place_of_experts(x, weight)
        if place is None or weights.owner(x, region) is not None:
            continue
        site = _site(region, node, x, weight, place)
        if site.has_a_parameter(weights) and not _is_copied(site):
            keep_if_many(site)
            site.spell = partial(_spelled, place=place, is_left=weight is left, weights=weights)
            return site
    return None


def _place_of_experts(x: Node, weight: Node) -> int | None:
    """The dimension of ``x``, counted from its last, that says which matrix of ``weight`` it meets; None if there is no
    such, or several."""
    shape, x_shape = value_of(weight).shape, value_of(x).shape
    if not 3 <= len(shape) <= len(x_shape) or any(not isinstance(size, int) for size in shape):
        return None
    places = [i - len(shape) for i in range(len(shape) - 2) if shape[i] != 1] or [-len(shape)]
    is_met = len(places) == 1 and isinstance(x_shape[places[0]], int) and x_shape[places[0]] == shape[places[0]]
    return places[0] if is_met else None


def _is_copied(site: Site) -> bool:
    """Is the batch of weights one parameter over and over, as queries that a model learned are for each of a batch?"""
    assert site.root_weight is not None
    return bool(value_of(site.weight).numel() > value_of(site.root_weight).numel())


def _site(region: Region, node: Node, x: Node, weight: Node, place: int) -> Site:
    experts, is_left = value_of(weight).shape[place], weight is argument(node, 0, "input")
    *_, rows, columns = value_of(weight).shape
    in_features, out_features = (columns, rows) if is_left else (rows, columns)
    tokens = math.prod(map(size_hint, value_of(x).shape)) // max(1, experts * in_features)
    return Site("", called(node), region, node, tokens, (in_features, out_features), x, weight, linears=experts)


def _spelled(site: Site, place: int, is_left: bool, weights: Weights) -> tuple[Node, list[Site]]:
    """Write the product out; returns the result and a site for each expert."""
    assert site.x is not None and site.weight is not None
    write, matrices = Writer(site.node), site.weight
    x = write.method("movedim", site.x, place, 0)
    if (dimensions := value_of(matrices).dim()) > 3:
        matrices = write.method("flatten", matrices, 0, dimensions - 3)
    if is_left:
        x, matrices = (write.method("transpose", each, -2, -1) for each in (x, matrices))
    result, spelled = one_by_one(write, replace(site, weight=matrices), x, matrices, weights)
    if is_left:
        result = write.method("transpose", result, -2, -1)
    return write.laid_out_like(write.method("movedim", result, 0, place), site.node), spelled
