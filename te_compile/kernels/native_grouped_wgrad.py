"""Weight gradients of experts by the C++ core, on Hopper: groups are not masked, and the L2 is read half as much.

csrc/cuda/grouped_wgrad_kernel.cuh has the design. Triton's kernel (kernels/grouped_gemm.py) clears the edges of groups
in registers, which an expert of some hundred tokens has few whole blocks beside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_compile.kernels import buffers, native
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.recording import STREAM
from te_compile.ops.registry import Target, Unsupported

CAPABILITY = (9, 0)  # its instructions are no part of what later GPUs run
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAPS = 256  # bytes of workspace for each expert


def check(target: Target, arguments: dict[str, Any]) -> None:
    """Raise Unsupported, with the reason, if :func:`grouped_wgrad` cannot run ``arguments`` (the operator's)."""
    if target.device != "cuda":
        raise Unsupported(f"needs a CUDA device, not {target.device}")
    if reason := native.missing(cuda=True):
        raise Unsupported(reason)
    if target.capability != CAPABILITY:
        raise Unsupported(f"needs compute capability 9.0, not {target.capability}")
    a, b, ends = (arguments[name] for name in ("a", "b", "ends"))
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise Unsupported("the tensor core multiplies no E5M2 with E5M2")
    if ends.dtype != torch.int32:
        raise Unsupported(f"groups end at {ends.dtype}, not torch.int32")
    if arguments["out_dtype"] not in OUT_DTYPES:
        raise Unsupported(f"the result is {arguments['out_dtype']}")
    if arguments["accumulation"] != "split":
        raise Unsupported(f"accumulation is {arguments['accumulation']!r}, not 'split'")


def grouped_wgrad(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    accumulation: str,
) -> Tensor:
    """dw [E, R, C] of a: [R, M] and b: [C, M], M padded to a multiple of 16; R and C are multiples of 16."""
    (rows, tokens), columns, experts = a.shape, b.shape[0], ends.shape[0]
    if 0 in (rows, columns, tokens, experts):  # sums over no rows
        return a.new_zeros((experts, rows, columns), dtype=out_dtype)
    a, b = (x.contiguous() for x in (a, b))
    with on_device_of(a):
        y = buffers.empty(a, (experts, rows, columns), out_dtype)
        workspace = buffers.workspace(a, experts * _MAPS)
    codes = native.dtype_codes()
    native.call(
        native.module().cuda_grouped_wgrad,
        a.device.index, a, codes[a.dtype], b, codes[b.dtype], rows, columns, tokens, experts,
        a_scale_inv, b_scale_inv, ends.contiguous(), y, codes[out_dtype], workspace, STREAM,
    )  # fmt: skip
    return y
