"""What torch.einsum is asked for: the letters of its operands and of its result.

``torch.tensordot`` and ``torch.inner`` are einsums by other names, and have letters too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from te_compile.passes.captured_nodes import argument, is_tensor, value_of


def _terms(equation: str, dimensions: list[int]) -> list[tuple[str, ...]] | None:
    """The letters of each operand and of the result; an ellipsis becomes numbered dimensions. None if it is unusual."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    given = left.split(",")
    if not arrow or len(given) != len(dimensions):
        return None
    terms, covered = [], 0
    for term, length in zip(given, dimensions, strict=True):
        before, dots, after = term.partition("...")
        extra = length - len(before) - len(after)
        if extra < 0 or (not dots and extra) or "." in before + after:
            return None
        covered = max(covered, extra)
        # An ellipsis is aligned at its end, as broadcasting is.
        terms.append((*before, *map(str, range(extra - 1, -1, -1)), *after))
    before, dots, after = right.partition("...")
    if covered and not dots:
        return None
    return [*terms, (*before, *map(str, range(covered - 1, -1, -1)), *after)]


def is_einsum(node: Node) -> bool:
    """Is ``node`` a call of torch.einsum with an equation, or of what can be written so?"""
    if node.op == "call_function" and node.target is torch.einsum:
        return isinstance(node.args[0], str)
    return node.op in ("call_function", "call_method") and node.target in _OTHER_NAMES


def operands_and_terms(node: Node) -> tuple[list[Any], list[tuple[str, ...]] | None]:
    """What the einsum reads, and the letters of each and of its result; None if it is unusual."""
    if node.target in _OTHER_NAMES:
        names, terms_of = _OTHER_NAMES[node.target]
        operands = [argument(node, position, name) for position, name in enumerate(names)]
        return operands, terms_of(node, *operands) if all(map(is_tensor, operands)) else None
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = [*operands[0]]
    if not all(map(is_tensor, operands)):
        return operands, None
    return operands, _terms(str(equation), [value_of(each).dim() for each in operands])


def _inner_terms(node: Node, left: Node, right: Node) -> list[tuple[str, ...]] | None:
    """``inner(left[…, K], right[…, K])``."""
    return _terms_without(left, right, [-1], [-1]) if not node.kwargs.keys() - {"input", "other"} else None


def _tensordot_terms(node: Node, left: Node, right: Node) -> list[tuple[str, ...]] | None:
    """``tensordot(left, right, dims)``: how many of the last and the first dimensions, or which of either."""
    dims = argument(node, 2, "dims", 2)
    if len(node.args) > 3 or node.kwargs.keys() - {"a", "b", "dims"}:
        return None
    if isinstance(dims, int):
        return _terms_without(left, right, [*range(-dims, 0)], [*range(dims)])
    lists = [*dims] if isinstance(dims, (list, tuple)) else []
    if len(lists) != 2 or not all(isinstance(each, (list, tuple)) for each in lists):
        return None
    return _terms_without(left, right, *lists)


def _terms_without(
    left: Node, right: Node, summed: Sequence[Any], with_: Sequence[Any]
) -> list[tuple[str, ...]] | None:
    """The terms of a sum over dimensions ``summed`` of ``left``, each with one ``with_`` of ``right``."""
    terms = []
    for name, node, dimensions in (("l", left, summed), ("r", right, with_)):
        length = value_of(node).dim()
        if not all(isinstance(each, int) and -length <= each < length for each in dimensions):
            return None
        letters = [f"{name}{each}" for each in range(length)]
        for number, each in enumerate(dimensions):
            letters[each] = f"s{number}"
        terms.append(tuple(letters))
    of_result = [each for term in terms for each in term if not each.startswith("s")]
    return [*terms, tuple(of_result)] if len(summed) == len(with_) else None


_OTHER_NAMES: dict[Any, tuple[tuple[str, str], Callable[[Node, Node, Node], list[tuple[str, ...]] | None]]] = {
    torch.inner: (("input", "other"), _inner_terms),
    "inner": (("input", "other"), _inner_terms),
    torch.tensordot: (("a", "b"), _tensordot_terms),
}


def adds_nothing_up(node: Node) -> bool:
    """Is ``node`` an einsum that multiplies numbers and adds none of the products, as an outer product is?"""
    terms = operands_and_terms(node)[1] if is_einsum(node) else None
    return terms is not None and all(letter in terms[-1] for term in terms[:-1] for letter in term)


@dataclass(frozen=True)
class Letters:
    """The dimensions of an einsum by their kinds, in the order of the activation, the weight and the result."""

    x: tuple[str, ...]
    weight: tuple[str, ...]
    result: tuple[str, ...]

    @property
    def rows(self) -> tuple[str, ...]:
        """Those of the activation and the result."""
        return tuple(each for each in self.result if each in self.x)

    @property
    def summed(self) -> tuple[str, ...]:
        """Those of the activation and the weight."""
        return tuple(each for each in self.weight if each in self.x)

    @property
    def new(self) -> tuple[str, ...]:
        """Those of the weight alone."""
        return tuple(each for each in self.weight if each not in self.x)

    def are_a_linear(self) -> bool:
        """Is every letter a row, one that is summed over, or a new one of the result, and each there once?"""
        named = (self.x, self.weight, self.result)
        if any(len(set(letters)) != len(letters) for letters in named) or not self.summed or not self.new:
            return False
        if set(self.summed) & set(self.result):  # a batch of products
            return False
        return set(self.x) == {*self.rows, *self.summed} and set(self.result) == {*self.rows, *self.new}

    def without(self, letter: str) -> Letters:
        """The same where none of the three has ``letter``."""
        terms = (self.x, self.weight, self.result)
        return Letters(*(tuple(each for each in term if each != letter) for term in terms))

    def permutation(self, have: tuple[str, ...], wanted: tuple[str, ...]) -> list[int]:
        """Where each of the letters ``wanted`` is among those that a tensor has."""
        return [have.index(each) for each in wanted]


def readings(node: Node) -> Iterator[tuple[Letters, Node, Node]]:
    """How an einsum of two operands may be read as an activation and a weight: the letters, and which is which."""
    operands, terms = operands_and_terms(node)
    if len(operands) == 2 and terms is not None:
        for weight in (1, 0):
            x = 1 - weight
            yield Letters(terms[x], terms[weight], terms[2]), operands[x], operands[weight]
