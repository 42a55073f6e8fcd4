"""What a bug report should say: versions, devices, what is built, and which implementations this machine runs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from te_compile.inspect.explanation import explain
from te_compile.inspect.table import details
from te_compile.kernels import gemm_choices, native, tile_choices
from te_compile.options import ENVIRONMENT_PREFIX

PACKAGES = ("te-compile", "torch", "triton", "transformers", "accelerate", "torchao", "transformer-engine", "numpy")


def environment() -> str:
    """All of it as lines of text."""
    return "\n".join([*_versions(), *_devices(), *_built(), *_settings(), *_implementations()])


def _versions() -> Iterator[str]:
    yield f"python       {platform.python_version()} on {platform.platform()}"
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        yield f"{name:<12} {version}"
    # Not __path__: where a package is installed to be edited, its code lies elsewhere.
    yield f"{'from':<12} {Path(sys.modules['te_compile'].__file__ or '').parent}"


def _devices() -> Iterator[str]:
    yield f"{'cuda':<12} {torch.version.cuda or 'torch is built without it'}"
    if not torch.cuda.is_available():
        yield f"{'gpu':<12} none: te_fp8 runs its references on the CPU, for tests and debugging"
        return
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        fit = "" if (major, minor) >= (8, 9) else "; FP8 needs 8.9 or newer"
        yield f"{'gpu ' + str(index):<12} {torch.cuda.get_device_name(index)}, compute capability {major}.{minor}{fit}"


def _built() -> Iterator[str]:
    yield f"{'C++ core':<12} {native.missing() or 'built'}"
    yield f"{'CUDA core':<12} {native.missing(cuda=True) or 'built'}"
    if torch.cuda.is_available() and not native.missing(cuda=True):
        yield f"{'GEMM choices':<12} {gemm_choices.described()}"
    if torch.cuda.is_available() and importlib.util.find_spec("triton"):
        yield f"{'tile choices':<12} {tile_choices.described(torch.cuda.device_count())}"


def _settings() -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if name.startswith((ENVIRONMENT_PREFIX, "TORCH_LOGS", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TRITON_INTERPRET")):
            yield f"{name}={value}"


def _implementations() -> Iterator[str]:
    """What a small model would run on here: the registry's own answer, and a proof that compiling works."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = (nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    model = nn.Sequential(*layers).to(device, torch.bfloat16)
    x = torch.randn(64, 64, device=device, dtype=torch.bfloat16)
    try:
        report = explain(model, x, options={"cost_model": False})
    except Exception as error:
        yield f"a small model does not compile on {device}: {type(error).__name__}: {error}"
        return
    yield f"a small model on {device}: {report.totals['fp8']} of {report.totals['linears']} linears in FP8"
    yield from (f"  {line}" for line in details(report))
    for row in report.rows:
        if row.status != "fp8":
            yield f"  kept: {row.name}: {row.reason}"
