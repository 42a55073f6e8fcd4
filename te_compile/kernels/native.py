"""The compiled core ``te_compile._native`` (csrc/), if it was built: what it offers, and why not where it does not.

Nothing else imports the module directly, so a checkout that was never built still works: each implementation that needs
the core asks :func:`missing` and gives the answer as its reason.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from te_compile.kernels.recording import STREAM, here
from te_compile.ops.registry import Target, Unsupported

BUILD_HINT = "build it with `pip install -e .` or `csrc/build.sh`"
HOPPER = (9, 0)
INTERFACE = 6  # of the sources that this file is part of (csrc/python/module.cpp)


@functools.lru_cache(maxsize=1)
def _loaded() -> tuple[ModuleType | None, str]:
    """The module and "", or None and why there is none."""
    try:
        module = importlib.import_module("te_compile._native")
    except ModuleNotFoundError:
        return None, f"the C++ core is not built; {BUILD_HINT}"
    except ImportError as error:  # built for another Python or system, or a library it needs is gone
        return None, f"the C++ core does not load ({error}); {BUILD_HINT}"
    if getattr(module, "INTERFACE", None) != INTERFACE:
        return None, f"the C++ core was built from other sources than these; {BUILD_HINT}"
    return module, ""


def missing(cuda: bool = False) -> str:
    """Why the core, or with ``cuda`` its CUDA part, cannot be used; "" if it can."""
    module, reason = _loaded()
    if module is not None and cuda and not module.cuda_built:
        return "the C++ core was built without CUDA: found no nvcc of 12.3 or later; put one on the PATH, build again"
    return reason


def require(target: Target) -> None:
    """Raise Unsupported, with the reason, if the core's CUDA kernels cannot run on ``target``."""
    if target.device != "cuda":
        raise Unsupported(f"needs a CUDA device, not {target.device}")
    if reason := missing(cuda=True):
        raise Unsupported(reason)


def require_hopper(target: Target) -> None:
    """The same for kernels whose instructions are no part of what later GPUs run."""
    require(target)
    if target.capability != HOPPER:
        raise Unsupported(f"needs compute capability 9.0, not {target.capability}")


def module() -> ModuleType:
    """The core. Raises ImportError with the reason if there is none."""
    found, reason = _loaded()
    if found is None:
        raise ImportError(reason)
    return found


@functools.lru_cache(maxsize=1)
def dtype_codes() -> dict[torch.dtype, int]:
    """The core's numbers for dtypes."""
    core = module()
    return {
        torch.float32: core.FLOAT32,
        torch.float16: core.FLOAT16,
        torch.bfloat16: core.BFLOAT16,
        torch.float8_e4m3fn: core.FLOAT8_E4M3,
        torch.float8_e5m2: core.FLOAT8_E5M2,
    }


def current_stream(device: int) -> int:
    """The address of the CUDA stream that PyTorch would launch on now."""
    return torch._C._cuda_getCurrentRawStream(device)


def call(function: Callable[..., Any], device: int, *arguments: Any) -> None:
    """Call a function of the core that launches on ``device``, which is its first argument.

    It takes addresses for tensors, 0 for None, and the current stream for ``STREAM``.
    """
    given = [0 if argument is None else argument for argument in (device, *arguments)]
    stream = current_stream(device)
    function(
        *(
            argument.data_ptr() if isinstance(argument, Tensor) else stream if argument is STREAM else argument
            for argument in given
        )
    )
    if here.recorder is not None:
        here.recorder.called(function, given)
