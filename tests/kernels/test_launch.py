"""Launches look a compiled kernel up under all that Triton would tell apart, and pass on what Triton would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from te_compile.kernels import launch as module
from te_compile.kernels.launch import launch


class Kernel:
    """Stands in for a ``triton.jit`` function of (x, y, n, eps, TILE, FLAG) and notes what was compiled and run."""

    arg_names = ("x", "y", "n", "eps", "TILE", "FLAG")

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, Any, Any]] = []
        self.run: list[tuple[Any, Any, Any]] = []

    def __getitem__(self, grid: Any) -> Any:
        def compile_and_run(*arguments: Any, **constants: Any) -> Any:
            self.compiled.append((grid, arguments, constants))
            return Compiled(self)

        return compile_and_run


class Compiled:
    """What launching a kernel returns."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, stream: self.kernel.run.append((grid, arguments, stream))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    monkeypatch.setattr(module, "_compiled", {})
    return Kernel()


def run(kernel: Kernel, x: Any, y: Any = None, n: int = 5, eps: float = 1e-5, grid: Any = 3, **constants: Any) -> int:
    """How many forms of the kernel are compiled after this launch."""
    launch(kernel, grid, x, y, n, eps, **{"TILE": 64, "FLAG": True, "num_warps": 4, **constants})
    return len(kernel.compiled)


def test_the_second_launch_runs_what_the_first_compiled(kernel: Kernel) -> None:
    x = torch.zeros(64)
    assert run(kernel, x) == 1 and not kernel.run
    assert kernel.compiled[0] == ((3, 1, 1), (x, None, 5, 1e-5), {"TILE": 64, "FLAG": True, "num_warps": 4})
    other = torch.ones(128)
    assert run(kernel, other, n=7, eps=0.5, grid=(4, 2)) == 1
    ((grid, arguments, stream),) = kernel.run
    assert (grid, stream) == ((4, 2, 1), 77)
    assert arguments[0] is other and arguments[1:] == (None, 7, 0.5, 64, True)  # constants in the signature's order


def test_whatever_triton_specialises_for_is_another_form(kernel: Kernel) -> None:
    x = torch.zeros(64)
    forms = 0
    for arguments in (
        {"x": x},
        {"x": x[1:]},  # not aligned to 16 bytes
        {"x": x.half()},
        {"x": x, "y": x},  # no longer None
        {"x": x, "n": 1},
        {"x": x, "n": 48},
        {"x": x, "n": 2**31 + 1},
        {"x": x, "n": 2**63 + 1},
        {"x": x, "TILE": 32},
        {"x": x, "FLAG": False},
        {"x": x, "num_warps": 8},
    ):
        forms += 1
        assert run(kernel, **arguments) == forms
        assert run(kernel, **arguments) == forms
    assert len(kernel.run) == forms


def test_another_kernel_or_device_is_another_form(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    x, second = torch.zeros(64), Kernel()
    assert run(kernel, x) == run(second, x) == 1
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert run(kernel, x) == 2
