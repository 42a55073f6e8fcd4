"""What a compile worker does: compile one Triton kernel into Triton's cache on disk, where a launch will find it.

A worker is another process, which has no GPU and launches nothing. So it is told all that a launch would know: how the
arguments look, the constants, the GPU, and the environment, for parts of that (which ptxas, which directory) decide
what is compiled and where it goes. Triton finds a kernel by a hash over all of this; what is compiled here is found
because the hash is made by Triton's own functions of the same things, and if it is not, a compilation was for nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia_compiler
from triton.backends.nvidia import driver as nvidia_driver
from triton.compiler import ASTSource, make_backend
from triton.compiler import compile as compile_source
from triton.runtime.jit import create_function_from_signature

from te_compile.kernels.generated import load_from
from te_compile.kernels.kernel_hashes import hash_from_below

PREFIXES = ("TRITON_", "LLVM_", "MLIR_", "DISABLE_", "NVPTX_", "USE_IR_LOC", "CC")
"""Of the variables that Triton reads."""

PTXAS = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
"""Of these, those that say which ptxas; from Triton 3.9 on the second one counts on Hopper as well."""


@dataclass(frozen=True)
class Pointer:
    """Stands for a tensor among the arguments; Triton asks no more of one."""

    dtype: torch.dtype
    aligned: bool

    def data_ptr(self) -> int:
        """An address that is a multiple of 16, or not."""
        return 0 if self.aligned else 1


@dataclass(frozen=True)
class Order:
    """A kernel to compile: the attribute ``name`` of ``module``, which ``file`` holds.

    arguments: for those that are no constants, a :class:`Pointer`, a number or None; constants: as in a launch, with
    num_warps; capability: of the GPU; environment: of the process that will launch, as far as Triton reads it.
    """

    module: str
    file: str
    name: str
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    capability: tuple[int, int]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """The hash under which Triton's cache has the kernel now, what it took, and why there is no launcher, if so."""

    hash: str
    seconds: float
    complaint: str = ""


def triton_environment() -> dict[str, str]:
    """The variables of this process that Triton reads."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}


def environment_for(capability: tuple[int, int]) -> dict[str, str]:
    """Those, but for the ptxas that this process decided on."""
    now = {name: value for name, value in triton_environment().items() if name not in PTXAS}
    return now | decided_ptxas(capability)


def target_of(capability: tuple[int, int]) -> GPUTarget:
    """As Triton's driver says it of a GPU with this compute capability."""
    return GPUTarget("cuda", 10 * capability[0] + capability[1], 32)


@cache
def decided_ptxas(capability: tuple[int, int]) -> dict[str, str]:
    """The variables by which this process found its ptxas when it was first asked. The version is part of each hash;
    Triton asks for it once, which is now, and Inductor may point to another one before a launch or an order."""
    make_backend(target_of(capability)).hash()
    return {name: os.environ[name] for name in PTXAS if name in os.environ}


def fill(order: Order) -> Answer:
    """Compile what is ordered, unless the cache has it already, and what launches it."""
    start = time.perf_counter()
    with _environment(order.environment):
        source, options = source_of(_kernel(order), order.arguments, order.constants, order.capability)
        compiled = compile_source(source, target=target_of(order.capability), options=options)
        complaint = _build_launcher(source, compiled)
    return Answer(compiled.hash, time.perf_counter() - start, complaint)


def fill_driver(environment: Mapping[str, str]) -> None:
    """Build what Triton asks the driver by, which a fresh cache lacks as well."""
    with _environment(environment):
        nvidia_driver.CudaUtils()


def source_of(
    kernel: Any, arguments: tuple[Any, ...], constants: Mapping[str, Any], capability: tuple[int, int]
) -> tuple[ASTSource, dict[str, Any]]:
    """What ``kernel[grid](*arguments, **constants)`` would compile on such a GPU, and by which options."""
    hash_from_below(kernel)
    backend = make_backend(target_of(capability))
    named = dict(constants)
    named["debug"] = named.get("debug", kernel.debug) or knobs.runtime.debug
    for option in ("instrumentation_mode", "fpsan_homomorphic_casts"):  # Triton adds those that it has
        if hasattr(knobs.compilation, option):
            named[option] = getattr(knobs.compilation, option)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, given = bind(*arguments, **named)
    options, signature, constexprs, attributes = kernel._pack_args(backend, named, bound, specialization, given)
    return ASTSource(kernel, signature, constexprs, attributes), options.__dict__


def _kernel(order: Order) -> Any:
    module = sys.modules.get(order.module)
    if module is None:
        try:
            module = importlib.import_module(order.module)
        except ModuleNotFoundError:  # one that was written by kernels/pointwise_source.py
            module = load_from(order.module, order.file)
    return getattr(module, order.name)


def _build_launcher(source: ASTSource, compiled: Any) -> str:
    """Up to 3.6 Triton writes C code for the launches of each signature, and has the C compiler build it: about as
    long as compiling the kernel takes. Later ones launch all by the same code. Returns what went wrong."""
    try:
        if hasattr(nvidia_driver, "make_launcher"):
            nvidia_driver.CudaLauncher(source, compiled.metadata)
    except Exception as error:  # the kernel is there all the same
        return repr(error)
    return ""


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """In here Triton reads these variables and no others. The worker is Inductor's, and its own are put back."""
    own = triton_environment()
    _replace(own, wanted)
    try:
        yield
    finally:
        _replace(wanted, own)


def _replace(old: Mapping[str, str], new: Mapping[str, str]) -> None:
    for name in old.keys() - new.keys():
        os.environ.pop(name, None)
    os.environ.update(new)
    if any(old.get(name) != new.get(name) for name in PTXAS):
        nvidia_compiler.get_ptxas_version.cache_clear()  # part of each hash, and asked only once
