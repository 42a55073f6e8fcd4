"""What the driver is told of a launch is what Triton's own launcher tells it; what is not understood is left to it."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from te_compile.kernels import driver_launch, native
from te_compile.kernels.driver_launch import DriverLaunch, declared_widths

ROOT = Path(__file__).parents[2]
PTX = """
.visible .func helper(.param .b32 helper_param_0) { ret; }
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u32 kernel_param_1,
	.param .f32 kernel_param_2,
	.param .u64 .ptr .global .align 1 kernel_param_3,
	.param .u64 .ptr .global .align 1 kernel_param_4
)
.reqntid 128
{
	ret;
}
"""
SIGNATURE = {"p": "*fp32", "n": "i32", "LENGTH": "constexpr", "x": "fp32"}
ARGUMENTS = (None, -5, 64, 0.1)
GRID = (7, 2, 1)


def compiled(**changes: Any) -> Any:
    """A kernel as Triton gives it, of (p, n, LENGTH, x), with a launcher of Triton's own type."""
    from triton.backends.nvidia import driver

    run = object.__new__(driver.CudaLauncher)
    wants = {
        "global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False, "launch_pdl": False,
    }  # fmt: skip
    run.__dict__.update({name: changes.pop(name, value) for name, value in wants.items()})
    if "gsan_enabled" in changes:
        run.gsan_enabled = changes.pop("gsan_enabled")
    signature = changes.pop("signature", SIGNATURE)
    names = changes.pop("names", tuple(signature))
    usual = {
        "run": run,
        "function": 0xF00,
        "packed_metadata": (4, 1, 2048),
        "metadata": SimpleNamespace(name="kernel"),
        "src": SimpleNamespace(signature=signature, fn=SimpleNamespace(arg_names=names)),
        "asm": {"ptx": PTX},
    }
    return SimpleNamespace(**{**usual, **changes})


def described(arguments: Any = ARGUMENTS, grid: Any = GRID, **changes: Any) -> DriverLaunch | None:
    return driver_launch.driver_launch(compiled(**changes), grid, arguments)


def test_parameters_are_what_is_no_constant_and_two_pointers_to_scratch_memory() -> None:
    bits = struct.unpack("<I", struct.pack("<f", 0.1))[0]
    assert described() == DriverLaunch(0xF00, GRID, 128, 2048, (0, 2**32 - 5, bits, 0, 0), {0: 0, 1: 1, 3: 2})
    found = described((torch.zeros(1), 5, 64, float("inf")))
    assert found is not None and found.words[:3] == (0, 5, 0x7F800000), "an address is to come"
    found = described((0x7F00_1234_5678, 5, 64, 3))
    assert found is not None and found.words[0] == 0x7F00_1234_5678, "one that never changes stays"


@pytest.mark.parametrize(
    "changes",
    [
        {"global_scratch_size": 16},
        {"profile_scratch_size": 16},
        {"launch_cooperative_grid": True},
        {"launch_pdl": True},
        {"gsan_enabled": True},
        {"packed_metadata": (4, 2, 2048)},
        {"packed_metadata": (4, 1, 2048, 1)},
        {"packed_metadata": (4, 1, 229 << 10)},
        {"run": print},
        {"function": None},
        {"names": ("n", "p", "LENGTH", "x")},
        {"signature": {**SIGNATURE, "x": "fp8"}},
        {"signature": {**SIGNATURE, "x": ("fp32",)}},
        {"signature": {**SIGNATURE, "p": "tensordesc<fp16[64, 64]>"}},
        {"signature": {**SIGNATURE, "n": "constexpr"}},  # the kernel itself has one parameter more
        {"signature": {**SIGNATURE, "x": "fp64"}},
        {"arguments": (None, 2**31, 64, 0.1)},
        {"arguments": (None, 0.5, 64, 0.1)},
        {"arguments": (None, 5, 64, 1e39)},
        {"arguments": (None, 5, 64, None)},
        {"arguments": (None, 5, 64)},
        {"arguments": (-1, 5, 64, 0.1)},
        {"grid": (0, 1, 1)},
        {"grid": (1, 1)},
        {"grid": (2**16, 2**15, 1)},
        {"asm": {}},
        {"asm": {"ptx": PTX.replace("\t.param .u64 .ptr .global .align 1 kernel_param_3,\n", "")}},
        {"asm": {"ptx": PTX.replace(".u32", ".u64")}},
        {"asm": {"ptx": PTX.replace(".f32 kernel_param_2", ".b8 kernel_param_2[4]")}},
        {"metadata": SimpleNamespace(name="other")},
    ],
    ids=str,
)
def test_what_is_not_understood_is_left_to_triton(changes: dict[str, Any]) -> None:
    assert described(**changes) is None


@pytest.mark.parametrize(
    ("version", "known"), [("3.5.1", False), ("3.6.0", True), ("3.9.0+git", True), ("3.10.0", False), ("4.0", False)]
)
def test_a_triton_that_nobody_has_looked_at_launches_itself(
    monkeypatch: pytest.MonkeyPatch, version: str, known: bool
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert (described() is not None) is known


@pytest.mark.parametrize(
    ("kind", "value", "word"),
    [
        ("i1", True, 1),
        ("i8", -1, None),
        ("i16", -2, 2**16 - 2),
        ("i64", -(2**63), 2**63),
        ("u64", 2**64 - 1, 2**64 - 1),
        ("u32", -1, None),
        ("u8", 255, 255),
        ("fp64", 0.1, struct.unpack("<Q", struct.pack("<d", 0.1))[0]),
        ("bf16", 0.5, None),
        ("*bf16", 2**64, None),
    ],
)
def test_words_of_every_type(kind: str, value: Any, word: int | None) -> None:
    found = driver_launch._word(kind, value)
    assert (None if found is None else found[0]) == word


def test_widths_are_those_of_the_kernel_and_of_no_other_function() -> None:
    assert declared_widths(PTX, "kernel") == [8, 4, 4, 8, 8]
    assert declared_widths(PTX, "helper") is None
    assert declared_widths(".entry bare()\n{", "bare") == []
    assert declared_widths(".entry one(\n\t.param .align 2 .b16 one_param_0\n)", "one") == [2]
    assert declared_widths(".entry odd(\n\t.param .u32 odd_param_0,\n\tsomething)", "odd") is None


@pytest.mark.slow
def test_the_driver_is_told_what_tritons_launcher_tells_it(tmp_path: Path) -> None:
    """Of our own kernels, compiled for Hopper, and of one with arguments of all kinds; to the byte."""
    if native.missing() or not shutil.which("cc"):
        pytest.skip("needs the C++ core and a C compiler")
    if torch.cuda.is_available():
        pytest.skip("where the real driver is loaded, none can be pretended beside it; tests/gpu launches on it")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.programs.triton_launches", str(tmp_path)]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-4000:]
    rows = json.loads(ran.stdout.splitlines()[-1])
    for row in rows:
        assert row["core"] == row["triton"], row["kernel"]
        assert row["triton"]["launches"] == 1 and row["triton"]["attributes"] == 0
    names = {row["kernel"] for row in rows}
    assert names >= {"_quantize_kernel", "_norm_kernel", "_norm_backward_kernel", "produce", "_of_all_kinds"}
    assert {width for row in rows for width in row["widths"]} == {1, 4, 8}
