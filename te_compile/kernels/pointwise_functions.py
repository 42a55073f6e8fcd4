"""What generated producers call: functions as accurate as fp32 in bulk needs, and how tiles of inputs are read.

pointwise_source.py writes the producers, and pointwise.py says how many instructions they can afford.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_compile.kernels.quantize import INTERPRETED

# 1 / (1 + 2^x): what tl.exp2 and a division add to this is care for subnormal numbers, 15 instructions of it.
LOGISTIC_ASSEMBLY = tl.constexpr("ex2.approx.ftz.f32 $0, $1; add.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0;")

WIDENING_ASSEMBLY = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
RECIPROCAL_ASSEMBLY = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")
EXP2_ASSEMBLY = tl.constexpr("ex2.approx.ftz.f32 $0, $1;")
# erfc(z) / 2 = t · e^-z² · (C0 + C1 · t + … + C7 · t⁷) with t = 1 / (1 + RATE · z) for z from 0 on, to 4.3e-7 of its
# value however small that is: the best for this rate, found by Lawson's iteration in high precision.
ERFC_RATE = 0.45
RATE = tl.constexpr(ERFC_RATE)
C0, C1 = tl.constexpr(0.1269403100013733), tl.constexpr(0.12703624367713928)
C2, C3 = tl.constexpr(0.11269810050725937), tl.constexpr(0.09861748665571213)
C4, C5 = tl.constexpr(0.012361692264676094), tl.constexpr(0.11246073991060257)
C6, C7 = tl.constexpr(-0.12453993409872055), tl.constexpr(0.034425366669893265)


@triton.jit
def logistic(exponent):
    """1 / (1 + 2^exponent), to a few units in the last place; 0 from 2^126 on, below fp32's normal range."""
    if INTERPRETED:
        return 1.0 / (1.0 + tl.exp2(exponent))
    else:
        return tl.inline_asm_elementwise(
            LOGISTIC_ASSEMBLY, "=&f,f", [exponent], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip


@triton.jit
def logistic_slope(value):
    """value · (1 - value). As value - value² it is one instruction, which rounds once: where the value nears 1, what is
    left is right. The interpreter has none that does."""
    if INTERPRETED:
        return value * (1.0 - value)
    else:
        return tl.fma(-value, value, value)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return logistic(x * -1.4426950408889634)


@triton.jit
def tanh(x):
    """One exponential and one division; near 0, where 1 - 2 / (e + 1) cancels, the series."""
    square = x * x
    near = x * (1.0 + square * (-0.33333333 + square * (0.13333333 - 0.053968254 * square)))
    far = 1.0 - 2.0 * sigmoid(-2.0 * x)
    return tl.where(tl.abs(x) < 0.25, near, far)


@triton.jit
def one_plus_tanh(x):
    """1 + tanh(x), as accurate as fp32 where tanh(x) nears -1."""
    return 2.0 * logistic(x * -2.8853900817779268)


@triton.jit
def one_less_tanh_squared(x):
    """1 - tanh(x)², the derivative of tanh."""
    return 4.0 * logistic_slope(logistic(x * -2.8853900817779268))


@triton.jit
def vanishing_exp2(exponent):
    """2^exponent; 0 below fp32's normal range."""
    if INTERPRETED:
        return tl.exp2(exponent)
    else:
        return tl.inline_asm_elementwise(EXP2_ASSEMBLY, "=f,f", [exponent], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def one_plus_erf(u):
    """1 + erf(u), to a millionth of its value also where that nears 0."""
    return 2.0 * normal_cdf(u, RATE, vanishing_exp2(u * u * -1.4426950408889634))


@triton.jit
def normal_cdf(x, rate, bell):
    """(1 + erf(u)) / 2 of a u that has the sign of ``x``; ``rate`` times ``x`` is ERFC_RATE · u, and ``bell`` e^-u²."""
    denominator = 1.0 + rate * tl.abs(x)
    if INTERPRETED:
        t = 1.0 / denominator
    else:
        t = tl.inline_asm_elementwise(
            RECIPROCAL_ASSEMBLY, "=f,f", [denominator], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    series = C0 + t * (C1 + t * (C2 + t * (C3 + t * (C4 + t * (C5 + t * (C6 + t * C7))))))
    tail = t * bell * series
    return tl.where(x < 0, tail, 1.0 - tail)


@triton.jit
def log1p(x):
    """log(1 + x), corrected for what the addition lost (Kahan)."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.where(u == float("inf"), u, tl.log(u) * (x / (u - 1.0))))


@triton.jit
def expm1(x):
    """exp(x) - 1; near 0, where that cancels, the series."""
    near = x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * (0.008333334 + x * 0.0013888889)))))
    return tl.where(tl.abs(x) < 0.35, near, tl.exp(x) - 1.0)


@triton.jit
def power(x, y):
    """x to a power that is not an integer (the pass spells those out): NaN for a negative x, as in torch."""
    return tl.exp2(y * tl.log2(x))


@triton.jit
def is_first():
    """Whether this is the first program of all."""
    return (tl.program_id(0) == 0) & (tl.program_id(1) == 0)


@triton.jit
def corner(
    columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, FLAT: tl.constexpr, WHOLE: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    """Where this program's tile begins: row and column, int64; then the row as an index a of A and one in S, int32.

    ``FLAT``: programs are numbered row by row. ``WHOLE``: the grid's third dimension is A, so nobody divides; the last
    two mean nothing without it.
    """
    if FLAT:
        program = tl.program_id(0)
        if BACKWARDS:
            program = tl.num_programs(0) - 1 - program
        across = tl.cdiv(columns, COLUMNS)
        down, right, a, within = program // across, program % across, 0, 0
    else:
        within, right, a = tl.program_id(1), tl.program_id(0), 0
        if WHOLE:
            a = tl.program_id(2)
        if BACKWARDS:
            within, right = tl.num_programs(1) - 1 - within, tl.num_programs(0) - 1 - right
            if WHOLE:
                a = tl.num_programs(2) - 1 - a
        down = within
        if WHOLE:
            down += a * tl.num_programs(1)
    return down.to(tl.int64) * ROWS, right.to(tl.int64) * COLUMNS, a, within * ROWS


@triton.jit
def widened(value):
    """bf16 in fp32. Two at a time, which saves an instruction of the four that Triton writes for them."""
    if INTERPRETED:
        return value.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            WIDENING_ASSEMBLY, "=r,=r,r", [value], dtype=tl.float32, is_pure=True, pack=2
        )  # fmt: skip


@triton.jit
def write(pointer, value, inside, EVEN: tl.constexpr):
    """Store a block, with no mask where none is needed."""
    if EVEN:
        tl.store(pointer, value)
    else:
        tl.store(pointer, value, mask=inside)


@triton.jit
def read(pointer, inside, EVEN: tl.constexpr):
    """A block, with no mask where none is needed, else 0 outside."""
    if EVEN:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=inside, other=0)


@triton.jit
def read_full(x, stride_m, stride_k, tile_m, tile_k, m, k, in_rows, in_columns, EVEN: tl.constexpr):
    """A tile of a matrix. Only the tile's corner needs 64 bits."""
    x += tile_m * stride_m + tile_k * stride_k
    return read(x + m[:, None] * stride_m + k[None, :] * stride_k, in_rows[:, None] & in_columns[None, :], EVEN)


@triton.jit
def read_row(x, stride_m, stride_k, tile_m, tile_k, m, k, in_rows, in_columns, EVEN: tl.constexpr):
    """A tile's part of a row vector, [1, TILE_COLUMNS]."""
    return read(x + (tile_k + k) * stride_k, in_columns, EVEN)[None, :]


@triton.jit
def read_column(x, stride_m, stride_k, tile_m, tile_k, m, k, in_rows, in_columns, EVEN: tl.constexpr):
    """A tile's part of a column vector, [TILE_ROWS, 1]."""
    return read(x + (tile_m + m) * stride_m, in_rows, EVEN)[:, None]


@triton.jit
def part_at(x, stride_g, turn, column, within, HEAD: tl.constexpr, HEADS: tl.constexpr):
    """Where column ``within`` of a part [A, S, G, D = HEAD] starts: column ``column`` of its turn ``turn``.

    ``HEADS``: a turn is as wide as a head, so it is the index in G.
    """
    if HEADS:
        return x + turn.to(tl.int64) * stride_g + column
    else:
        return x + (within // HEAD).to(tl.int64) * stride_g + within % HEAD


@triton.jit
def part_rows(
    x, stride_a, stride_s, length, tile_m, tile_a, tile_s, m, WHOLE: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Where the rows of a tile are, of a part with S = ``length``, in the column at ``x``. ``WHOLE``: they have one
    index in A.

    ``ALIGNED``: every row starts on a multiple of 16 bytes. Up to Triton 3.6 it does not know that of a pointer or a
    stride that is one of several, and loads element by element, which takes a third longer.
    """
    if ALIGNED:
        stride_a, stride_s = tl.multiple_of(stride_a, 16), tl.multiple_of(stride_s, 16)
    if WHOLE:
        x += tile_a.to(tl.int64) * stride_a + tile_s.to(tl.int64) * stride_s
        rows = m * stride_s
    else:
        row = tile_m.to(tl.int32) + m
        rows = (row // length).to(tl.int64) * stride_a + (row % length).to(tl.int64) * stride_s
    if ALIGNED:
        x = tl.multiple_of(x, 16)
    return x + rows


@triton.jit
def read_part(
    x, stride_a, stride_s, length, tile_m, tile_a, tile_s, m, k, in_rows, in_columns,
    EVEN: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A tile of a part, from the column at ``x`` on: see ``part_rows``."""
    rows = part_rows(x, stride_a, stride_s, length, tile_m, tile_a, tile_s, m, WHOLE, ALIGNED)
    return read(rows[:, None] + k[None, :], in_rows[:, None] & in_columns[None, :], EVEN)


@triton.jit
def whole(value, in_rows, in_columns, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``value`` over the whole tile, 0 outside the matrix (a producer of zeros need not be zero)."""
    value = tl.broadcast_to(value, (ROWS, COLUMNS))
    if not EVEN:
        value = tl.where(in_rows[:, None] & in_columns[None, :], value, 0.0)
    return value
