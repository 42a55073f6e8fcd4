"""FP8 matrix products through cuBLASLt, and what its epilogues do on the way out of the tensor cores.

    p[M, N] = (a[M, K] · b[N, K]ᵀ) · a_scale_inv · b_scale_inv

    gemm            y = p + addend + bias: a residual stream, or ``out`` itself, which so takes weight gradients
    gemm_gelu_aux   aux = p + bias, y = gelu(aux)                 the tanh form: an erf GELU must not come here
    gemm_dgelu      dx = p · gelu'(aux), db = Σ rows of dx
    gemm_to_fp8     q = saturate(y · scale) in FP8 and amax, of the first two

On an H200 large products run at 1230 to 1340 TFLOP/s with fast accumulation and 1160 to 1250 with split. Beside
``aten._scaled_mm``, which ends in the same library, this adds the epilogues and algorithms that were timed rather than
guessed. ``TE_COMPILE_GEMM_CANDIDATES`` says how many of the library's suggestions are timed for each new shape (8);
with 1, or under ``torch.use_deterministic_algorithms``, its first one is taken, so that every process takes the same.
What was timed is kept on disk (gemm_choices.py): later processes on the same kind of GPU take the same without timing,
unless ``TE_COMPILE_GEMM_CACHE=0``.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor

from te_compile.kernels import buffers, gemm_choices, native
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.recording import STREAM
from te_compile.ops.registry import Target, Unsupported

ALIGNMENT = 16  # bytes or FP8 elements: matrices, rows and contraction lengths
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Allocated for each call and given back at once: PyTorch's allocator knows about streams and CUDA graphs, so one buffer
# serves all, and none outlives the memory pool of a graph. Calls that the core replays share one: buffers.Workspace.
WORKSPACE_BYTES = 32 << 20
# The one bias dtype that the library reads beside each result dtype.
_BIAS_DTYPE = {
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
    torch.float32: torch.bfloat16,
    torch.float8_e4m3fn: torch.bfloat16,
    torch.float8_e5m2: torch.bfloat16,
}
_SMALLEST_CAPABILITY = (8, 9)
_USUAL_ROWS = 1024  # stands for a row count that is not known at compile time


@functools.lru_cache(maxsize=1)
def _configured_candidates() -> int:
    """How many algorithms to time for each new shape."""
    text = os.environ.get("TE_COMPILE_GEMM_CANDIDATES", "8")
    if not text.isdecimal() or not 1 <= int(text) <= 32:
        raise ValueError(f"TE_COMPILE_GEMM_CANDIDATES={text!r}: must be a number from 1 to 32")
    return int(text)


def _candidates() -> int:
    return 1 if torch.are_deterministic_algorithms_enabled() else _configured_candidates()


@functools.lru_cache(maxsize=1)
def _epilogues() -> dict[str, int]:
    """The core's numbers for epilogues."""
    core = native.module()
    return {
        "none": core.EPILOGUE_NONE,
        "bias": core.EPILOGUE_BIAS,
        "gelu_aux": core.EPILOGUE_GELU_AUX,
        "gelu_aux_bias": core.EPILOGUE_GELU_AUX_BIAS,
        "dgelu": core.EPILOGUE_DGELU,
        "dgelu_bgrad": core.EPILOGUE_DGELU_BGRAD,
    }


# --- what can run ---------------------------------------------------------------------------------------------------


def check(target: Target, arguments: dict[str, Any]) -> None:
    """Raise Unsupported, with the reason, if :func:`gemm` cannot run ``arguments`` (named as in te::gemm's schema).

    Tensors may be fake and sizes symbolic. Where sizes are known the library itself is asked, for the tensors' device.
    """
    native.require(target)
    if target.capability is None or target.capability < _SMALLEST_CAPABILITY:
        raise Unsupported(f"FP8 tensor cores need compute capability 8.9, this device has {target.capability}")
    a, b, out_dtype = arguments["a"], arguments["b"], arguments["out_dtype"]
    if a.dtype not in FP8 or b.dtype not in FP8:
        raise Unsupported(f"multiplies FP8, not {a.dtype} by {b.dtype}")
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise Unsupported("no FP8 library multiplies E5M2 by E5M2")
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise Unsupported(f"writes bfloat16, float16 or float32, not {out_dtype}")
    for name, length in (("K", a.shape[1]), ("N", b.shape[0])):
        if isinstance(length, int) and length % ALIGNMENT:
            raise Unsupported(f"{name}={length} is not a multiple of {ALIGNMENT}")
    bias, added = arguments.get("bias"), arguments.get("addend") is not None
    biased = bias is not None
    if bias is not None and bias.dtype != _BIAS_DTYPE[out_dtype]:  # what runs then adds to the bias in fp32
        out_dtype, biased, added = torch.float32, False, True
    rows, columns, length = a.shape[0], b.shape[0], a.shape[1]
    if isinstance(columns, int) and isinstance(length, int):
        rows = rows if isinstance(rows, int) else _USUAL_ROWS
        fast = arguments.get("accumulation", "fast") == "fast"
        device, dtypes = a.device.index or 0, (a.dtype, b.dtype, out_dtype)
        if reason := _refused(device, rows, columns, length, *dtypes, biased, added, fast):
            raise Unsupported(reason)


