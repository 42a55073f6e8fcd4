"""FP8 state: what delayed scaling remembers of every parameter, kept outside the model.

A linear quantises three tensors: its input x, its weight w, and in the backward the gradient of its output. Each is one
row of fp32:

    column 0     scale, 0 while no data has been seen
    column 1     skipped: how many amaxes were not finite and so never entered the history
    column 2…    the last L amaxes, newest first

The rows x and w are one tensor, the gradient's another, because a forward may run again before the backward of the
last one. Both belong to the *parameter*: found by its identity on every call, they follow a weight that is tied, moved
or shared by regions that are compiled apart, never show up in the model's ``state_dict``, and die with the parameter.

A graph has one place for each parameter, however often it uses it. Where two parameters become one after it was
compiled, Dynamo does not look, and the graph gets one parameter at two places. Each would update the state as if it
were alone, and the last would win. So every place but the first has a state of its own there, which begins afresh, goes
with the parameter's and is never saved: compiled anew, the graph has one place.

A gradient's scale is one for E5M2 or for E4M3, as the recipe says, and those are a power of two apart. So each format
has a row of its own, for backward passes of both may wait at a time. Where a recipe of the other format meets a
parameter, its row learns what the last one's knows (gradient_states.py).

They are saved and loaded on request (state_files.py). What is loaded is written into the tensors that exist, because a
captured CUDA graph knows their addresses.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from te_compile import first_steps
from te_compile.gradient_states import GradientState, known_of
from te_compile.ops import agreement
from te_compile.ops.host_copies import HostCopy, copied_to_host
from te_compile.ops.scaling import HISTORY, SCALE, SKIPPED
from te_compile.parameter_names import parameters_by_name
from te_compile.recipe import Format

ROLES = ("x", "w", "gradient")  # rows 0 and 1 of the forward tensor, row 0 of the backward tensor
FORWARD_ROWS, BACKWARD_ROWS = 2, 1
GRADIENT_MAX = Format.HYBRID.backward_max
"""What a gradient's scale aims at before any recipe has said so, and in every file."""


class StateError(ValueError):
    """State that does not fit the model or a file that holds none; the message names the entries or the path."""


_numbers = itertools.count()  # names of state tensors


@dataclass(eq=False)
class ParameterState:
    """The state of one parameter: forward [2, 2+L] for x and w, and of its gradient one [1, 2+L] for each format that
    it is quantised in, all fp32."""

    forward: Tensor
    gradients: dict[float, GradientState]  # by the largest number of the format, which the scale aims at
    forward_number: int = field(default_factory=lambda: next(_numbers), repr=False)
    gradient_max: float = field(default=GRADIENT_MAX, repr=False)  # of the format that was asked for last
    only_loaded: bool = field(default=False, repr=False)  # read from a file, and no compiled call has used it yet
    next_place: ParameterState | None = field(default=None, repr=False)  # of a graph that gets the parameter twice

    @property
    def backward(self) -> Tensor:
        """[1, 2+L], the gradient's row for the format that was asked for last."""
        return self.gradients[self.gradient_max].tensor

    @property
    def scale(self) -> Tensor:
        """[3] in the order of ``ROLES``; 0 where no data has been seen."""
        return torch.cat([self.forward[:, SCALE], self.backward[:, SCALE]])

    @property
    def skipped(self) -> Tensor:
        """[3] in the order of ``ROLES``: how many amaxes were not finite."""
        return torch.cat([self.forward[:, SKIPPED], self.backward[:, SKIPPED]])

    @property
    def history(self) -> Tensor:
        """[3, L] in the order of ``ROLES``, newest first."""
        return torch.cat([self.forward[:, HISTORY:], self.backward[:, HISTORY:]])

    @property
    def history_length(self) -> int:
        """L."""
        return self.forward.shape[1] - HISTORY

    def backward_for(self, gradient_max: float) -> Tensor:
        """[1, 2+L], a copy: what is known of the gradient by now, with a scale that aims at ``gradient_max``."""
        return known_of(self.gradients, self.gradient_max, gradient_max)

    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [self.forward, *(each.tensor for each in self.gradients.values())]


# --- lookup --------------------------------------------------------------------------------------------------------

# By id(parameter), then L. An entry goes when its parameter dies, before the id can be anyone else's. A plain dict,
# because a step looks up every weight of the model: a WeakIdKeyDictionary takes four times as long.
_states: dict[int, dict[int, ParameterState]] = {}
_MAKING = threading.RLock()  # of two threads that call a fresh model at once one makes its states
_changes = itertools.count(1)
_version = {"now": 0}


