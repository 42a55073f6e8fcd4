"""Prove what a mask of any size says, from the way it is built.

With symbolic sizes a mask cannot be evaluated, and agreeing at a few sizes proves nothing. But the masks that models
build from positions are simple formulas: every integer in them is a sum of the tensor's own indices, such as ``q + 1``,
and every boolean a conjunction of comparisons of such sums. Following the nodes with these two kinds of values ends at
a formula in (b, h, q, k) for all sizes at once: no comparison is left, or ``k ≤ q`` alone.

A size is looked at to see that it is 1 (such a dimension's index is 0), that two are the same, and how far an index
goes: the one query of a decoding step is at ``past``, the last of ``past + 1`` keys, whatever ``past`` is. What is not
known to have a formula (a tensor from outside, a view that mixes dimensions) has none, and so has all that is made of
it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_compile.passes.attention_scores import same_sizes
from te_compile.passes.captured_nodes import argument, called, is_tensor, value_of
from te_compile.passes.mask_numbers import HIDDEN, PRODUCTS, QUOTIENTS, most_that_swallows, number_in
from te_compile.passes.side_effects import may_change

_ALL = slice(None, None, None)
_WHOLE = (torch.int32, torch.int64)  # others count to 127 or 255, or are truths
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class _UnknownError(Exception):
    """This tensor has no formula, or none that is known."""


@dataclass(frozen=True)
class Sum:
    """``constant`` + each index of the tensor times its weight. ``weights`` has one number for each dimension; the
    constant is a number, or an expression in the symbols of sizes."""

    weights: tuple[int, ...]
    constant: int | sympy.Expr = 0

    def __add__(self, other: Sum) -> Sum:
        weights = tuple(a + b for a, b in zip(self.weights, other.weights, strict=True))
        return Sum(weights, self.constant + other.constant)

    def times(self, factor: int) -> Sum:
        """This sum, ``factor`` times."""
        return Sum(tuple(factor * weight for weight in self.weights), factor * self.constant)

    @property
    def is_never_negative(self) -> bool:
        """Whatever the indices are, which start at 0?"""
        return _is_known(self.constant >= 0) and all(weight >= 0 for weight in self.weights)

    def least(self, sizes: Sequence[Any]) -> int | sympy.Expr:
        """What it is where each index makes it smallest, in a tensor of ``sizes``."""
        falling = [(weight, size) for weight, size in zip(self.weights, sizes, strict=True) if weight < 0]
        return sum((weight * (_expression(size) - 1) for weight, size in falling), self.constant)

    @property
    def is_constant(self) -> bool:
        """Is it the same for every index?"""
        return not any(self.weights)


@dataclass(frozen=True)
class Both:
    """True where every one of ``sums`` is at least 0; ``never``: nowhere."""

    dimensions: int
    sums: frozenset[Sum] = frozenset()
    never: bool = False


Formula = Sum | Both
Window = tuple[int, int]
"""How many keys a query sees before its own place, and how many behind it."""


def _expression(size: Any) -> int | sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _is_known(relation: Any) -> bool:
    """Does it hold whatever the symbols in it are?"""
    return relation is True or relation is sympy.true


def _at_least_zero(left: Sum, sizes: Sequence[Any] | None = None) -> Both:
    """``sizes``: how far the indices go, where that is known."""
    if left.is_never_negative or (sizes is not None and _is_known(left.least(sizes) >= 0)):
        return Both(len(left.weights))
    if left.times(-1).is_never_negative and _is_known(left.constant < 0):
        return Both(len(left.weights), never=True)
    return Both(len(left.weights), frozenset({left}))


def _map(formula: Formula, change: Callable[[Sum], Sum], dimensions: int) -> Formula:
    """``formula`` with ``change`` made to each of its sums."""
    if isinstance(formula, Sum):
        return change(formula)
    if formula.never:
        return Both(dimensions, never=True)
    result = Both(dimensions)
    for each in formula.sums:
        result = _and(result, _at_least_zero(change(each)))
    return result


def _and(a: Both, b: Both) -> Both:
    if a.never or b.never:
        return Both(a.dimensions, never=True)
    return Both(a.dimensions, a.sums | b.sums)


def _not(a: Both, sizes: Sequence[Any]) -> Both:
    if a.never or not a.sums:
        return Both(a.dimensions, never=not a.never)
    if len(a.sums) > 1:
        raise _UnknownError  # an alternative of comparisons
    (only,) = a.sums
    return _at_least_zero(only.times(-1) + Sum((0,) * a.dimensions, -1), sizes)


def _is_one(size: Any) -> bool:
    return bool(statically_known_true(size == 1))


class Proof:
    """Formulas of nodes, each found once. ``through`` tells what an operand of a body stands for; else the node.
    ``changes``: of each node, whether anything writes to it."""

    def __init__(self, through: Callable[[Node], Node], changes: dict[Node, bool] | None = None) -> None:
        self.known: dict[Node, Formula] = {}
        self.through = through
        self.changes: dict[Node, bool] = {} if changes is None else changes

    def of(self, node: Any) -> Formula:
        """The formula of ``node``; raises _UnknownError."""
        if not isinstance(node, Node) or not isinstance(value_of(node), Tensor) or may_change(node, self.changes):
            raise _UnknownError
        source = self.through(node)
        if source is not node:
            return self.of(source)
        if node not in self.known:
            rule = _RULES.get(node.target)
            if rule is None:
                raise _UnknownError
            formula = rule(self, node)
            # The index of a dimension of size 1 is 0.
            ones = [_is_one(size) for size in value_of(node).shape]

            def without_ones(each: Sum) -> Sum:
                return Sum(tuple(0 if one else w for w, one in zip(each.weights, ones, strict=True)), each.constant)

            self.known[node] = _map(formula, without_ones, len(ones))
        return self.known[node]

    def as_part_of(self, operand: Any, node: Node) -> Formula:
        """The formula of ``operand`` with the dimensions that it has when it is broadcast for ``node``."""
        dimensions = value_of(node).dim()
        if isinstance(operand, bool):
            return Both(dimensions, never=not operand)
        number = _integer(operand)
        if number is not None:
            return Sum((0,) * dimensions, number)
        formula = self.of(operand)
        missing = dimensions - value_of(operand).dim()
        if missing < 0:
            raise _UnknownError
        return _map(formula, lambda each: Sum((0,) * missing + each.weights, each.constant), dimensions)


def _integer(operand: Any) -> int | sympy.Expr | None:
    """A number, or what a node computes from sizes; None for anything else."""
    value = value_of(operand) if isinstance(operand, Node) else operand
    return _expression(value) if isinstance(value, int | torch.SymInt) else None


def _sum_of(formula: Formula) -> Sum:
    """Booleans count as 0 and 1 where they are the same everywhere."""
    if isinstance(formula, Both):
        if formula.sums:
            raise _UnknownError
        return Sum((0,) * formula.dimensions, int(not formula.never))
    return formula


def _both_of(formula: Formula) -> Both:
    if isinstance(formula, Sum):
        raise _UnknownError
    return formula


def _arange(proof: Proof, node: Node) -> Formula:
    bounds = list(node.args)
    has_start = len(bounds) > 1 or (bounds and "end" in node.kwargs)
    start = _integer(bounds[0] if has_start else node.kwargs.get("start", 0))
    step = bounds[2] if len(bounds) > 2 else node.kwargs.get("step", 1)
    if start is None or step != 1 or value_of(node).dtype not in _WHOLE:
        raise _UnknownError
    return Sum((1,), start)


def _filled(number: bool) -> Callable[[Proof, Node], Formula]:
    def rule(proof: Proof, node: Node) -> Formula:
        dimensions = value_of(node).dim()
        if value_of(node).dtype == torch.bool:
            return Both(dimensions, never=not number)
        return Sum((0,) * dimensions, int(number))

    return rule


def _arithmetic(sign: int) -> Callable[[Proof, Node], Formula]:
    def rule(proof: Proof, node: Node) -> Formula:
        if len(node.args) != 2 or node.kwargs or value_of(node).dtype not in _WHOLE:
            raise _UnknownError
        left, right = (_sum_of(proof.as_part_of(each, node)) for each in node.args)
        return left + right.times(sign)

    return rule


_MAGNITUDES = {operator.abs, torch.abs, "abs"}


def _largest_of(proof: Proof, operand: Any, node: Node) -> list[Sum]:
    r"""Sums of which ``operand`` is the largest: itself, or of \|x\| both x and -x."""
    if isinstance(operand, Node) and operand.target in _MAGNITUDES and value_of(operand).dtype in _WHOLE:
        if may_change(operand, proof.changes):
            raise _UnknownError
        inside = _sum_of(proof.as_part_of(argument(operand, 0, "input"), node))
        return [inside, inside.times(-1)]
    return [_sum_of(proof.as_part_of(operand, node))]


def _comparison(offset: int, swapped: bool) -> Callable[[Proof, Node], Formula]:
    """``left - right + offset ≥ 0``, the other way round if ``swapped``."""

    def rule(proof: Proof, node: Node) -> Formula:
        left, right = node.args[0], argument(node, 1, "other")
        if swapped:
            left, right = right, left
        larger = _sum_of(proof.as_part_of(left, node)) + Sum((0,) * value_of(node).dim(), offset)
        result = Both(value_of(node).dim())
        for smaller in _largest_of(proof, right, node):
            result = _and(result, _at_least_zero(larger + smaller.times(-1), value_of(node).shape))
        return result

    return rule


def _equality(equal: bool) -> Callable[[Proof, Node], Formula]:
    def rule(proof: Proof, node: Node) -> Formula:
        left, right = (_sum_of(proof.as_part_of(each, node)) for each in (node.args[0], argument(node, 1, "other")))
        difference = left + right.times(-1)
        if not difference.is_constant or not isinstance(difference.constant, int | sympy.Integer):
            raise _UnknownError
        return Both(len(left.weights), never=(difference.constant == 0) != equal)

    return rule


def _conjunction(proof: Proof, node: Node) -> Formula:
    left, right = (_both_of(proof.as_part_of(each, node)) for each in (node.args[0], argument(node, 1, "other")))
    return _and(left, right)


def _negation(proof: Proof, node: Node) -> Formula:
    return _not(_both_of(proof.of(node.args[0])), value_of(node).shape)


def _same(proof: Proof, node: Node) -> Formula:
    """Other dimensions of size 1 in front, or another device or dtype."""
    if value_of(node).dtype not in (torch.bool, torch.int32, torch.int64):
        raise _UnknownError
    formula = proof.as_part_of(node.args[0], node)
    return _sum_of(formula) if value_of(node).dtype != torch.bool else _both_of(formula)


def _unsqueeze(proof: Proof, node: Node) -> Formula:
    formula, dimension = proof.of(node.args[0]), argument(node, 1, "dim")
    at = dimension % value_of(node).dim()
    return _map(formula, lambda s: Sum((*s.weights[:at], 0, *s.weights[at:]), s.constant), value_of(node).dim())


def _diff(proof: Proof, node: Node) -> Formula:
    """Along the last dimension, with something in front, so that the size stays: only where every step is the same."""
    source, first = node.args[0], argument(node, 3, "prepend")
    last = argument(node, 2, "dim", -1) in (-1, value_of(node).dim() - 1)
    if argument(node, 1, "n", 1) != 1 or not last or argument(node, 4, "append") is not None:
        raise _UnknownError
    if not isinstance(first, Node) or not _is_one(value_of(first).shape[-1]):
        raise _UnknownError
    values, before = _sum_of(proof.of(source)), _sum_of(proof.of(first))
    start = Sum((*values.weights[:-1], 0), values.constant) + before.times(-1)
    if not start.is_constant or start.constant != values.weights[-1]:
        raise _UnknownError
    return start


def _cumsum(proof: Proof, node: Node) -> Formula:
    if _sum_of(proof.of(node.args[0])) != Sum((0,) * value_of(node).dim()):
        raise _UnknownError
    return Sum((0,) * value_of(node).dim())


def _getitem(proof: Proof, node: Node) -> Formula:
    source, index = node.args
    if not isinstance(source, Node) or not isinstance(value_of(source), Tensor):
        raise _UnknownError
    parts = index if isinstance(index, tuple) else (index,)
    if parts and all(isinstance(part, Node) for part in parts):
        return _gathered(proof, node, source, parts)
    return _sliced(proof, node, source, list(parts))


def _gathered(proof: Proof, node: Node, source: Node, indices: tuple[Any, ...]) -> Formula:
    """``source[b, q]``: each of its indices becomes the sum that indexes it."""
    formula = proof.of(source)
    sums = [_sum_of(proof.as_part_of(index, node)) for index in indices]
    is_whole = len(sums) == value_of(source).dim()
    if not is_whole or not all(
        s.is_never_negative and not value_of(i).dtype == torch.bool for s, i in zip(sums, indices, strict=True)
    ):
        raise _UnknownError

    def substituted(each: Sum) -> Sum:
        result = Sum((0,) * value_of(node).dim(), each.constant)
        for weight, by in zip(each.weights, sums, strict=True):
            result = result + by.times(weight)
        return result

    return _map(formula, substituted, value_of(node).dim())


def _sliced(proof: Proof, node: Node, source: Node, parts: list[Any]) -> Formula:
    """``source[:, None, 3:, ...]``: dimensions come in, and indices start later."""
    formula, dimensions = proof.of(source), value_of(source).dim()
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        missing = dimensions - sum(part is not None for part in parts) + 1
        parts[at : at + 1] = [_ALL] * missing
    parts += [_ALL] * (dimensions - sum(part is not None for part in parts))
    starts: list[int] = []
    for part in parts:
        if part is None:
            continue
        if not isinstance(part, slice) or part.step not in (None, 1) or not isinstance(part.start, int | None):
            raise _UnknownError
        if (part.start or 0) < 0:
            raise _UnknownError
        starts.append(part.start or 0)

    def moved(each: Sum) -> Sum:
        weights = iter(each.weights)
        constant = each.constant + sum(w * start for w, start in zip(each.weights, starts, strict=True))
        return Sum(tuple(0 if part is None else next(weights) for part in parts), constant)

    return _map(formula, moved, value_of(node).dim())


def _diagonal(node: Node) -> int:
    diagonal = argument(node, 1, "diagonal", 0)
    if not isinstance(diagonal, int):
        raise _UnknownError
    return diagonal


def _lower(node: Node) -> Both:
    """Where ``torch.tril`` keeps what it is given; ``torch.triu`` keeps the rest if its diagonal is the next one."""
    leading = value_of(node).dim() - 2
    offset = _diagonal(node) - (called(node) == "triu")
    return _at_least_zero(Sum((*(0,) * leading, 1, -1), offset))


def _triangle(proof: Proof, node: Node) -> Formula:
    """Of booleans: what is cut off becomes False."""
    kept = _lower(node) if called(node) == "tril" else _not(_lower(node), value_of(node).shape)
    return _and(_both_of(proof.of(argument(node, 0, "input"))), kept)


_RULES: dict[Any, Callable[[Proof, Node], Formula]] = {torch.arange: _arange, operator.getitem: _getitem}
_RULES |= dict.fromkeys((torch.zeros, torch.zeros_like, "new_zeros"), _filled(False))
_RULES |= dict.fromkeys((torch.ones, torch.ones_like, "new_ones"), _filled(True))
_RULES |= dict.fromkeys((operator.add, torch.add, "add"), _arithmetic(1))
_RULES |= dict.fromkeys((operator.sub, torch.sub, "sub"), _arithmetic(-1))
_RULES |= dict.fromkeys((operator.le, torch.le, "le"), _comparison(0, True))
_RULES |= dict.fromkeys((operator.lt, torch.lt, "lt"), _comparison(-1, True))
_RULES |= dict.fromkeys((operator.ge, torch.ge, "ge"), _comparison(0, False))
_RULES |= dict.fromkeys((operator.gt, torch.gt, "gt"), _comparison(-1, False))
_RULES |= dict.fromkeys((operator.eq, torch.eq, "eq"), _equality(True))
_RULES |= dict.fromkeys((operator.ne, torch.ne, "ne"), _equality(False))
_RULES |= dict.fromkeys((operator.and_, torch.logical_and, "logical_and", "__and__"), _conjunction)
_RULES |= dict.fromkeys((operator.invert, torch.logical_not, "logical_not"), _negation)
_RULES |= dict.fromkeys(("expand", "expand_as", "to", "bool", "int", "long", "contiguous", "clone", "detach"), _same)
_RULES |= {"unsqueeze": _unsqueeze, torch.unsqueeze: _unsqueeze, torch.diff: _diff, "diff": _diff}
_RULES |= dict.fromkeys((torch.tril, "tril", torch.triu, "triu"), _triangle)
_RULES |= {torch.cumsum: _cumsum, "cumsum": _cumsum}


def _before_scales(proof: Proof, mask: Node) -> tuple[Node, float]:
    """What a mask that is added was before it was viewed, cast and scaled by positive numbers, and their product."""
    factor = 1.0
    while value_of(mask).dtype in _FLOATS:
        if may_change(mask, proof.changes):
            raise _UnknownError
        outside = proof.through(mask)
        if outside is not mask:
            mask = outside
            continue
        source = mask.args[0] if mask.args else None
        if (mask.target in PRODUCTS or mask.target in QUOTIENTS) and len(mask.args) == 2 and not mask.kwargs:
            by = number_in(mask.args[1], proof.changes)
            is_kept = by is not None and 0 < by < math.inf and is_tensor(source)
            if not is_kept or not same_sizes(value_of(source).shape, value_of(mask).shape):
                raise _UnknownError
            assert by is not None
            factor = factor / by if mask.target in QUOTIENTS else factor * by
        elif mask.target not in ("expand", "to", "contiguous", "clone", "detach"):
            break
        assert isinstance(source, Node)
        if value_of(source).dtype not in _FLOATS:  # truths as numbers, 0 and 1, hide nothing
            raise _UnknownError
        mask = source
    return mask, factor


def _allowed(proof: Proof, mask: Node) -> Both:
    """Where attention may look, of a bool mask or of one that is added."""
    swallows = most_that_swallows(value_of(mask).dtype) if value_of(mask).dtype in _FLOATS else 0.0
    shape = value_of(mask).shape
    mask, factor = _before_scales(proof, mask)
    if value_of(mask).dtype == torch.bool:
        return _both_of(proof.of(mask))
    if called(mask) == "triu":
        hidden = number_in(argument(mask, 0, "input"), proof.changes)
        if hidden is None or factor * hidden > swallows:
            raise _UnknownError
        # A triangle of one row is the same for every query that it is expanded to, and no triangle of theirs.
        if not same_sizes(value_of(mask).shape[-2:], shape[-2:]):
            raise _UnknownError
        return _lower(mask)
    if mask.target is torch.where and len(mask.args) == 3:
        condition, yes, no = mask.args
    elif mask.target == "masked_fill" and len(mask.args) == 3:
        no, condition, yes = mask.args
    else:
        raise _UnknownError
    shown, hidden = number_in(yes, proof.changes), number_in(no, proof.changes)
    inverted = shown is not None and shown <= HIDDEN
    if inverted:
        shown, hidden = hidden, shown
    if shown != 0 or hidden is None or factor * hidden > swallows:
        raise _UnknownError
    where = _both_of(proof.as_part_of(condition, mask))
    return _not(where, value_of(mask).shape) if inverted else where


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
    except _UnknownError:
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
    except _UnknownError:
        return None
    leading = (0,) * (allowed.dimensions - 2)
    ends = {each.weights: each.constant for each in allowed.sums}
    right, left = ends.get((*leading, 1, -1)), ends.get((*leading, -1, 1))
    if allowed.never or len(allowed.sums) != 2 or left is None or right is None:
        return None
    if not all(isinstance(each, int | sympy.Integer) and each >= 0 for each in (left, right)):
        return None
    return int(left), int(right)
