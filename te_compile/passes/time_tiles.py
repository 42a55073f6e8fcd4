"""Time which tiles a graph's producers are fastest with, where the user asks for kernels to be timed.

``mode="max-autotune"``, or Inductor's options ``max_autotune`` and ``max_autotune_pointwise``, have Inductor time forms
of the kernels that it writes; here the same words have ours timed. Of each kind of call of the graph the launcher names
the tiles that it could take (kernels/tiles.py); kernels with all of these are compiled, by workers where there are any,
and run on random numbers of the shapes and strides that the call will get. What is found is kept on disk
(kernels/tile_choices.py), so that it is found once. It changes no graph and no result, only time.

Calls whose shapes are not known when the graph is compiled keep their launchers' own tiles, and so does all that is
timed without success: on a device without the memory, say.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config
from torch.fx import Graph
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from te_compile.kernels import ahead, tile_choices, tiles
from te_compile.kernels.ahead import Notes
from te_compile.kernels.tiles import Question, Tile
from te_compile.ops import calibration
from te_compile.passes.rehearse import Call, calls_of, rehearse_call

LOG = logging.getLogger("te_compile")
GAIN = 0.98
"""Of the time with the launcher's own tile, that another must not exceed: less is noise."""
ROUNDS = 2  # of all tiles, of which the better counts: the first of a device that was idle is slower than the next
TURNS = 12  # of one tile in a round, of which the median counts
HEAD_START = 1_000_000  # cycles, some half a millisecond: the host needs less to launch a call
ALIGNMENT = 128  # elements: where in its storage a tensor starts matters up to this

Asked = tuple[Call, Question]


def is_asked_for(inductor: Mapping[str, Any]) -> bool:
    """Do these options of Inductor, or its configuration, ask for kernels to be timed?"""
    return any(inductor.get(name, getattr(config, name)) for name in ("max_autotune", "max_autotune_pointwise"))


def time_tiles(graph: Graph) -> int:
    """Have launchers take the fastest tiles for what ``graph`` calls; returns how many kinds of work were timed."""
    asked = {(question.device, question.kind): (call, question) for call, question in _asked(graph)}
    if not asked:
        return 0
    _compile_ahead(list(asked.values()))
    try:
        return sum(_time(*each) for each in asked.values())
    finally:
        torch.cuda.empty_cache()  # the model may need all there is


def _asked(graph: Graph) -> Iterator[Asked]:
    """What launchers ask that nobody has answered yet."""
    for call in calls_of(graph):
        with tiles.trying() as trial:
            rehearse_call(Notes(missing=False), call)
        question = trial.asked
        if question is None or question.device < 0:
            continue
        tile_choices.load(question.device)
        if len(question.tiles) > 1 and tiles.chosen.get((question.device, question.kind)) not in question.tiles:
            yield call, question


def _compile_ahead(asked: list[Asked]) -> None:
    """Order the kernels with all tiles."""
    notes = Notes(missing=False)
    for call, question in asked:
        for tile in question.tiles:
            with tiles.trying(tile):
                rehearse_call(notes, call)
    ahead.compile_ahead(notes.launches)


def _time(call: Call, question: Question) -> bool:
    """Keep which tile this call is fastest with; False if that could not be found out."""
    own = question.tiles[0]
    try:
        microseconds = _microseconds(call, question)
    except Exception as error:  # the device has no memory left for it, as a rule
        LOG.warning("%s keeps its own tile, as others could not be timed: %r", call.name, error)
        return False
    fastest = min(microseconds, key=microseconds.__getitem__)
    best = fastest if microseconds[fastest] <= GAIN * microseconds[own] else own
    tile_choices.keep(question, best, microseconds)
    LOG.info("%s: %s, of %s", call.name, best, {tile: round(time, 1) for tile, time in microseconds.items()})
    return True


def _microseconds(call: Call, question: Question) -> dict[Tile, float]:
    """What the call takes on the device with each of the tiles that it has room for."""
    device = torch.device("cuda", question.device)
    own, times = question.tiles[0], dict[Tile, float]()
    with _disable_current_modes(), torch.no_grad(), torch.cuda.device(device), calibration.as_in_later_steps():
        real = pytree.tree_map_only(Tensor, partial(_like, torch.Generator(device)), call.arguments)
        work = partial(call.function, **real)
        for tile in question.tiles * ROUNDS:
            try:
                times[tile] = min(times.get(tile, math.inf), _measure(work, tile))
            except Exception as error:
                if tile == own:
                    raise
                LOG.info("%s does not run with %s: %r", call.name, tile, error)
    return times


def _measure(work: Callable[[], Any], tile: Tile) -> float:
    """Microseconds on the device with this tile, and an L2 that knows nothing of the operands.

    A call is short beside what it costs the host to launch it. So the device has something else to do until that is
    done: to write over its L2, and to wait.
    """
    device = torch.cuda.current_device()
    turns = []
    with tiles.trying(tile):
        work()  # compiles
        other = torch.empty(
            2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device="cuda"
        )
        for _ in range(TURNS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            other.zero_()
            torch.cuda._sleep(HEAD_START)
            start.record()
            work()
            end.record()
            turns.append((start, end))
    torch.cuda.synchronize(device)
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in turns)


def _like(generator: torch.Generator, fake: Tensor) -> Tensor:
    """A tensor as the fake one says, of random numbers, or of ones where it is a single one: a scale."""
    size, strides, offset = fake.shape, fake.stride(), int(fake.storage_offset()) % ALIGNMENT
    reach = offset + 1 + sum((length - 1) * stride for length, stride in zip(size, strides, strict=True))
    memory = torch.empty(reach if fake.numel() else offset, dtype=fake.dtype, device=generator.device)
    if not fake.dim():
        memory.fill_(1)
    elif fake.dtype in (torch.float32, torch.bfloat16, torch.float16):
        memory.normal_(generator=generator)
    else:
        memory.view(torch.uint8).zero_()
    return memory.as_strided(size, strides, offset)