def version() -> int:
    """Another number whenever :func:`state_of` may find, for parameters that stay where they are, something else than
    before, or find something to do."""
    return _version["now"]


def _changed() -> None:
    _version["now"] = next(_changes)


def state_of(
    parameter: Tensor,
    history_length: int,
    *,
    training: bool = False,
    gradient_max: float = GRADIENT_MAX,
    place: int = 0,
    shown_by: Tensor | None = None,
) -> ParameterState:
    """The state of ``parameter`` for a history of this length, made now if there is none, on the parameter's device.

    training: a backward will follow, so from here on the gradient's row, too, is waited for. gradient_max: the largest
    number of the FP8 type in which that backward quantises gradients. place: how often the graph has got the parameter
    before. shown_by: the tensor that is the parameter in this call, where it is not itself (flat_parameters.py); its
    device counts.
    A fake parameter (a compiler's dry run) gets a fake state that nobody keeps.
    """
    state = existing_state(parameter, history_length)
    used = parameter if shown_by is None else shown_by
    if state is None:
        if isinstance(parameter, FakeTensor):
            return _fresh(parameter, history_length, gradient_max)
        _require_no_other_loaded(parameter, history_length)
        state = _create(parameter, history_length)
    state.only_loaded = False
    for _ in range(place):
        if state.next_place is None:
            state.next_place = _waiting_for_data(_fresh(used, history_length))
        state = state.next_place
    if state.forward.device != used.device:
        _move(state, used)
    if training and state.gradient_max != gradient_max:
        _aim(state, gradient_max)
    if training and not (gradient := state.gradients[gradient_max]).trains:
        gradient.trains = True
        _await_scales(state, gradient_max)
    return state


def existing_state(parameter: Tensor, history_length: int) -> ParameterState | None:
    """The state that :func:`state_of` would return, or None if it would have to make one."""
    by_length = _states.get(id(parameter))
    return None if by_length is None else by_length.get(history_length)


def states_of(parameter: Tensor) -> dict[int, ParameterState]:
    """All states of ``parameter`` by history length."""
    return _states.get(id(parameter), {})


def _fresh(parameter: Tensor, history_length: int, gradient_max: float = GRADIENT_MAX) -> ParameterState:
    """A state that has seen nothing, on the parameter's device, registered nowhere."""

    def zeros(rows: int) -> Tensor:
        if isinstance(parameter, FakeTensor):
            return parameter.new_zeros((rows, HISTORY + history_length), dtype=torch.float32)
        return torch.zeros(rows, HISTORY + history_length, dtype=torch.float32, device=parameter.device)

    # A tensor made in inference mode could never be updated by a training step.
    with torch.inference_mode(False), torch.no_grad():
        gradient = GradientState(zeros(BACKWARD_ROWS), next(_numbers))
        return ParameterState(zeros(FORWARD_ROWS), {gradient_max: gradient}, gradient_max=gradient_max)


def _create(parameter: Tensor, history_length: int) -> ParameterState:
    """A new registered state for ``parameter``, or that which another thread has made since somebody looked."""
    key = id(parameter)
    with _MAKING:
        if (made := existing_state(parameter, history_length)) is not None:
            return made
        if key not in _states:
            _states[key] = {}
            weakref.finalize(parameter, _forget, key).atexit = False
        state = _states[key][history_length] = _waiting_for_data(_fresh(parameter, history_length))
    _changed()
    return state


def _waiting_for_data(state: ParameterState) -> ParameterState:
    """``state``, whose scales are waited for as long as it lives."""
    _await_scales(state)
    for number in (state.forward_number, *(each.number for each in state.gradients.values())):
        weakref.finalize(state, _stop_waiting, number).atexit = False
    weakref.finalize(state, first_steps.forget, state.forward_number).atexit = False
    return state


def _forget(key: int) -> None:
    """A parameter is gone."""
    del _states[key]
    _changed()


def _require_no_other_loaded(parameter: Tensor, history_length: int) -> None:
    """Starting afresh beside a state that was loaded and never used would lose it in silence."""
    by_length = states_of(parameter)
    if by_length and all(state.only_loaded for state in by_length.values()):
        raise StateError(
            f"the FP8 state loaded for a parameter of shape {list(parameter.shape)} has "
            f"amax_history_len={next(iter(by_length))}, but the recipe asks for {history_length}; "
            "choose the recipe that the state was saved with"
        )


