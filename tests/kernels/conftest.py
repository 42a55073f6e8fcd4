"""Kernels run on the GPU where there is one, else in Triton's interpreter, which must be chosen before Triton loads.

The interpreter is made to compute as the hardware does (interpreter.py). What the hardware itself does is the business
of tests/gpu and of these tests run on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels.addresses import check_addresses
from tests.kernels.interpreter import correct_interpreter
from tests.poison import poison_memory

correct_interpreter()


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels under test run."""
    if torch.cuda.is_available():
        return "cuda"
    assert triton.knobs.runtime.interpret and isinstance(tl.sum, interpreter.InterpretedFunction), (
        "Triton was imported before tests/kernels/conftest.py asked for its interpreter: "
        "set TRITON_INTERPRET=1 in the environment"
    )
    return "cpu"


@pytest.fixture(autouse=True)
def checked_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that reaches outside of its tensors fails, as it would under compute-sanitizer."""
    if triton.knobs.runtime.interpret:
        check_addresses(monkeypatch)


@pytest.fixture
def uninitialised_memory_is_poisoned() -> Iterator[None]:
    """All fresh tensors hold NaN or the largest integer, PyTorch's own too, so an element that nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten is neither zero nor right by chance."""
    poison_memory(monkeypatch)
