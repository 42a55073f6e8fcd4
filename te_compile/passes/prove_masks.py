"""Prove what a mask of any size says, from the way it is built.

With symbolic sizes a mask cannot be evaluated, and agreeing at a few sizes proves nothing. But the masks that models
build from positions are simple formulas in indices (``index_formulas``). Following the nodes that compute them
(``node_formulas``) ends at a formula in (b, h, q, k) for all sizes at once: no comparison is left, or ``k ≤ q`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.fx import Node

from te_compile.passes.attention_scores import same_sizes
from te_compile.passes.captured_nodes import argument, called, is_tensor, value_of
from te_compile.passes.index_formulas import Both, Sum, Truths, UnknownFormulaError, both_of, in_more_dimensions
from te_compile.passes.mask_numbers import HIDDEN, PRODUCTS, QUOTIENTS, SUMS, most_that_swallows, number_in
from te_compile.passes.node_formulas import VIEWS, Proof, lower_triangle
from te_compile.passes.side_effects import may_change

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Window = tuple[int, int]
"""How many keys a query sees before its own place, and how many behind it."""


def _before_scales(proof: Proof, mask: Node) -> tuple[Node, float]:
    """What a mask that is added was before it was viewed, cast and scaled by positive numbers, and their product."""
    factor = 1.0
    while value_of(mask).dtype in _FLOATS:
        if may_change(mask, proof.changes):
            raise UnknownFormulaError
        outside = proof.through(mask)
        if outside is not mask:
            mask = outside
            continue
        source = mask.args[0] if mask.args else None
        if (mask.target in PRODUCTS or mask.target in QUOTIENTS) and len(mask.args) == 2 and not mask.kwargs:
            by = number_in(mask.args[1], proof.changes)
            if by is not None and by < 0:
                break
            is_kept = by is not None and 0 < by < math.inf and is_tensor(source)
            if not is_kept or not same_sizes(value_of(source).shape, value_of(mask).shape):
                raise UnknownFormulaError
            assert by is not None
            factor = factor / by if mask.target in QUOTIENTS else factor * by
        elif mask.target not in ("expand", "to", "contiguous", "clone", "detach"):
            break
        assert isinstance(source, Node)
        if value_of(source).dtype not in _FLOATS:  # truths as numbers, 0 and 1, hide nothing
            raise UnknownFormulaError
        mask = source
    return mask, factor


def _sum_allows(proof: Proof, total: Node, factor: float) -> Both:
    """Where attention may look of two masks that are added, ``factor`` times: where both let it."""
    result = Both(value_of(total).dim())
    for part in total.args:
        if not is_tensor(part) or value_of(part).dtype not in _FLOATS:
            raise UnknownFormulaError
        allowed = _allowed(proof, part, factor)
        # A formula's indices are those of its own tensor, of which a single row or key is there for all.
        if not allowed.sums or same_sizes(value_of(part).shape[-2:], value_of(total).shape[-2:]):
            result = result & in_more_dimensions(allowed, result.dimensions)
        else:
            raise UnknownFormulaError
    return result


def _product_allows(proof: Proof, product: Node, factor: float, swallows: float) -> Both:
    """Where attention may look under ``(1 - shown) * smallest``: truths as numbers, times one that hides."""
    truths, number = product.args
    hidden = number_in(number, proof.changes)
    if hidden is None or not -math.inf < hidden or factor * hidden > swallows:  # 0 times infinity is no number
        raise UnknownFormulaError
    formula, dimensions = proof.as_part_of(truths, product), value_of(product).dim()
    if isinstance(formula, Truths):
        return formula.where.negated(value_of(product).shape)
    if formula not in (Sum((0,) * dimensions, 0), Sum((0,) * dimensions, 1)):
        raise UnknownFormulaError
    return Both(dimensions, never=formula == Sum((0,) * dimensions, 1))


def _view_allows(proof: Proof, view: Node, factor: float) -> Both:
    """Where attention may look under a view of a mask that is added, ``factor`` times."""
    source = view.args[0]
    if not is_tensor(source):  # a tuple: the mask is one of the results of a body, as of a checkpointed block
        raise UnknownFormulaError
    allowed = in_more_dimensions(_allowed(proof, source, factor), value_of(source).dim())
    while (outside := proof.through(source)) is not source:
        source = outside
    places = Proof(proof.through, proof.changes)  # another, for which the mask's numbers are truths
    places.known[source] = allowed
    return both_of(places.of(view))


def _allowed(proof: Proof, mask: Node, times: float = 1.0) -> Both:
    """Where attention may look, of a bool mask or of one that is added, so many times."""
    swallows = most_that_swallows(value_of(mask).dtype) if value_of(mask).dtype in _FLOATS else 0.0
    shape = value_of(mask).shape
    mask, factor = _before_scales(proof, mask)
    factor *= times
    if value_of(mask).dtype == torch.bool:
        return both_of(proof.of(mask))
    if number_in(mask, proof.changes) == 0:
        return Both(value_of(mask).dim())
    if mask.target in SUMS and len(mask.args) == 2 and not mask.kwargs:
        return _sum_allows(proof, mask, factor)
    if mask.target in PRODUCTS and len(mask.args) == 2 and not mask.kwargs:
        return _product_allows(proof, mask, factor, swallows)
    if mask.target in VIEWS:
        return _view_allows(proof, mask, factor)
    if called(mask) == "triu":
        hidden = number_in(argument(mask, 0, "input"), proof.changes)
        if hidden is None or factor * hidden > swallows:
            raise UnknownFormulaError
        # A triangle of one row is the same for every query that it is expanded to, and no triangle of theirs.
        if not same_sizes(value_of(mask).shape[-2:], shape[-2:]):
            raise UnknownFormulaError
        return lower_triangle(mask)
    if mask.target is torch.where and len(mask.args) == 3:
        condition, yes, no = mask.args
    elif mask.target == "masked_fill" and len(mask.args) == 3:
        no, condition, yes = mask.args
    else:
        raise UnknownFormulaError
    shown, hidden = number_in(yes, proof.changes), number_in(no, proof.changes)
    inverted = shown is not None and shown <= HIDDEN
    if inverted:
        shown, hidden = hidden, shown
    if shown != 0 or hidden is None or factor * hidden > swallows:
        raise UnknownFormulaError
    where = both_of(proof.as_part_of(condition, mask))
    return where.negated(value_of(mask).shape) if inverted else where


def proven_meaning(
    mask: Node,
    lengths: tuple[Any, Any] | None = None,
    through: Callable[[Node], Node] = lambda node: node,
    changes: dict[Node, bool] | None = None,
) -> str | None:
    """ "all" if ``mask`` hides nothing at any size, "causal" if it hides exactly what comes later, None if unproven.

    "causal" is what ``is_causal`` means: query i sees the keys up to i, counted from the first, whatever the number of
    keys; so does the mask of a prompt before a cache with room for more. lengths: of queries and keys, where they are
    not those of the mask. through: what an operand of a body stands for.
    changes: what ``may_change`` remembers.
    """
    try:
        allowed = _allowed(Proof(through, changes), mask)
    except UnknownFormulaError:
        return None
    if allowed.never:
        return None
    if not allowed.sums:
        return "all"
    is_whole = lengths is None or same_sizes(value_of(mask).shape[-2:], lengths)
    causal = Sum((0,) * (allowed.dimensions - 2) + (1, -1))
    return "causal" if is_whole and allowed.sums == {causal} else None


def proven_window(
    mask: Node,
    through: Callable[[Node], Node] = lambda node: node,
    changes: dict[Node, bool] | None = None,
) -> Window | None:
    """The window that ``mask`` [..., S, S] is at any size, of which two comparisons are left: k ≤ q + right and
    k ≥ q - left. None if it is anything else, or unproven. See :func:`proven_meaning` for the rest."""
    try:
        allowed = _allowed(Proof(through, changes), mask)
    except UnknownFormulaError:
        return None
    leading = (0,) * (allowed.dimensions - 2)
    ends = {each.weights: each.constant for each in allowed.sums}
    right, left = ends.get((*leading, 1, -1)), ends.get((*leading, -1, 1))
    if allowed.never or len(allowed.sums) != 2 or left is None or right is None:
        return None
    if not all(isinstance(each, int | sympy.Integer) and each >= 0 for each in (left, right)):
        return None
    return int(left), int(right)
