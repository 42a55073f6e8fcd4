"""Einsums that are linears: ``"bsd,dn->bsn"``, ``"bsd,dhk->bshk"``, ``"bshk,hkd->bsd"``.

An einsum of an activation and a weight is a linear if every letter is one of three kinds: a row (of the activation and
the result), a feature that is summed over (of both operands, not of the result), a new feature (of the weight and the
result). Then the weight is a matrix from the summed features to the new ones, whatever the order of the letters. With a
letter that all three have, an expert's or a head's, it is a batch of them: batched_einsums.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.fx import Node

from te_compile.passes.captured_nodes import called, size_hint, value_of
from te_compile.passes.einsum_letters import Letters, readings
from te_compile.passes.plan import Site
from te_compile.passes.regions import Region
from te_compile.passes.weight_expressions import Weights
from te_compile.passes.writing import Writer


def einsum_site(region: Region, node: Node, weights: Weights) -> Site | None:
    """A site for an einsum that is a linear; None for any other."""
    for letters, x, weight in readings(node):
        site = site_of(region, node, weights, letters, x, weight)
        if site is not None:
            site.spell = partial(_spelled, letters=letters, weights=weights)
            return site
    return None


def site_of(
    region: Region, node: Node, weights: Weights, letters: Letters, x: Node, weight: Node, expert: str = ""
) -> Site | None:
    """The einsum as a linear of ``x`` with ``weight``, or as one for each ``expert``; None if it is none."""
    linear, shape, x_shape = letters.without(expert), value_of(weight).shape, value_of(x).shape
    sizes = dict(zip(letters.weight, shape, strict=True))
    if not linear.are_a_linear() or any(not isinstance(size, int) for size in shape):
        return None
    # Einsum broadcasts dimensions of size one; a linear does not.
    if any(x_shape[letters.x.index(each)] != sizes[each] for each in letters.summed):
        return None
    rows = math.prod(size_hint(x_shape[letters.x.index(each)]) for each in linear.rows)
    features = math.prod(sizes[each] for each in linear.summed), math.prod(sizes[each] for each in linear.new)
    site = Site("", called(node), region, node, rows, features, x, weight, linears=sizes.get(expert, 1))
    return site if site.has_a_parameter(weights) else None


def joined(write: Writer, node: Node, order: list[int], groups: tuple[int, ...]) -> Node:
    """``node`` with its dimensions in ``order``, then the last ``groups[-1]`` made one, and those before likewise."""
    if order != sorted(order):
        node = write.method("permute", node, *order)
    end = value_of(node).dim()
    for length in reversed(groups):
        if length > 1:
            node = write.method("flatten", node, end - length, end - 1)
        end -= length
    return node


def apart(write: Writer, node: Node, letters: tuple[str, ...], weight: Node, all_of_weight: tuple[str, ...]) -> Node:
    """``node``, whose last dimension is ``letters`` of ``weight`` joined, with one for each."""
    if len(letters) < 2:
        return node
    sizes = dict(zip(all_of_weight, value_of(weight).shape, strict=True))
    return write.method("unflatten", node, -1, tuple(sizes[each] for each in letters))


def _spelled(site: Site, letters: Letters, weights: Weights) -> tuple[Node, list[Site]]:
    """Write the einsum as a product of x [..., K] with a matrix; returns the result and the one site."""
    node, (rows, summed, new) = site.node, (letters.rows, letters.summed, letters.new)
    assert site.x is not None and site.weight is not None
    write = Writer(node)
    x = joined(write, site.x, letters.permutation(letters.x, rows + summed), (len(summed),))
    # As stored where the weight's letters allow: te::linear reads [K, N] and [N, K] alike.
    stored_nk = letters.weight == new + summed
    order = new + summed if stored_nk else summed + new
    groups = (len(new), len(summed)) if stored_nk else (len(summed), len(new))
    weight = joined(write, site.weight, letters.permutation(letters.weight, order), groups)
    product = write.product(F.linear if stored_nk else torch.matmul, x, weight)
    result = apart(write, product, new, site.weight, letters.weight)
    back = letters.permutation(rows + new, letters.result)
    if back != sorted(back):
        result = write.method("permute", result, *back)
    spelled = replace(site, node=product, x=x, spell=None)
    spelled.multiplies_by(weights.weight(weight, site.region, transposed=not stored_nk))
    return write.laid_out_like(result, node), [spelled]
