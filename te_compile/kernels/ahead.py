"""Triton kernels compiled before their first launch, several at a time, by Inductor's compile workers.

Triton compiles a kernel when it is first launched, and a training step launches some thirty that are new, one after the
other, while all cores but one do nothing. Which they will be is known as soon as the graph is: passes/rehearse.py finds
out. So they are ordered then, and compiled while Inductor is still busy with the rest of the graph. The first launch
waits for its order, if need be, and finds the kernel in Triton's cache on disk.

Nothing depends on it. A kernel that was not ordered, or was ordered with other arguments than it gets, or whose worker
failed is compiled when it is launched.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_compile.kernels.recording import address_of

LOG = logging.getLogger("te_compile")
PATIENCE = 60.0  # seconds for which a launch waits for its order; workers may be busy with Inductor's own
Form = tuple[Any, ...]


@dataclass
class Statistics:
    """Of this process so far: kernels ordered, found when they were launched, ordered in vain as the launch wanted
    something else; and the seconds that launches waited."""

    ordered: int = 0
    found: int = 0
    missed: int = 0
    waited: float = 0.0


@dataclass(frozen=True)
class Launch:
    """A launch that will be made, as ``compile_worker.Order`` describes it: of ``kernel`` on the device ``device``."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    device: int
    form: Form


statistics = Statistics()
_orders: dict[Form, Any] = {}  # futures of answers, until the first launch
_known: set[Form] = set()  # all that were ever ordered


def _forget() -> None:
    _orders.clear()
    _known.clear()


if hasattr(os, "register_at_fork"):  # a forked child never hears from its parent's workers
    os.register_at_fork(after_in_child=_forget)


def form_of(kernel: Any, arguments: Sequence[Any], constants: dict[str, Any]) -> tuple[Form, int]:
    """What Triton tells launches apart by, and the device that they are on."""
    forms: list[Any] = []
    device = 0
    for parameter, argument in zip(kernel.params, arguments, strict=False):
        if isinstance(argument, Tensor):
            device = argument.get_device()
            aligned = parameter.do_not_specialize_on_alignment or address_of(argument) & 15 == 0
            forms.append((argument.dtype, aligned))
        elif isinstance(argument, int):
            forms.append((argument == 1, argument & 15 == 0, -0x80000000 <= argument < 0x80000000))
        else:
            forms.append(type(argument))
    return (id(kernel), device, tuple(constants.items()), *forms), device


def rehearsed(kernel: Any, arguments: Sequence[Any], constants: dict[str, Any]) -> Launch:
    """A launch that a rehearsal is told of. Its tensors are forgotten."""
    form, device = form_of(kernel, arguments, constants)
    return Launch(kernel, tuple(map(_described, arguments)), constants, device, form)


class Notes:
    """The launches of a rehearsal. ``missing``: of one in which scales may be missing."""

    def __init__(self, missing: bool) -> None:
        self.missing, self.launches = missing, list[Launch]()

    def launched(self, kernel: Any, arguments: Sequence[Any], constants: dict[str, Any]) -> None:
        """See :class:`te_compile.kernels.recording.Rehearsal`."""
        self.launches.append(rehearsed(kernel, arguments, constants))


def _described(argument: Any) -> Any:
    from te_compile.kernels.compile_worker import Pointer

    return Pointer(argument.dtype, address_of(argument) & 15 == 0) if isinstance(argument, Tensor) else argument


def is_possible() -> bool:
    """Are there workers to compile ahead, and is what they compile looked for?"""
    from torch._inductor.async_compile import get_compile_threads

    if get_compile_threads() <= 1 or torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return False
    from triton import knobs

    return not (knobs.runtime.interpret or knobs.compilation.always_compile)


def compile_ahead(launches: Iterable[Launch]) -> int:
    """Order the kernels of these launches, as far as nobody has yet; returns how many are new. Never raises."""
    try:
        new = {launch.form: launch for launch in launches if launch.form not in _known}
        if new and is_possible():
            return _order(new.values())
    except Exception as error:  # whatever it is, kernels can still be compiled when they are launched
        LOG.warning("no kernels are compiled ahead: %r", error)
    return 0


def _order(launches: Iterable[Launch]) -> int:
    from torch._inductor.async_compile import AsyncCompile

    from te_compile.kernels import compile_worker

    AsyncCompile.use_process_pool()  # so that Inductor hears that its workers are ready before they turn to ours
    pool = AsyncCompile.process_pool()
    if not statistics.ordered:
        pool.submit(compile_worker.fill_driver, compile_worker.triton_environment())
    count = 0
    for launch in launches:
        capability = torch.cuda.get_device_capability(launch.device)
        order = compile_worker.Order(
            launch.kernel.fn.__module__,
            launch.kernel.fn.__code__.co_filename,
            launch.kernel.fn.__name__,
            launch.arguments,
            launch.constants,
            capability,
            compile_worker.environment_for(capability),
        )
        _orders[launch.form] = pool.submit(compile_worker.fill, order)
        _known.add(launch.form)
        statistics.ordered += 1
        count += 1
    return count


def awaited(kernel: Any, arguments: Sequence[Any], constants: dict[str, Any]) -> str | None:
    """Wait for the order of a kernel that is about to be launched. Returns the hash under which Triton's cache has it;
    None if nobody ordered it or it could not be compiled."""
    if not _orders:
        return None
    future = _orders.pop(form_of(kernel, arguments, constants)[0], None)
    if future is None:
        return None
    start = time.perf_counter()
    try:
        answer = future.result(timeout=PATIENCE)
    except Exception as error:
        LOG.warning("%s was not compiled ahead: %r", kernel.fn.__name__, error)
        return None
    finally:
        statistics.waited += time.perf_counter() - start
    if answer.complaint:
        LOG.info("the launcher of %s was not built ahead: %s", kernel.fn.__name__, answer.complaint)
    found: str = answer.hash
    return found


def note_use(expected: str | None, compiled: Any) -> None:
    """Count whether what was compiled ahead, under the hash ``expected``, is what a launch runs."""
    if expected is not None:
        found = expected == compiled.hash
        statistics.found += found
        statistics.missed += not found
        if not found:
            LOG.info("%s was compiled ahead in another form", compiled.name)
