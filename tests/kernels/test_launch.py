"""Launches look a compiled kernel up under all that Triton would tell apart, and pass on what Triton would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from te_compile.kernels import launch as module
from te_compile.kernels import native, player
from te_compile.kernels.launch import Launches, Repeated, launch


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
    """What launching a kernel returns: run by its launcher, or by index where somebody watches."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, stream: self.kernel.run.append((grid, arguments, stream, "watched"))

    def run(self, *given: Any) -> None:
        *grid, stream, function, metadata, launch_metadata, enter, leave = given[:9]
        assert (function, metadata) == (self.function, self.packed_metadata)
        assert launch_metadata is enter is leave is None
        self.kernel.run.append((tuple(grid), given[9:], stream, "alone"))


class Elsewhere(torch.Tensor):
    """A tensor of another device."""

    def get_device(self) -> int:
        return 1


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    monkeypatch.setattr(module, "_compiled", {})
    return Kernel()


def run(kernel: Kernel, x: Any, y: Any = None, n: int = 5, eps: float = 1e-5, grid: Any = 3, **constants: Any) -> int:
    """How many forms of the kernel are compiled after this launch."""
    launch(kernel, grid, x, y, n, eps, **{"TILE": 64, "FLAG": True, "num_warps": 4, **constants})
    return len(kernel.compiled)


@pytest.mark.parametrize("watched", [False, True])
def test_the_second_launch_runs_what_the_first_compiled(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    monkeypatch.setattr(module, "is_watched", lambda: watched)
    x = torch.zeros(64)
    assert run(kernel, x) == 1 and not kernel.run
    assert kernel.compiled[0] == ((3, 1, 1), (x, None, 5, 1e-5), {"TILE": 64, "FLAG": True, "num_warps": 4})
    other = torch.ones(128)
    assert run(kernel, other, n=7, eps=0.5, grid=(4, 2)) == 1
    ((grid, arguments, stream, how),) = kernel.run
    assert (grid, stream, how) == ((4, 2, 1), 77, "watched" if watched else "alone")
    assert arguments == (other.data_ptr(), None, 7, 0.5, 64, True)  # constants in the signature's order


def test_whoever_asks_triton_to_be_told_of_launches_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not module.is_watched()
    hooks = triton.knobs.runtime
    if hasattr(hooks.launch_enter_hook, "add"):
        hooks.launch_enter_hook.add(print)
        assert module.is_watched()
        hooks.launch_enter_hook.remove(print)
    else:
        monkeypatch.setattr(hooks, "launch_enter_hook", print)
        assert module.is_watched()


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


def test_another_kernel_or_device_is_another_form(kernel: Kernel) -> None:
    x, second = torch.zeros(64), Kernel()
    assert run(kernel, x) == run(second, x) == 1
    assert run(kernel, x.as_subclass(Elsewhere)) == 2


def test_a_repeated_launch_decides_once_and_runs_on_the_stream_of_the_moment(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(64)
    constants = {"TILE": 64, "FLAG": True, "num_warps": 4}
    repeated = Repeated(kernel, 3, x, None, 5, 0.5, **constants)
    repeated()
    assert len(kernel.compiled) == 1 and not kernel.run
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    repeated()
    ((grid, arguments, stream, _),) = kernel.run
    assert (grid, arguments, stream) == ((3, 1, 1), (x.data_ptr(), None, 5, 0.5, 64, True), 99)
    other = Repeated(kernel, 7, torch.ones(128), None, 7, 0.1, **constants)
    other()
    assert len(kernel.compiled) == 1 and kernel.run[-1][0] == (7, 1, 1), "another launch of the same form"


NEEDS_CORE = pytest.mark.skipif(bool(native.missing()), reason="the C++ core is not built")


@pytest.mark.parametrize("by_core", [False, pytest.param(True, marks=NEEDS_CORE)])
def test_launches_are_repeated_in_order_on_the_stream_of_the_moment(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, by_core: bool
) -> None:
    monkeypatch.setattr(player, "core", lambda: native.module() if by_core else None)
    x, y = torch.zeros(64), torch.ones(64)
    constants = {"TILE": 64, "FLAG": True, "num_warps": 4}
    first = Repeated(kernel, 3, x, None, 5, 0.5, **constants)
    both = Launches([first, Repeated(kernel, 4, y, None, 7, 0.1, **constants)])
    both()
    assert len(kernel.compiled) == 1 and len(kernel.run) == 1, "the first is compiled by its launch"
    assert (both.play is not None) is by_core
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    wanted = [
        ((3, 1, 1), (x.data_ptr(), None, 5, 0.5, 64, True), 99, "alone"),
        ((4, 1, 1), (y.data_ptr(), None, 7, 0.1, 64, True), 99, "alone"),
    ]
    for _ in range(2):
        kernel.run.clear()
        both()
        assert kernel.run == wanted
    monkeypatch.setattr(module, "is_watched", lambda: True)
    kernel.run.clear()
    both()
    assert [how for *_, how in kernel.run] == ["watched"] * 2
