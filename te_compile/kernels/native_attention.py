"""Attention by the C++ core, on Hopper: asynchronous products beside the softmax.

csrc/cuda/attention_forward.cuh and attention_backward.cuh have the design. The tensor cores make the next scores and
the last sums while weights are made of the scores before, and the backward pass makes five products of a tile. Its dq
is added up in memory in the order in which blocks come, so its last bits may differ from run to run: with
``torch.use_deterministic_algorithms(True)`` another kernel must run.

A head of fewer features takes the time of one of 64, or of more than that the time of one of 128.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_compile.kernels import buffers, native
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.recording import STREAM
from te_compile.ops.registry import Target, Unsupported

VECTOR = 8  # elements of 16 bytes: rows must start and end on such
NARROWER, WIDEST = 32, 128
FEWEST_KEYS = 384  # with a dropout and up to 64 features: Triton's kernels take less time below
QUERIES, KEYS = 64, 128  # of a tile of the backward pass
MOST_BLOCKS = 2**31 - 1
MOST_MASKS = 2**16 - 1  # what a launch's second and third dimension hold (mask_tiles.py)
_KINDS = 64, 128  # features that kernels were built for; a narrower head takes the time of the next
Mask = tuple[Tensor, Tensor]
"""Bits of a mask and lists of its tiles, as te::mask_tiles makes them, of the direction in question."""


def check(target: Target, arguments: dict[str, Any]) -> None:
    """Raise Unsupported, with the reason, if :func:`forward` cannot run ``arguments``, whose q and k are [B, S, H, D],
    or slower than others, as heads of up to 32 features."""
    width = arguments["q"].shape[3]
    if not isinstance(width, int) or width % VECTOR or not NARROWER < width <= WIDEST:
        raise Unsupported(f"a head of {width} features is not a multiple of {VECTOR} above {NARROWER} up to {WIDEST}")
    _check_core(target, arguments)


def _check_core(target: Target, arguments: dict[str, Any]) -> None:
    """Is this a Hopper GPU, for which the core was built, and can a launch have as many blocks?"""
    native.require_hopper(target)
    q, k = arguments["q"], arguments["k"]
    sizes = (*q.shape[:3], k.shape[1])
    if all(isinstance(size, int) for size in sizes):
        batch, queries, heads, keys = sizes
        if -(-max(queries, keys) // KEYS) * batch * heads > MOST_BLOCKS:
            raise Unsupported(f"{batch} × {heads} heads of {max(queries, keys)} positions are too many tiles")


def _check_operands(arguments: dict[str, Any]) -> None:
    """Are q, k and v of 16 bits, and their heads of one width?"""
    q, k, v = (arguments[name] for name in ("q", "k", "v"))
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise Unsupported(f"q is {q.dtype}, not of 16 bits")
    if {k.shape[3], v.shape[3]} != {q.shape[3]}:
        raise Unsupported("queries, keys and values have heads of several widths")


def check_masked(target: Target, arguments: dict[str, Any]) -> None:
    """The same under a mask."""
    check(target, arguments)
    _check_operands(arguments)
    q = arguments["q"]
    if isinstance(q.shape[0], int) and q.shape[0] > MOST_MASKS:
        raise Unsupported(f"{q.shape[0]} rows may have as many masks, and {MOST_MASKS} are packed at once")


def check_biased(target: Target, arguments: dict[str, Any]) -> None:
    """The same with a bias; the other kernels for that are no faster with narrow heads."""
    width = arguments["q"].shape[3]
    if not isinstance(width, int) or width % VECTOR or not 0 < width <= WIDEST:
        raise Unsupported(f"a head of {width} features is not a multiple of {VECTOR} up to {WIDEST}")
    _check_core(target, arguments)
    _check_operands(arguments)


def check_dropout(target: Target, arguments: dict[str, Any]) -> None:
    """The same with bits, where Triton's kernels are the others."""
    check(target, arguments)
    width, keys = arguments["q"].shape[3], arguments["k"].shape[1]
    if width <= _KINDS[0] and not (isinstance(keys, int) and keys >= FEWEST_KEYS):
        raise Unsupported(f"heads of {width} features and {keys} keys take no longer in Triton's kernels")


def check_dropout_backward(target: Target, arguments: dict[str, Any]) -> None:
    """The same for :func:`backward` with bits; without them it takes what :func:`forward` does."""
    check_dropout(target, arguments)
    queries, keys = arguments["q"].shape[1], arguments["k"].shape[1]
    for name, length, multiple in (("queries", queries, QUERIES), ("keys", keys, KEYS)):
        if not isinstance(length, int) or length % multiple:
            raise Unsupported(f"{length} {name} are no multiple of {multiple} known at compile time")


def _strides(x: Tensor) -> tuple[int, ...]:
    """Those of batch, row and head, of [B, S, H, D]; where there is one of something, any that is allowed."""
    return tuple(x.stride(at) if x.shape[at] > 1 else VECTOR for at in range(3))


