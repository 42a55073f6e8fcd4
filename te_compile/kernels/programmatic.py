"""A kernel of few rows lets the next one take its places while it still runs: programmatic dependent launch.

In a decoding step a kernel takes as long to begin as to work. Products of few rows (csrc/cuda/skinny_gemm.cu) are
launched so that they may begin early, and wait for what runs before them by themselves. They begin when every program
of the kernel before has said that the next may; a kernel that never says so is waited for to its end. Saying it first
of all is safe, because a kernel that is launched as usual runs when those before it have ended.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

MOST_ROWS = 16  # that products which begin early have
_FIRST_CAPABILITY = (9, 0)


@triton.jit
def let_next_begin(MAY: tl.constexpr):
    """The kernel that is launched next may take its places, if ``may_next_begin`` said so."""
    if MAY:
        gdc_launch_dependents()


def may_next_begin(x: Tensor, rows: int) -> bool:
    """May a product of few rows come next, on a GPU that can begin it early? x: on the device of the launch."""
    return rows <= MOST_ROWS and x.is_cuda and _begins_early(x.get_device())


@lru_cache(maxsize=64)
def _begins_early(device: int) -> bool:
    # None is there where a launch is rehearsed for a GPU of another machine.
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
