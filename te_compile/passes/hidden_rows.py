"""Rows of scores that masks hide from every key: what a model computes there, and how a fused call computes the same.

A row that was overwritten everywhere holds numbers of the mask alone: no score has any influence, and none gets a
gradient. A row that a mask was added to everywhere holds sums that were rounded in the model's dtype. Of a score, -1e4
in float32 leaves almost all and -1e9 nothing, for float32 has steps of 64 there; what lies between leaves it in coarse
steps. Fused kernels add in float32 whatever the model did, and for backward they keep the logarithm of a row's sum, in
which -1e9 leaves nothing of the number of keys.

So in such a row the mask is shifted up to zero, which softmax does not see, and where the model forgets the scores the
query is set to zero. Coarse steps cannot be had like that: a model with a number that makes them is left as it is. Of a
mask that comes from outside no number is known; what it would leave in coarse steps stays whole.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch.fx import Node

from te_compile.passes.attention_scores import Addend, Factor, Fill, NotAttentionError, Step
from te_compile.passes.captured_nodes import value_of
from te_compile.passes.mask_numbers import HIDDEN, HIDES_A_ROW, SWALLOWS, may_hide, numbers_behind

_KEEPS_A_SCORE = 2.0**-8  # a mask times its dtype's eps: half of that is how far it moves what it is added to
_FORGETS_A_SCORE = 32.0  # swallows any score up to 8 at least: -1e9 in float32, -1e4 in bfloat16
_MOSTLY_FORGETS = 4.0  # between the two, for masks that nobody knows when compiling


def hides(step: Step, changes: dict[Node, bool]) -> bool:
    """Can ``step`` hide keys? changes: what ``may_change`` remembers, here and below."""
    return isinstance(step, Fill) or (isinstance(step, Addend) and may_hide(step.tensor, changes))


def _factors(steps: list[Step]) -> list[Any]:
    """What ``steps`` multiply scores with, one after the other: numbers, and tensors for those that are none."""
    factors = [step for step in steps if isinstance(step, Factor)]
    return [f.by if isinstance(f.by, Node) or not f.divides else 1 / f.by for f in factors]


def _after(step: Step, steps: list[Step]) -> list[Step]:
    return steps[next(at for at, each in enumerate(steps) if each is step) + 1 :]


def _counts_as(fill: Fill, steps: list[Step]) -> float:
    """The number that softmax finds where ``fill``, one of ``steps``, overwrote scores; raises if it may not hide.

    What a tensor scales is sure to hide only if it is about as small as numbers get.
    """
    counts = fill.value
    for by in _factors(_after(fill, steps)):
        if not isinstance(by, Node):
            counts *= by
        elif fill.value > SWALLOWS:
            why = f"its scores are overwritten with {fill.value:g}, and a tensor scales that, so that it may not hide"
            raise NotAttentionError(f"{why}; use -inf, or scale before overwriting, for a fused kernel")
    if not counts <= HIDDEN:
        why = f"its scores are overwritten with {fill.value:g}, which counts as {counts:g} after it was scaled"
        raise NotAttentionError(f"{why}; use -inf, or scale before overwriting, for a fused kernel")
    return counts


def number_to_fill_with(fill: Fill, steps: list[Step], dtype: torch.dtype) -> float:
    """What a bias of ``dtype`` gets where ``fill``, one of ``steps``, overwrote the scores; raises if nothing will do.

    The smallest number, beside which any score is hidden; where something is added as well, or scores are overwritten
    with several numbers, it is the model's own, for in a hidden row the largest decides.
    """
    counts, smallest = _counts_as(fill, steps), torch.finfo(dtype).min
    others = {_counts_as(each, steps) for each in steps if isinstance(each, Fill)} - {counts}
    factors = _factors(_after(fill, steps))
    if counts == float("-inf"):
        return fill.value
    is_scaled = any(isinstance(by, Node) for by in factors)
    if not others and not is_scaled and not any(isinstance(step, Addend) for step in steps):
        number = smallest / max(accumulate(factors, mul, initial=1.0))
        fits = number * (counts / fill.value) <= HIDDEN
    else:
        number = max(fill.value, smallest) if smallest <= SWALLOWS else fill.value
        fits = min(number, number * (counts / fill.value)) >= smallest
    if not fits:
        why = f"its scores are overwritten with {fill.value:g}, for which {dtype} has no number that hides as well"
        raise NotAttentionError(f"{why}; use -inf for a fused kernel")
    return number


def check_sinks_beside(steps: list[Step]) -> None:
    """Raise if in a row that ``steps`` overwrite everywhere sinks may count no more than the number it then holds.

    Such a row has weights of zero where a sink outweighs them all, as it does unless it is as low itself.
    """
    for step in steps:
        if isinstance(step, Fill) and step.value > SWALLOWS:
            why = f"its scores are overwritten with {step.value:g} beside sinks, which may be as low"
            raise NotAttentionError(f"{why}; use torch.finfo(dtype).min or -inf for a fused kernel")


def forgets_its_scores(steps: list[Step], softmax: Node, changes: dict[Node, bool]) -> float:
    """A row in which nothing that hides is above this forgets its scores, in the arithmetic of the model.

    Raises where the model has a number that keeps scores in coarse steps. steps: those in front of ``softmax``.
    """
    masks = [step for step in steps if isinstance(step, Addend) and hides(step, changes)]
    if not masks:
        return HIDES_A_ROW
    dtypes = {step.dtype for step in masks}
    if len(dtypes) > 1:
        raise NotAttentionError("its masks are added in several dtypes; add them in one for a fused kernel")
    eps = max(torch.finfo(d).eps for d in (*dtypes, *(value_of(n).dtype for n in (softmax, softmax.args[0]))))
    for mask in masks:
        _check_numbers(mask, steps, eps, changes)
    limit = min(HIDES_A_ROW, -_MOSTLY_FORGETS / eps)
    for fill in steps:
        if isinstance(fill, Fill) and _counts_as(fill, steps) > limit:
            why = f"its scores are overwritten with {fill.value:g} and a mask is added, which keeps some of them"
            raise NotAttentionError(f"{why}; use one mask, or the smallest numbers, for a fused kernel")
    return limit


def _check_numbers(mask: Addend, steps: list[Step], eps: float, changes: dict[Node, bool]) -> None:
    """Raise if ``mask`` is made of a number that keeps scores in coarse steps where it hides a whole row."""
    factor = 1.0
    for by in _factors(_after(mask, steps)):
        factor *= 1.0 if isinstance(by, Node) else by
    for number in numbers_behind(mask.tensor, changes):
        if _KEEPS_A_SCORE < abs(number * factor) * eps < _FORGETS_A_SCORE:
            why = f"its mask adds {-abs(number):g}, which rounds the scores of queries that it hides from every key"
            raise NotAttentionError(f"{why}; use torch.finfo(dtype).min for a fused kernel")
