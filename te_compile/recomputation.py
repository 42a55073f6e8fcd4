"""Forwards that checkpointing around a compiled block runs anew: by the scales of the first time, and leaving no trace.

``checkpoint(block, x, use_reentrant=False)`` calls the block once more when the backward pass first asks for a tensor
that the block saved. To a block that is compiled by itself this is a call like any other: it would cast by the scales
of that moment, and enter its amaxes a second time. So each call that trains with state asks here for the checkpoints in
which it stands. In a first pass it leaves there what it reads. When a checkpoint recomputes, its n-th call gets what
the n-th call of its first pass left, and the states are afterwards as they were.

Which first pass a recomputation repeats is known to PyTorch's hooks for saved tensors alone: those of a first pass hold
the checkpoint's frame, those of a recomputation refer to it. What is left here lives as long as that frame, which is as
long as a backward pass may want it. Inside of a recomputation nested checkpoints begin anew: calls in these leave what
they got themselves. Where hooks look otherwise than they do today, a recomputed forward is a call like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._dynamo.eval_frame import innermost_fn
from torch.utils._python_dispatch import _disable_current_modes

from te_compile.ops import agreement
from te_compile.ops.scaling import SCALE, snapshot_reference

_autograd = torch._C._autograd
_MODULE = "torch.utils.checkpoint"


@dataclass(eq=False)
class FirstPass:
    """What a call read the first time.

    ``scales``: those of its states; ``copies``: the FP8 copies of its weights, in the form that ``runner`` wants.
    """

    weights: Sequence[Tensor]
    scales: Tensor
    runner: Any
    copies: list[Tensor]

    @staticmethod
    def of(weights: Sequence[Tensor], states: list[Tensor], runner: Any, copies: list[Tensor]) -> FirstPass:
        """For a call that is about to run. states: fp32 [rows, 2 + L], those of forward and backward."""
        return FirstPass(weights, snapshot_reference(states), runner, copies)

    def is_of(self, weights: Sequence[Tensor]) -> bool:
        """Was that a call with these very weights?"""
        return len(weights) == len(self.weights) and all(map(is_, weights, self.weights))

    @contextmanager
    def repeated(self, states: list[Tensor]) -> Iterator[None]:
        """Meanwhile ``states`` hold the scales of then, and afterwards what they hold now.

        In place, because CUDA graphs and recorded launches know them by their addresses.
        """
        rows = [state.shape[0] for state in states]
        with torch.no_grad(), _disable_current_modes():
            now = torch.cat(states)
            then = now.clone()
            then[:, SCALE] = self.scales
            torch._foreach_copy_(states, then.split(rows))
        try:
            with agreement.unheard():
                yield
        finally:  # a recomputation ends by an exception as soon as it has all that backward wants
            with torch.no_grad(), _disable_current_modes():
                torch._foreach_copy_(states, now.split(rows))


@dataclass(eq=False)
class _Region:
    """A checkpoint: the calls of its first pass in order, and how many of them each recomputation has repeated."""

    calls: list[FirstPass] = field(default_factory=list)
    repeated: dict[Any, int] = field(default_factory=dict)

    def next(self, recomputation: Any) -> FirstPass | None:
        """The call that is the next one of ``recomputation``, if there was one."""
        place = self.repeated.get(recomputation, 0)
        self.repeated[recomputation] = place + 1
        return self.calls[place] if place < len(self.calls) else None


_regions: WeakKeyDictionary[Any, _Region] = WeakKeyDictionary()  # by the checkpoint's frame


@dataclass(eq=False)
class Checkpoints:
    """Those in which a call stands: ``opened`` for the first time, and around these the ``recomputed`` one, if any."""

    opened: list[_Region]
    recomputed: _Region | None = None
    recomputation: Any = None

    def first_pass(self, weights: Sequence[Tensor]) -> FirstPass | None:
        """What this call, of ``weights``, is to repeat. To be asked once; None if this is the first time."""
        first = None if self.recomputed is None else self.recomputed.next(self.recomputation)
        return first if first is not None and first.is_of(weights) else None

    def leave(self, first: FirstPass) -> None:
        """For those that recompute this call, when they do."""
        for region in self.opened:
            region.calls.append(first)


def checkpoints() -> Checkpoints | None:
    """The checkpoints around this call; None where there are none, as a rule, which is known at once."""
    if not _autograd._top_saved_tensors_default_hooks(True):
        return None
    found = Checkpoints([])
    for pack in _pack_hooks():
        known = _variables_of(pack)
        if "frame" in known:
            found.opened.append(_region_of(known["frame"]))
        elif "target_frame_ref" in known:
            found.recomputed, found.recomputation = _region_of(known["target_frame_ref"]()), known["gid"]
            break  # what is around that has nothing to do with this call: it stands in the forward that is repeated
    return found if found.opened or found.recomputed else None


def _region_of(frame: Any) -> _Region:
    return _regions.setdefault(frame, _Region())


def _pack_hooks() -> list[Callable[[Tensor], Any]]:
    """What packs saved tensors, innermost first. PyTorch shows only that one, so all are taken and put back in turn."""
    taken: list[tuple[Any, Any]] = []
    try:
        while top := _autograd._top_saved_tensors_default_hooks(True):
            taken.append(top)
            _autograd._pop_saved_tensors_default_hooks()
    finally:
        for pair in reversed(taken):
            _autograd._push_saved_tensors_default_hooks(*pair)
    return [pack for pack, _ in taken]


def _variables_of(hook: Any) -> dict[str, Any]:
    """What a hook of PyTorch's checkpoints knows of its surroundings, by name; nothing of any other."""
    function = innermost_fn(hook)
    if getattr(function, "__module__", None) != _MODULE:
        return {}
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}