@functools.lru_cache(maxsize=4096)
def _refused(
    device: int,
    rows: int,
    columns: int,
    length: int,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    out_dtype: torch.dtype,
    biased: bool,
    added: bool,
    fast: bool,
) -> str:
    """Why the library has no algorithm for such a product on this device; "" if it has one."""
    core, codes = native.module(), native.dtype_codes()
    somewhere = 4096  # an address that is well aligned and never followed
    try:
        core.cublaslt_check(
            device,
            somewhere, somewhere, somewhere,  # a, b, d
            somewhere, somewhere, 0, 0,  # their scales, amax
            somewhere if biased else 0, 0, somewhere if added else 0,  # bias, aux, addend
            rows, columns, length,
            length, length, columns, columns, columns,  # leading dimensions
            codes[a_dtype], codes[b_dtype], codes[out_dtype], codes[_BIAS_DTYPE[out_dtype]], codes[torch.bfloat16],
            _epilogues()["bias" if biased else "none"],
            fast,
            0, 0, 1, 0,  # no workspace of the caller's, one candidate, the default stream
        )  # fmt: skip
    except core.Unsupported as reason:
        return str(reason)
    return ""


# --- the products ---------------------------------------------------------------------------------------------------


def gemm(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    accumulation: str,
    addend: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = p + addend + bias [M, N] of ``out_dtype``. On Hopper p is rounded to 16 bits before a 16-bit addend is added.

    a: [M, K], b: [N, K] FP8, not both E5M2. Scales: [] fp32 on the device. accumulation: "fast" or "split".
    addend, out: [M, N] of ``out_dtype``, ``out`` where to write. They may be one tensor, which is then added to.
    """
    rows, columns = a.shape[0], b.shape[0]
    if bias is not None and bias.dtype != _BIAS_DTYPE[out_dtype]:
        return _gemm_with_foreign_bias(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, accumulation, addend, out)
    y = out
    if y is None:
        with on_device_of(a):
            y = buffers.empty(a, (rows, columns), out_dtype)
    for name, matrix in (("out", out), ("addend", addend)):
        if matrix is not None:
            _check_matrix(name, matrix, rows, columns, out_dtype)
    if addend is not None and addend is not out:  # it may begin anywhere, as a view of the user's own does
        addend = _begun_well(addend)
    epilogue = "none" if bias is None else "bias"
    _launch(a, b, y, a_scale_inv, b_scale_inv, epilogue, accumulation, bias=bias, addend=addend)
    return y


def _gemm_with_foreign_bias(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor,
    out_dtype: torch.dtype,
    accumulation: str,
    addend: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """:func:`gemm` with a bias that the epilogue cannot read: the product is added to it in fp32, so it rounds once."""
    # Memory of its own, for it is written to: a bias in fp32, expanded to one row, is contiguous as it is.
    wide = torch.empty((a.shape[0], b.shape[0]), dtype=torch.float32, device=bias.device).copy_(bias)
    if addend is not None:
        wide += addend
    _launch(a, b, wide, a_scale_inv, b_scale_inv, "none", accumulation, addend=wide)
    if out is None:
        return wide.to(out_dtype)
    _check_matrix("out", out, a.shape[0], b.shape[0], out_dtype)
    return out.copy_(wide)


def gemm_gelu_aux(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    accumulation: str,
) -> tuple[Tensor, Tensor]:
    """(y, aux) [M, N] bf16: aux = p + bias and y = gelu(aux), tanh form. bias: [N] bf16."""
    y = torch.empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16, device=a.device)
    aux = torch.empty_like(y)
    epilogue = "gelu_aux" if bias is None else "gelu_aux_bias"
    _launch(a, b, y, a_scale_inv, b_scale_inv, epilogue, accumulation, bias=bias, aux=aux)
    return y, aux


def gemm_dgelu(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    aux: Tensor,
    accumulation: str,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """(dx, db): dx = p · gelu'(aux) [M, N] bf16, tanh form; db = the sums of its columns [N] bf16 if asked for.

    aux: [M, N] bf16, what :func:`gemm_gelu_aux` kept.
    """
    dx = torch.empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16, device=a.device)
    db = torch.empty(b.shape[0], dtype=torch.bfloat16, device=a.device) if bias_gradient else None
    if dx.numel() == 0:  # an empty tensor has no address to hand over
        return dx, None if db is None else db.zero_()
    epilogue = "dgelu_bgrad" if bias_gradient else "dgelu"
    _launch(a, b, dx, a_scale_inv, b_scale_inv, epilogue, accumulation, bias=db, aux=aux)
    return dx, db


def gemm_to_fp8(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    out_dtype: torch.dtype,
    accumulation: str,
    gelu: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(q, amax, aux): q = saturate(y · scale) in FP8, amax = max |y|; with ``gelu``, y = gelu(aux) as above.

    The amax is the library's: it does not turn infinite where y holds a NaN. An E5M2 result wants an E5M2 operand.
    """
    q = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    amax = torch.empty((), dtype=torch.float32, device=a.device)
    aux = torch.empty(q.shape, dtype=torch.bfloat16, device=a.device) if gelu else None
    epilogue = ("gelu_aux" if gelu else "none") if bias is None else ("gelu_aux_bias" if gelu else "bias")
    _launch(a, b, q, a_scale_inv, b_scale_inv, epilogue, accumulation, bias=bias, aux=aux, d_scale=scale, amax=amax)
    return q, amax, aux


# --- the call -------------------------------------------------------------------------------------------------------


def _check_matrix(name: str, matrix: Tensor, rows: int, columns: int, dtype: torch.dtype) -> None:
    """Raise ValueError if a product cannot be written to ``matrix`` or added to it."""
    if matrix.shape != (rows, columns) or matrix.dtype != dtype or (columns > 1 and matrix.stride(1) != 1):
        raise ValueError(
            f"{name} is {matrix.dtype} {list(matrix.shape)} with strides {list(matrix.stride())}; "
            f"needed: {dtype} [{rows}, {columns}], contiguous along its rows"
        )


def _rowwise(matrix: Tensor) -> tuple[Tensor, int]:
    """``matrix``, copied if its rows are not contiguous, and the distance from row to row."""
    if matrix.stride(1) != 1 and matrix.shape[1] > 1:
        matrix = matrix.contiguous()
    return matrix, matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1]


