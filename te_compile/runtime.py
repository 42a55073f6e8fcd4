"""What stands between Dynamo and the compiled graph on each call: the lookup of FP8 states and copies of weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.eval_frame import innermost_fn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.nn import Parameter
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from te_compile import first_steps, state
from te_compile.accumulated_gradients import BackwardHasRun
from te_compile.again import Memory
from te_compile.flat_parameters import parameter_of
from te_compile.head_start import HeadStart
from te_compile.ops import agreement, calibration
from te_compile.ops.scaling import HISTORY
from te_compile.ops.weights import QUANTIZE_WEIGHTS
from te_compile.passes.cached_weights import WeightGroup
from te_compile.passes.captured_nodes import value_of
from te_compile.passes.lower import Signature
from te_compile.passes.memory import autograd_is_compiled
from te_compile.recipe import DelayedScaling, Recipe
from te_compile.recomputation import Checkpoints, FirstPass, checkpoints
from te_compile.weight_cache import CopiesOfGroup

_SHORT_HISTORY = (
    "te_fp8: a linear was called {calls} times before the first backward pass, and the recipe makes scales from the "
    "last {window}. Each call enters an amax of its own, so scales know a part of a step, and what is larger elsewhere "
    'is cut off. Choose a longer amax_history_len with amax_compute_algo="max", or recipe="current".'
)


def example_inputs_of(signature: Signature, recipe: Recipe) -> list[Tensor]:
    """Fake tensors of the shapes that :class:`Runner` will hand in, in the order of the new placeholders.

    Fake, because a backend may be called with fake parameters, and twice: a real state would be made for nobody.
    """
    if not signature.added:
        return []
    context = TracingContext.try_get()
    fake_mode = context.fake_mode if context is not None else None
    assert fake_mode is not None, "te_fp8 is called by torch.compile, which provides a fake mode"
    with fake_mode, torch.no_grad():
        states = _example_states(signature, recipe) if signature.states else []
        return states + [each for group in signature.groups for each in _example_copies(group)]


def _example_states(signature: Signature, recipe: Recipe) -> list[Tensor]:
    devices = [value_of(weight).device for weight in signature.weights]
    columns = HISTORY + history_length(recipe)
    states = [torch.zeros(state.FORWARD_ROWS, columns, dtype=torch.float32, device=device) for device in devices]
    if signature.training:
        states += [torch.zeros(state.BACKWARD_ROWS, columns, dtype=torch.float32, device=device) for device in devices]
        states.append(new_token(signature.slots, devices[0]))
    return states


def new_token(slots: int, device: torch.device) -> Tensor:
    """The input whose gradient carries amaxes, [slots]; fp32 as they are, whatever the default dtype is."""
    return torch.zeros(slots, dtype=torch.float32, device=device, requires_grad=True)


def _token_of_one_call(token: Tensor) -> tuple[Tensor, int]:
    """One for a call whose scales may be missing, to its backward too: it lives as long as that may come. And the name
    of that time.

    In the same memory, because CUDA graphs know it by its address.
    """
    own = token.detach().requires_grad_()
    return own, calibration.moment_of(own)


_MOST_VIEWS = 3  # of the graph's own results, among what a call returns


def _tell_when_backward_has_run(results: Any, token: Tensor, tell: BackwardHasRun) -> None:
    """Have ``tell`` called after each backward pass of the call that ``token`` was made for and that returned
    ``results``.

    By its own node in autograd's graph, for a gradient of the token is nothing that ``torch.autograd.grad`` asks for.
    """
    for result in pytree.tree_leaves(results):
        node = result.grad_fn if isinstance(result, Tensor) else None
        for _ in range(_MOST_VIEWS):
            if node is None:
                break
            if any(getattr(leaf, "variable", None) is token for leaf, _ in node.next_functions):
                node.register_hook(tell)
                return
            node = node.next_functions[0][0] if node.next_functions else None
    token.register_hook(tell)


def _backward_has_run(moment: int, states: list[int], window: int) -> None:
    """A loop may hold on to its loss, which keeps a call's token alive: once its graph is let go, no kernel has to be
    ready for missing scales."""
    calls = first_steps.end(states)
    if calls > window:
        warnings.warn(_SHORT_HISTORY.format(calls=calls, window=window), stacklevel=2)
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        calibration.settle(moment)


def _example_copies(group: WeightGroup) -> list[Tensor]:
    layout = group.layout
    matrices = [torch.empty(shape, dtype=group.dtype, device=group.device) for shape in layout.copies]
    flags = list(layout.rowwise), list(layout.columnwise)
    outputs = QUANTIZE_WEIGHTS(matrices, None, layout.dtype, *flags, layout.rule.text())
    return [outputs[i] for i in group.inputs]


def history_length(recipe: Recipe) -> int:
    """How many amaxes a state remembers; 0 for a recipe that keeps none."""
    return recipe.amax_history_len if isinstance(recipe, DelayedScaling) else 0


def window_of(recipe: Recipe) -> int:
    """How many of those a scale is made from."""
    only_the_last = isinstance(recipe, DelayedScaling) and recipe.amax_compute_algo == "most_recent"
    return 1 if only_the_last else history_length(recipe)


_Found = tuple[int, list[int], list[torch.device]]
"""All that the states of weights were found by: what :func:`te_compile.state.version` was then, and of each weight the
identity and the device."""


@dataclass(frozen=True)
class _States:
    """What a call is handed for its weights: their states and, when it trains, the token; and which states these are.

    The numbers are those of te_compile/state.py; a call without gradients has none of ``backward``.
    """

    tensors: list[Tensor] = field(default_factory=list)
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)

    def lack_scales(self) -> bool:
        """May one of them have none yet?"""
        return state.lack_scales(self.forward) or state.lack_scales(self.backward)


_NOTHING: tuple[_Found | None, _States] = None, _States()
_device_of = attrgetter("device")


class Runner:
    """Calls the compiled graph with the states and FP8 copies of this call's own parameters in front of the arguments.

    By parameter identity and on every call: with regional compilation one graph serves many blocks, each with states
    of its own.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        signature: Signature,
        gm: GraphModule,
        recipe: Recipe,
        replays_cuda_graphs: bool = False,
    ) -> None:
        given = gm.graph.find_nodes(op="placeholder")[signature.added :]
        self.compiled = innermost_fn(compiled)  # Dynamo, which calls this, is off already
        self.head_start = HeadStart(self.compiled, wanted=not replays_cuda_graphs)
        self.positions = [given.index(weight) for weight in signature.weights] if signature.states else []
        self.some_are_flat = not all(isinstance(value_of(weight), Parameter) for weight in signature.weights)
        self.signature, self.history_length = signature, history_length(recipe)
        self.window = window_of(recipe)
        self.gradient_max = recipe.fp8_format.backward_max
        self.token: Tensor | None = None
        self.found: dict[int, tuple[_Found, _States]] = {}  # by the id of the first weight
        self.copies = [
            CopiesOfGroup(group, [given.index(weight) for weight in group.weights], replays_cuda_graphs)
            for group in signature.groups
        ]
        remembers = len(self.copies) == 1 and not self.some_are_flat  # views of flat parameters are others each time
        every = dict.fromkeys([*self.copies[0].positions, *self.positions]) if remembers else ()
        self.memory = Memory(list(every)) if remembers else None

    def __call__(self, *args: Any) -> Any:
        """Run the graph on the arguments that Dynamo passes."""
        again = None if self.memory is None else self.memory.of(args)
        if again is not None and not (self.signature.slots and checkpoints() is not None):
            if not again.lacking:
                self._settle(again.states)
                return self.head_start(again.states, again.copies, args)
            state.poll()
            if state.lack_scales(again.lacking):
                with calibration.expected():
                    return self.head_start(again.states, again.copies, args)
        states = self._states(args) if self.positions else _States()
        if states.lack_scales() or first_steps.is_on(states.forward):
            return self._without_all_scales(states, args)
        return self._called(states.tensors.copy(), args)

    def _without_all_scales(self, states: _States, args: tuple[Any, ...]) -> Any:
        """A call that reads a state which may lack its scale: kernels are ready for that, and those of its backward."""
        tensors, moment = states.tensors.copy(), None
        measures = state.lack_scales(states.forward)
        if self.signature.training:
            tensors[-1], moment = _token_of_one_call(tensors[-1])
            measures = measures or first_steps.is_on(states.forward)
        # A gradient's scale, which may never come, is no business of the forward pass.
        with calibration.expected() if measures else nullcontext():
            results = self._called(tensors, args, states.forward)
            if moment is not None:
                calibration.expect(moment)
                if not autograd_is_compiled():  # which would trace the hook
                    tell = partial(_backward_has_run, moment, states.forward, self.window)
                    _tell_when_backward_has_run(results, tensors[-1], BackwardHasRun(tell))
        return results

    def _called(self, states: list[Tensor], args: tuple[Any, ...], in_first_step: Sequence[int] = ()) -> Any:
        """in_first_step: the numbers of the forward states, where this may be a call of their first step."""
        if self.signature.slots and (around := checkpoints()) is not None:
            return self._checkpointed(around, states, args, in_first_step)
        self._settle(states)
        if not in_first_step:
            return self.head_start(states, lambda: self._copies(args, states), args)
        with self._counted(states, in_first_step):
            return self.head_start(states, lambda: self._copies(args, states, in_first_step), args)

    def _counted(self, states: Sequence[Tensor], in_first_step: Sequence[int]) -> AbstractContextManager[None]:
        """Around a call that reads ``states`` and repeats no other one."""
        if not (in_first_step and self.signature.training) or autograd_is_compiled():
            return nullcontext()  # compiled autograd does not tell when a backward has run
        if self.token is not None and self.token.is_cuda and torch.cuda.is_current_stream_capturing():
            return nullcontext()  # each replay would find no scale
        return first_steps.counted_call(in_first_step, states, state.lacking(in_first_step))

    def _settle(self, states: Sequence[Tensor]) -> None:
        """What is known of these states by now enters them, if this call trains."""
        if self.signature.slots:
            agreement.settle_before_reading(states)

    def _checkpointed(
        self, around: Checkpoints, states: list[Tensor], args: tuple[Any, ...], in_first_step: Sequence[int]
    ) -> Any:
        """A call inside of a checkpoint, which runs it once more (recomputation.py)."""
        *own, _ = states  # but for the token
        weights = self._parameters([args[position] for position in self.positions])
        first = around.first_pass(weights)
        if first is None:
            self._settle(states)
            with self._counted(states, in_first_step):
                # A checkpoint that selects what it saves counts operators; these run once.
                with _disable_current_modes():
                    copies = self._copies(args, states)
                    around.leave(FirstPass.of(weights, own, self, copies))
                return self.compiled(*states, *copies, *args)
        around.leave(first)
        with first.repeated(own):
            copies = first.copies if first.runner is self else self._copies(args, states)
            return self.compiled(*states, *copies, *args)

    def _copies(self, args: tuple[Any, ...], states: list[Tensor], lacking: Sequence[int] = ()) -> list[Tensor]:
        """The FP8 copies of weights that the graph takes. lacking: the numbers of the forward states, if one of these
        may have no scale."""
        forward = states[: len(self.positions)]
        found = [each for copies in self.copies for each in copies.inputs(args, forward)]
        measures = bool(lacking) and not self.signature.training
        if self.memory is not None and (measures or not calibration.pending()):
            are_found = partial(self._are_found, args, states)
            self.copies[0].remember(self.memory, args, states, are_found, lacking if measures else ())
        return found

    def _are_found(self, args: tuple[Any, ...], states: list[Tensor]) -> bool:
        """Would a call of these arguments get these states now? None gets the token of one call again."""
        if not self.positions:
            return True
        found, known = self.found.get(id(args[self.positions[0]]), _NOTHING)
        is_current = found is not None and found[0] == state.version()
        return is_current and list(map(id, known.tensors)) == list(map(id, states))

    def _states(self, args: tuple[Any, ...]) -> _States:
        state.poll()
        given = [args[position] for position in self.positions]
        weights = self._parameters(given)
        version = state.version()
        by = version, list(map(id, weights)), list(map(_device_of, given))
        found, states = self.found.get(by[1][0], _NOTHING)
        if found != by:
            if found is not None and found[0] != version:
                self.found.clear()  # it would keep alive what is gone
            states = self._looked_up(weights, given)
            if state.version() == version and not isinstance(weights[0], FakeTensor):
                self.found[by[1][0]] = by, states
        state.keep_if_captured(states.tensors)
        return states

    def _parameters(self, given: list[Tensor]) -> list[Tensor]:
        """The parameters of the user's model that these weights are, which last."""
        if not self.some_are_flat:
            return given
        return [each if (parameter := parameter_of(each)) is None else parameter for each in given]

    def _looked_up(self, weights: list[Tensor], given: list[Tensor]) -> _States:
        training = self.signature.training
        ids = list(map(id, weights))  # the same one twice, if another became it after Dynamo had looked
        states = [
            state.state_of(
                weight, self.history_length, training=training, gradient_max=self.gradient_max,
                place=ids[:at].count(ids[at]), shown_by=given[at],
            )
            for at, weight in enumerate(weights)
        ]  # fmt: skip
        found = _States([each.forward for each in states], [each.forward_number for each in states])
        if training:
            gradients = [each.gradients[self.gradient_max] for each in states]
            found.tensors.extend(each.tensor for each in gradients)
            if not isinstance(weights[0], FakeTensor):
                agreement.remember(list(found.tensors))
            found.tensors.append(self._token_beside(states[0].forward))
            found.backward.extend(each.number for each in gradients)
        return found

    def _token_beside(self, state: Tensor) -> Tensor:
        """The input whose gradient carries the amaxes; its values are never read. Beside a fake state it is fake, and
        is not kept."""
        if isinstance(state, FakeTensor):
            return new_token(self.signature.slots, state.device)
        if self.token is None or self.token.device != state.device:
            self.token = new_token(self.signature.slots, state.device)
        return self.token