def _aim(state: ParameterState, gradient_max: float) -> None:
    """Have the gradient's row for another FP8 type, which learns what the last one knows."""
    last, own = state.gradients[state.gradient_max], state.gradients.get(gradient_max)
    if own is None and last.trains and _is_capturing():
        raise RuntimeError(
            "te_fp8: a step under a recipe of another fp8_format is being captured into a CUDA graph, and its "
            "gradients have no scales yet: run one such step before"
        )
    with torch.inference_mode(False), torch.no_grad():
        if own is None:
            own = state.gradients[gradient_max] = GradientState(state.backward_for(gradient_max), next(_numbers))
            weakref.finalize(state, _stop_waiting, own.number).atexit = False
            last.mark_learnt()
        elif not _is_capturing():  # each replay would learn anew
            own.tensor.copy_(state.backward_for(gradient_max))
            last.mark_learnt()
    if not last.trains:  # no backward has it
        del state.gradients[state.gradient_max]
    state.gradient_max = gradient_max
    _changed()


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _move(state: ParameterState, parameter: Tensor) -> None:
    """Follow ``parameter`` to the device where it is now."""
    with torch.inference_mode(False), torch.no_grad():
        if state.forward.is_meta:
            moved = _fresh(parameter, state.history_length)
            state.forward = moved.forward
            first_steps.forget(state.forward_number)
            _await_scales(state)
            for aim, each in state.gradients.items():
                each.tensor = moved.backward.clone()
                each.mark_learnt()
                if each.trains:
                    _await_scales(state, aim)
        else:
            state.forward = state.forward.to(parameter.device)
            for each in state.gradients.values():
                each.tensor = each.tensor.to(parameter.device)
                each.learnt = None if each.learnt is None else each.learnt.to(parameter.device)
    _changed()


def start_afresh(parameter: Tensor) -> None:
    """Forget the states of ``parameter``; the next call makes a new one. Backward passes that wait have the old one."""
    if by_length := _states.get(id(parameter)):
        by_length.clear()
        _changed()


_captured: list[list[Tensor]] = []  # a CUDA graph of the user's knows them by their addresses, and may be replayed


def keep_if_captured(states: list[Tensor]) -> None:
    """Keep ``states`` in memory for good if this call of theirs is being captured into a CUDA graph."""
    if _is_capturing():
        _captured.append(states)


# --- which states still lack a scale, asked without ever stalling a device -----------------------------------------


@dataclass
class _Look:
    """Scales on their way from a device: the states' numbers with their row counts, and the host copy once ready."""

    rows: list[tuple[int, int]]
    scales: HostCopy


LONGEST_PAUSE = 256  # calls between two looks at states that never get a scale, such as that of an unused backward

# By the number of a state tensor, the state and, of a gradient's, the format's largest number.
_waiting: dict[int, tuple[weakref.ref[ParameterState], float | None]] = {}
_looks: dict[torch.device, _Look] = {}
_pause = _calls_left = 0


def lack_scales(numbers: Iterable[int]) -> bool:
    """Has one of these state tensors not been seen to have all its scales yet?"""
    return bool(_waiting) and any(number in _waiting for number in numbers)


def lacking(numbers: Iterable[int]) -> list[int]:
    """Those of these state tensors."""
    return [number for number in numbers if number in _waiting]


def poll() -> None:
    """Find out about states that have got a scale by now. For each compiled call; free once all have one.

    A look is a copy of the scales to pinned memory, read at a later call when it has arrived. If states are left the
    next look comes after twice as many calls, so a row that never gets a scale (a weight that is all zero) costs
    nothing either.
    """
    global _pause, _calls_left
    if not _waiting:
        return
    if _is_capturing():
        return
    for device in [device for device, look in list(_looks.items()) if look.scales.arrived()]:
        arrived = _looks.pop(device, None)
        if arrived is not None:  # else another thread has read it
            _read(arrived)
    if _calls_left > 0:
        _calls_left -= 1
        return
    _pause = _calls_left = min(2 * _pause + 1, LONGEST_PAUSE)
    for device, tensors in _waiting_tensors().items():
        if device not in _looks and device.type != "meta":
            look = _look_at(tensors)
            if look.scales.arrived():
                _read(look)
            else:
                _looks[device] = look


