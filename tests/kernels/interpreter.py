"""Make Triton's interpreter compute as the hardware does.

Triton 3.9's narrows floats by cutting bits off (bfloat16) or rounds ties away from zero without a carry (FP8), and
where it widens FP8 for a product it loses the smallest numbers of E5M2 and the NaN of E4M3. The hardware does nothing
of the kind, so the interpreter is made to convert as torch does.

Triton 3.6's, which comes with PyTorch 2.11, knows no constants of bfloat16, and beside NumPy 2.4 it fails where a
kernel loops up to a number that it was given, and where a sum of integers wraps around.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
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
_convert_float = interpreter._convert_float
_patch_lang_tensor = interpreter._patch_lang_tensor
_to_tensor = interpreter.ReduceScanOpInterface.to_tensor


def correct_interpreter() -> None:
    """Put what is below in place of the interpreter's own; for the whole process."""
    interpreter._convert_float = _convert_as_torch_does
    interpreter._patch_lang_tensor = _patch_with_an_index
    interpreter.ReduceScanOpInterface.to_tensor = _to_tensor_of_its_dtype
    if not hasattr(interpreter.InterpreterBuilder, "get_bf16"):
        interpreter.InterpreterBuilder.get_bf16 = _bfloat16_constant


def _convert_as_torch_does(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """fp32 → bf16, fp16 or FP8, nearest even, and FP8 → fp16; every other conversion as the interpreter has it."""
    if source in FP8 and target == tl.float16:
        codes = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8))
        return codes.view(NARROW[source]).half().numpy().view(np.uint16).reshape(data.shape)
    if source != tl.float32 or target not in NARROW:
        return _convert_float(data, source, target, rounding)
    wide = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32))
    bits = BITS[target.primitive_bitwidth]
    return wide.to(NARROW[target]).view(bits).numpy().view(f"uint{target.primitive_bitwidth}").reshape(data.shape)


def _patch_with_an_index(tensor: Any, scope: Any) -> None:
    """A scalar, which is an array of one element here, counts loops: NumPy 2.4 makes a number only of one of none."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())


def _to_tensor_of_its_dtype(self: Any, reduced: Any, dtype: Any) -> Any:
    """NumPy sums int32 as int64; what does not fit wraps around as on the hardware."""
    return _to_tensor(self, np.asarray(reduced).astype(interpreter._get_np_dtype(dtype))[()], dtype)


def _bfloat16_constant(self: Any, value: float) -> Any:
    bits = _convert_as_torch_does(np.array([value], dtype=np.float32), tl.float32, tl.bfloat16, None)
    return interpreter.TensorHandle(bits, tl.bfloat16)
