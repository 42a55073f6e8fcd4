"""What a te:: operator does on a GPU, noted once for each kind of call and from then on done without asking again.

The code behind an operator finds out which implementation was chosen, how large each result is, which tile fits, which
compiled kernel that means and how the library wants to be called. All of it follows from the arguments' shapes,
strides, dtypes and options, a training step asks it hundreds of times, and each time takes the host tens of
microseconds. At small sizes the GPU waits for that, and at any size it does so at the start of a step, until the first
product is on its way.

So the second call of a kind is recorded: memory made, kernels launched, results. Later ones make such memory again and
launch the same kernels with this call's addresses. A kind of call is all that the code may ask: what is no tensor, and
of each tensor dtype, shape, strides and how its address is aligned, and whether a scale may still be missing.

What cannot be replayed runs as it always did: a call that does more than that (a copy of an operand that lies badly,
say), one that is captured into a CUDA graph, whose memory is made in other ways, and one that somebody watches.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from te_compile.kernels import buffers, player
from te_compile.kernels.launch import is_watched
from te_compile.kernels.recording import STREAM, Step, here
from te_compile.ops import calibration

MOST_KINDS = 1024  # of calls of one operator; beyond it all are forgotten, as shapes seem to be new each time
MOST_TRIES = 16  # calls of one place that could not be replayed, after which it no longer asks
_profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
_aten = torch.ops.aten
_LAUNCH_NOTHING = {  # and make no memory
    _aten.alias.default, _aten.as_strided.default, _aten.detach.default, _aten.select.int, _aten.slice.Tensor,
    _aten.promote_types.default, _aten.t.default, _aten.transpose.int, _aten.view.default, _aten.view.dtype,
}  # fmt: skip


class Tape:
    """The memory, the launches and the results of one kind of call, as Python plays them; player.py has it done faster.

    Tensors are known by their places among the call's own and then those made. ``kept``: what else is read, at
    addresses that stand among the arguments.
    """

    def __init__(
        self,
        makes: Sequence[Callable[[int, int], Tensor]],
        steps: Sequence[Step],
        results: int | list[int] | tuple[int, ...],
        kept: Sequence[Tensor] = (),
    ) -> None:
        self.makes, self.steps, self.results, self.kept = makes, steps, results, kept
        self.is_list = isinstance(results, list)

    def __call__(self, tensors: list[Tensor], addresses: list[int], device: int, stream: int) -> Any:
        """Do it for these tensors, all on ``device``, the current one, and at these addresses."""
        for make in self.makes:
            made = make(device, stream)
            tensors.append(made)
            addresses.append(made.data_ptr())
        addresses.append(stream)  # found at -1
        for function, template, places, _ in self.steps:
            arguments = template.copy()
            for place, tensor, offset in places:
                arguments[place] = addresses[tensor] + offset
            function(*arguments)
        if isinstance(self.results, int):
            return tensors[self.results]
        results = [tensors[result] for result in self.results]
        return results if self.is_list else tuple(results)


class _Recording(TorchDispatchMode):
    """Notes one call; a mode, because PyTorch's own operators are work as well."""

    def __init__(self, given: list[Tensor], by_address: bool, missing: bool) -> None:
        super().__init__()
        self.tensors = given.copy()  # alive until the end, so that identities mean something
        self.by_address, self.missing = by_address, missing
        self.makes: list[Callable[[int, int], Tensor]] = []
        self.steps: list[Step] = []
        self.kept: list[Tensor] = []
        self.tables: set[int] = set()  # by their addresses, which are part of no kind
        self.complete = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if here.recorder is self and func not in _LAUNCH_NOTHING:
            self.complete = False
        return func(*args, **(kwargs or {}))

    def made(self, tensor: Tensor, make: Callable[[int, int], Tensor]) -> None:
        self.tensors.append(tensor)
        self.makes.append(make)

    def found(self, table: Tensor) -> None:
        self.tables.add(table.data_ptr())
        self.kept.append(table)

    def called(self, function: Callable[..., Any], arguments: Sequence[Any], kernel: Any = None) -> None:
        template, places = list(arguments), []
        for place, argument in enumerate(arguments):
            if argument is STREAM:
                places.append((place, -1, 0))
            elif isinstance(argument, Tensor):
                found = self._find(argument)
                if found is not None:
                    places.append((place, *found))
                elif argument.data_ptr() in self.tables:
                    template[place] = argument.data_ptr()
                elif self.by_address:
                    template[place] = argument.data_ptr()
                    self.kept.append(argument)
                else:
                    self.complete = False
        for place, _, _ in places:
            template[place] = None
        self.steps.append(Step(function, template, places, kernel))

    def _find(self, tensor: Tensor) -> tuple[int, int] | None:
        """Which of the tensors this one is, or lies in, and how many bytes into it. None: neither, or not for sure."""
        for place, known in enumerate(self.tensors):
            if known is tensor:
                return place, 0
        storage = tensor.untyped_storage()._cdata
        within = [at for at, known in enumerate(self.tensors) if known.untyped_storage()._cdata == storage]
        if len(within) != 1:
            return None
        return within[0], tensor.data_ptr() - self.tensors[within[0]].data_ptr()

    def tape(self, results: Any) -> Callable[..., Any] | None:
        """What plays what was recorded, if that is all that the call did and ``results`` are memory that it made."""
        given = len(self.tensors) - len(self.makes)
        each = [results] if isinstance(results, Tensor) else results
        if not self.complete or not isinstance(each, (list, tuple)):
            return None
        places = []
        for result in each:
            place = next((at for at, known in enumerate(self.tensors) if known is result), -1)
            if place < given:
                return None
            places.append(place)
        shaped = places[0] if isinstance(results, Tensor) else places if isinstance(results, list) else tuple(places)
        return player.played(Tape(self.makes, self.steps, shaped, self.kept), given)


