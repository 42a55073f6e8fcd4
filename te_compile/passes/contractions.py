"""Products of two activations, batch by batch, in every form that models write them.

``torch.matmul``, ``@``, ``bmm``, ``baddbmm`` and an ``einsum`` of two operands are all ``left[…, M, K] · right[…, K,
N]`` once the dimensions of their operands are put in order. An operand that is itself a transposition is read from
before it, so that the order it ends up in is often the order that it was made in.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from te_compile.passes.captured_nodes import argument, called, is_tensor, value_of
from te_compile.passes.sizes import same
from te_compile.passes.writing import Writer

_PRODUCTS = {torch.matmul, operator.matmul, torch.bmm, torch.linalg.matmul, "matmul", "bmm"}
_PRODUCTS_WITH_ADDEND = {torch.baddbmm, "baddbmm"}
_SWAPS = {"transpose", "swapaxes", "swapdims"}

Order = tuple[int, ...]
OrderWithNew = tuple[int | None, ...]


@dataclass(frozen=True)
class Operand:
    """``node`` with its dimensions in ``order``, as ``node.permute(order)`` has them; where that is None, with a new
    one of size 1."""

    node: Node
    order: OrderWithNew

    @property
    def is_plain(self) -> bool:
        """Is it the node as it stands?"""
        return self.order == tuple(range(len(self.order)))

    def swapped(self) -> Operand:
        """With the last two dimensions exchanged."""
        return Operand(self.node, (*self.order[:-2], self.order[-1], self.order[-2]))

    def before_transpositions(self, may_skip: Callable[[Node], bool]) -> Operand:
        """The same values read from before the transpositions that made them, as far as ``may_skip`` allows."""
        operand = self
        while (order := order_of(operand.node)) is not None and may_skip(operand.node):
            before = tuple(None if i is None else order[i] for i in operand.order)
            operand = Operand(source_of(operand.node), before)
        return operand

    def written(self, write: Writer) -> Node:
        """A node that holds it."""
        x, order = self.node, [i for i in self.order if i is not None]
        moved = [i for i, dimension in enumerate(order) if dimension != i]
        if len(moved) == 2:
            x = write.method("transpose", x, *moved)
        elif moved:
            x = write.method("permute", x, *order)
        for place, dimension in enumerate(self.order):
            x = write.method("unsqueeze", x, place) if dimension is None else x
        return x


@dataclass(frozen=True)
class Contraction:
    """``(alpha · left[…, M, K] · right[…, K, N] + addend).permute(result)``."""

    left: Operand
    right: Operand
    result: Order
    addend: Node | None = None
    alpha: float = 1.0

    def turned(self) -> Contraction:
        """The same read from the other side: ``(a · b).mT`` is ``b.mT · a.mT``."""
        last = len(self.result) - 1
        exchanged = {last: last - 1, last - 1: last}
        result = tuple(exchanged.get(i, i) for i in self.result)
        return Contraction(self.right.swapped(), self.left.swapped(), result, self.addend, self.alpha)


def _plain(node: Node) -> Operand:
    return Operand(node, tuple(range(value_of(node).dim())))


def source_of(view: Node) -> Node:
    """The tensor that a view is made from."""
    source = argument(view, 0, "input")
    assert isinstance(source, Node), f"{view} is a view of a tensor"
    return source


def order_of(node: Node) -> Order | None:
    """The order in which ``node`` has the dimensions of the tensor that it transposes; None if it does not."""
    name = called(node)
    source = argument(node, 0, "input") if name in (*_SWAPS, "permute", "mT") else None
    if not is_tensor(source) or not is_tensor(node):
        return None
    dimensions = value_of(source).dim()
    order = list(range(dimensions))
    if name == "permute":
        given = argument(node, 1, "dims")
        given = given if isinstance(given, (tuple, list)) else node.args[1:]
        if len(given) != dimensions or not all(isinstance(d, int) for d in given):
            return None
        return tuple(d % dimensions for d in given)
    first, second = (-2, -1) if name == "mT" else (argument(node, 1, "dim0"), argument(node, 2, "dim1"))
    if not isinstance(first, int) or not isinstance(second, int):
        return None
    order[first], order[second] = order[second], order[first]
    return tuple(order)


def contractions_of(node: Node) -> Iterator[Contraction]:
    """Every way to read ``node`` as a product of matrices; nothing if it is none."""
    if node.op not in ("call_function", "call_method") or not is_tensor(node):
        return
    if node.target is torch.einsum:
        yield from _einsum(node)
    elif node.target in _PRODUCTS and len(node.args) + len(node.kwargs) == 2:
        left = argument(node, 0, "input")
        right = argument(node, 1, "other") or node.kwargs.get("mat2")
        yield from _matrices(left, right)
    elif node.target in _PRODUCTS_WITH_ADDEND and len(node.args) <= 3 and "out" not in node.kwargs:
        addend = argument(node, 0, "input")
        left, right = argument(node, 1, "batch1"), argument(node, 2, "batch2")
        alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
        # Times 0 an addend counts for nothing but has a gradient, of zeros, which optimizers tell from none.
        ignored = beta == 0 and is_tensor(addend) and value_of(addend).requires_grad
        if isinstance(alpha, (int, float)) and beta in (0, 1) and is_tensor(addend) and not ignored:
            yield from _matrices(left, right, addend if beta == 1 else None, float(alpha))


def shares_queries(node: Node) -> bool:
    """Does a matrix, or a batch of fewer dimensions, meet a batch from the left in ``node``, as learned queries do?"""
    left, right = argument(node, 0, "input"), argument(node, 1, "other")
    is_product = node.target in _PRODUCTS and is_tensor(left) and is_tensor(right)
    return is_product and 2 <= value_of(left).dim() < value_of(right).dim()


def _matrices(left: Any, right: Any, addend: Node | None = None, alpha: float = 1.0) -> Iterator[Contraction]:
    if not is_tensor(left) or not is_tensor(right):
        return
    dimensions = value_of(left).dim()
    if dimensions == value_of(right).dim() and dimensions >= 3:
        yield Contraction(_plain(left), _plain(right), tuple(range(dimensions)), addend, alpha)


def _einsum(node: Node) -> Iterator[Contraction]:
    """``torch.einsum("bhqd,bkhd->bhqk", q, k)`` and its like, read with either operand first.

    The second may lack a letter of the batch, as a head of keys that all heads of queries share does: "bkd".
    """
    equation, *factors = node.args
    if len(factors) == 1 and isinstance(factors[0], (tuple, list)):
        factors = list(factors[0])
    operands: list[Node] = [factor for factor in factors if is_tensor(factor)]
    if not isinstance(equation, str) or len(operands) != 2 or len(factors) != 2 or node.kwargs:
        return
    given, arrow, out = equation.replace(" ", "").partition("->")
    letters = given.split(",")
    if not arrow or "." in equation or len(letters) != 2 or any(len(set(s)) != len(s) for s in (*letters, out)):
        return
    for i, j in ((0, 1), (1, 0)):
        first, second = letters[i], letters[j]
        inner = [c for c in first if c in second and c not in out]
        rows = [c for c in first if c not in second]
        columns = [c for c in second if c not in first]
        has_batch = any(c in first and c in second for c in out)
        sizes = [value_of(operands[at]).shape[letters[at].index(c)] for c in inner for at in (0, 1)]
        if not len(inner) == len(columns) == 1 or {*first, *second} - {*inner} != set(out) or not same(*sizes):
            continue
        for row in rows if has_batch and len(rows) == 2 else rows[: len(rows) == 1]:
            batch = [c for c in out if c in first and c != row]
            left = Operand(operands[i], tuple(first.index(c) for c in (*batch, row, *inner)))
            places = (second.index(c) if c in second else None for c in (*batch, *inner, *columns))
            written = [*batch, row, *columns]
            yield Contraction(left, Operand(operands[j], tuple(places)), tuple(written.index(c) for c in out))
