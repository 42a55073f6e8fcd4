"""What tests need of the machine, said once: marks that skip them elsewhere, with the reason."""

from __future__ import annotations

import pytest
import torch

from te_compile.kernels import native
from te_compile.passes.attention_kernels import is_faster_on

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
FP8_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_FP8, reason="needs a CUDA device with FP8 tensor cores (compute capability 8.9)"),
)

HAS_FAST_CUDNN = torch.cuda.is_available() and is_faster_on(torch.device("cuda"))
FAST_CUDNN = (
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_FAST_CUDNN, reason="needs a CUDA device on which cuDNN's attention is the fastest"),
)

HAS_HOPPER_CORE = (
    torch.cuda.is_available() and torch.cuda.get_device_capability() == native.HOPPER and not native.missing(cuda=True)
)
HOPPER_CORE = pytest.mark.skipif(
    not HAS_HOPPER_CORE,
    reason="needs a GPU of compute capability 9.0 and the C++ core with CUDA",
)