class Replayed:
    """A te:: operator's code, called as that is.

    by_address: its kernels read a table made of its tensors' addresses, and each address is part of a call's kind; or
    whether they do, told from a call's positional arguments.
    repeats: one tensor may stand in several of its places, none of which it writes to.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        by_address: bool | Callable[..., bool] = False,
        repeats: bool = False,
    ) -> None:
        self.name, self.function, self.by_address, self.repeats = name, function, by_address, repeats
        self.tapes: dict[tuple[Any, ...], Callable[..., Any] | None] = {}
        self.met: set[tuple[Any, ...]] = set()
        _operators.add(self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the operator."""
        if not _profiler_enabled():
            return self._run(arguments, named)
        with torch.profiler.record_function(f"te::{self.name}"):
            return self._run(arguments, named)

    def site(self, early: bool = False) -> Callable[..., Any]:
        """The operator for one place in generated code, where shapes are what they are. early: see :class:`Site`."""
        site = Site(self, early)
        return site if site.place is None else site.place

    def _run(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        tensors, addresses, form = self._read(arguments, named)
        device = _device_for_replays(tensors)
        if device >= 0:
            kind = self._kind(form, device)
            tape = self.tapes.get(kind)
            if tape is not None:
                return tape(tensors, addresses, device, torch._C._cuda_getCurrentRawStream(device))
            if kind not in self.tapes:
                return self._first(kind, arguments, named)
        return self.function(*arguments, **named)

    def _is_by_address(self, arguments: tuple[Any, ...]) -> bool:
        return self.by_address if isinstance(self.by_address, bool) else self.by_address(*arguments)

    def _address_bits(self, arguments: tuple[Any, ...]) -> int:
        return -1 if self._is_by_address(arguments) else 15

    def _read(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[list[Tensor], list[int], list[Any]]:
        """The tensors of a call, their addresses, and what its kind is told by."""
        tensors: list[Tensor] = []
        addresses: list[int] = []
        form: list[Any] = [*named]
        bits = self._address_bits(arguments)
        _read(arguments, tensors, addresses, form, bits)
        _read(named.values(), tensors, addresses, form, bits)
        return tensors, addresses, form

    @staticmethod
    def _kind(form: list[Any], device: int) -> tuple[Any, ...]:
        """What tells calls apart; its last part, whether a scale may be missing, another thread may change any time."""
        return (*form, device, calibration.pending())

    def may_be_replayed(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Is a call on these tensors replayed now, if those of its kind can be?"""
        tensors, _, _ = self._read(arguments, named)
        return _device_for_replays(tensors) >= 0

    def binding(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Binding | None:
        """How calls like this one are replayed, if they are."""
        tensors, addresses, form = self._read(arguments, named)
        device = _device_for_replays(tensors)
        kind = self._kind(form, device)
        tape = self.tapes.get(kind)
        if tape is None:
            return None
        bits = self._address_bits(arguments)
        alignments = tuple(address & bits for address in addresses)
        return Binding(tape, _paths(arguments, named), bits, alignments, device, pending=kind[-1])

    def _first(self, kind: tuple[Any, ...], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The first call of its kind, in which kernels are compiled and algorithms timed; the second is recorded."""
        if kind not in self.met:
            results = self.function(*arguments, **named)
            self.met.add(kind)
            return results
        if self.repeats:
            arguments = _told_apart(arguments, set())
        tensors, _, _ = self._read(arguments, named)
        if len(set(map(id, tensors))) < len(tensors):  # one in two roles: which is which would not show
            return self.function(*arguments, **named)
        recording = _Recording(tensors, self._is_by_address(arguments), missing=kind[-1])
        with recording:
            here.recorder = recording
            try:
                results = self.function(*arguments, **named)
            finally:
                here.recorder = None
        if len(self.tapes) >= MOST_KINDS:
            self.tapes.clear()
            self.met.clear()
        self.tapes[kind] = recording.tape(results)
        return results


_operators: weakref.WeakSet[Replayed] = weakref.WeakSet()


def forget() -> None:
    """Have all kinds of calls recorded anew: their code would do something else now. Places in generated code that are
    bound go on with what they have."""
    for operator in list(_operators):
        operator.tapes.clear()
        operator.met.clear()


@dataclass(frozen=True)
class Binding:
    """A tape and what must hold for it where shapes and options cannot change: where the call's tensors are among its
    arguments, the device, how their addresses are aligned, and whether a scale may be missing."""

    tape: Callable[..., Any]
    paths: tuple[tuple[int | str, int | None], ...]
    address_bits: int
    alignments: tuple[int, ...]
    device: int
    pending: bool


@dataclass(frozen=True)
class BoundCall:
    """A call of operator ``name`` at a place in generated code that is bound. tensors: in the order of its paths."""

    name: str
    place: Any
    tensors: list[Tensor]
    results: Any


Look = Callable[[BoundCall], bool]
"""Is shown a call, and says whether it wants to see more."""


class _LookedAt(threading.local):
    """Who looks at the calls of this thread (head_start.py)."""

    look: Look | None = None


looked_at = _LookedAt()
_looking = threading.Lock()


@contextmanager
def looking(look: Look) -> Iterator[None]:
    """In here ``look`` is shown the calls of this thread at places that may be played early, played by Python or not,
    for as long as it wants: who holds on to a call keeps its memory."""
    before, looked_at.look = looked_at.look, look
    with _looking:
        player.lookers["count"] += 1  # places leave every call to Python
    try:
        yield
    finally:
        looked_at.look = before
        with _looking:
            player.lookers["count"] -= 1


class Site:
    """An operator at one place in generated code whose shapes are constants, so that nobody asks for them again.

    ``place``: what the code calls instead if the C++ core does the replaying. ``early``: the call needs nothing but
    what the graph was given and what such calls made, and nothing that the code does before it gets here changes any
    of that, so the place shows itself to who may play it early.
    """

    def __init__(self, operator: Replayed, early: bool = False) -> None:
        self.operator, self.early = operator, early
        self.binding: Binding | None = None
        self.tries = 0  # in a row, without one
        self.place = player.place(self._unbound)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the operator."""
        binding = self.binding
        if binding is None or _profiler_enabled():
            return self._unbound(arguments, named)
        tensors = _tensors(arguments, named, binding.paths)
        addresses = [tensor.data_ptr() for tensor in tensors]
        bits, device = binding.address_bits, binding.device
        if (
            _device_for_replays(tensors) != device
            or calibration.pending() != binding.pending
            or tuple([address & bits for address in addresses]) != binding.alignments
        ):
            return self._unbound(arguments, named)
        return binding.tape(tensors, addresses, device, torch._C._cuda_getCurrentRawStream(device))

    def _unbound(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self.tries == MOST_TRIES:
            return self.operator.function(*arguments, **named)
        results = self.operator(*arguments, **named)
        self.binding = self.operator.binding(arguments, named)
        if self.binding is not None:
            self.tries = 0
        elif self.operator.may_be_replayed(arguments, named):  # else for a while: a profiler may look on
            self.tries += 1
        if self.place is not None:
            player.bind(self.place, self.binding, len(arguments), len(named))
            look = looked_at.look
            if self.early and self.binding is not None and look is not None:
                tensors = _tensors(arguments, named, self.binding.paths)
                if not look(BoundCall(self.operator.name, self.place, tensors, results)):
                    looked_at.look = None
        return results

    @property
    def bound(self) -> bool:
        """Is there something to play?"""
        return self.binding is not None


def _tensors(
    arguments: tuple[Any, ...], named: dict[str, Any], paths: Iterable[tuple[int | str, int | None]]
) -> list[Tensor]:
    """The tensors of a call that these paths lead to."""
    tensors = []
    for at, within in paths:
        argument = arguments[at] if isinstance(at, int) else named[at]
        tensors.append(argument if within is None else argument[within])
    return tensors


def _paths(arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[int | str, int | None], ...]:
    """Where the tensors of a call are, in the order in which they are read: argument, and place in a list of them."""
    paths: list[tuple[int | str, int | None]] = []
    places: list[tuple[int | str, Any]] = [*enumerate(arguments), *named.items()]
    for at, argument in places:
        if isinstance(argument, Tensor):
            paths.append((at, None))
        elif isinstance(argument, (list, tuple)):
            paths += [(at, within) for within, each in enumerate(argument) if isinstance(each, Tensor)]
    return tuple(paths)


def _told_apart(arguments: Iterable[Any], met: set[int]) -> Any:
    """The arguments, with an alias for each tensor that stands among them for another time."""
    apart: list[Any] = []
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            argument = _told_apart(argument, met)
        elif isinstance(argument, Tensor):
            argument = argument if id(argument) not in met else argument.detach()
            met.add(id(argument))
        apart.append(argument)
    return apart if isinstance(arguments, list) else tuple(apart)


def _read(
    arguments: Iterable[Any], tensors: list[Tensor], addresses: list[int], form: list[Any], address_bits: int
) -> None:
    """Add all tensors among ``arguments`` to ``tensors``, and to ``form`` all that a call's kind is told by."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            address = argument.data_ptr()
            tensors.append(argument)
            addresses.append(address)
            form += (argument.dtype, argument.shape, argument.stride(), address & address_bits)
        elif isinstance(argument, (list, tuple)):
            form.append(len(argument))
            _read(argument, tensors, addresses, form, address_bits)
        else:
            form.append(argument)


def _device_for_replays(tensors: list[Tensor]) -> int:
    """The index of the device of ``tensors`` if work on them can be replayed now, else -1."""
    if not tensors or not tensors[0].is_cuda or not buffers.lends() or is_watched():
        return -1
    device = tensors[0].get_device()
    current = device == torch._C._cuda_getDevice() and not torch._C._cuda_isCurrentStreamCapturing()
    return device if current else -1
