"""Memory that is neither zero nor right by chance where a kernel leaves it unwritten."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from te_compile.kernels import buffers
from te_compile.kernels.recording import here, unrecorded

BYTE = 0xA5


def poison_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what kernels are given to write to. Calls that are replayed make their memory elsewhere."""
    original = buffers.empty

    def poisoned(like: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        memory = original(like, size, dtype)
        if memory.numel() and here.rehearsal is None:
            with unrecorded():
                memory.view(-1).view(torch.uint8).fill_(BYTE)
        return memory

    monkeypatch.setattr(buffers, "empty", poisoned)
