"""A matrix to FP8: q, qᵀ, amax and the dequantisation multiplier in one pass over x.

Bytes, for x [M, K] of two-byte elements: 2·M·K read, M·K written for q, M·K for qᵀ. An H200 copies 4.27 TB/s (read and
written bytes together), which allows

    8192 × 4096     134 MB     31 µs        8192 × 16384    537 MB    126 µs

A matrix without a scale (current scaling, or the first step of a delayed one) is read once more to find it: the
measuring pass adds 2·M·K bytes, less what is still in the L2 when the second pass starts where the first one ended.

A program takes one tile, in four quarters of interleaved rows: quarter j holds the rows 4·i + j. So a thread holds four
rows of one column, and qᵀ is transposed as 32-bit words of four codes, in one exchange through shared memory, where
bytes would take four. The amax is a maximum over bit patterns: of two non-negative floats the larger one has the larger
bits, infinity is above every number, and NaN above infinity, so one integer maximum and one clamp give "infinite if
anything is not finite".

Codes are made by :func:`fp8_codes` and :func:`fp8_words` alone. Triton's own cast, ``x.to(tl.float8e4nv)``, leaves two
codes in a 16-bit register. Where such a register is both joined with a neighbour, for a wide store of q, and shifted
for its upper code, which qᵀ needs by itself, the assembly that Triton 3.6 writes is right and what its ptxas (12.8)
makes of it is not: up to 44% of the codes in qᵀ were wrong, with every form of transpose, depending on dtype, shape and
tile. Here conversions leave their block of assembly as 32 full bits, and the two layouts share no conversion.

The functions marked ``triton.jit`` without a leading underscore are the vocabulary of all kernel files.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_compile.kernels import buffers
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.launch import launch
from te_compile.kernels.programmatic import let_next_begin, may_next_begin
from te_compile.kernels.tiles import Tile, Work, choose
from te_compile.ops.quantize import padded
from te_compile.ops.reach import near
from te_compile.recipe import ScaleRule

INFINITY_BITS = tl.constexpr(0x7F800000)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
FP32_SMALLEST_NORMAL = tl.constexpr(torch.finfo(torch.float32).tiny)
E4M3_MAX = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)
E5M2_MAX = tl.constexpr(torch.finfo(torch.float8_e5m2).max)

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # Triton's interpreter reads no assembly
# Four fp32 numbers to four codes. The instruction rounds to nearest even, saturates (infinity too, see ``scaled``) and
# keeps NaN.
_ASSEMBLY = (
    "{{ .reg .b16 low, high; cvt.rn.satfinite.{0}x2.f32 low, $2, $1; cvt.rn.satfinite.{0}x2.f32 high, $4, $3; "
    "mov.b32 $0, {{low, high}}; }}"
)
# Two fp32 numbers to bf16 and back, joined: converted one at a time (which is what Triton writes) they take four times
# as long, 9 µs for 8192 × 4096.
BF16_ASSEMBLY = tl.constexpr(
    "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }"
)
E4M3_ASSEMBLY = tl.constexpr(_ASSEMBLY.format("e4m3"))
E5M2_ASSEMBLY = tl.constexpr(_ASSEMBLY.format("e5m2"))


# 32 elements a thread: four 16-byte loads in flight, runs of 128 bytes in q and of 64 in qᵀ. On an H200 the best of
# eight, by 3% of 8192 × 4096 and 1% of 8192 × 16384.
TILE = Tile(64, 128, 8)
OTHERS = (Tile(64, 64, 4), Tile(64, 128, 4), Tile(32, 128, 4), Tile(64, 64, 8), Tile(128, 64, 8), Tile(64, 256, 8))


TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def magnitude(value):
    """The bits of \\|value\\| (fp32), as int32: they order as the numbers do, NaN above infinity."""
    return value.to(tl.int32, bitcast=True) & MAGNITUDE_BITS


@triton.jit
def magnitude_of_four(first, second, third, fourth):
    """The largest magnitude of four fp32 tiles at each place, as :func:`magnitude` has it.

    By float maxima that keep NaN: they take absolute values for nothing, which integer ones do not.
    """
    left = tl.maximum(tl.abs(first), tl.abs(second), propagate_nan=tl.PropagateNan.ALL)
    right = tl.maximum(tl.abs(third), tl.abs(fourth), propagate_nan=tl.PropagateNan.ALL)
    return magnitude(tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def record_amax(amax, bits):
    """Raise fp32 ``*amax`` to the magnitude ``bits`` (int32 []), a NaN counted as infinity."""
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32), bitcast=True), tl.minimum(bits, INFINITY_BITS), sem="relaxed")


@triton.jit
def scale_from_amax(amax, TARGET: tl.constexpr, EPSILON: tl.constexpr, POWER_2: tl.constexpr):
    """``ScaleRule.scale``, bit for bit; ``TARGET`` is fp8_max · 2^-margin."""
    amax = tl.maximum(amax.to(tl.float32), EPSILON)
    usable = (amax > 0) & (amax < float("inf"))
    scale = tl.div_rn(tl.full((), TARGET, tl.float32), tl.where(usable, amax, 1.0))
    scale = tl.where(usable, scale, 1.0)
    scale = tl.minimum(tl.maximum(scale, FP32_SMALLEST_NORMAL), FP32_MAX)
    if POWER_2:
        scale = (scale.to(tl.int32, bitcast=True) & INFINITY_BITS).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def scale_in_use(
    scale, amax, MEASURED: tl.constexpr, TARGET: tl.constexpr, EPSILON: tl.constexpr, POWER_2: tl.constexpr
):
    """The scale to cast with: the given one, or the measured one where none is given or the given one is 0."""
    if MEASURED:
        used = scale_from_amax(tl.load(amax), TARGET, EPSILON, POWER_2)
        if scale is not None:
            given = tl.load(scale)
            used = tl.where(given > 0, given, used)
    else:
        used = tl.load(scale)
    return used


@triton.jit
def must_measure(scale):
    """Whether the measuring pass has work to do: no scale was given, or the one given is 0."""
    if scale is None:
        return tl.full((), 1, tl.int1)
    else:
        return tl.load(scale) <= 0


@triton.jit
def scaled(value, scale):
    """``value · scale``, and NaN where ``value`` is infinite: a cast would make the largest number of it, and whoever
    looks for an overflow, a loss scaler above all, would find none. A finite value whose product overflows stays."""
    return tl.fma(value, 0.0, value * scale)


@triton.jit
def fp8_codes(value, E5M2: tl.constexpr):
    """fp32, from ``scaled``, to FP8 codes as uint8: saturating, nearest even, NaN stays NaN."""
    if INTERPRETED:
        codes = _interpreted_codes(value, E5M2)
    elif E5M2:
        codes = tl.inline_asm_elementwise(
            E5M2_ASSEMBLY, "=r,r,r,r,r", [value], dtype=tl.uint8, is_pure=True, pack=4
        )  # fmt: skip
    else:
        codes = tl.inline_asm_elementwise(
            E4M3_ASSEMBLY, "=r,r,r,r,r", [value], dtype=tl.uint8, is_pure=True, pack=4
        )  # fmt: skip
    return codes


@triton.jit
def fp8_words(first, second, third, fourth, E5M2: tl.constexpr):
    """The codes of four fp32 tiles as uint32, that of ``first`` in the lowest byte."""
    if INTERPRETED:
        words = _interpreted_codes(first, E5M2).to(tl.uint32)
        words |= _interpreted_codes(second, E5M2).to(tl.uint32) << 8
        words |= _interpreted_codes(third, E5M2).to(tl.uint32) << 16
        words |= _interpreted_codes(fourth, E5M2).to(tl.uint32) << 24
    elif E5M2:
        words = tl.inline_asm_elementwise(
            E5M2_ASSEMBLY, "=r,r,r,r,r", [first, second, third, fourth], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        words = tl.inline_asm_elementwise(
            E4M3_ASSEMBLY, "=r,r,r,r,r", [first, second, third, fourth], dtype=tl.uint32, is_pure=True, pack=1
        )
    return words


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """fp32 rounded to the numbers of ``DTYPE``, nearest even, in fp32."""
    if tl.bfloat16 == DTYPE and not INTERPRETED:
        return tl.inline_asm_elementwise(
            BF16_ASSEMBLY, "=r,=r,r,r", [value], dtype=tl.float32, is_pure=True, pack=2
        )  # fmt: skip
    else:
        return value.to(DTYPE).to(tl.float32)


@triton.jit
def _interpreted_codes(value, E5M2: tl.constexpr):
    if E5M2:
        value = tl.clamp(value, -E5M2_MAX, E5M2_MAX, propagate_nan=tl.PropagateNan.ALL)
        return value.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        value = tl.clamp(value, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def store_words(qt, words, tile_m, tile_k, word, k, columns, padded_rows):
    """Store ``words``, [rows / 4, columns], of the tile at tile_m (a multiple of 16) and tile_k transposed.

    word, k: their places in the tile. Rows from M to the padded end are zeros in it, so their codes are the padding.
    """
    length = tl.multiple_of(padded_rows // 4, 4)
    qt = qt.to(tl.pointer_type(tl.uint32), bitcast=True) + (tile_k.to(tl.int64) * length + tile_m // 4)
    within = (tile_k + k < columns)[:, None] & (tile_m // 4 + word < length)[None, :]
    tl.store(qt + k[:, None] * length + word[None, :], tl.trans(words), mask=within)


@triton.jit
def largest_of_four(first, second, third, fourth):
    """The largest magnitude in four fp32 tiles, as its bits."""
    return largest_of(magnitude_of_four(first, second, third, fourth))


@triton.jit
def largest_of(bits):
    """The maximum of a 2-D tile."""
    return tl.max(tl.max(bits, axis=1), axis=0)


@triton.jit(do_not_specialize_on_alignment=["scale"])
def _measure_kernel(
    x, scale, amax, rows, columns, stride_m, stride_k, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr
):
    if must_measure(scale):
        across = tl.maximum(tl.cdiv(columns, TILE_COLUMNS), 1)
        tile_m = (tl.program_id(0) // across) * TILE_ROWS
        tile_k = (tl.program_id(0) % across) * TILE_COLUMNS
        m, k = tl.arange(0, TILE_ROWS), tl.arange(0, TILE_COLUMNS)
        inside = (tile_m + m < rows)[:, None] & (tile_k + k < columns)[None, :]
        x += tile_m.to(tl.int64) * stride_m + tile_k.to(tl.int64) * stride_k
        value = tl.load(x + m[:, None] * stride_m + k[None, :] * stride_k, mask=inside, other=0.0)
        record_amax(amax, largest_of(magnitude(value.to(tl.float32))))


@triton.jit
def _load_quarter(x, j, tile_m, tile_k, word, k, rows, columns, stride_m, stride_k):
    """Rows 4·i + j of a tile in fp32, zeros outside; ``x`` is where the tile starts."""
    m = 4 * word + j
    inside = (tile_m + m < rows)[:, None] & (tile_k + k < columns)[None, :]
    return tl.load(x + m[:, None] * stride_m + k[None, :] * stride_k, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_quarter(q, codes, j, tile_m, tile_k, word, k, rows, columns):
    """Store rows 4·i + j of a tile of a contiguous matrix; ``q`` is where the tile starts."""
    m = 4 * word + j
    inside = (tile_m + m < rows)[:, None] & (tile_k + k < columns)[None, :]
    tl.store(q + m[:, None] * columns + k[None, :], codes, mask=inside)


@triton.jit
def load_tile(x, tile_m, tile_k, word, k, rows, columns, stride_m, stride_k):
    """The four quarters of the tile at tile_m, tile_k of ``x``, in fp32, zeros outside."""
    x += tile_m.to(tl.int64) * stride_m + tile_k.to(tl.int64) * stride_k
    first = _load_quarter(x, 0, tile_m, tile_k, word, k, rows, columns, stride_m, stride_k)
    second = _load_quarter(x, 1, tile_m, tile_k, word, k, rows, columns, stride_m, stride_k)
    third = _load_quarter(x, 2, tile_m, tile_k, word, k, rows, columns, stride_m, stride_k)
    fourth = _load_quarter(x, 3, tile_m, tile_k, word, k, rows, columns, stride_m, stride_k)
    return first, second, third, fourth


@triton.jit
def store_tile(q, first, second, third, fourth, tile_m, tile_k, word, k, rows, columns, E5M2: tl.constexpr):
    """The codes of four quarters (fp32, scaled) to their places in ``q``."""
    q += tile_m.to(tl.int64) * columns + tile_k
    store_quarter(q, fp8_codes(first, E5M2), 0, tile_m, tile_k, word, k, rows, columns)
    store_quarter(q, fp8_codes(second, E5M2), 1, tile_m, tile_k, word, k, rows, columns)
    store_quarter(q, fp8_codes(third, E5M2), 2, tile_m, tile_k, word, k, rows, columns)
    store_quarter(q, fp8_codes(fourth, E5M2), 3, tile_m, tile_k, word, k, rows, columns)


@triton.jit(do_not_specialize_on_alignment=["scale"])
def _quantize_kernel(
    x, scale, q, qt, amax, scale_inv,
    rows, columns, padded_rows, stride_m, stride_k,
    MEASURED: tl.constexpr, TARGET: tl.constexpr, EPSILON: tl.constexpr, POWER_2: tl.constexpr,
    E5M2: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    let_next_begin(NEXT)
    program = tl.program_id(0)
    used = scale_in_use(scale, amax, MEASURED, TARGET, EPSILON, POWER_2)
    if program == 0:
        tl.store(scale_inv, tl.div_rn(tl.full((), 1.0, tl.float32), used))
    if MEASURED:
        program = tl.num_programs(0) - 1 - program  # the L2 still holds what the measuring pass read last
    across = tl.maximum(tl.cdiv(columns, TILE_COLUMNS), 1)
    tile_m = (program // across) * TILE_ROWS
    tile_k = (program % across) * TILE_COLUMNS
    word, k = tl.arange(0, TILE_ROWS // 4), tl.arange(0, TILE_COLUMNS)
    first, second, third, fourth = load_tile(x, tile_m, tile_k, word, k, rows, columns, stride_m, stride_k)
    largest = largest_of_four(first, second, third, fourth)
    first, second, third, fourth = scaled(first, used), scaled(second, used), scaled(third, used), scaled(fourth, used)
    if ROWWISE:
        store_tile(q, first, second, third, fourth, tile_m, tile_k, word, k, rows, columns, E5M2)
    if COLUMNWISE:
        words = fp8_words(first, second, third, fourth, E5M2)
        store_words(qt, words, tile_m, tile_k, word, k, columns, padded_rows)
    record_amax(amax, largest)


@functools.lru_cache(maxsize=256)
def rule_constants(rule: ScaleRule, dtype: torch.dtype) -> tuple[float, float, bool]:
    """TARGET, EPSILON and POWER_2 of the kernels."""
    return torch.finfo(dtype).max * 2.0**-rule.margin, rule.epsilon, rule.power_2


def quantize(
    x: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    rule: ScaleRule,
    measure: bool,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, qᵀ, amax and 1 / scale of x: [M, K] with any strides. ``measure``: the scale may be absent or 0."""
    rows, columns = x.shape
    x = near(x, 0, 1)
    what = ("quantize", dtype, rowwise, columnwise, scale is None)
    tile = tile or choose(TILE, lambda: Work([x], what, OTHERS))
    target, epsilon, power_2 = rule_constants(rule, dtype)
    grid = max(1, triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns))
    with on_device_of(x):
        q, qt, amax, scale_inv = buffers.quantized(x, rows, columns, dtype, rowwise, columnwise)
        if measure:
            launch(
                _measure_kernel, grid, x, scale, amax, rows, columns, *x.stride(),
                TILE_ROWS=tile.rows, TILE_COLUMNS=tile.columns, num_warps=tile.warps,
            )  # fmt: skip
        launch(
            _quantize_kernel, grid, x, scale, q.view(torch.uint8), qt.view(torch.uint8), amax, scale_inv,
            rows, columns, padded(rows), *x.stride(),
            MEASURED=measure, TARGET=target, EPSILON=epsilon, POWER_2=power_2,
            E5M2=dtype == torch.float8_e5m2, ROWWISE=rowwise, COLUMNWISE=columnwise,
            TILE_ROWS=tile.rows, TILE_COLUMNS=tile.columns, NEXT=may_next_begin(x, rows), num_warps=tile.warps,
        )  # fmt: skip
    return q, qt, amax, scale_inv