def _in_place(x: Tensor) -> Tensor:
    """``x``, or a copy if it cannot be read as it lies."""
    fits = all(stride > 0 and stride % VECTOR == 0 for stride in _strides(x))
    in_place = fits and x.stride(3) == 1 and x.data_ptr() % 16 == 0
    return x if in_place else x.clone(memory_format=torch.contiguous_format)  # a contiguous one may begin badly, too


def _rows(bias: Tensor | None) -> Tensor | None:
    """A bias as the core reads it."""
    if bias is None or (bias.is_contiguous() and bias.data_ptr() % 16 == 0):
        return bias
    return bias.clone(memory_format=torch.contiguous_format)


def _task(
    q: Tensor, k: Tensor, v: Tensor, left: int, right: int, scale: float, growth: float, bits: Tensor | None,
    mask: Mask | None, bias: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """The core's first arguments."""
    batch, queries, heads, width = q.shape
    sizes = (batch, heads, k.shape[2], queries, k.shape[1], width)
    operands = [part for x in (q, k, v) for part in (x, _strides(x))]
    bit_sizes = (0, 0) if bits is None else tuple(bits.shape[1:])
    shown = (None, None, 1) if mask is None else (*mask, mask[0].shape[0])
    added = (1, 1, 0) if bias is None else (*bias.shape[:2], bias.shape[3])
    given = native.dtype_codes()[q.dtype], left, right, sizes, scale, growth, *operands
    return *given, bits, bit_sizes, *shown, bias, added


def forward(
    q: Tensor, k: Tensor, v: Tensor, left: int, right: int, scale: float,
    bits: Tensor | None = None, growth: float = 1.0, mask: Mask | None = None, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(q · kᵀ · scale) · v, and the logsumexp of each row of logits.

    q: [B, Sq, H, D], k and v: [B, Sk, G, D], of one 16-bit dtype, H a multiple of G; at least one query and one key.
    Query i sees the keys from i - left to i + right, all on a side where that is below 0; other windows only where
    Sq = Sk. bits: which weights are kept, and multiplied by ``growth`` (ops/dropout_bits.py), of Sq queries and Sk keys
    or more, where G = H and no window ends but with right = 0; None for all. mask: rows and row_tiles, where no window
    ends; a query that sees nothing has 0 and a logsumexp of -∞ then. bias: [B or 1, H or 1, Sq, R] of that dtype, of
    which the first Sk of a row are added to scores, where no window ends and there is no mask. Returns out:
    [B, Sq, H, D] contiguous, of that dtype; logsumexp: fp32 [B, H, Sq].
    """
    batch, queries, heads, width = q.shape
    q, k, v = map(_in_place, (q, k, v))
    with on_device_of(q):
        out = buffers.empty(q, (batch, queries, heads, width), q.dtype)
        logsumexp = buffers.empty(q, (batch, heads, queries), torch.float32)
    native.call(
        native.module().cuda_attention,
        q.device.index, *_task(q, k, v, left, right, scale, growth, bits, mask, _rows(bias)), out, logsumexp, STREAM,
    )  # fmt: skip
    return out, logsumexp


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    left: int, right: int, scale: float, bits: Tensor | None = None, growth: float = 1.0, mask: Mask | None = None,
    bias: Tensor | None = None, ds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of :func:`forward`'s out, whose gradient is ``grad``: dq, dk and dv, in the shapes of q, k and v and
    their dtype, contiguous. bits: those of a multiple of 64 queries and of 128 keys. mask: columns and column_tiles.
    ds: [B, H, Sk, R], to overwrite with the gradient of what a bias adds, R a multiple of 8; what lies behind Sq is
    left alone."""
    grad, q, k, v = map(_in_place, (grad, q, k, v))
    out, logsumexp = out.contiguous(), logsumexp.contiguous()
    with on_device_of(q):
        dq, dk, dv = (buffers.empty(q, tuple(x.shape), x.dtype) for x in (q, k, v))
        rows = logsumexp.shape[0] * logsumexp.shape[1] * -(-logsumexp.shape[2] // QUERIES) * QUERIES
        kind = min(kind for kind in _KINDS if q.shape[3] <= kind)
        workspace = buffers.empty(q, (rows * (kind + 2),), torch.float32)  # dq, shifts and logsumexps
    native.call(
        native.module().cuda_attention_backward,
        q.device.index, *_task(q, k, v, left, right, scale, growth, bits, mask, _rows(bias)), out, logsumexp,
        grad, _strides(grad), workspace, dq, dk, dv, ds, 0 if ds is None else ds.shape[3], STREAM,
    )  # fmt: skip
    return dq, dk, dv


def biased_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, logsumexp: Tensor, scale: float,
    bits: Tensor | None, growth: float, wants_ds: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same of a result with a bias, and the gradient of what is added to scores, [B, H, Sk, R] of the dtype of q,
    R the next multiple of 8 of Sq, where that is wanted; else [0]."""
    batch, queries, heads, _ = q.shape
    with on_device_of(q):
        shape = (batch, heads, k.shape[1], -(-queries // VECTOR) * VECTOR) if wants_ds else (0,)
        ds = buffers.empty(q, shape, q.dtype)
    written = ds if wants_ds else None
    made = backward(grad, q, k, v, out, logsumexp, -1, -1, scale, bits, growth, bias=bias, ds=written)
    return *made, ds
