"""What every test of this folder starts from."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from te_compile.kernels import buffers


@pytest.fixture(autouse=True)
def _no_cuda_graphs_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has compiled for CUDA graphs lends no memory and replays no calls any more, nor would the tests
    that come after the one that did."""
    monkeypatch.setitem(buffers._lending, "stopped", False)
    monkeypatch.setitem(buffers._keeping, "stopped", False)


MUCH = 2 << 30  # bytes


@pytest.fixture(autouse=True)
def _no_memory_of_other_tests() -> Iterator[None]:
    """Tests of several processes share the device, and what PyTorch holds back after a large one the others lack."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > MUCH:
        gc.collect()
        torch.cuda.empty_cache()
