"""What stands between Dynamo and the compiled graph on each call: the lookup of the FP8 states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.fx import GraphModule

from te_compile import state
from te_compile.ops.scaling import HISTORY
from te_compile.passes.captured_nodes import value_of
from te_compile.passes.lower import Signature
from te_compile.passes.plan import Plan
from te_compile.recipe import DelayedScaling, Recipe


def example_states(signature: Signature, plan: Plan, recipe: Recipe) -> list[Tensor]:
    """Fake tensors of the shapes that :class:`Runner` will hand in, in the order of the new placeholders.

    Fake, because a backend may be called with fake parameters, and twice: a real state would be made for nobody.
    """
    if not signature.weights or not signature.stateful:
        return []
    context = TracingContext.try_get()
    fake_mode = context.fake_mode if context is not None else None
    assert fake_mode is not None, "te_fp8 is called by torch.compile, which provides a fake mode"
    devices = [value_of(weight).device for weight in signature.weights]
    columns = HISTORY + history_length(recipe)
    with fake_mode:
        states = [torch.zeros(state.FORWARD_ROWS, columns, device=device) for device in devices]
        if signature.training:
            states += [torch.zeros(state.BACKWARD_ROWS, columns, device=device) for device in devices]
            states.append(torch.zeros(signature.slots, device=devices[0], requires_grad=True))
    return states


def history_length(recipe: Recipe) -> int:
    """How many amaxes a state remembers; 0 for a recipe that keeps none."""
    return recipe.amax_history_len if isinstance(recipe, DelayedScaling) else 0


class Runner:
    """Calls the compiled graph with the states of this call's own parameters in front of the arguments.

    By parameter identity and on every call: with regional compilation one graph serves many blocks, each with states
    of its own.
    """

    def __init__(
        self, compiled: Callable[..., Any], signature: Signature, gm: GraphModule, added: int, recipe: Recipe
    ) -> None:
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.compiled = compiled
        self.positions = [placeholders.index(weight) - added for weight in signature.weights] if added else []
        self.signature, self.history_length = signature, history_length(recipe)
        self.gradient_max = recipe.fp8_format.backward_max
        self.token: Tensor | None = None

    def __call__(self, *args: Any) -> Any:
        """Run the graph on the arguments that Dynamo passes."""
        if not self.positions:
            return self.compiled(*args)
        training = self.signature.training
        state.poll()
        states = [
            state.state_of(args[position], self.history_length, training=training, gradient_max=self.gradient_max)
            for position in self.positions
        ]
        extra = [each.forward for each in states]
        if training:
            extra += [each.backward for each in states]
            extra.append(self._token_on(extra[0].device))
        return self.compiled(*extra, *args)

    def _token_on(self, device: torch.device) -> Tensor:
        """The input whose gradient carries the amaxes; its values are never read."""
        if self.token is None or self.token.device != device:
            self.token = torch.zeros(self.signature.slots, device=device, requires_grad=True)
        return self.token
