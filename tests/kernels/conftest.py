"""Kernels run on the GPU where there is one, else in Triton's interpreter, which must be chosen before Triton loads.

Triton 3.9's interpreter narrows floats by cutting bits off (bfloat16) or rounds ties away from zero without a carry
(FP8), and where it widens FP8 for a product it loses the smallest numbers of E5M2 and the NaN of E4M3. The hardware
does nothing of the kind, so here the interpreter converts as torch does. What the hardware itself does is the
business of tests/gpu and of these tests run on a GPU.
"""

from __future__ import annotations

import os
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.runtime import interpreter

NARROW = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
FP8 = (tl.float8e4nv, tl.float8e5)
BITS = {8: torch.uint8, 16: torch.int16}
_original = interpreter._convert_float


def _convert_as_torch_does(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """fp32 → bf16, fp16 or FP8, nearest even, and FP8 → fp16; every other conversion as the interpreter has it."""
    if source in FP8 and target == tl.float16:
        codes = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8))
        return codes.view(NARROW[source]).half().numpy().view(np.uint16).reshape(data.shape)
    if source != tl.float32 or target not in NARROW:
        return _original(data, source, target, rounding)
    wide = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32))
    bits = BITS[target.primitive_bitwidth]
    return wide.to(NARROW[target]).view(bits).numpy().view(f"uint{target.primitive_bitwidth}").reshape(data.shape)


interpreter._convert_float = _convert_as_torch_does


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
def fresh_random_numbers() -> None:
    """Other numbers in every run; a failure shows the seed that repeats it."""
    print(f"torch.manual_seed({torch.seed()})")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten is neither zero nor right by chance."""
    original = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        memory = original(self, *args, **kwargs)
        if memory.numel():
            memory.view(-1).view(torch.uint8).fill_(0xA5)
        return memory

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
