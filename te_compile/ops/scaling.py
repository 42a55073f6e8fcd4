"""``te::snapshot`` and ``te::update_scales_``: delayed scaling's state, read once and written once per step.

A state is one fp32 tensor with a row per quantised tensor:

    scale | number of skipped amaxes | amax history, newest first          [rows, 2 + L]

``te::snapshot(states)`` is every scale of the step, copied. It is opaque and its output is fresh, for a reason: if the
graph showed that scales are a view of what the update then overwrites, the compiler would save the view for backward
and drop the copy, and gradients would be divided by the next step's scale. Where it is known what backward gets, a pass
lets the others read the state after all (passes/read_scales_in_place.py).

``te::update_scales_`` notes the amaxes of the step, one launch for all states of a direction:

    amax not finite   the row's count goes up by one and nothing else changes
    amax = 0          nothing changes
    else              the history rolls, and the scale becomes the recipe's formula for its maximum (or for this amax)

With several ranks, each seeing its own data, all take the largest amax first, in one all-reduce for all states of a
step, at its end (agreement.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from te_compile.ops import agreement, registry
from te_compile.ops.library import define
from te_compile.recipe import DelayedScaling, recipe_of

FORWARD = "forward"
BACKWARD = "backward"

SCALE = 0
SKIPPED = 1
HISTORY = 2


@registry.register("snapshot", registry.REFERENCE)
def snapshot_reference(states: list[Tensor]) -> Tensor:
    """The scale column of all states, fp32 [rows of the first, of the second, …]."""
    return torch.cat([state[:, SCALE] for state in states])


def _snapshot(states: list[Tensor], implementation: str = registry.REFERENCE) -> Tensor:
    return registry.function_of("snapshot", implementation)(states)


def _snapshot_fake(states: list[Tensor], implementation: str = registry.REFERENCE) -> Tensor:
    return states[0].new_empty(sum(state.shape[0] for state in states))


SNAPSHOT: Any = define('snapshot(Tensor[] states, str implementation="reference") -> Tensor', _snapshot, _snapshot_fake)


def fp8_max_of(recipe: DelayedScaling, direction: str) -> float:
    """The largest number of the FP8 type that ``direction`` uses."""
    if direction not in (FORWARD, BACKWARD):
        raise ValueError(f"direction {direction!r}: unknown; choose {FORWARD!r} or {BACKWARD!r}")
    return recipe.fp8_format.forward_max if direction == FORWARD else recipe.fp8_format.backward_max


_UPDATING = threading.RLock()  # what two threads enter in one history at once is both entered


@registry.register("update_scales_", registry.REFERENCE)
def update_scales_reference(
    states: list[Tensor], amaxes: Sequence[Tensor], fp8_max: float, recipe: DelayedScaling
) -> None:
    """See the module. states: fp32 [rows, 2 + L], changed in place; amaxes: fp32, [] or [n], one for each row."""
    sizes = [state.shape[0] for state in states]
    with _UPDATING:
        for state, amax in zip(states, flattened(amaxes).split(sizes), strict=True):
            history, scale, skipped = recipe.updated(state[:, HISTORY:], state[:, SCALE], amax, fp8_max)
            state[:, HISTORY:].copy_(history)
            state[:, SCALE].copy_(scale)
            state[:, SKIPPED].add_(skipped)


def flattened(amaxes: Sequence[Tensor]) -> Tensor:
    """All amaxes in one fresh tensor, fp32 [R]; each given one is [] or [rows]."""
    if all(amax.dim() == 0 for amax in amaxes):
        return torch.stack(list(amaxes))
    return torch.cat([amax.reshape(-1) for amax in amaxes])


def asks_others(recipe: DelayedScaling) -> bool:
    """Are there several ranks, which take the largest amax of all?"""
    return recipe.reduce_amax and agreement.are_several()


def _delayed(recipe: str) -> DelayedScaling:
    scaling = recipe_of(recipe)
    if not isinstance(scaling, DelayedScaling):
        raise ValueError(f"recipe {recipe!r} keeps no state; te::update_scales_ is for delayed scaling")
    return scaling


def update_alone(
    states: list[Tensor],
    amaxes: list[Tensor],
    direction: str,
    recipe: str,
    implementation: str = registry.REFERENCE,
) -> tuple[()]:
    """The update by these very amaxes. Returns no tensors, as what replays a call wants it said."""
    measured = sum(amax.numel() for amax in amaxes)
    rows = sum(state.shape[0] for state in states)
    if measured != rows:
        raise ValueError(f"{measured} amaxes for {rows} rows of {len(states)} states")
    scaling = _delayed(recipe)
    registry.function_of("update_scales_", implementation)(states, amaxes, fp8_max_of(scaling, direction), scaling)
    return ()


def scale_update(
    alone: Callable[..., Any], agreed: Callable[..., Any] | None = None, in_cuda_graphs: bool = False
) -> Callable[..., None]:
    """The operator's code. alone: :func:`update_alone`, or what calls it faster; agreed: the same, for amaxes that were
    agreed on, which are not in as many tensors, nor those of one place in a graph. in_cuda_graphs: may the memory of
    amaxes on a GPU be that of a CUDA graph, which is someone else's as soon as the graph has run?"""

    def run(
        states: list[Tensor],
        amaxes: list[Tensor],
        direction: str,
        recipe: str,
        implementation: str = registry.REFERENCE,
    ) -> None:
        if not amaxes:
            return
        if not asks_others(_delayed(recipe)):
            alone(states, amaxes, direction, recipe, implementation)
            return
        if agreement.is_unheard():
            return
        flat, how = flattened(amaxes), (direction, recipe, implementation)
        update = agreed or update_alone
        if not (in_cuda_graphs and flat.is_cuda) and agreement.may_wait(states, flat):
            agreement.agree_later(flat, states, update, how)
            return
        agreement.agree(flat, agreement.group_of(states))
        update(states, [flat], *how)

    return run


def _update_scales_fake(*_: Any, **__: Any) -> None:
    """Nothing comes back."""


UPDATE_SCALES: Any = define(
    "update_scales_(Tensor(a!)[] states, Tensor[] amaxes, str direction, str recipe, "
    'str implementation="reference") -> ()',
    scale_update(update_alone, in_cuda_graphs=True),
    _update_scales_fake,
)
