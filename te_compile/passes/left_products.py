"""Products with the weight on the left: a linear whose features come before its tokens.

    y[…, N, M] = weight[N, K] @ x[…, K, M]                      (F.linear(xᵀ, weight))ᵀ

So write models that keep channels in front of positions, Mamba's projections among them. For the product the features
come last, and go back behind it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch.nn.functional as F
from torch.fx import Node

from te_compile.passes.captured_nodes import argument, called, is_tensor, size_hint, value_of
from te_compile.passes.plan import Site
from te_compile.passes.regions import Region
from te_compile.passes.weight_expressions import Weights
from te_compile.passes.writing import Writer


def left_site(region: Region, node: Node, weights: Weights) -> Site | None:
    """A site for a matrix product whose first operand is a weight and whose second is none; None for any other."""
    weight, x = argument(node, 0, "input"), argument(node, 1, "other") or node.kwargs.get("mat2")
    if len(node.args) + len(node.kwargs) != 2 or not is_tensor(weight) or not is_tensor(x):
        return None
    if value_of(weight).dim() != 2 or value_of(x).dim() < 2 or weights.owner(x, region) is not None:
        return None
    out_features, in_features = map(size_hint, value_of(weight).shape)
    *leading, _, columns = map(size_hint, value_of(x).shape)
    tokens = math.prod(leading) * columns
    site = Site("", called(node), region, node, tokens, (in_features, out_features), x, weight)
    if not site.has_a_parameter(weights):
        return None
    site.spell = partial(_spelled, weight=weight, weights=weights)
    return site


def _spelled(site: Site, weight: Node, weights: Weights) -> tuple[Node, list[Site]]:
    """Write the product as a linear of x with its features last; returns the result and the one site."""
    assert site.x is not None
    write = Writer(site.node)
    x = write.method("transpose", site.x, -2, -1)
    linear = write.product(F.linear, x, weight)
    result = write.laid_out_like(write.method("transpose", linear, -2, -1), site.node)
    spelled = replace(site, node=linear, x=x, spell=None)
    spelled.multiplies_by(weights.weight(weight, site.region, transposed=False))
    return result, [spelled]
