"""Which tiles were the fastest, kept on disk: a later process takes the same, and does not time them again.

One file for each kind of device and version of Triton, in Inductor's cache directory, a line of JSON for each kind of
work. Only who asks for timed tiles reads it (passes/time_tiles.py). A line that is no choice, or names a tile that a
launcher does not offer any more, is passed over, and of several lines for one kind the last one counts; deleting the
file has everything timed anew. Processes that run at once append to it, and may take different tiles, for that changes
no result.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import cache_dir

from te_compile.kernels.gemm_choices import device_parts
from te_compile.kernels.tiles import Question, Tile, chosen

LOG = logging.getLogger("te_compile")
FORMAT = 1  # of the file; also to be raised where kernels change so much that old times say nothing of them
_loaded: set[int] = set()


def path_for(device: int) -> Path:
    """The file for launches on this CUDA device."""
    import triton

    name = "_".join((f"tile_choices_v{FORMAT}", *device_parts(device), f"triton{triton.__version__}.jsonl"))
    return Path(cache_dir()) / "te_compile" / name


def load(device: int) -> None:
    """Have launchers take what is kept for this device; reads its file once."""
    if device in _loaded:
        return
    _loaded.add(device)
    try:
        kept = dict(_kept(path_for(device)))  # of several for one kind the last: launchers offered no earlier one
    except (OSError, ImportError) as error:  # there is no such folder, or no Triton
        LOG.info("which tiles are the fastest is not read: %s", error)
        return
    for kind, tile in kept.items():
        chosen.setdefault((device, kind), tile)
    if kept:
        _have_them_taken()


def keep(question: Question, tile: Tile, microseconds: dict[Tile, float]) -> None:
    """From now on launchers take ``tile`` for this kind of work, here and in later processes. ``microseconds``: what
    was measured, for who reads the file."""
    chosen[question.device, question.kind] = tile
    _have_them_taken()
    line = {
        "kind": question.kind,
        "tile": _numbers(tile),
        "microseconds": round(microseconds[tile], 2),
        "own": round(microseconds[question.tiles[0]], 2),
    }
    try:
        path = path_for(question.device)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:  # at once: another process may append as well
            file.write(f"{json.dumps(line)}\n".encode())
    except OSError as error:
        LOG.info("which tiles are the fastest is not kept for later processes: %s", error)


def described(devices: int) -> str:
    """What is kept for the first so many devices of this machine, for people."""
    try:
        paths = {path_for(device): None for device in range(devices)}
    except OSError as error:
        return str(error)
    return "; ".join(f"{len(dict(_kept(path)))} in {path}" for path in paths)


def _have_them_taken() -> None:
    """Calls that are replayed look at no choice, so they are recorded anew."""
    from te_compile.kernels import replay

    replay.forget()


def _numbers(tile: Tile) -> list[int | None]:
    return [tile.rows, tile.columns, tile.warps, tile.registers]


def _kept(path: Path) -> Iterator[tuple[str, Tile]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            read = json.loads(line)
            rows, columns, warps, registers = read["tile"]
            if any(type(number) is not int for number in (rows, columns, warps, registers or 0)):
                raise TypeError("Triton takes no 64.0 for 64")
            yield str(read["kind"]), Tile(rows, columns, warps, registers)
        except (ValueError, TypeError, KeyError, RecursionError):
            LOG.info("no choice of a tile: %.80s in %s", line, path)
