"""FP8 copies of weights from one call to the next: made once for each change, in one launch for all weights of a graph.

Copies are looked up on every call, by what tells that a weight is the same one and has not changed: its identity,
autograd's version, its address. An edit in place, ``load_state_dict``, new data and most optimizers change one of
these. Fused optimizers, ``torch.optim.AdamW(fused=True)`` among them, leave the version as it is, so steps are counted
as well. What else happens behind autograd's back, as ``weight.data.add_``, shows in none of these. So copies that are
used again are also checked on the device against a fingerprint of the weights (ops/weight_refresh.py), and made anew
there.

Copies are memory: one byte an element for each layout. A training that quantises, steps and quantises again would hold
on to copies that nobody reads any more, so none are kept until one version of the weights has been met twice, as by
micro-batches. From then on they are, until a version is met only once. Weights that no optimizer is expected to change
(in a graph without gradients, or frozen) have their copies kept from the first call.

Copies that changed are new tensors: a forward's own backward may still be waiting for the old ones. The exception are
graphs that replay CUDA graphs, which read their inputs at the addresses of the first replay. There copies are made anew
in place, and autograd is told, so that a backward that comes too late raises an error.

Weights are cast by the scale that their history gives. Larger ones, loaded after a training, are cut off by it until a
step has entered their amax. Copies of weights that no optimizer changes would stay so for good, for no later version
takes their place. So these are looked at when they are made; the host waits for that, once for each change. In training
what would be cut off is cast by its own amax. Without gradients a warning says so, and it is cast anew when a training
has run in between. Where only the device sees the change, there is no telling the host, and it is cast by its own amax
in either case.

Nothing is looked up while a CUDA graph is being captured by the user: its replays would not look, so the launch is part
of what is captured.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

from te_compile.again import Again, Memory
from te_compile.kernels.replay import Replayed
from te_compile.ops import calibration, registry
from te_compile.ops.scaling import SNAPSHOT, snapshot_reference
from te_compile.ops.weight_refresh import OTHER_WEIGHTS, ROUNDED_DOWN, Refresher
from te_compile.ops.weights import QUANTIZE_WEIGHTS, Outputs, copies_of
from te_compile.parameter_names import parameters_by_name
from te_compile.passes.cached_weights import OUTPUTS, WeightGroup

AMAX = OUTPUTS.index("amax")
_CUT_OFF = (
    "te_fp8: one of {weights} weights reaches {times:.3g} times as far as its FP8 scale, which is that of the weights "
    "of an earlier training. Without gradients no scale is renewed: the weight is cut off, and so may activations be, "
    "until training has met them. Load the FP8 state that belongs to these weights (te_compile.load_state), forget the "
    'one from before (te_compile.reset_state), or compile with recipe="current".'
)

_USES = 2  # of kept copies, before a call is remembered: two micro-batches end before that pays

Key = tuple[list[int], list[int], int, int]
"""Of each weight the version, and how many steps were taken; of each weight the address; the id of the first FP8 state;
the stream. Equal keys: nothing is known to have changed. One state stands for all: they are others under another
recipe, or where weights have moved. The stream, because work on another one is not ordered after the launch that made
the copies."""

_version_of = attrgetter("_version")
_trainings = {"calls": 0}  # that entered amaxes of weights in histories
_replayed = Replayed("copies", copies_of, by_address=True)
T = TypeVar("T")

_caches: weakref.WeakSet[CopiesOfGroup] = weakref.WeakSet()
_shared: weakref.WeakValueDictionary[tuple[Any, ...], _Record] = weakref.WeakValueDictionary()


class _Kept:
    """Copies that may be used again. A refresher may know the states by their addresses alone: here they stay alive.

    ``cut_off``: the scale that they were cast by is too large for them; ``trainings``: how many calls had entered
    amaxes by then. ``unfinished``: a refresh was interrupted, which may have noted a change and made nothing of it.
    """

    def __init__(self, outputs: Outputs, inputs: list[Tensor], refresher: Refresher, states: Sequence[Tensor]) -> None:
        self.outputs, self.inputs, self.refresher, self.states = outputs, inputs, refresher, states
        self.cut_off, self.trainings, self.uses = False, _trainings["calls"], 0
        self.unfinished = False
        self._one_at_a_time = threading.Lock()

    def refresh(self, weights: Sequence[Tensor], amaxes: bool, force: bool = False) -> None:
        """Make the copies anew if the weights have changed. Two threads whose launches mix would each see only half."""
        with self._one_at_a_time:
            trainings = _trainings["calls"]
            another_scale = self.cut_off and self.trainings != trainings  # there may be one by now
            force = force or another_scale or self.unfinished
            self.unfinished = True
            self.refresher(weights, amaxes, calibration.pending(), force)
            self.trainings, self.unfinished = trainings, False

    def repeated(self, amaxes: bool) -> Callable[[], list[Tensor]] | None:
        """What does as :meth:`refresh` does as long as no scale is missing, or for copies that last in any case, and
        returns what the graph takes.

        None if nothing does so faster, or if that may change.
        """
        launch = None if self.cut_off else self.refresher.repeated(amaxes)
        if launch is None:
            return None

        def again() -> list[Tensor]:
            _trainings["calls"] += amaxes
            with self._one_at_a_time:
                launch()
            return self.inputs

        return again


class _Record:
    """What is known about one set of weights."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.ids = list(map(id, weights))
        gone = _once_gone(weakref.ref(self))
        self.references = [weakref.ref(weight, gone) for weight in weights]
        self.calls: dict[int, Again] = {}  # that found what is known; see again.py
        self.known = None, None
        self.met_again = False  # was the version before this one used more than once?
        self.counter = {"steps": 0}  # of optimizers that have one of the weights
        self.make: Callable[..., tuple[Tensor, ...]] = _replayed.site()
        self.scales: Tensor | None = None  # that the last copies were cast by, as far as these came from states
        self.rows: tuple[list[Tensor], list[Tensor]] = [], []  # of these states those of the weights

    @property
    def known(self) -> tuple[Key | None, _Kept | None]:
        """The copies and what they are of. Replaced as a whole: another thread may be reading it."""
        return self._known

    @known.setter
    def known(self, known: tuple[Key | None, _Kept | None]) -> None:
        self.calls.clear()
        self._known = known

    def kept_for(self, key: Key) -> _Kept | None:
        """The copies, if they are those of this key."""
        known, kept = self._known
        return kept if known == key else None


