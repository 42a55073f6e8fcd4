"""What tests need of the machine, said once: marks that skip them elsewhere, with the reason."""

from __future__ import annotations

import pytest
import torch

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
FP8_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_FP8, reason="needs a CUDA device with FP8 tensor cores (compute capability 8.9)"),
)
