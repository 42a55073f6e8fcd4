"""Einsums that are batches of products with a weight: ``"ecd,edf->ecf"``, ``"becd,edf->becf"``, ``"bki,kij->bkj"``.

One letter, an expert's or a block's, is of the activation, the weight and the result. Without it the others are those
of a linear (linear_einsums.py), so for each expert there is one, as in torch.bmm (batched_linears.py).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch.fx import Node

from te_compile.passes.batched_linears import keep_if_many, one_by_one
from te_compile.passes.captured_nodes import size_hint, value_of
from te_compile.passes.einsum_letters import Letters, operands_and_terms
from te_compile.passes.linear_einsums import joined
from te_compile.passes.plan import Site
from te_compile.passes.regions import Region
from te_compile.passes.weight_expressions import NotAWeightError, Weights
from te_compile.passes.writing import Writer


def batched_einsum_site(region: Region, node: Node, weights: Weights) -> Site | None:
    """A site for an einsum that is a batch of linears; None for any other."""
    operands, terms = operands_and_terms(node)
    if len(operands) != 2 or terms is None:
        return None
    for place in (1, 0):
        site = _site_of(region, node, weights, Letters(terms[1 - place], terms[place], terms[2]), operands, place)
        if site is not None:
            return site
    return None


def _without(letters: Letters, batch: str) -> Letters:
    return Letters(
        *(tuple(each for each in term if each != batch) for term in (letters.x, letters.weight, letters.result))
    )


def _site_of(
    region: Region, node: Node, weights: Weights, letters: Letters, operands: list[Any], place: int
) -> Site | None:
    """The einsum as a batch of linears whose weight is the operand at ``place``; None if it is none."""
    x, weight = operands[1 - place], operands[place]
    batch = set(letters.x) & set(letters.weight) & set(letters.result)
    if len(batch) != 1:
        return None
    (expert,) = batch
    linear, shape, x_shape = _without(letters, expert), value_of(weight).shape, value_of(x).shape
    sizes = dict(zip(letters.weight, shape, strict=True))
    if not linear.are_a_linear() or not linear.rows or any(not isinstance(size, int) for size in shape):
        return None
    if any(term.count(expert) > 1 for term in (letters.x, letters.weight, letters.result)):
        return None  # a diagonal
    # Einsum broadcasts dimensions of size one; a linear does not.
    if any(x_shape[letters.x.index(each)] != sizes[each] for each in (expert, *linear.summed)):
        return None
    try:
        matrix = weights.matrix(weight, region)
    except NotAWeightError:
        return None
    rows = math.prod(size_hint(x_shape[letters.x.index(each)]) for each in linear.rows)
    features = math.prod(sizes[each] for each in linear.summed), math.prod(sizes[each] for each in linear.new)
    site = Site("", "einsum", region, node, rows, features, x, weight, linears=sizes[expert], root_weight=matrix.owner)
    keep_if_many(site)
    site.spell = partial(_spelled, letters=letters, expert=expert, sizes=sizes, weights=weights)
    return site


def _spelled(
    site: Site, letters: Letters, expert: str, sizes: dict[str, int], weights: Weights
) -> tuple[Node, list[Site]]:
    """Write the einsum out; returns the result and a site for each expert."""
    assert site.x is not None and site.weight is not None
    write, linear = Writer(site.node), _without(letters, expert)
    rows, summed, new = linear.rows, linear.summed, linear.new
    x = joined(write, site.x, letters.permutation(letters.x, (expert, *rows, *summed)), (len(summed),))
    order = letters.permutation(letters.weight, (expert, *summed, *new))
    weight = joined(write, site.weight, order, (len(summed), len(new)))
    result, spelled = one_by_one(write, site, x, weight, weights)
    if len(new) > 1:
        result = write.method("unflatten", result, -1, tuple(sizes[each] for each in new))
    back = letters.permutation((expert, *rows, *new), letters.result)
    if back != sorted(back):
        result = write.method("permute", result, *back)
    return write.laid_out_like(result, site.node), spelled