class CopiesOfGroup:
    """The copies of one group of a compiled graph, for each set of weights that the graph is called with.

    Graphs that want the same of the same weights, as those of prefill and decode do, share their records.
    """

    def __init__(self, group: WeightGroup, positions: list[int], in_place: bool) -> None:
        """positions: of the group's weights among the arguments of a call. in_place: see the module."""
        self.group, self.positions, self.in_place = group, positions, in_place
        self.gives_amaxes = AMAX in group.inputs
        self.is_cuda = group.device.type == "cuda"
        self.pads = group.layout.shapes != group.layout.copies
        chosen = tuple(sorted(group.implementations.items()))
        self.wants = (group.layout, group.dtype, group.device, tuple(group.inputs), chosen, in_place)
        self.records: dict[int, _Record] = {}  # by the id of the first weight
        _caches.add(self)
        _watch_optimizers()

    def inputs(self, args: Sequence[Any], states: list[Tensor]) -> list[Tensor]:
        """What the graph takes in this call. states: the forward states of all weights of the graph, or none."""
        weights = [args[position] for position in self.positions]
        _trainings["calls"] += self.gives_amaxes
        is_captured = self.is_cuda and torch._C._cuda_isCurrentStreamCapturing()
        record = None if is_captured else self._record(weights, states)
        if record is None:
            return self._chosen(self._quantized(_by_operators, weights, self._rows(states))[0])
        key = self._key(record, weights, states)
        kept = record.kept_for(key)
        if kept is None:
            return self._renewed(record, key, weights, states)
        record.met_again = True
        kept.refresh(weights, self.gives_amaxes)
        kept.uses += 1
        return kept.inputs

    def remember(
        self,
        memory: Memory,
        args: tuple[Any, ...],
        states: Sequence[Tensor],
        are_found: Callable[[], bool],
        lacking: Sequence[int] = (),
    ) -> None:
        """Have ``memory`` remember this call, if its copies have been used as they were more than once.

        states: what :meth:`inputs` got first, and whatever else the graph takes before its copies. are_found: would a
        call find these states now? lacking: the states' numbers, if one has no scale yet.
        """
        if lacking and not self.group.layout.lasting:
            return  # what is launched for copies that do not last is another thing once scales are known
        weights = [args[position] for position in self.positions]
        record = self.records.get(id(weights[0]))
        kept = None if record is None else record.known[1]
        if record is None or kept is None or kept.uses < _USES:
            return
        copies = kept.repeated(self.gives_amaxes)
        if copies is None:
            return

        def is_still_so() -> bool:
            return record.kept_for(self._key(record, weights, states)) is kept and are_found()

        memory.remember(args, states, copies, record.calls, record.counter, is_still_so, lacking)

    # --- looking up ---

    def _key(self, record: _Record, weights: Sequence[Tensor], states: Sequence[Tensor]) -> Key:
        stream = torch._C._cuda_getCurrentRawStream(self.group.device.index) if self.is_cuda else 0
        state = id(states[0]) if states else 0
        changes = [*map(_version_of, weights), record.counter["steps"]]
        return changes, list(map(Tensor.data_ptr, weights)), state, stream

    def _record(self, weights: Sequence[Tensor], states: Sequence[Tensor]) -> _Record | None:
        """The record of these weights, a new one if need be; None if they are such whose changes cannot be seen."""
        first, ids = id(weights[0]), list(map(id, weights))
        record = self.records.get(first)
        if record is not None and record.ids == ids:
            return record
        if not all(map(_shows_its_changes, weights)):
            self.records.pop(first, None)
            return None
        of_these = (*self.wants, bool(states), *ids)
        record = _shared.get(of_these)
        if record is None:
            record = _shared[of_these] = _Record(weights)
        self.records[first] = record
        return record

    # --- making copies ---

    def _renewed(self, record: _Record, key: Key, weights: Sequence[Tensor], states: Sequence[Tensor]) -> list[Tensor]:
        """Quantise, and keep the copies if that promises to pay.

        Of one version all copies are cast by one scale, kept or not: a step's calls then mean the same, and so do those
        of a training that was saved and goes on where nobody has met a version twice yet.
        """
        again = record.known[0] == key
        keeps = self.group.layout.lasting or self.in_place or again or record.met_again
        record.met_again = again
        rows = self._rows_for(record, states)
        with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode serves nothing else
            if self.in_place and record.known[1] is not None:
                return self._remade(record, key, weights, states)
            record.known = None, None  # the memory of the old ones is free before there are new ones
            if not again:
                self._free_old_copies_elsewhere(weights[0])
            # What is padded lies elsewhere each time, and what is replayed knows its weights by their addresses.
            if again and record.scales is not None:
                outputs = self._quantized_again(weights, record.scales)
            else:
                make = copies_of if self.pads else record.make
                outputs, record.scales = self._quantized(make, weights, rows)
            cut_off = self._cuts_off(outputs, rows)
            if cut_off and self.gives_amaxes:
                rows = None
                outputs, record.scales = self._quantized(copies_of, weights, rows)
            inputs = self._chosen(outputs)
            kept = _Kept(outputs, inputs, self._refresher(outputs, weights, rows), states) if keeps else None
            if kept is not None:
                kept.cut_off = cut_off and not self.gives_amaxes
            record.known = key, kept
        return inputs

    def _remade(self, record: _Record, key: Key, weights: Sequence[Tensor], states: Sequence[Tensor]) -> list[Tensor]:
        """Quantise into the copies that there are."""
        known, kept = record.known
        assert kept is not None
        if known is None or known[1:] != key[1:]:  # other addresses
            kept.refresher, kept.states = self._refresher(kept.outputs, weights, self._rows(states)), states
        kept.refresh(weights, self.gives_amaxes, force=True)
        cut_off = self._cuts_off(kept.outputs, self._rows(states))
        kept.cut_off = cut_off and not self.gives_amaxes
        if cut_off and self.gives_amaxes:
            kept.refresher = self._refresher(kept.outputs, weights, None)
            kept.refresh(weights, self.gives_amaxes, force=True)
        for output in kept.outputs:
            torch.autograd.graph.increment_version(output)
        kept.uses = 0
        record.known = key, kept
        return kept.inputs

    def _refresher(self, outputs: Outputs, weights: Sequence[Tensor], rows: Sequence[Tensor] | None) -> Refresher:
        make = registry.function_of("refresh_weights", self.group.implementations["refresh_weights"])
        refresher: Refresher = make(self.group.layout, outputs, rows, weights)
        return refresher

    def _rows(self, states: Sequence[Tensor]) -> list[Tensor] | None:
        """The row of each matrix's weight, whose scale it is cast by: [1, 2 + L]. None: by one from its own amax."""
        return [states[owner][1:2] for owner in self.group.owners] if states else None

    def _rows_for(self, record: _Record, states: Sequence[Tensor]) -> list[Tensor] | None:
        """Those rows, which are the same until the states are others."""
        known, rows = record.rows
        if not states or list(map(id, known)) != list(map(id, states)):
            rows = self._rows(states) or []
            record.rows = list(states), rows
        return rows or None

    def _cuts_off(self, outputs: Outputs, rows: list[Tensor] | None) -> bool:
        """Do copies that last, cast by the scales of ``rows``, lack more of a weight than rounding takes?

        Where they are not cast anew for it, a warning says so, if it is more than what a step of an optimizer does.
        """
        if not rows or not self.group.layout.lasting:
            return False
        layout = self.group.layout
        reached = outputs[AMAX] * snapshot_reference(rows)
        times = float((reached / layout.most).nan_to_num(0.0, posinf=0.0).max())
        if times > OTHER_WEIGHTS and not self.gives_amaxes:
            warnings.warn(_CUT_OFF.format(times=times, weights=len(rows)), stacklevel=2)
        return times > ROUNDED_DOWN

    def _quantized(
        self, make: Callable[..., tuple[Tensor, ...]], weights: Sequence[Tensor], rows: list[Tensor] | None
    ) -> tuple[Outputs, Tensor | None]:
        """The copies, and the scales of ``rows`` that they were cast by."""
        layout, chosen = self.group.layout, self.group.implementations
        by = chosen["snapshot"], chosen["quantize_weights"]
        with torch.no_grad():
            codes, transposed, amax, scale_inv, *scales = make(layout.padded(weights), rows, *self._how(), *by)
        return (codes, transposed, amax, scale_inv), scales[0] if scales else None

    def _quantized_again(self, weights: Sequence[Tensor], scales: Tensor) -> Outputs:
        """The copies once more, by the scales of the first time, some of which may have been missing."""
        by = self.group.implementations["quantize_weights"]
        with torch.no_grad(), calibration.expected():
            outputs: Outputs = QUANTIZE_WEIGHTS(self.group.layout.padded(weights), scales, *self._how(), by)
        return outputs

    def _how(self) -> tuple[torch.dtype, list[bool], list[bool], str]:
        """What ``te::quantize_weights`` is told besides weights and scales."""
        layout = self.group.layout
        return layout.dtype, list(layout.rowwise), list(layout.columnwise), layout.rule.text()

    def _chosen(self, outputs: Outputs) -> list[Tensor]:
        return [outputs[i] for i in self.group.inputs]

    def _free_old_copies_elsewhere(self, weight: Tensor) -> None:
        """Other graphs (that of the evaluation, say) may keep copies of what these weights were before."""
        for copies in _listed(_caches.copy):
            record = copies.records.get(id(weight))
            if record is not None and not copies.in_place:
                known, kept = record.known
                if kept is not None and known is not None:
                    first, *_, steps = known[0]
                    if (first, steps) != (weight._version, record.counter["steps"]):
                        record.known = None, None


