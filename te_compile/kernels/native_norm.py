"""A row norm and the quantize of its result by the C++ core: x is read once, by clusters of blocks that share rows.

csrc/cuda/norm_quantize_kernel.cuh has the design and the byte counts. It serves what a transformer's norms are on a
GPU with clusters (Hopper and data-centre Blackwell): two-byte activations, rows of up to 16384 elements, a scale that
is known. The rest is Triton's (kernels/norm.py), which reads x twice. ``python -m benchmarks.kernels --only norm`` on
an H200, for 8192 × 4096 and 8192 × 16384:

                    this           Triton
    RMS norm        45, 160 µs     58, 213 µs
    layer norm      45, 164 µs     64, 219 µs

Current scaling has to read x twice in any form, and there Triton's took 80 and 294 µs, this one 81 and 297. Without qᵀ
rows fit into programs of Triton's (kernels/norm_rows.py): 33 and 129 µs, where this one took 36 and 129. With a bias
beside the weight that is so of short rows and of few. Long ones wait for two vectors of parameters each there, which
this kernel's blocks keep: a layer norm of 8192 × 16384 takes 141 µs here and 173 there. They meet below 5120 columns.

Few rows without qᵀ, as decoding has them, are one cluster's, whatever the scaling (csrc/cuda/norm_few_rows.cuh).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_compile.kernels import buffers, native
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.recording import STREAM
from te_compile.ops.norm import KINDS, LAYER, RMS, RMS_MIXED, RMS_OFFSET, output_dtype
from te_compile.ops.norm_quantize import Norm, Outputs, Wanted
from te_compile.ops.registry import Target, Unsupported

X_DTYPES = (torch.bfloat16, torch.float16)
PARAMETER_DTYPES = (*X_DTYPES, torch.float32)
VECTOR = 8  # elements of a 16-byte copy: rows must start and end on such
LONGEST_ROW = 16384  # 16 blocks of 1024 columns, the largest cluster there is
FEW_ROWS = 16  # TE_NORM_FEW_ROWS of csrc/include/te_compile.h
_LONG_BIASED_ROW, _MANY_ROWS = 5120, 4096  # from where on it is the faster one without qᵀ, if there is a bias
_FIRST_CAPABILITY, _TOO_NEW = (9, 0), (11, 0)  # 12.x, desktop Blackwell, has not the shared memory


def check(target: Target, arguments: dict[str, Any]) -> None:
    """Raise Unsupported, with the reason, if :func:`norm_quantize` cannot run ``arguments`` (te::norm_quantize's)."""
    native.require(target)
    if target.capability is None or not _FIRST_CAPABILITY <= target.capability < _TOO_NEW:
        raise Unsupported(f"needs clusters and shared memory of compute capability 9 or 10, not {target.capability}")
    x, weight, bias, kind = (arguments[name] for name in ("x", "weight", "bias", "kind"))
    if kind not in KINDS:
        raise Unsupported(f"norm kind {kind!r} is none of {', '.join(KINDS)}")
    if arguments["dtype"] != torch.float8_e4m3fn:
        raise Unsupported(f"writes float8_e4m3fn, not {arguments['dtype']}")
    if x.dtype not in X_DTYPES:
        raise Unsupported(f"reads bfloat16 and float16, not {x.dtype}")
    for parameter in (weight, bias):
        if parameter is not None and parameter.dtype not in PARAMETER_DTYPES:
            raise Unsupported(f"a parameter in {parameter.dtype}")
    y_dtype = output_dtype(x.dtype, None if weight is None else weight.dtype, kind)
    if y_dtype != x.dtype:
        raise Unsupported(f"y is {y_dtype} and x is {x.dtype}")
    rows, columns = x.shape
    columnwise = arguments.get("columnwise", True)
    if not _are_few(rows, columnwise):
        if arguments["scale"] is None:
            raise Unsupported("current scaling reads x twice in any form, and Triton's is the faster one")
        if not columnwise and not _shares_long_parameters(rows, columns, bias):
            raise Unsupported("rows alone are one pass of Triton's as well, and that is the faster one")
    if not isinstance(columns, int):
        raise Unsupported("the length of a row is not known at compile time")
    if columns % VECTOR or columns > LONGEST_ROW:
        raise Unsupported(f"K={columns} is not a multiple of {VECTOR} up to {LONGEST_ROW}")


def _are_few(rows: Any, columnwise: bool) -> bool:
    """Is it one cluster's? rows: a symbol where their number is not known."""
    return isinstance(rows, int) and rows <= FEW_ROWS and not columnwise


def _shares_long_parameters(rows: Any, columns: Any, bias: Tensor | None) -> bool:
    """Are there two vectors of parameters, long enough and for enough rows, that reading them once a block pays?"""
    if bias is None or not isinstance(rows, int) or not isinstance(columns, int):
        return False
    return rows >= _MANY_ROWS and columns >= _LONG_BIASED_ROW


def _in_place(x: Tensor) -> bool:
    """Can x's rows be copied as they lie?"""
    return x.stride(1) == 1 and x.stride(0) % VECTOR == 0 and x.data_ptr() % 16 == 0


def norm_quantize(x: Tensor, norm: Norm, wanted: Wanted, measure: bool) -> Outputs:
    """What is wanted of the norm of x: [M, K], M > 0. ``measure``: the scale may be absent or 0.

    mean and rstd are fp32 [M, 1]; y, q, qᵀ that were not asked for and the mean of an rms kind have shape [0].
    """
    weight, bias, eps, kind = norm
    scale, dtype, rowwise, columnwise, emit, rule = wanted
    rows, columns = x.shape
    if not _in_place(x):
        x = x.clone(memory_format=torch.contiguous_format)
    with on_device_of(x):
        cleared = not _are_few(rows, columnwise)
        q, qt, amax, scale_inv = buffers.quantized(x, rows, columns, dtype, rowwise, columnwise, cleared=cleared)
        y = buffers.empty(x, (rows, columns) if emit else (0,), x.dtype)
        mean = buffers.empty(x, (rows, 1) if kind == LAYER else (0,), torch.float32)
        rstd = buffers.empty(x, (rows, 1), torch.float32)
    weight, bias = (None if parameter is None else parameter.contiguous() for parameter in (weight, bias))
    codes = native.dtype_codes()
    weight_dtype, bias_dtype = (
        codes[x.dtype] if parameter is None else codes[parameter.dtype] for parameter in (weight, bias)
    )
    native.call(
        native.module().cuda_norm_quantize,
        x.device.index, x, codes[x.dtype], rows, columns, x.stride(0),
        weight, weight_dtype, 1.0 if kind == RMS_OFFSET else 0.0, bias, bias_dtype,
        kind == LAYER, kind in (RMS, RMS_MIXED) and weight is not None, eps,
        scale, measure, torch.finfo(dtype).max, rule.margin, rule.epsilon, rule.power_2,
        y, q, qt, amax, scale_inv, mean, rstd, STREAM,
    )  # fmt: skip
    return y, q, qt, amax, scale_inv, mean, rstd
