"""Small integer tables on the device that multi-tensor kernels read: addresses of tensors, shapes, tile maps.

One launch over hundreds of tensors needs their addresses in device memory. They hardly ever change, so a table is
copied once and then found by its contents; steady state costs a dictionary lookup and no copy.

CUDA graphs: a graph that was captured reads the very table it saw, so that table is kept for good. A table that is new
during capture (a graph's own intermediate has a new address) is filled by a copy that is captured too, from pinned
memory that is set aside beforehand, because neither pinning nor a plain copy is allowed while capturing. Before it
captures, torch.compile runs a function once with this thread's allocations going to the graph's private pool, where
nothing may outlive the run; a table is therefore allocated by a thread of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from te_compile.kernels.recording import here

ENTRIES = 256  # tables kept; one costs 8 bytes a tensor
STAGING = 1 << 17  # int64 elements of pinned memory for tables that are new during a capture: 1 MiB

_tables: OrderedDict[tuple[Hashable, torch.device], Tensor] = OrderedDict()
_captured: dict[int, Tensor] = {}
_staging: dict[str, Tensor] = {}


def device_table(key: Hashable, build: Callable[[], Tensor], device: torch.device) -> Tensor:
    """The tensor that ``build`` makes on the CPU, on ``device``; ``key`` must tell apart all different contents."""
    if here.rehearsal is not None:
        return _fake_table(build, device)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    table = _tables.get((key, device))
    if table is None:
        return _capture_table(build(), device) if capturing else _add_table(key, build(), device)
    with suppress(KeyError):  # another thread may have dropped it
        _tables.move_to_end((key, device))
    if capturing:
        _captured[id(table)] = table
    return table


def table_of_shapes(key: Hashable, build: Callable[[], Tensor], device: torch.device) -> Tensor:
    """:func:`device_table`, for what follows from shapes alone: calls of these shapes that are replayed (replay.py)
    read the very table, for good."""
    table = device_table(key, build, device)
    if here.recorder is not None:
        here.recorder.found(table)
    return table


def address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [n]: these addresses."""
    return device_table(addresses, lambda: torch.tensor(addresses, dtype=torch.int64, device="cpu"), device)


def _fake_table(build: Callable[[], Tensor], device: torch.device) -> Tensor:
    """What stands for the table while no kernel is launched. Built in earnest, for what else is made on the way may be
    kept for later calls."""
    with unset_fake_temporarily():
        contents = build()
    return torch.empty(contents.shape, dtype=contents.dtype, device=device)


def _add_table(key: Hashable, contents: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and "remaining" not in _staging:
        _staging["remaining"] = torch.empty(STAGING, dtype=torch.int64, device="cpu", pin_memory=True)
    with ThreadPoolExecutor(max_workers=1) as outside:  # rare: once for each table
        table = outside.submit(_copied_to, device, contents).result()
    _tables[key, device] = table
    if len(_tables) > ENTRIES:
        _tables.popitem(last=False)
    return table


def _copied_to(device: torch.device, contents: Tensor) -> Tensor:
    """``contents`` on ``device``, the copy done, so that any stream may read it at once."""
    table = contents.to(device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return table


def _capture_table(contents: Tensor, device: torch.device) -> Tensor:
    """A table that each replay of the graph being captured fills anew; it holds nothing until then, so no one else may
    find it. Its pinned source is never handed out twice."""
    remaining = _staging.get("remaining")
    wanted = (contents.numel() * contents.element_size() + 7) // 8
    if remaining is None or remaining.numel() < wanted:
        raise RuntimeError(
            "a CUDA graph is being captured and needs a new table of tensor addresses, for which no pinned memory is "
            "left: run the compiled function once on the same tensors before capturing it"
        )
    source = remaining[:wanted].view(contents.dtype)[: contents.numel()].view(contents.shape)
    _staging["remaining"] = remaining[wanted:]
    _captured[id(source)] = source.copy_(contents)
    return torch.empty_like(contents, device=device).copy_(source, non_blocking=True)