def _by_operators(matrices: list[Tensor], rows: list[Tensor] | None, *how: Any) -> tuple[Tensor, ...]:
    """The copies of :func:`copies_of`, by PyTorch's dispatcher, which knows of fake tensors and subclasses."""
    *quantize, snapshot, implementation = how
    scales = None if rows is None else SNAPSHOT(rows, snapshot)
    outputs: tuple[Tensor, ...] = QUANTIZE_WEIGHTS(matrices, scales, *quantize, implementation)
    return outputs


def _shows_its_changes(weight: Any) -> bool:
    """Has ``weight`` a version and an address to be known by?"""
    return type(weight) is Parameter and not weight.is_inference() and weight.data_ptr() != 0


@cache
def _watch_optimizers() -> None:
    """Count the steps of all optimizers from now on."""
    register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():  # what counts here would be compiled in; versions or samples show such a step
        return
    records = _listed(_shared.values)
    if records:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        stepped = {id(parameter) for parameter in parameters if parameter.requires_grad}
        for record in records:
            if not stepped.isdisjoint(record.ids):
                record.counter["steps"] += 1


def _listed(entries: Callable[[], Iterable[T]]) -> list[T]:
    """What ``entries()`` goes through, from the beginning again if another thread adds to it meanwhile."""
    while True:
        try:
            return list(entries())
        except RuntimeError as error:
            if "changed size during iteration" not in str(error):
                raise


