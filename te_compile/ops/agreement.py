"""Data-parallel ranks agree on the amaxes of a step: each has seen its own data, and all take the largest.

One all-reduce for each step, at the end of its backward pass. Nothing reads a state before that once its amaxes are
there: a forward pass has taken a snapshot of its scales, and the next one comes later. And nothing earlier would do as
well. Whoever waits for an exchange in the middle waits for all that was begun on the communicator before, which is how
parameters are gathered for the next layer and gradients exchanged for the last ones, meant to go on behind the
computation. A graph that is cut at its buckets, or compiled block by block, has an update in each piece, and each would
be a wait of this kind.

Where a forward pass does read states whose amaxes wait, as that of a block which is used twice, or one that runs within
the backward pass (a reentrant checkpoint, a hook), the ranks agree before it. Only a pass that trains asks for that:
what one rank alone does without gradients, an evaluation, must not wait for the others, and reads what there is. What
runs inside of CUDA graphs or compiled autograd is agreed on where it stands.

Which ranks, DistributedDataParallel knows: those of its process group. Nor do ranks agree on micro-batches whose
gradients they do not exchange (``no_sync``), of which each may have another number: their largest amaxes are held until
the backward pass that does.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from te_compile import data_parallel
from te_compile.ops import same_layers

Update = Callable[..., object]
"""Updates states, the first argument, by amaxes, the second, one for each of their rows; the others say how."""


# --- who trains them, and when it exchanges gradients ---------------------------------------------------------------


@dataclass(eq=False)
class _Wrapper:
    """A DistributedDataParallel, and whether it exchanges the gradients of its last forward pass; without one, all
    ranks and always."""

    module: Callable[[], Any] = lambda: None
    exchanges: bool = True

    @property
    def group(self) -> Any:
        """The ranks that agree; None for all."""
        module = self.module()
        group = None if module is None else module.process_group
        return None if group is _world() else group


_NOBODY = _Wrapper()
_wrappers: WeakKeyDictionary[Any, _Wrapper] = WeakKeyDictionary()


@dataclass
class _Trainer:
    """What trains states that one graph is handed together, as its last forward pass has found."""

    wrapper: _Wrapper


def _wrapper_now() -> _Wrapper:
    """What the forward pass that is running belongs to."""
    module = data_parallel.active()
    if module is None:
        return _NOBODY
    wrapper = _wrappers.get(module)
    if wrapper is None:
        wrapper = _wrappers[module] = _Wrapper(ref(module))
    return wrapper


# --- what is measured ------------------------------------------------------------------------------------------------


@dataclass
class _Measured:
    """Amaxes that this rank has seen, fp32 [rows of all states], and what is done with the largest of all ranks.

    ``order``: the places of the states (``_Lasting``). ``stream``: the one that they were measured on; 0 on
    a CPU. ``wrapper``: what trains them.
    """

    amaxes: Tensor
    states: list[Tensor]
    update: Update
    how: tuple[str, ...]
    order: list[int]
    stream: int = 0
    wrapper: _Wrapper = _NOBODY

    def arrive(self) -> None:
        """Have the current stream wait for the amaxes."""
        device = self.amaxes.device
        if device.type == "cuda" and self.stream != torch._C._cuda_getCurrentRawStream(device.index):
            current = torch.cuda.current_stream(device)
            current.wait_stream(torch.cuda.ExternalStream(self.stream, device))
            self.amaxes.record_stream(current)


class _Waiting(list[_Measured]):
    """What waits for the end of a backward pass, which holds it: one that fails takes it away."""


_from_forwards = _Waiting()  # waits for the end of the next backward pass, whichever that is
_waiting: WeakValueDictionary[int, _Waiting] = WeakValueDictionary()  # by the backward pass
_awaited: dict[int, ref[_Waiting]] = {}  # by the address of a state, where its amaxes wait


def are_several() -> bool:
    """Are there several ranks?"""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def agree(amaxes: Tensor, group: Any = None) -> None:
    """Make ``amaxes``, fp32 [R], the largest of all ranks, or of a process group's, in place; infinity wins and is
    skipped."""
    torch.distributed.all_reduce(amaxes, op=torch.distributed.ReduceOp.MAX, group=group)


# --- which states may be updated later ------------------------------------------------------------------------------


@dataclass
class _Lasting:
    """A state that outlives a pass, what trains it, and its place in the order in which such states first took part in
    an exchange."""

    state: ref[Tensor]
    trainer: _Trainer
    place: int | None = None


_lasting: dict[int, _Lasting] = {}  # by their addresses


def remember(states: Sequence[Tensor]) -> None:
    """These very tensors are states, of forward and of backward passes, as they are handed to a compiled graph."""
    trainer = _Trainer(_wrapper_now())
    for state in states:
        address = state.data_ptr()
        known = _lasting.get(address)
        if known is None or known.state() is not state:
            known = _lasting[address] = _Lasting(ref(state, partial(_forget, address)), trainer)
        known.trainer = trainer


def _forget(address: int, gone: ref[Tensor]) -> None:
    known = _lasting.get(address)
    if known is not None and known.state is gone:
        del _lasting[address]


def are_lasting(states: Sequence[Tensor]) -> bool:
    """Are these the states themselves? A compiler may hand an operator that changes its arguments copies of them, and
    write these back when it has run."""
    return all((known := _lasting.get(state.data_ptr())) is not None and known.state() is not None for state in states)


def may_wait(states: Sequence[Tensor], amaxes: Tensor) -> bool:
    """May ``states`` be updated at the end of a backward pass? One that is captured into a CUDA graph, or run by
    compiled autograd, ends elsewhere than where it says."""
    if torch._dynamo.compiled_autograd.compiled_autograd_enabled:
        return False
    return are_lasting(states) and not (amaxes.is_cuda and torch.cuda.is_current_stream_capturing())


def _wrapper_of(addresses: Sequence[int]) -> _Wrapper:
    """What trains lasting states. A forward pass that trains says who does, for the backward pass too, and whether
    gradients are exchanged."""
    trainers = [_lasting[address].trainer for address in addresses]
    if torch._C._current_graph_task_id() == -1:
        wrapper = _wrapper_now()
        if wrapper is not _NOBODY:
            wrapper.exchanges = bool(wrapper.module().require_backward_grad_sync)
        for trainer in trainers:
            trainer.wrapper = wrapper
    return trainers[0].wrapper


def group_of(states: Sequence[Tensor]) -> Any:
    """The ranks that agree on the amaxes of ``states``; None for all."""
    known = _lasting.get(states[0].data_ptr())
    return (_wrapper_now() if known is None else known.trainer.wrapper).group


# --- what was measured twice ----------------------------------------------------------------------------------------


class _Thread(threading.local):
    repeats = False


_thread = _Thread()


@contextmanager
def unheard() -> Iterator[None]:
    """In here this thread runs once more what has been run and measured: nobody is told of its amaxes."""
    before, _thread.repeats = _thread.repeats, True
    try:
        yield
    finally:
        _thread.repeats = before


def is_unheard() -> bool:
    """Is that so?"""
    return _thread.repeats


# --- waiting, and the end of it -------------------------------------------------------------------------------------


def agree_later(amaxes: Tensor, states: list[Tensor], update: Update, how: tuple[str, ...]) -> None:
    """Have the ranks agree on ``amaxes``, fp32 [R], and ``states`` updated by them, at the end of the backward pass:
    of this one or, in a forward pass, of the next one.

    states: fp32, R rows in all, lasting ones (:func:`may_wait`). Updates that are told the same ``how`` may be done in
    one. ``amaxes`` is the caller's to give away. What the process group raises, the backward pass raises at its end.
    """
    device = amaxes.device
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    addresses = [state.data_ptr() for state in states]
    waiting = _of_this_pass()
    wrapper = _wrapper_of(addresses)
    waiting.append(_Measured(amaxes, states, update, how, _places_of(addresses, wrapper.group), stream, wrapper))
    _awaited.update(dict.fromkeys(addresses, ref(waiting)))


@dataclass
class _Ranks:
    """Those that come together now: the process group of all, and how many states have a place in that of a group."""

    world: Callable[[], object] = lambda: None
    places: WeakKeyDictionary[Any, Iterator[int]] = field(default_factory=WeakKeyDictionary)


_ranks = _Ranks()


def _world() -> object:
    return torch.distributed.group.WORLD


def _places_of(addresses: Sequence[int], group: Any = None) -> list[int]:
    """Of lasting states, which have one from here on. Ranks that come together anew, one of them perhaps in a process
    of its own, count from the beginning; those of each process group count their own."""
    world = _world()
    if world is not _ranks.world():
        _ranks.world, _ranks.places = ref(world), WeakKeyDictionary()
        same_layers.begin_again()
        for known in list(_lasting.values()):
            known.place = None
    places = _ranks.places.setdefault(world if group is None else group, itertools.count())
    found = []
    for address in addresses:
        state = _lasting[address]
        if state.place is None:
            state.place = next(places)
        found.append(state.place)
    return found


def _of_this_pass() -> _Waiting:
    backward_pass = torch._C._current_graph_task_id()
    if backward_pass == -1:
        return _from_forwards
    waiting = _waiting.get(backward_pass)
    if waiting is None:
        waiting = _waiting[backward_pass] = _Waiting()
        torch.autograd.Variable._execution_engine.queue_callback(partial(_settle, waiting))
    return waiting


def settle_before_reading(states: Sequence[Tensor]) -> None:
    """For a forward pass that trains, which is about to read ``states``, fp32 [rows, 2 + L]: if their amaxes wait,
    update all that does. Raises what the process group raises.

    Fake ones, of a compiler's dry run, are nobody's.
    """
    if not _awaited or isinstance(states[0], FakeTensor):
        return
    in_backward = torch._C._current_graph_task_id() != -1
    passes = list(_waiting.values()) if in_backward else []  # this one, and those that it runs within
    known = {id(_from_forwards), *map(id, passes)}
    if any(_waits(state.data_ptr(), known) for state in states) and not _is_captured(states[0]):
        _settle(*passes)


def _waits(address: int, known: set[int]) -> bool:
    """Do amaxes of the state at ``address`` wait, for one of the passes that are ``known`` by their identities?"""
    where = _awaited.get(address)
    waiting = None if where is None else where()
    return bool(waiting) and id(waiting) in known


def _is_captured(state: Tensor) -> bool:
    """Is this call captured into a CUDA graph, which would do the updates of before once more at each replay?"""
    return state.is_cuda and torch.cuda.is_current_stream_capturing()


@torch.no_grad()
def _settle(*several: _Waiting) -> None:
    """Agree on what waits for these backward passes, and for any, and do the updates, in their order and as few at a
    time as that allows."""
    arriving: list[_Measured] = []
    for waiting in (_from_forwards, *several):
        with suppress(IndexError):  # one by one, for a pass on several devices has several threads, which may do this
            while True:
                arriving.append(waiting.pop(0))
    for each in arriving:
        for state in each.states:
            _awaited.pop(state.data_ptr(), None)
        each.arrive()
    due = [each for each in _with_held(arriving) if each.wrapper.exchanges]
    for device, group in dict.fromkeys((each.amaxes.device, each.wrapper.group) for each in due):
        _settle_on([each for each in due if each.amaxes.device == device and each.wrapper.group is group])


_held: WeakKeyDictionary[_Wrapper, list[_Measured]] = WeakKeyDictionary()


def _with_held(arriving: Sequence[_Measured]) -> list[_Measured]:
    """What arrives, with what is held for it. What does not exchange gradients now is held: of several micro-batches
    the largest of each amax, so that an exchange has as many whatever their number."""
    for wrapper in [each for each in _held if each is not _NOBODY and each.module() is None]:
        del _held[wrapper]  # nobody will ask for it
    due: list[_Measured] = []
    for wrapper in dict.fromkeys(each.wrapper for each in arriving):
        own = [each for each in arriving if each.wrapper is wrapper]
        held = _held.pop(wrapper, [])
        if not wrapper.exchanges or held:
            own = _largest([*held, *own])
        if wrapper.exchanges:
            due += own
        else:
            _held[wrapper] = own
    return due


def _largest(measured: Sequence[_Measured]) -> list[_Measured]:
    """Amaxes of the same states as one, the largest of each."""
    found: dict[tuple[Any, ...], _Measured] = {}
    for each in measured:
        key = (*each.how, *(state.data_ptr() for state in each.states))
        before = found.get(key)
        if before is None:
            found[key] = each
            continue
        before.arrive()
        device = each.amaxes.device
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        found[key] = replace(each, amaxes=torch.maximum(before.amaxes, each.amaxes), stream=stream)
    return list(found.values())


def _settle_on(arriving: Sequence[_Measured]) -> None:
    """What lies on one device: one exchange, if there are other ranks still, and one amax after the other, so that each
    update finds those of its own in one tensor."""
    batches = _batches(arriving)
    sizes = [sum(each.amaxes.numel() for each in batch) for batch in batches]
    for batch, amaxes in zip(batches, _agreed(arriving).split(sizes), strict=True):
        batch[0].update([state for each in batch for state in each.states], [amaxes], *batch[0].how)


def _agreed(arriving: Sequence[_Measured]) -> Tensor:
    """All their amaxes in a row, fp32, the largest of all ranks if there are others still."""
    amaxes = [each.amaxes for each in arriving]
    if not are_several():
        return torch.cat(amaxes)
    measured = sum(each.numel() for each in amaxes)
    order = [place for each in arriving for place in each.order]
    together = torch.cat([*amaxes, *same_layers.fingerprint(order, amaxes[0].device)])
    agree(together, arriving[0].wrapper.group)
    same_layers.look_at(together[measured:])
    return together[:measured]


def _batches(waiting: Sequence[_Measured]) -> list[list[_Measured]]:
    """What may be done at once: updates that are told the same, each state once, for one launch writes them all."""
    batches: list[list[_Measured]] = []
    taken: set[int] = set()
    for each in waiting:
        states = {state.data_ptr() for state in each.states}
        if not batches or batches[-1][0].how != each.how or states & taken:
            batches.append([])
            taken = set()
        batches[-1].append(each)
        taken |= states
    return batches


def let_go(states: Sequence[Tensor]) -> None:
    """``states``, fp32 [rows, 2 + L], are written otherwise: what waits for them is agreed on all the same, as other
    ranks expect, and then dropped."""
    gone = {state.data_ptr() for state in states}
    for waiting in (_from_forwards, *_waiting.values(), *_held.values()):
        for each in list(waiting):
            each.states = [state.clone() if state.data_ptr() in gone else state for state in each.states]
    for address in gone:
        _awaited.pop(address, None)
