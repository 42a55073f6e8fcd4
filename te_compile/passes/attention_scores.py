"""What a model does to its attention scores between their product and their softmax, one step after the other.

Scores are scaled, get a bias or a mask added, are overwritten where a mask says so, cast, and viewed with batch and
heads in one dimension or two. Whatever else happens to them (a tanh, a gate, a concatenation) is not
attention as ``F.scaled_dot_product_attention`` knows it, and the walk back from the softmax ends there, with a reason.

Two things are no steps of their own. Each row's largest score may be subtracted, as softmax does itself. And sinks may
be put beside the scores, one more column that no value follows: ``te::sink_attention`` knows those.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_compile.passes.captured_nodes import argument, called, is_tensor, value_of
from te_compile.passes.contractions import Contraction, contractions_of, shares_queries
from te_compile.passes.drop_noop_casts import is_cast
from te_compile.passes.linear_convolutions import is_convolution
from te_compile.passes.mask_numbers import DIFFERENCES, FILLS, HIDDEN, PRODUCTS, QUOTIENTS, SUMS, number_in
from te_compile.passes.result_readers import keeps_values
from te_compile.passes.written_tensors import writes, written_by

_CONCATENATIONS = ("cat", "concat", "concatenate")
_NORMS = {"batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm"}
_RESHAPES = {"view", "reshape", "unflatten", "flatten", "unsqueeze", "squeeze", torch.reshape, torch.flatten}


@dataclass(frozen=True)
class Factor:
    """Scores times (or divided by) a number, which may be symbolic, or a tensor that is the same for all keys of a
    query. ``dimensions``: how many the scores have there."""

    by: Any
    divides: bool
    dimensions: int


@dataclass(frozen=True)
class Addend:
    """Scores plus (or minus) a tensor. ``dimensions``: how many the scores have where it is added; ``dtype``: of the
    sum."""

    tensor: Node
    negative: bool
    dimensions: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Fill:
    """Scores overwritten with a number that hides, where ``where`` is true (``inverted``: where it is false)."""

    where: Node
    inverted: bool
    value: float
    dimensions: int


@dataclass(frozen=True)
class Sinks:
    """A column put beside the scores, in front of them if ``first``, else behind. ``dimensions``: how many those have
    there. ``is_column``: unless ``tensor`` lacks the last of them."""

    tensor: Node
    first: bool
    dimensions: int
    is_column: bool = True


@dataclass(frozen=True)
class Shift:
    """Scores minus the largest of each row, which ``nodes`` find."""

    nodes: tuple[Node, ...]


Step = Factor | Addend | Fill


@dataclass
class Scores:
    """A product of queries and keys, and the steps from it to the softmax; ``nodes`` are all those in between.
    ``is_shifted``: by the largest of each row."""

    product: Contraction
    steps: list[Step] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    sinks: Sinks | None = None
    is_shifted: bool = False

    def take(self, step: Step | Sinks | Shift | None) -> None:
        """Note what follows on the steps so far; raises where sinks make that another computation."""
        if isinstance(step, Shift):
            self.nodes.extend(step.nodes)
            self.is_shifted = True
        elif isinstance(step, Sinks):
            if self.sinks is not None or self.is_shifted:
                why = "sinks are put beside its scores twice, or after these were shifted"
                raise UnusualScoresError(
                    f"{why}; put them there once, beside the scores as they are, for a fused kernel"
                )
            self.sinks = step
        elif step is not None:
            if self.sinks is not None:
                why = "its scores are changed once more after sinks were put beside them"
                raise UnusualScoresError(f"{why}; put the sinks there last for a fused kernel")
            self.steps.append(step)


class NotAttentionError(Exception):
    """Why something that looks like attention is none, in words for a report."""


class UnusualScoresError(NotAttentionError):
    """The same, of scores that are some."""


_NO_SCORES = "what softmax is taken of is no product of queries and keys; nothing to do: no fused kernel computes that"
_SCORES_ARE_READ = "its scores are read elsewhere too; return and log none of them for a fused kernel"
_SOME_ARE_CHANGED = "some of its scores are changed in place; add one bias to all of them instead for a fused kernel"


def same_sizes(a: Any, b: Any) -> bool:
    """Are two shapes equal, for every size that is symbolic, without a guard?"""
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))


def _is_scores(node: Any, like: Node) -> TypeGuard[Node]:
    return (
        is_tensor(node)
        and value_of(node).is_floating_point()
        and same_sizes(value_of(node).shape, value_of(like).shape)
    )


def _shift(node: Node) -> Iterator[tuple[Node, Shift]]:
    """Each row minus its largest number, which is looked for in nothing else."""
    if len(node.args) != 2 or node.kwargs or writes(node):
        return
    scores, largest = node.args
    between: list[Node] = []
    while _is_scores(scores, node) and isinstance(largest, Node) and len(largest.users) == 1:
        between.append(largest)
        if called(largest) == "detach" or (largest.target is operator.getitem and largest.args[1] == 0):
            largest = largest.args[0]
            continue
        if called(largest) in ("amax", "max") and largest.args[:1] == (scores,) and _is_along_keys(largest):
            yield scores, Shift(tuple(reversed(between)))
        return


def _is_along_keys(node: Node) -> bool:
    """Does this reduction keep its dimension, and is that the last one?"""
    last = value_of(node.args[0]).dim() - 1
    return argument(node, 1, "dim") in (-1, last, (-1,), [-1]) and argument(node, 2, "keepdim", False) is True


def _sinks(node: Node) -> Iterator[tuple[Node, Sinks]]:
    """A column that comes in front of scores or behind them."""
    parts, dim = argument(node, 0, "tensors"), argument(node, 1, "dim", 0)
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or not all(map(is_tensor, parts)):
        return
    dimensions = value_of(node).dim()
    if dim not in (-1, dimensions - 1) or not value_of(node).is_floating_point():
        return
    for first, (scores, sinks) in enumerate((parts, parts[::-1])):
        one = value_of(sinks)
        if scores is not sinks and one.is_floating_point() and statically_known_true(one.shape[-1] == 1):
            yield scores, Sinks(sinks, bool(first), dimensions)


def drops_sinks(node: Node, weights: Node, sinks: Sinks) -> bool:
    """Is ``node`` all columns of ``weights`` but that of ``sinks``?"""
    if node.target is not operator.getitem or node.args[0] is not weights:
        return False
    before, after = value_of(weights).shape, value_of(node).shape
    if not same_sizes(before[:-1], after[:-1]) or not statically_known_true(after[-1] == before[-1] - 1):
        return False
    index: Any = node.args[1]
    *others, columns = index if isinstance(index, tuple) and index else (None,)
    if not isinstance(columns, slice) or columns.step not in (None, 1):
        return False
    if not all(each is Ellipsis or (isinstance(each, slice) and each == slice(None)) for each in others):
        return False  # of the same sizes, maybe, and in another order
    return columns.start in ((1,) if sinks.first else (None, 0))


def _factor(node: Node) -> Iterator[tuple[Node, Step | None]]:
    if len(node.args) != 2 or node.kwargs:
        return
    divides = node.target in QUOTIENTS
    for scores, by in (node.args,) if divides or writes(node) else (node.args, node.args[::-1]):
        if not _is_scores(scores, node):
            continue
        number = number_in(by)
        if number is not None:
            yield scores, Factor(number, divides, value_of(scores).dim())
        elif isinstance(by, Node) and isinstance(value_of(by), torch.SymFloat):
            yield scores, Factor(by, divides, value_of(scores).dim())  # a float attribute where all is dynamic
        elif is_tensor(by) and (value_of(by).dim() == 0 or statically_known_true(value_of(by).shape[-1] == 1)):
            yield scores, Factor(by, divides, value_of(scores).dim())


def _addend(node: Node) -> Iterator[tuple[Node, Step | None]]:
    if len(node.args) != 2 or node.kwargs:
        return
    negative = node.target in DIFFERENCES
    for scores, tensor in (node.args,) if negative or writes(node) else (node.args, node.args[::-1]):
        if _is_scores(scores, node) and isinstance(tensor, (int, float)) and tensor == 0:
            yield scores, None  # what a model adds for a part that is switched off
        elif _is_scores(scores, node) and is_tensor(tensor) and tensor is not scores:
            yield scores, Addend(tensor, negative, value_of(node).dim(), value_of(node).dtype)


def _fill(node: Node) -> Iterator[tuple[Node, Step | None]]:
    if node.target is torch.where:
        condition, yes, no = node.args if len(node.args) == 3 else (None, None, None)
        choices: tuple[tuple[Any, Any, Any, bool], ...] = ((yes, condition, no, True), (no, condition, yes, False))
    else:
        where, value = argument(node, 1, "mask"), argument(node, 2, "value")
        choices = ((node.args[0], where, value, False),)
    for scores, where, value, inverted in choices:
        number = number_in(value)
        if _is_scores(scores, node) and is_tensor(where) and number is not None and number <= HIDDEN:
            yield scores, Fill(where, inverted, number, value_of(node).dim())


def _view(node: Node) -> Iterator[tuple[Node, Step | None]]:
    """Batch and heads in one dimension or in two; queries and keys stay the last."""
    source = argument(node, 0, "input")
    if is_tensor(source) and same_sizes(value_of(source).shape[-2:], value_of(node).shape[-2:]):
        yield source, None


def _steps(node: Node) -> Iterator[tuple[Node, Step | Sinks | Shift | None]]:
    """(scores, what ``node`` does to them), for every operand of ``node`` that may be the scores."""
    if node.target in DIFFERENCES:
        yield from _shift(node)
    if called(node) in _CONCATENATIONS:
        yield from _sinks(node)
    elif is_cast(node):
        source = node.args[0]
        if is_tensor(source) and value_of(node).is_floating_point():
            yield source, None
    elif node.target in PRODUCTS or node.target in QUOTIENTS:
        yield from _factor(node)
    elif node.target in SUMS or node.target in DIFFERENCES:
        yield from _addend(node)
    elif node.target in FILLS or node.target is torch.where:
        yield from _fill(node)
    elif node.target in _RESHAPES:
        yield from _view(node)


def why_not_alone(scores: Node) -> str:
    """What else there is to ``scores`` than one reader."""
    return _SOME_ARE_CHANGED if any(scores in written_by(user) for user in scores.users) else _SCORES_ARE_READ


def _is_made_by_a_linear(node: Any) -> bool:
    """Does a linear or a convolution give the numbers of ``node``, as where positions say themselves what to weigh?
    They may be normalised, or go through whatever else is given nothing but them."""
    while isinstance(node, Node) and node.args and not any(contractions_of(node)):
        if called(node) == "linear" or is_convolution(node):
            return True
        goes_on = keeps_values(node) or called(node) in _NORMS or len(node.all_input_nodes) == 1
        node = node.args[0] if goes_on else None
    return False


def scores_behind(node: Any) -> Scores:
    """The scores that ``node`` holds, from their product on; raises NotAttentionError where they are no plain ones."""
    if not is_tensor(node):
        raise NotAttentionError(_NO_SCORES)
    for product in contractions_of(node):
        if product.result == tuple(range(len(product.result))):
            value = value_of(node)
            addend = [] if product.addend is None else [Addend(product.addend, False, value.dim(), value.dtype)]
            return Scores(product, [*addend], [node])
    if node.op not in ("call_function", "call_method"):
        raise NotAttentionError(_NO_SCORES)
    if _is_made_by_a_linear(node):
        raise NotAttentionError(_NO_SCORES)
    if shares_queries(node):
        raise NotAttentionError("its queries are the same for all of the batch; expand them to it for a fused kernel")
    why = f"its scores go through {_name(node)} before softmax, which F.scaled_dot_product_attention does not do"
    problem = NotAttentionError(f"{why}; use flex_attention for a fused kernel, where the model offers it")
    for source, step in _steps(node):
        readers = {node, *(step.nodes[:1] if isinstance(step, Shift) else ())}
        if len(source.users) > len(readers):
            problem = NotAttentionError(why_not_alone(source))
            continue
        try:
            scores = scores_behind(source)
            scores.take(step)
        except NotAttentionError as error:
            problem = error
            continue
        scores.nodes.append(node)
        return scores
    raise problem


def _name(node: Node) -> str:
    return str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
