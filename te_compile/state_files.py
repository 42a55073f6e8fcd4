"""FP8 state to and from files, as plain fp32 tensors by the model's own parameter names, in safetensors:

    te_compile.save_state(model, "fp8.safetensors")
    te_compile.load_state(model, "fp8.safetensors")     # before or after the first compiled call

A state is two entries, ``<parameter name>.forward`` and ``<parameter name>.backward`` (state.py says what they hold).
A gradient's scale is always written as one for E5M2, so that a training may go on with another format.
Loading checks everything before it changes anything, and an error names every entry that does not fit.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from te_compile import __version__
from te_compile.ops.scaling import HISTORY
from te_compile.parameter_names import parameters_by_name
from te_compile.state import (
    BACKWARD_ROWS,
    FORWARD_ROWS,
    GRADIENT_MAX,
    StateError,
    drop_unused,
    overwrite,
    states_by_name,
    states_of,
)
from te_compile.weight_cache import forget_copies

FILE_FORMAT = "te_compile.state"
FILE_VERSION = "1"
_ENTRY = re.compile(r"(?P<name>.*)\.(?P<direction>forward|backward)(?P<suffix>(\.\d+)?)")
_ROWS = {"forward": FORWARD_ROWS, "backward": BACKWARD_ROWS}
MOST_PROBLEMS_SHOWN = 20


def state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Copies on the CPU of all FP8 state of ``model``: ``<parameter name>.forward`` and ``<parameter name>.backward``.

    model: the model, what ``torch.compile`` made of it, or a part of it. It is empty before the first compiled call and
    with recipes that keep no state.
    """
    entries: dict[str, Tensor] = {}
    with torch.inference_mode(False), torch.no_grad():
        for name, suffix, state in states_by_name(model):
            entries[f"{name}.forward{suffix}"] = state.forward.to("cpu", copy=True)
            entries[f"{name}.backward{suffix}"] = state.backward_for(GRADIENT_MAX).to("cpu", copy=True)
    if not entries:
        _require_whole(model, parameters_by_name(model).values())
    return entries


def load_state_dict(model: nn.Module, tensors: Mapping[str, Tensor], strict: bool = True) -> None:
    """Give ``model`` the state that :func:`state_dict` returned: all of it or, with a :class:`StateError`, none.

    strict: every state of the model must be in ``tensors`` and every entry must name a parameter of the model; without
    it what is missing stays as it is. A wrong shape, type or value is an error either way. Raises TypeError for another
    ``strict`` than a bool.
    """
    if not isinstance(tensors, Mapping):
        kind = type(tensors).__name__
        raise StateError(f"the FP8 state is of type {kind}, must be what te_compile.state_dict returns")
    if not isinstance(strict, bool):
        raise TypeError(f"strict={strict!r}: must be True or False")
    pairs, problems = _paired(tensors)
    placed, unplaced = _placed(model, pairs)
    _require_whole(model, [pair.parameter for pair in placed])
    problems += [f"unexpected entry {entry!r}: the model has no such parameter" for entry in unplaced if strict]
    problems += [f"missing entry {entry!r}" for entry in _not_covered(model, placed) if strict]
    problems += _conflicts(placed)
    problems += [f"parameter {name!r} is on the meta device: load its weights first" for name in _without_data(placed)]
    if problems:
        hidden = len(problems) - MOST_PROBLEMS_SHOWN
        shown = problems[:MOST_PROBLEMS_SHOWN] + ([f"and {hidden} more"] if hidden > 0 else [])
        raise StateError("the FP8 state does not fit the model, nothing was loaded:\n  " + "\n  ".join(shown))
    for pair in placed:
        drop_unused(pair.parameter)
    for pair in placed:
        overwrite(pair.parameter, pair.forward, pair.backward)
    forget_copies(pair.parameter for pair in placed)  # they were cast by the scales from before


