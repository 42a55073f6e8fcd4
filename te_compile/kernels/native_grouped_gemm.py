"""Products of experts by the C++ core, on Hopper: asynchronous copies and products, operands shared by two blocks.

csrc/cuda/grouped_gemm_kernel.cuh and grouped_wgrad_kernel.cuh have the design. In weight gradients, whose groups begin
and end anywhere along the contraction, Triton's kernel (kernels/grouped_gemm.py) clears the edges of groups in
registers, and an expert of some hundred tokens has few whole blocks beside those; here a group ends where a copy does.
``python -m benchmarks.experts`` has both beside PyTorch's products in 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_compile.kernels import buffers, native
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.recording import STREAM
from te_compile.ops.registry import Target, Unsupported

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_EXPERTS = 1024
_MAPS = 256  # bytes of workspace for each expert


def check(target: Target, arguments: dict[str, Any]) -> None:
    """Raise Unsupported, with the reason, if :func:`grouped_gemm` cannot run ``arguments`` (the operator's)."""
    native.require_hopper(target)
    a, b, ends = (arguments[name] for name in ("a", "b", "ends"))
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise Unsupported("the tensor core multiplies no E5M2 with E5M2")
    if ends.dtype != torch.int32:
        raise Unsupported(f"groups end at {ends.dtype}, not torch.int32")
    if arguments["out_dtype"] not in OUT_DTYPES:
        raise Unsupported(f"the result is {arguments['out_dtype']}")
    if isinstance(ends.shape[0], int) and ends.shape[0] > MOST_EXPERTS:
        raise Unsupported(f"there are {ends.shape[0]} experts, more than {MOST_EXPERTS}")


def check_wgrad(target: Target, arguments: dict[str, Any]) -> None:
    """The same for :func:`grouped_wgrad`."""
    check(target, arguments)
    if arguments["accumulation"] != "split":
        raise Unsupported(f"accumulation is {arguments['accumulation']!r}, not 'split'")


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    accumulation: str,
) -> Tensor:
    """y [M, N] of a: [M, K] and b: [E, N, K], any strides of b but 1 along K; K and the strides are multiples of 16."""
    (tokens, depth), (experts, features, _) = a.shape, b.shape
    if 0 in (tokens, features, depth, experts):
        return a.new_zeros((tokens, features), dtype=out_dtype)
    a = a.contiguous()
    with on_device_of(a):
        y = buffers.empty(a, (tokens, features), out_dtype)
    codes = native.dtype_codes()
    native.call(
        native.module().cuda_grouped_gemm,
        a.device.index, a, codes[a.dtype], b, codes[b.dtype],
        tokens, features, depth, experts, b.stride(1), b.stride(0),
        a_scale_inv, b_scale_inv, ends.contiguous(), y, codes[out_dtype], accumulation == "fast", STREAM,
    )  # fmt: skip
    return y


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