def _waiting_tensors() -> dict[torch.device, list[tuple[int, Tensor]]]:
    """By device, the number and tensor of each state without a scale."""
    found: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for number, (reference, gradient_max) in list(_waiting.items()):
        state = reference()
        if state is not None:
            tensor = state.forward if gradient_max is None else state.gradients[gradient_max].tensor
            found.setdefault(tensor.device, []).append((number, tensor))
    return found


def _look_at(tensors: list[tuple[int, Tensor]]) -> _Look:
    """Start the copy of all scales of ``tensors``; whoever watches the operators of this call has no part in it."""
    rows = [(number, tensor.shape[0]) for number, tensor in tensors]
    with torch.no_grad(), _disable_current_modes():
        return _Look(rows, copied_to_host(torch.cat([tensor[:, SCALE] for _, tensor in tensors])))


def _read(look: _Look) -> None:
    """Stop waiting for every state all of whose rows had a scale."""
    scales = iter(look.scales.numbers.tolist())
    for number, rows in look.rows:
        if min(itertools.islice(scales, rows)) > 0:
            _stop_waiting(number)


def _await_scales(state: ParameterState, gradient_max: float | None = None) -> None:
    """Calls with this state let kernels be ready for scales of 0 until every row of its forward tensor, or of the
    gradient's of one format, has one; look at the next call."""
    global _pause, _calls_left
    _pause = _calls_left = 0
    _waiting[_number(state, gradient_max)] = (weakref.ref(state), gradient_max)


def _number(state: ParameterState, gradient_max: float | None) -> int:
    """Of its forward tensor, or of the gradient's of one format."""
    return state.forward_number if gradient_max is None else state.gradients[gradient_max].number


def _stop_waiting(number: int) -> None:
    _waiting.pop(number, None)


# --- what a file brings ---------------------------------------------------------------------------------------------


def drop_unused(parameter: Tensor) -> None:
    """Forget what an earlier load gave ``parameter`` and no compiled call has used."""
    by_length = states_of(parameter)
    for length in [length for length, state in by_length.items() if state.only_loaded]:
        del by_length[length]
        _changed()


def overwrite(parameter: Tensor, forward: Tensor, backward: Tensor) -> None:
    """Give ``parameter`` these states, fp32 [2, 2 + L] and [1, 2 + L]: in place if there are any of this length.

    The scale in ``backward`` aims at ``GRADIENT_MAX``.
    """
    history_length = forward.shape[1] - HISTORY
    state = existing_state(parameter, history_length)
    if state is None:
        state = _create(parameter, history_length)
        state.only_loaded = True
    agreement.let_go(state.tensors())
    with torch.inference_mode(False), torch.no_grad():
        state.forward.copy_(forward)
        for aim, each in state.gradients.items():
            each.tensor.copy_(known_of({GRADIENT_MAX: GradientState(backward, 0)}, GRADIENT_MAX, aim))
            each.mark_learnt()
    first_steps.forget(state.forward_number)
    state.next_place = None  # what it knows is of another training
    _changed()
    _looks.clear()  # what is on its way from the device was read before
    formats: list[float | None] = [None, *state.gradients]
    for gradient_max in formats:
        if bool(((forward if gradient_max is None else backward)[:, SCALE] > 0).all()):
            _stop_waiting(_number(state, gradient_max))
        elif gradient_max is None or state.gradients[gradient_max].trains:
            _await_scales(state, gradient_max)


# --- by the model's names -------------------------------------------------------------------------------------------


def states_by_name(model: nn.Module) -> Iterator[tuple[str, str, ParameterState]]:
    """For every state of the model: parameter name, suffix of its entries, state.

    The suffix is empty unless recipes with several history lengths were used on one parameter.
    """
    for name, parameter in parameters_by_name(model).items():
        by_length = states_of(parameter)
        for length, state in sorted(by_length.items()):
            yield name, f".{length}" if len(by_length) > 1 else "", state


def skipped_counts(model: nn.Module) -> dict[str, dict[str, int]]:
    """How many amaxes of each parameter were not finite, e.g. {"fc.weight": {"x": 0, "w": 0, "gradient": 2}}."""
    counts: dict[str, dict[str, int]] = {}
    for name, _, state in states_by_name(model):
        of_parameter = counts.setdefault(name, dict.fromkeys(ROLES, 0))
        for role, count in zip(ROLES, state.skipped.tolist(), strict=True):
            of_parameter[role] += int(count)
    return counts
