"""Batched products with a weight of three dimensions: the experts of a mixture, each a linear on tokens of its own.

    torch.bmm(x[E, T, K], weight[E, K, N])     baddbmm, matmul and @ likewise

FP8 products are of matrices, so a batch of few experts is written out: x and the weight fall into E matrices each, and
the results are stacked. With many, the launches would cost more than they gain.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from te_compile.passes.captured_nodes import argument, called, size_hint, value_of
from te_compile.passes.plan import Cause, Site
from te_compile.passes.regions import Region
from te_compile.passes.summed_products import PLAIN, factors_of, summed
from te_compile.passes.weight_expressions import Weights
from te_compile.passes.writing import Writer

MOST_EXPERTS = 64  # that are written out as linears of their own
PLAIN_PRODUCTS = {torch.bmm, torch.matmul, torch.linalg.matmul, operator.matmul, "bmm", "matmul"}
_PRODUCTS = {torch.baddbmm, "baddbmm", *PLAIN_PRODUCTS}


def is_batched_product(node: Node) -> bool:
    """May ``node`` be a product of batches of matrices?"""
    return node.op in ("call_function", "call_method") and node.target in _PRODUCTS


def _operands(node: Node) -> tuple[Any, Any, Any] | None:
    """What is added, x and the weight; None if the product writes to an output of the caller's, or is scaled by what
    nobody knows yet."""
    if called(node) == "baddbmm":
        if len(node.args) > 3 or factors_of(node) is None:
            return None
        known = {"input", "batch1", "batch2", "beta", "alpha"}
        operands = tuple(argument(node, i, name) for i, name in enumerate(("input", "batch1", "batch2")))
    else:
        known = {"input", "other", "mat2"}
        operands = None, argument(node, 0, "input"), argument(node, 1, "other") or node.kwargs.get("mat2")
        if len(node.args) + len(node.kwargs) != 2:
            return None
    return operands if node.kwargs.keys() <= known else None


def batched_site(region: Region, node: Node, weights: Weights) -> Site | None:
    """A site for a batched product with a weight; None for any other."""
    added, x, weight = _operands(node) or (None, None, None)
    values: list[Any] = [value_of(each) if isinstance(each, Node) else None for each in (x, weight)]
    if not isinstance(weight, Node) or any(not isinstance(value, Tensor) or value.dim() != 3 for value in values):
        return None
    (batch, tokens, _), sizes = (value.shape for value in values)
    if any(not isinstance(size, int) for size in sizes) or batch != sizes[0]:
        return None
    experts, in_features, out_features = sizes
    form, features = called(node), (in_features, out_features)
    site = Site("", form, region, node, size_hint(tokens), features, x, weight, added, linears=experts)
    if not site.has_a_parameter(weights):
        return None
    keep_if_many(site)
    site.spell = partial(_spelled, weights=weights)
    return site


def keep_if_many(site: Site) -> None:
    """Keep a batch of too many products to be written out."""
    if site.linears > MOST_EXPERTS:
        why = (
            f"{site.form} of {site.linears} experts, of which FP8 takes up to {MOST_EXPERTS}; use F.grouped_mm for more"
        )
        site.keep(Cause.UNSUPPORTED, why)


def one_by_one(write: Writer, site: Site, x: Node, weight: Node, weights: Weights) -> tuple[Node, list[Site]]:
    """Write x [E, …, K] · weight [E, K, N] out; returns the results [E, …, N] and a site for each expert."""
    xs, experts = (write.method("unbind", each, 0) for each in (x, weight))
    parts = [[write.call(operator.getitem, whole, index) for whole in (xs, experts)] for index in range(site.linears)]
    products = [write.product(torch.matmul, part, expert) for part, expert in parts]
    spelled = []
    for (part, expert), product in zip(parts, products, strict=True):
        each = replace(site, node=product, x=part, bias=None, linears=1, spell=None)
        each.multiplies_by(weights.weight(expert, site.region, transposed=True))
        spelled.append(each)
    return write.call(torch.stack, products), spelled


def _spelled(site: Site, weights: Weights) -> tuple[Node, list[Site]]:
    """Write the product out; returns the result and a site for each expert."""
    assert site.x is not None and site.weight is not None
    write = Writer(site.node)
    result, spelled = one_by_one(write, site, site.x, site.weight, weights)
    if site.bias is not None:
        result = summed(write, site.node, result, site.bias, factors_of(site.node) or PLAIN)
    return write.laid_out_like(result, site.node), spelled