def _once_gone(record: weakref.ref[_Record]) -> Callable[[object], None]:
    """What a dead weight has done with ``record``. When Python ends, weights may outlive what this module calls so."""
    forget, is_finalizing = _forget, sys.is_finalizing
    return lambda _: None if is_finalizing() else forget(record())


def _forget(record: _Record | None) -> None:
    """A weight is dead: drop its record before the id can be anyone else's."""
    if record is None:
        return
    for copies in _listed(_caches.copy):
        if copies.records.get(record.ids[0]) is record:
            del copies.records[record.ids[0]]
    for of_these, each in _listed(_shared.items):
        if each is record:
            _shared.pop(of_these, None)


def refresh_weights(model: nn.Module) -> None:
    """Quantise the weights of ``model`` anew when they are used next, whatever is known of their changes.

    For a change that neither autograd nor a look at samples of the weights shows: a few elements or rows that are
    written through ``weight.data``, or by code that knows addresses alone. Steps of optimizers, edits under
    ``torch.no_grad()`` and ``load_state_dict`` need no such call.
    """
    forget_copies(parameters_by_name(model).values())


def forget_copies(weights: Iterable[Tensor]) -> None:
    """:func:`refresh_weights` for these parameters."""
    ids = set(map(id, weights))
    for copies in _listed(_caches.copy):
        for record in list(copies.records.values()):
            if not ids.isdisjoint(record.ids):
                record.known = None, record.known[1] if copies.in_place else None
