"""Find the formula in indices of what a node computes, for the nodes that masks of any size are made of.

A size is looked at to see that it is 1 (such a dimension's index is 0), that two are the same, and how far an index
goes: the one query of a decoding step is at ``past``, the last of ``past + 1`` keys, whatever ``past`` is. What is not
known to have a formula (a tensor from outside, a view that mixes dimensions) has none, and so has all that is made of
it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_compile.passes.attention_scores import same_sizes
from te_compile.passes.captured_nodes import argument, called, value_of
from te_compile.passes.index_formulas import (
    Both,
    Formula,
    Sum,
    Truths,
    UnknownFormulaError,
    at_least_zero,
    both_of,
    expression_of,
    mapped,
    sum_of,
)
from te_compile.passes.side_effects import may_change

_ALL = slice(None, None, None)
_WHOLE = (torch.int32, torch.int64)  # others count to 127 or 255, or are truths
_HOLD_TRUTHS = (*_WHOLE, torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
        """The formula of ``node``; raises UnknownFormulaError."""
        if not isinstance(node, Node) or not isinstance(value_of(node), Tensor) or may_change(node, self.changes):
            raise UnknownFormulaError
        source = self.through(node)
        if source is not node:
            return self.of(source)
        if node not in self.known:
            rule = _RULES.get(node.target)
            if rule is None:
                raise UnknownFormulaError
            formula = rule(self, node)
            # The index of a dimension of size 1 is 0.
            ones = [_is_one(size) for size in value_of(node).shape]

            def without_ones(each: Sum) -> Sum:
                return Sum(tuple(0 if one else w for w, one in zip(each.weights, ones, strict=True)), each.constant)

            self.known[node] = mapped(formula, without_ones, len(ones))
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
            raise UnknownFormulaError
        return mapped(formula, lambda each: Sum((0,) * missing + each.weights, each.constant), dimensions)


def _integer(operand: Any) -> int | sympy.Expr | None:
    """A number, or what a node computes from sizes; None for anything else."""
    value = value_of(operand) if isinstance(operand, Node) else operand
    return expression_of(value) if isinstance(value, int | torch.SymInt) else None


def _arange(proof: Proof, node: Node) -> Formula:
    bounds = list(node.args)
    has_start = len(bounds) > 1 or (bounds and "end" in node.kwargs)
    start = _integer(bounds[0] if has_start else node.kwargs.get("start", 0))
    step = bounds[2] if len(bounds) > 2 else node.kwargs.get("step", 1)
    if start is None or step != 1 or value_of(node).dtype not in _WHOLE:
        raise UnknownFormulaError
    return Sum((1,), start)


def _filled(number: bool) -> Callable[[Proof, Node], Formula]:
    def rule(proof: Proof, node: Node) -> Formula:
        dimensions = value_of(node).dim()
        if value_of(node).dtype == torch.bool:
            return Both(dimensions, never=not number)
        return Sum((0,) * dimensions, int(number))

    return rule


def _is_truths(formula: Formula) -> bool:
    """Are all numbers 0 or 1?"""
    return isinstance(formula, Truths) or (
        isinstance(formula, Sum) and formula.is_constant and formula.constant in (0, 1)
    )


def _opposite(proof: Proof, node: Node) -> Formula | None:
    """Of ``1 - x`` where x is truths as numbers, of any dtype; None for anything else."""
    if len(node.args) != 2 or node.args[0] != 1 or node.kwargs or value_of(node).dtype not in _HOLD_TRUTHS:
        return None
    formula = proof.as_part_of(node.args[1], node)
    if isinstance(formula, Truths):
        return Truths(formula.where.negated(value_of(node).shape))
    return Sum((0,) * value_of(node).dim(), 1) + sum_of(formula).times(-1) if _is_truths(formula) else None


def _arithmetic(sign: int) -> Callable[[Proof, Node], Formula]:
    def rule(proof: Proof, node: Node) -> Formula:
        opposite = _opposite(proof, node) if sign < 0 else None
        if opposite is not None:
            return opposite
        if len(node.args) != 2 or node.kwargs or value_of(node).dtype not in _WHOLE:
            raise UnknownFormulaError
        left, right = (sum_of(proof.as_part_of(each, node)) for each in node.args)
        return left + right.times(sign)

    return rule


_MAGNITUDES = {operator.abs, torch.abs, "abs"}


def _largest_of(proof: Proof, operand: Any, node: Node) -> list[Sum]:
    r"""Sums of which ``operand`` is the largest: itself, or of \|x\| both x and -x."""
    if isinstance(operand, Node) and operand.target in _MAGNITUDES and value_of(operand).dtype in _WHOLE:
        if may_change(operand, proof.changes):
            raise UnknownFormulaError
        inside = sum_of(proof.as_part_of(argument(operand, 0, "input"), node))
        return [inside, inside.times(-1)]
    return [sum_of(proof.as_part_of(operand, node))]


def _comparison(offset: int, swapped: bool) -> Callable[[Proof, Node], Formula]:
    """``left - right + offset ≥ 0``, the other way round if ``swapped``."""

    def rule(proof: Proof, node: Node) -> Formula:
        left, right = node.args[0], argument(node, 1, "other")
        if swapped:
            left, right = right, left
        larger = sum_of(proof.as_part_of(left, node)) + Sum((0,) * value_of(node).dim(), offset)
        result = Both(value_of(node).dim())
        for smaller in _largest_of(proof, right, node):
            result = result & at_least_zero(larger + smaller.times(-1), value_of(node).shape)
        return result

    return rule


def _equality(equal: bool) -> Callable[[Proof, Node], Formula]:
    def rule(proof: Proof, node: Node) -> Formula:
        left, right = (sum_of(proof.as_part_of(each, node)) for each in (node.args[0], argument(node, 1, "other")))
        difference = left + right.times(-1)
        if not difference.is_constant or not isinstance(difference.constant, int | sympy.Integer):
            raise UnknownFormulaError
        return Both(len(left.weights), never=(difference.constant == 0) != equal)

    return rule


def _conjunction(proof: Proof, node: Node) -> Formula:
    left, right = (both_of(proof.as_part_of(each, node)) for each in (node.args[0], argument(node, 1, "other")))
    return left & right


def _negation(proof: Proof, node: Node) -> Formula:
    return both_of(proof.of(node.args[0])).negated(value_of(node).shape)


def _same(proof: Proof, node: Node) -> Formula:
    """Other dimensions of size 1 in front, or another device or dtype."""
    formula, dtype = proof.as_part_of(node.args[0], node), value_of(node).dtype
    if dtype == torch.bool and isinstance(formula, Truths):
        return formula.where
    if dtype == torch.bool and _is_truths(formula):
        return Both(value_of(node).dim(), never=sum_of(formula).constant == 0)
    if dtype == torch.bool:
        return both_of(formula)
    if isinstance(formula, Both) and formula.sums:
        formula = Truths(formula)
    number = formula if isinstance(formula, Truths) else sum_of(formula)
    if dtype not in _WHOLE and not (_is_truths(number) and dtype in _HOLD_TRUTHS):
        raise UnknownFormulaError
    return number


def _repeat(proof: Proof, node: Node) -> Formula:
    """Copies along dimensions of size 1, where the index was 0, and along new ones in front."""
    given = node.args[1:] if len(node.args) > 1 else node.kwargs.get("repeats")
    times = given[0] if isinstance(given, tuple) and len(given) == 1 and isinstance(given[0], (list, tuple)) else given
    source = node.args[0]
    if not isinstance(source, Node) or not isinstance(times, (list, tuple)):
        raise UnknownFormulaError
    shape = value_of(source).shape
    if not all(time == 1 or _is_one(size) for time, size in zip(times[len(times) - len(shape) :], shape, strict=True)):
        raise UnknownFormulaError
    return proof.as_part_of(source, node)


def _viewed(proof: Proof, node: Node) -> Formula:
    """The same elements with dimensions of size 1 in front, where there were none."""
    source = node.args[0]
    if not isinstance(source, Node) or not isinstance(value_of(source), Tensor):
        raise UnknownFormulaError
    before, after = value_of(source).shape, value_of(node).shape
    new = len(after) - len(before)
    if new < 0 or not all(map(_is_one, after[:new])) or not same_sizes(after[new:], before):
        raise UnknownFormulaError
    return proof.as_part_of(source, node)


def _unsqueeze(proof: Proof, node: Node) -> Formula:
    formula, dimension = proof.of(node.args[0]), argument(node, 1, "dim")
    at = dimension % value_of(node).dim()
    return mapped(formula, lambda s: Sum((*s.weights[:at], 0, *s.weights[at:]), s.constant), value_of(node).dim())


def _diff(proof: Proof, node: Node) -> Formula:
    """Along the last dimension, with something in front, so that the size stays: only where every step is the same."""
    source, first = node.args[0], argument(node, 3, "prepend")
    last = argument(node, 2, "dim", -1) in (-1, value_of(node).dim() - 1)
    if argument(node, 1, "n", 1) != 1 or not last or argument(node, 4, "append") is not None:
        raise UnknownFormulaError
    if not isinstance(first, Node) or not _is_one(value_of(first).shape[-1]):
        raise UnknownFormulaError
    values, before = sum_of(proof.of(source)), sum_of(proof.of(first))
    start = Sum((*values.weights[:-1], 0), values.constant) + before.times(-1)
    if not start.is_constant or start.constant != values.weights[-1]:
        raise UnknownFormulaError
    return start


def _cumsum(proof: Proof, node: Node) -> Formula:
    if sum_of(proof.of(node.args[0])) != Sum((0,) * value_of(node).dim()):
        raise UnknownFormulaError
    return Sum((0,) * value_of(node).dim())


def _getitem(proof: Proof, node: Node) -> Formula:
    source, index = node.args
    if not isinstance(source, Node) or not isinstance(value_of(source), Tensor):
        raise UnknownFormulaError
    parts = index if isinstance(index, tuple) else (index,)
    if parts and all(isinstance(part, Node) for part in parts):
        return _gathered(proof, node, source, parts)
    return _sliced(proof, node, source, list(parts))


def _gathered(proof: Proof, node: Node, source: Node, indices: tuple[Any, ...]) -> Formula:
    """``source[b, q]``: each of its indices becomes the sum that indexes it."""
    formula = proof.of(source)
    sums = [sum_of(proof.as_part_of(index, node)) for index in indices]
    is_whole = len(sums) == value_of(source).dim()
    if not is_whole or not all(
        s.is_never_negative and not value_of(i).dtype == torch.bool for s, i in zip(sums, indices, strict=True)
    ):
        raise UnknownFormulaError

    def substituted(each: Sum) -> Sum:
        result = Sum((0,) * value_of(node).dim(), each.constant)
        for weight, by in zip(each.weights, sums, strict=True):
            result = result + by.times(weight)
        return result

    return mapped(formula, substituted, value_of(node).dim())


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
            raise UnknownFormulaError
        if (part.start or 0) < 0:
            raise UnknownFormulaError
        starts.append(part.start or 0)

    def moved(each: Sum) -> Sum:
        weights = iter(each.weights)
        constant = each.constant + sum(w * start for w, start in zip(each.weights, starts, strict=True))
        return Sum(tuple(0 if part is None else next(weights) for part in parts), constant)

    return mapped(formula, moved, value_of(node).dim())


def _diagonal(node: Node) -> int:
    diagonal = argument(node, 1, "diagonal", 0)
    if not isinstance(diagonal, int):
        raise UnknownFormulaError
    return diagonal


def lower_triangle(node: Node) -> Both:
    """Where ``torch.tril`` keeps what it is given; ``torch.triu`` keeps the rest if its diagonal is the next one."""
    *leading, rows, columns = value_of(node).shape
    offset = _diagonal(node) - (called(node) == "triu")
    weights = (0 if _is_one(rows) else 1, 0 if _is_one(columns) else -1)  # the one index there is 0
    return at_least_zero(Sum((*(0,) * len(leading), *weights), offset))


def _triangle(proof: Proof, node: Node) -> Formula:
    """Of booleans or of ones: what is cut off becomes False, or 0."""
    lower, formula = lower_triangle(node), proof.of(argument(node, 0, "input"))
    kept = lower if called(node) == "tril" else lower.negated(value_of(node).shape)
    if isinstance(formula, Both):
        return formula & kept
    if isinstance(formula, Truths):
        return Truths(formula.where & kept)
    if value_of(node).dtype not in _HOLD_TRUTHS or formula != Sum((0,) * value_of(node).dim(), 1):
        raise UnknownFormulaError
    return Truths(kept)


def _of_truths(compare: Callable[[Any, Any], Any], rule: Callable[[Proof, Node], Formula]) -> Any:
    """``rule`` of a comparison, but for that of 0 and 1 with a number, which is the truth itself or its opposite."""

    def either(proof: Proof, node: Node) -> Formula:
        left, right = node.args[0], argument(node, 1, "other")
        is_exact = isinstance(right, (int, float)) and right in (0, 0.5, 1)  # others may be rounded or wrapped
        is_one_number = is_exact and isinstance(left, Node) and left.target not in _MAGNITUDES
        formula = proof.as_part_of(left, node) if is_one_number else None
        if not isinstance(formula, Truths):
            return rule(proof, node)
        if compare(1, right) == compare(0, right):
            return Both(value_of(node).dim(), never=not compare(1, right))
        return formula.where if compare(1, right) else formula.where.negated(value_of(node).shape)

    return either


VIEWS: dict[Any, Callable[[Proof, Node], Formula]] = {operator.getitem: _getitem}
"""What shows elements of one tensor at other indices, whatever they are."""
VIEWS |= dict.fromkeys(("view", "reshape", torch.reshape), _viewed)
VIEWS |= {"repeat": _repeat, "unsqueeze": _unsqueeze, torch.unsqueeze: _unsqueeze}

_RULES: dict[Any, Callable[[Proof, Node], Formula]] = {**VIEWS, torch.arange: _arange}
_RULES |= dict.fromkeys((torch.zeros, torch.zeros_like, "new_zeros"), _filled(False))
_RULES |= dict.fromkeys((torch.ones, torch.ones_like, "new_ones"), _filled(True))
_RULES |= dict.fromkeys((operator.add, torch.add, "add"), _arithmetic(1))
_RULES |= dict.fromkeys((operator.sub, torch.sub, "sub"), _arithmetic(-1))
_RULES |= dict.fromkeys((operator.le, torch.le, "le"), _of_truths(operator.le, _comparison(0, True)))
_RULES |= dict.fromkeys((operator.lt, torch.lt, "lt"), _of_truths(operator.lt, _comparison(-1, True)))
_RULES |= dict.fromkeys((operator.ge, torch.ge, "ge"), _of_truths(operator.ge, _comparison(0, False)))
_RULES |= dict.fromkeys((operator.gt, torch.gt, "gt"), _of_truths(operator.gt, _comparison(-1, False)))
_RULES |= dict.fromkeys((operator.eq, torch.eq, "eq"), _of_truths(operator.eq, _equality(True)))
_RULES |= dict.fromkeys((operator.ne, torch.ne, "ne"), _of_truths(operator.ne, _equality(False)))
_RULES |= dict.fromkeys((operator.and_, torch.logical_and, "logical_and", "__and__"), _conjunction)
_RULES |= dict.fromkeys((operator.invert, torch.logical_not, "logical_not"), _negation)
_RULES |= dict.fromkeys(("expand", "expand_as", "to", "bool", "int", "long", "contiguous", "clone", "detach"), _same)
_RULES |= dict.fromkeys(("float", "half", "bfloat16", "double", "type_as"), _same)
_RULES |= {torch.diff: _diff, "diff": _diff}
_RULES |= dict.fromkeys((torch.tril, "tril", torch.triu, "triu"), _triangle)
_RULES |= {torch.cumsum: _cumsum, "cumsum": _cumsum}
