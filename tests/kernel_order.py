"""The order in which PyTorch asks its kernels for attention whether they can run, set for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from te_compile.passes import attention_kernels

FLASH_FIRST = attention_kernels._UNTOUCHED_ORDER
"""Where PyTorch finds no cuDNN, or an older one."""
CUDNN_FIRST = attention_kernels._CUDNN_FIRST
"""Where it finds a newer one."""


@contextmanager
def order_of_kernels(order: Sequence[int]) -> Iterator[None]:
    """Numbers of PyTorch's kernels, the first one first."""
    before = attention_kernels.order_of_kernels()  # PyTorch sets its own order at the first look
    torch._C._set_sdp_priority_order(list(order))
    try:
        yield
    finally:
        torch._C._set_sdp_priority_order(before)
