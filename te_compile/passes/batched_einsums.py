"""Einsums that are batches of products with a weight: ``"ecd,edf->ecf"``, ``"becd,edf->becf"``, ``"bki,kij->bkj"``.

One letter, an expert's or a block's, is of the activation, the weight and the result. Without it the others are those
of a linear (linear_einsums.py), so for each expert there is one, as in torch.bmm (batched_linears.py).
"""

from __future__ import annotations

from functools import partial

from torch.fx import Node

from te_compile.passes.batched_linears import keep_if_many, one_by_one
from te_compile.passes.einsum_letters import Letters, readings
from te_compile.passes.linear_einsums import apart, joined, site_of
from te_compile.passes.plan import Site
from te_compile.passes.regions import Region
from te_compile.passes.weight_expressions import Weights
from te_compile.passes.writing import Writer


def batched_einsum_site(region: Region, node: Node, weights: Weights) -> Site | None:
    """A site for an einsum that is a batch of linears; None for any other."""
    for letters, x, weight in readings(node):
        expert = _expert_of(letters)
        if expert is None:
            continue
        site = site_of(region, node, weights, letters, x, weight, expert)
        if site is not None:
            keep_if_many(site)
            site.spell = partial(_spelled, letters=letters, expert=expert, weights=weights)
            return site
    return None


def _expert_of(letters: Letters) -> str | None:
    """The one letter that all three have, each once, if there are rows beside it."""
    terms = (letters.x, letters.weight, letters.result)
    batch = set(letters.x) & set(letters.weight) & set(letters.result)
    if len(batch) != 1:
        return None
    (expert,) = batch
    is_once = all(term.count(expert) == 1 for term in terms)  # else a diagonal
    return expert if is_once and letters.without(expert).rows else None


def _spelled(site: Site, letters: Letters, expert: str, weights: Weights) -> tuple[Node, list[Site]]:
    """Write the einsum out; returns the result and a site for each expert."""
    assert site.x is not None and site.weight is not None
    write, linear = Writer(site.node), letters.without(expert)
    rows, summed, new = linear.rows, linear.summed, linear.new
    x = joined(write, site.x, letters.permutation(letters.x, (expert, *rows, *summed)), (len(summed),))
    order = letters.permutation(letters.weight, (expert, *summed, *new))
    weight = joined(write, site.weight, order, (len(summed), len(new)))
    result, spelled = one_by_one(write, site, x, weight, weights)
    result = apart(write, result, new, site.weight, letters.weight)
    back = letters.permutation((expert, *rows, *new), letters.result)
    if back != sorted(back):
        result = write.method("permute", result, *back)
    return write.laid_out_like(result, site.node), spelled
