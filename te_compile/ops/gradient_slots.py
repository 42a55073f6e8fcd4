"""``te::gradient_slots``: how the amaxes of gradients reach one update at the end of the backward pass.

Each lowered linear takes one slot as an input, and its backward returns the amax of its gradient as that slot's
"gradient". Autograd then does what it always does: it waits for the last user, gathers what came back and calls the
backward of this operator once, with every amax of the step. That backward holds the one batched update of the backward
states. So no pass has to find and merge mutations in a functionalised graph, and a linear that took part in no loss
contributes zero, which changes no state.

``token`` exists to require a gradient, for autograd prunes what leads to no input that does; it receives none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_compile.ops.library import define_composite
from te_compile.ops.scaling import UPDATE_SCALES


class _GradientSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, states: list[Tensor], owners: list[int], recipe: str) -> Tensor:
        ctx.states, ctx.owners, ctx.recipe = states, owners, recipe
        return token.clone()

    @staticmethod
    def backward(ctx: Any, amaxes: Tensor) -> tuple[None, None, None, None]:
        largest: list[Tensor | None] = [None] * len(ctx.states)
        for owner, amax in zip(ctx.owners, amaxes.unbind(0), strict=True):
            known = largest[owner]
            largest[owner] = amax if known is None else torch.maximum(known, amax)
        updates = [(state, amax) for state, amax in zip(ctx.states, largest, strict=True) if amax is not None]
        UPDATE_SCALES([state for state, _ in updates], [amax for _, amax in updates], "backward", ctx.recipe)
        return None, None, None, None


def gradient_slots(token: Tensor, states: list[Tensor], owners: list[int], recipe: str) -> Tensor:
    """token: fp32 [slots], requires a gradient. states: backward states; ``owners[i]`` is the state that slot i feeds
    (a weight used twice has two slots and one state). Returns the slots, fp32 [slots]."""
    return _GradientSlots.apply(token, states, owners, recipe)


GRADIENT_SLOTS = define_composite(
    "gradient_slots(Tensor token, Tensor[] states, int[] owners, str recipe) -> Tensor", gradient_slots
)
