"""Products that are scaled, or to which more is added than one number a feature.

    addmm(addend, x, weight, beta=β, alpha=α) = β · addend + α · x @ weight
    F.linear(x, weight, bias)                                          a bias of one number, or of one a row

The addend may be anything that broadcasts to the result, a residual stream for one. For the product it is taken apart
from it; where it pays, add_in_products.py puts it back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from te_compile.passes.captured_nodes import value_of
from te_compile.passes.plan import Site
from te_compile.passes.weight_expressions import Weights
from te_compile.passes.writing import Writer

Factors = tuple[float, float]
"""β and α."""

PLAIN: Factors = (1, 1)


def factors_of(node: Node) -> Factors | None:
    """What the addend and the product are multiplied by; None where the graph computes it, and where β is 0, for then
    the addend is not read at all and still has a gradient."""
    beta, alpha = (node.kwargs.get(name, 1) for name in ("beta", "alpha"))
    if not isinstance(beta, (int, float)) or not isinstance(alpha, (int, float)) or beta == 0:
        return None
    return beta, alpha


def sum_apart(site: Site, weight: Node, weights: Weights, factors: Factors = PLAIN) -> None:
    """Have ``site``, a linear or an addmm by the matrix ``weight``, written out: a product, and a sum with its bias."""
    product = F.linear if site.form == "linear" else torch.matmul
    site.spell = partial(_spelled, product=product, weight=weight, weights=weights, factors=factors)


def summed(write: Writer, node: Node, product: Node, addend: Node, factors: Factors) -> Node:
    """β · ``addend`` + α · ``product``, in the dtype of ``node``: autocast casts what addmm adds, but no operand of a
    sum."""
    beta, alpha = factors
    scaled = product if alpha == 1 else write.call(operator.mul, product, alpha)
    added = addend if beta == 1 else write.call(operator.mul, addend, beta)
    result = write.call(operator.add, scaled, added)
    dtype = value_of(node).dtype
    return result if value_of(result).dtype == dtype else write.method("to", result, dtype)


def _spelled(
    site: Site, product: Callable[..., Tensor], weight: Node, weights: Weights, factors: Factors
) -> tuple[Node, list[Site]]:
    """Write the sum beside the product; returns the result and the one site."""
    assert site.x is not None and site.bias is not None
    write = Writer(site.node)
    multiplied = write.product(product, site.x, weight)
    result = summed(write, site.node, multiplied, site.bias, factors)
    spelled = replace(site, node=multiplied, bias=None, spell=None)
    is_linear = product is F.linear
    spelled.multiplies_by(weights.weight(weight, site.region, transposed=not is_linear, by_products=is_linear))
    return write.laid_out_like(result, site.node), [spelled]