def _require_whole(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Raise where FSDP has put shards in the place of ``parameters``: state is that of the whole ones, which ran."""
    is_sharded = any(base.__name__ == "FSDPModule" for each in model.modules() for base in type(each).__mro__)
    if is_sharded and any(hasattr(each, "device_mesh") and not states_of(each) for each in parameters):
        raise StateError(
            "the parameters are FSDP's shards, and FP8 state is that of the whole ones: call unshard() on every "
            "FSDPModule before, on all ranks, and reshard() after"
        )


@dataclass
class _Pair:
    """Both entries of one state, and where they go."""

    forward_name: str
    backward_name: str
    forward: Tensor
    backward: Tensor
    parameter: nn.Parameter = field(init=False)

    @property
    def history_length(self) -> int:
        return self.forward.shape[1] - HISTORY


def _paired(tensors: Mapping[str, Tensor]) -> tuple[dict[tuple[str, str], _Pair], list[str]]:
    """(parameter name, suffix) → the forward and backward entry; and what is wrong with entries on their own."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    problems = []
    for entry, tensor in tensors.items():
        match = _ENTRY.fullmatch(entry) if isinstance(entry, str) else None
        if match is None:
            problems.append(f"entry {entry!r} is not named <parameter>.forward or <parameter>.backward")
        elif fault := _fault_of(tensor, _ROWS[match["direction"]]):
            problems.append(f"entry {entry!r} {fault}")
        else:
            found.setdefault((match["name"], match["suffix"]), {})[match["direction"]] = entry
    pairs = {}
    for (name, suffix), entries in found.items():
        alone = [direction for direction in _ROWS if direction not in entries]
        other = [f"{name}.{direction}{suffix}" for direction in alone]
        if alone:
            problems += [f"missing entry {entry!r}" for entry in other if entry not in tensors]
            continue
        pair = _Pair(entries["forward"], entries["backward"], tensors[entries["forward"]], tensors[entries["backward"]])
        if pair.forward.shape[1] != pair.backward.shape[1]:
            problems.append(f"entries {pair.forward_name!r} and {pair.backward_name!r} differ in history length")
        pairs[name, suffix] = pair
    return pairs, problems


def _fault_of(tensor: object, rows: int) -> str:
    """Why ``tensor`` cannot be a state of so many rows, or nothing."""
    if not isinstance(tensor, Tensor):
        return f"is of type {type(tensor).__name__}, must be a tensor"
    if tensor.dtype != torch.float32:
        return f"has type {tensor.dtype}, must be torch.float32"
    if tensor.dim() != 2 or tensor.shape[0] != rows or tensor.shape[1] <= HISTORY:
        return f"has shape {list(tensor.shape)}, must be [{rows}, {HISTORY} + history length]"
    if not (tensor.isfinite() & (tensor >= 0)).all():
        return "holds a negative or non-finite number, which no scale, count or amax is"
    return ""


def _placed(model: nn.Module, pairs: Mapping[tuple[str, str], _Pair]) -> tuple[list[_Pair], list[str]]:
    """The pairs whose parameter the model has, each told its parameter; and the entries of the others."""
    parameters = parameters_by_name(model, every_alias=True)
    placed, unplaced = [], []
    for (name, _), pair in pairs.items():
        if name in parameters:
            pair.parameter = parameters[name]
            placed.append(pair)
        else:
            unplaced += [pair.forward_name, pair.backward_name]
    return placed, unplaced


def _without_data(placed: list[_Pair]) -> list[str]:
    """The names of parameters that have no memory yet. What gives them some makes new ones, and state is that of one
    parameter."""
    names = (pair.forward_name.rpartition(".forward")[0] for pair in placed if pair.parameter.is_meta)
    return list(dict.fromkeys(names))


def _not_covered(model: nn.Module, placed: list[_Pair]) -> list[str]:
    """The entries that the model's live states would have had and that no pair names."""
    covered = {(id(pair.parameter), pair.history_length) for pair in placed}
    parameters, missing = parameters_by_name(model), []
    for name, suffix, state in states_by_name(model):
        if (id(parameters[name]), state.history_length) not in covered and not state.only_loaded:
            missing += [f"{name}.forward{suffix}", f"{name}.backward{suffix}"]
    return missing


def _conflicts(placed: list[_Pair]) -> list[str]:
    """Where pairs do not fit the states that exist, or each other."""
    conflicts = []
    seen: dict[tuple[int, int], _Pair] = {}
    for pair in placed:
        by_length = states_of(pair.parameter)
        used = [length for length, state in by_length.items() if not state.only_loaded]
        if used and pair.history_length not in used:
            expected = " or ".join(str([FORWARD_ROWS, HISTORY + length]) for length in used)
            conflicts.append(
                f"entry {pair.forward_name!r} has shape {list(pair.forward.shape)}, the model's is {expected}: "
                f"amax_history_len is {pair.history_length} there and {' or '.join(map(str, used))} here"
            )
        first = seen.setdefault((id(pair.parameter), pair.history_length), pair)
        if first is not pair:
            conflicts.append(f"entries {first.forward_name!r} and {pair.forward_name!r} are for one tied parameter")
    return conflicts


def save_state(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write :func:`state_dict` to a safetensors file; a file that is there already is replaced whole or not at all.

    Raises OSError where no file of that name can be written.
    """
    tensors = state_dict(model)
    lengths = sorted({tensor.shape[1] - HISTORY for tensor in tensors.values()})
    metadata = {
        "format": FILE_FORMAT,
        "format_version": FILE_VERSION,
        "te_compile_version": __version__,  # for people who look into a file
        "history_length": ",".join(map(str, lengths)),
    }
    path = _path_of(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "this is a directory, and the FP8 state is saved in a file", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such directory to save the FP8 state in", str(path.parent))
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(safetensors_bytes(tensors, metadata))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def load_state(model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> None:
    """:func:`load_state_dict` from a file that :func:`save_state` wrote. Errors name the file and what it holds."""
    tensors = _read_file(_path_of(path))
    try:
        load_state_dict(model, tensors, strict)
    except StateError as error:
        raise StateError(f"{path}: {error}") from None


def _path_of(path: object) -> Path:
    """``path``, if it can be that of a file."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path is of type {type(path).__name__}, must be a str or an os.PathLike: a file of FP8 state")
    if not Path(path).name:
        raise ValueError(f"path is {str(path)!r}, must name a file of FP8 state")
    return Path(path)


def _read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a state file."""
    if path.is_dir():
        raise StateError(f"{path}: found a directory, expected a file that te_compile.save_state wrote")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = file.keys()
            tensors = {name: file.get_tensor(name).clone() for name in names}
    except SafetensorError as error:
        raise StateError(f"{path}: found {_contents_of(path)}, expected a whole safetensors file ({error})") from None
    kind, version = metadata.get("format"), metadata.get("format_version")
    if kind != FILE_FORMAT:
        raise StateError(
            f"{path}: found a safetensors file of {len(tensors)} tensors with format={kind!r}, "
            f"expected format={FILE_FORMAT!r}, which te_compile.save_state writes"
        )
    if version != FILE_VERSION:
        raise StateError(
            f"{path}: found version {version!r} of the format, written by te_compile "
            f"{metadata.get('te_compile_version')}; this te_compile {__version__} reads version {FILE_VERSION!r}"
        )
    return tensors


def _contents_of(path: Path) -> str:
    """What a file that is not safetensors looks like."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"PK\x03\x04":
        return f"a zip archive of {size} bytes, as torch.save writes them"
    return f"{size} bytes, the file is truncated or foreign" if size else "an empty file"
