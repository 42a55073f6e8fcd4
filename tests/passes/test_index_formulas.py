"""Formulas in indices say of every element what counting through the indices says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest

from te_compile.passes.index_formulas import Both, Sum, UnknownFormulaError, at_least_zero, both_of, mapped, sum_of


def drawn() -> tuple[Sum, Sum, tuple[int, int]]:
    """Two sums in the indices of a matrix, and its sizes."""
    left, right = (Sum((random.randint(-2, 2), random.randint(-2, 2)), random.randint(-4, 4)) for _ in "ab")
    return left, right, (random.randint(1, 5), random.randint(1, 5))


def value(of: Sum, at: Sequence[int]) -> int:
    return int(of.constant) + sum(weight * index for weight, index in zip(of.weights, at, strict=True))


def holds(formula: Both, at: Sequence[int]) -> bool:
    return not formula.never and all(value(each, at) >= 0 for each in formula.sums)


@pytest.mark.parametrize("_", range(50))
def test_sums_and_comparisons_are_those_of_each_element(_: int) -> None:
    left, right, sizes = drawn()
    both = at_least_zero(left) & at_least_zero(right)
    within, negated = at_least_zero(left, sizes), at_least_zero(left).negated(sizes)
    for at in product(*map(range, sizes)):
        assert value(left + right.times(3), at) == value(left, at) + 3 * value(right, at)
        assert holds(both, at) == (value(left, at) >= 0 and value(right, at) >= 0)
        assert holds(within, at) == (value(left, at) >= 0) != holds(negated, at)
    assert value(left, (0, 0)) == left.constant
    assert left.least(sizes) <= min(value(left, at) for at in product(*map(range, sizes)))


def test_what_holds_everywhere_or_nowhere_keeps_no_sum() -> None:
    assert at_least_zero(Sum((1, 2), 3)) == Both(2)
    assert at_least_zero(Sum((-1, 0), 4), (5, 9)) == Both(2) != at_least_zero(Sum((-1, 0), 4), (6, 9))
    assert at_least_zero(Sum((-1, 0), -1)) == Both(2, never=True)
    assert Both(2).negated((5, 9)) == Both(2, never=True) and Both(2, never=True).negated((5, 9)) == Both(2)


def test_an_index_may_stand_for_another() -> None:
    comparison = at_least_zero(Sum((1, -1)))
    turned = mapped(comparison, lambda each: Sum(each.weights[::-1], each.constant), 2)
    assert turned == at_least_zero(Sum((-1, 1)))


def test_what_is_neither_sum_nor_conjunction_has_no_formula() -> None:
    comparison = at_least_zero(Sum((1, -1))) & at_least_zero(Sum((-1, 1)))
    with pytest.raises(UnknownFormulaError):
        comparison.negated((5, 5))
    with pytest.raises(UnknownFormulaError):
        sum_of(comparison)
    with pytest.raises(UnknownFormulaError):
        both_of(Sum((1, -1)))
    assert sum_of(Both(2)) == Sum((0, 0), 1) and sum_of(Both(2, never=True)) == Sum((0, 0), 0)
