"""Formulas in the indices of a tensor: sums, and conjunctions of sums that are at least 0.

The masks that models build from positions are made of nothing else: every integer in them is a sum of the tensor's own
indices, such as ``q + 1``, and every boolean a conjunction of comparisons of such sums, also where truths are written
as the numbers 0 and 1. A formula holds for all sizes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch


class UnknownFormulaError(Exception):
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
        return sum((weight * (expression_of(size) - 1) for weight, size in falling), self.constant)

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

    def __and__(self, other: Both) -> Both:
        if self.never or other.never:
            return Both(self.dimensions, never=True)
        return Both(self.dimensions, self.sums | other.sums)

    def negated(self, sizes: Sequence[Any]) -> Both:
        """True where this is not, in a tensor of ``sizes``; raises where that is an alternative of comparisons."""
        if self.never or not self.sums:
            return Both(self.dimensions, never=not self.never)
        if len(self.sums) > 1:
            raise UnknownFormulaError
        (only,) = self.sums
        return at_least_zero(only.times(-1) + Sum((0,) * self.dimensions, -1), sizes)


@dataclass(frozen=True)
class Truths:
    """Numbers: 1 where ``where`` is true, 0 elsewhere."""

    where: Both


Formula = Sum | Both | Truths


def expression_of(size: Any) -> int | sympy.Expr:
    """A size as a number, or in the symbols of sizes."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _is_known(relation: Any) -> bool:
    """Does it hold whatever the symbols in it are?"""
    return relation is True or relation is sympy.true


def at_least_zero(left: Sum, sizes: Sequence[Any] | None = None) -> Both:
    """Where ``left`` is at least 0. ``sizes``: how far the indices go, where that is known."""
    if left.is_never_negative or (sizes is not None and _is_known(left.least(sizes) >= 0)):
        return Both(len(left.weights))
    if left.times(-1).is_never_negative and _is_known(left.constant < 0):
        return Both(len(left.weights), never=True)
    return Both(len(left.weights), frozenset({left}))


def mapped(formula: Formula, change: Callable[[Sum], Sum], dimensions: int) -> Formula:
    """``formula`` with ``change`` made to each of its sums."""
    if isinstance(formula, Sum):
        return change(formula)
    if isinstance(formula, Truths):
        return Truths(both_of(mapped(formula.where, change, dimensions)))
    if formula.never:
        return Both(dimensions, never=True)
    result = Both(dimensions)
    for each in formula.sums:
        result = result & at_least_zero(change(each))
    return result


def in_more_dimensions(formula: Both, dimensions: int) -> Both:
    """``formula`` of a tensor that is broadcast along others in front, none of which it depends on."""
    missing = (0,) * (dimensions - formula.dimensions)
    return both_of(mapped(formula, lambda each: Sum(missing + each.weights, each.constant), dimensions))


def sum_of(formula: Formula) -> Sum:
    """``formula`` of an integer: booleans count as 0 and 1 where they are the same everywhere; raises elsewhere."""
    if isinstance(formula, Both):
        if formula.sums:
            raise UnknownFormulaError
        return Sum((0,) * formula.dimensions, int(not formula.never))
    if isinstance(formula, Truths):
        return sum_of(formula.where)
    return formula


def both_of(formula: Formula) -> Both:
    """``formula`` of a boolean; raises for one of numbers."""
    if not isinstance(formula, Both):
        raise UnknownFormulaError
    return formula
