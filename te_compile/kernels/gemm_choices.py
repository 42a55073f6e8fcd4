"""Which algorithms products take, kept on disk: a later process takes the same, and does not time them again.

The C++ core keeps what it chose in a file (csrc/core/shared_choices.hpp). Here is which file: one for each kind of
device and version of cuBLASLt, in Inductor's cache directory beside our generated kernels. Processes that run at once,
one on each GPU of a machine, say, share it and come to the same choices. A choice takes some 210 bytes, and the file
never more than 1 MiB. Deleting it has everything timed anew.

``TE_COMPILE_GEMM_CACHE=0`` turns it off: each process then times for itself and may find another algorithm the fastest.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from pathlib import Path

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from te_compile.kernels import native

LOG = logging.getLogger("te_compile")
_seen: set[int] = set()  # devices that need no more looking after


def is_on() -> bool:
    """Are choices kept?"""
    text = os.environ.get("TE_COMPILE_GEMM_CACHE", "1")
    if text not in ("0", "1"):
        raise ValueError(f"TE_COMPILE_GEMM_CACHE={text!r}: must be 0 or 1")
    return text == "1"


@functools.cache
def path_for(device: int) -> Path:
    """The file for the products of this CUDA device."""
    core = native.module()
    parts = (f"gemm_choices_v{core.CHOICES_FORMAT}", *device_parts(device), f"cublaslt{core.cublaslt_version()}.txt")
    return Path(cache_dir()) / "te_compile" / "_".join(parts)


def device_parts(device: int) -> tuple[str, ...]:
    """What tells kinds of devices apart, for names of files."""
    properties = torch.cuda.get_device_properties(device)
    return (
        re.sub(r"[^A-Za-z0-9]+", "-", properties.name).strip("-"),
        f"sm{properties.major}{properties.minor}",
        f"{properties.multi_processor_count}",  # of which a part of a device (MIG) has fewer
    )


def keep(device: int) -> None:
    """From its first call on the core keeps its choices for ``device``, unless that is turned off."""
    if device in _seen:
        return
    if is_on():
        try:
            path = path_for(device)
            native.module().cublaslt_keep_choices(device, str(path))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:  # one that can be read and not written serves as well
            LOG.info("which algorithms products take is not kept for later processes: %s", error)
    _seen.add(device)


def described() -> str:
    """What is kept on this machine, for people. Needs the core's CUDA part and a device."""
    try:
        if not is_on():
            return "each process chooses for itself"
        paths = {path_for(device): None for device in range(torch.cuda.device_count())}
        return "; ".join(f"{_lines(path)} in {path}" for path in paths)
    except (ValueError, OSError, native.module().NativeError) as error:
        return str(error)


def _lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0