def _readable(vector: Tensor) -> Tensor:
    """A scale or bias where the library can read it, which refuses what does not start on a multiple of 16 bytes."""
    return _begun_well(vector.contiguous())


def _begun_well(x: Tensor) -> Tensor:
    """``x``, or a copy if it does not start on a multiple of 16 bytes."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)


def _launch(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    epilogue: str,
    accumulation: str,
    *,
    bias: Tensor | None = None,
    aux: Tensor | None = None,
    d_scale: Tensor | None = None,
    amax: Tensor | None = None,
    addend: Tensor | None = None,
) -> None:
    """Enqueue one product on PyTorch's current stream of a's device. Raises Unsupported if the library refuses it."""
    core, codes = native.module(), native.dtype_codes()
    if accumulation not in ("fast", "split"):
        raise ValueError(f"accumulation={accumulation!r}: choose 'fast' or 'split'")
    if a.shape[1] != b.shape[1] or (bias is not None and bias.shape != b.shape[:1]):
        shapes = [list(tensor.shape) for tensor in (a, b, bias) if tensor is not None]
        raise ValueError(f"a, b, bias of shapes {shapes}: must be [M, K], [N, K], [N]")
    if aux is not None and aux.shape != d.shape:
        raise ValueError(f"aux of shape {list(aux.shape)}: must be {list(d.shape)}")
    a, lda = _rowwise(a)
    b, ldb = _rowwise(b)
    ldd = d.stride(0) if d.shape[0] > 1 else d.shape[1]
    ld_addend = 0 if addend is None else addend.stride(0) if addend.shape[0] > 1 else addend.shape[1]
    if aux is not None:
        aux, ld_aux = _rowwise(aux)
    else:
        ld_aux = 0
    a_scale_inv, b_scale_inv = _readable(a_scale_inv), _readable(b_scale_inv)
    d_scale = None if d_scale is None else _readable(d_scale)
    bias = None if bias is None else _readable(bias)  # one to be written is fresh memory and stays itself
    device, candidates = a.device.index, _candidates()
    with on_device_of(a):
        workspace = buffers.workspace(a, WORKSPACE_BYTES)
    try:
        if candidates > 1:
            gemm_choices.keep(device)
        native.call(
            core.cublaslt_gemm, device,
            a, b, d, a_scale_inv, b_scale_inv, d_scale, amax, bias, aux, addend,
            a.shape[0], b.shape[0], a.shape[1],
            lda, ldb, ldd, ld_aux, ld_addend,
            codes[a.dtype], codes[b.dtype], codes[d.dtype],
            codes[torch.bfloat16 if bias is None else bias.dtype],
            codes[torch.bfloat16 if aux is None else aux.dtype],
            _epilogues()[epilogue],
            accumulation == "fast",
            workspace, WORKSPACE_BYTES, candidates, STREAM,
        )  # fmt: skip
    except core.Unsupported as reason:
        raise Unsupported(str(reason)) from None
