"""Data-parallel ranks agree on the amaxes of a step: each has seen its own data, and all take the largest.

One all-reduce for what one update takes. In a forward pass the update waits for it. In a backward pass nothing reads
the states any more (a snapshot was taken in the forward pass), but a forward pass that runs within it, as a reentrant
checkpoint or a hook has it; that one has them updated first. Meanwhile, on the same communicator the gradients of the
layers before are being exchanged: whoever waits for the amaxes waits for these, and the exchange, which is meant to go
on behind the computation, stands in its way. A graph that is cut at its buckets, or compiled block by block, has an
update in each piece. So the all-reduces of a backward pass are started where the amaxes are there, in the same order on
all ranks, and what they were for is done when the pass ends: the exchange has to be over by then as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

Update = Callable[..., object]
"""Updates states, the first argument, by amaxes, the second, one for each of their rows; the others say how."""


@dataclass
class _Agreed:
    """Amaxes that the ranks are taking the largest of, fp32 [rows of all states], and what is done with them."""

    work: Any
    amaxes: Tensor
    states: list[Tensor]
    update: Update
    how: tuple[str, ...]

    def goes_with(self, other: _Agreed) -> bool:
        """May one launch do both? It writes what lies on one device."""
        return self.how == other.how and self.amaxes.device == other.amaxes.device

    def arrive(self) -> None:
        """Have the stream, or the host, wait for the amaxes."""
        self.work.wait()
        if self.amaxes.is_cuda:
            self.amaxes.record_stream(torch.cuda.current_stream(self.amaxes.device))


class _Waiting(list[_Agreed]):
    """What waits for the end of a backward pass, which holds it: one that fails takes it away."""


_waiting: WeakValueDictionary[int, _Waiting] = WeakValueDictionary()  # by the backward pass


def are_several() -> bool:
    """Are there several ranks?"""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def agree(amaxes: Tensor) -> None:
    """Make ``amaxes``, fp32 [R], the largest of all ranks, in place; infinity wins and is skipped."""
    torch.distributed.all_reduce(amaxes, op=torch.distributed.ReduceOp.MAX)


_lasting: dict[int, ref[Tensor]] = {}  # states that outlive a backward pass, by their addresses


def remember(states: Sequence[Tensor]) -> None:
    """These very tensors are states, as they are handed to compiled graphs."""
    for state in states:
        address = state.data_ptr()
        _lasting[address] = ref(state, partial(_forget, address))


def _forget(address: int, gone: ref[Tensor]) -> None:
    if _lasting.get(address) is gone:
        del _lasting[address]


def are_lasting(states: Sequence[Tensor]) -> bool:
    """Are these the states themselves? A compiler may hand an operator that changes its arguments copies of them, and
    write these back when it has run."""
    return all((known := _lasting.get(state.data_ptr())) is not None and known() is not None for state in states)


def may_wait(states: Sequence[Tensor], amaxes: Tensor) -> bool:
    """Is this part of a backward pass at whose end ``states`` can be updated? One that is captured into a CUDA graph,
    or run by compiled autograd, ends elsewhere than where it says."""
    if torch._C._current_graph_task_id() == -1 or torch._dynamo.compiled_autograd.compiled_autograd_enabled:
        return False
    return are_lasting(states) and not (amaxes.is_cuda and torch.cuda.is_current_stream_capturing())


def agree_by_the_end(amaxes: Tensor, states: list[Tensor], update: Update, how: tuple[str, ...]) -> None:
    """Start to agree on ``amaxes``, fp32 [R], and have ``states`` updated by them at the end of the backward pass.

    states: fp32, R rows in all. Updates that are told the same ``how`` may be done in one. ``amaxes`` is the caller's
    to give away. Raises what the process group raises; what arrives late, the backward pass raises at its end.
    """
    work = torch.distributed.all_reduce(amaxes, op=torch.distributed.ReduceOp.MAX, async_op=True)
    backward_pass = torch._C._current_graph_task_id()
    waiting = _waiting.get(backward_pass)
    if waiting is None:
        waiting = _waiting[backward_pass] = _Waiting()
        torch.autograd.Variable._execution_engine.queue_callback(partial(_settle, waiting))
    waiting.append(_Agreed(work, amaxes, states, update, how))


def settle_before_reading() -> None:
    """For a forward pass, which is about to read states: update what waits, if it runs within a backward pass."""
    if _waiting and torch._C._current_graph_task_id() != -1:
        for waiting in list(_waiting.values()):  # of this pass, and of those that it runs within
            _settle(waiting)


@torch.no_grad()
def _settle(waiting: _Waiting) -> None:
    """Do the updates of a backward pass, in their order and as few at a time as that allows."""
    arriving: list[_Agreed] = []
    with suppress(IndexError):  # one by one, for a pass on several devices has several threads, which may all do this
        while True:
            arriving.append(waiting.pop(0))
    for each in arriving:
        each.arrive()
    for batch in _batches(arriving):
        states = [state for each in batch for state in each.states]
        batch[0].update(states, [each.amaxes for each in batch], *batch[0].how)


def _batches(waiting: Sequence[_Agreed]) -> list[list[_Agreed]]:
    """What may be done at once: updates that go together, each state once, for one launch writes them all."""
    batches: list[list[_Agreed]] = []
    taken: set[int] = set()
    for each in waiting:
        states = {state.data_ptr() for state in each.states}
        if not batches or not batches[-1][0].goes_with(each) or states & taken:
            batches.append([])
            taken = set()
        batches[-1].append(each)
        taken |= states
    return batches
