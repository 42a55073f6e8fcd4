"""Producers: a Triton kernel written from a spec, which computes z, casts it and never stores it.

Bytes, for z [M, K] from n inputs [M, K] of two-byte elements: 2·n·M·K read, M·K written for q, M·K for qᵀ, and 2·M·K
for a value that is emitted. An H200 copies 4.27 TB/s (read and written bytes together), which allows

                          activation (n = 1)       its backward, a gate (n = 2)      gate backward (n = 3)
    8192 × 4096           134 MB     31 µs         201 MB     47 µs                  268 MB     63 µs
    8192 × 16384          537 MB    126 µs         805 MB    189 µs                 1074 MB    252 µs

That is about 28 instructions an element for n = 1: less than an accurate tanh or erf costs, hence the forms below,
which are as accurate as fp32 in bulk needs (a few units in the last place) and no more.
``python -m benchmarks.instructions`` counts them.

The generated file holds one function with the spec's statements, one a line, and two kernels around it that differ
only in what they do with z: ``measure`` takes its amax when no scale is known, ``produce`` writes everything else. A
program owns one tile, in four quarters of interleaved rows, so that a thread holds four rows of one column and qᵀ can
be transposed four codes at a time: through shared memory as 32-bit words, in one exchange, where bytes would take four.
Column sums leave as one partial row per tile and are added up afterwards in a fixed order, so they are the same in
every run. Triton needs the source of a kernel in a file; its name is a hash of its content, so processes share it and a
changed generator never meets a stale one.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import os
import tempfile
from pathlib import Path
from types import ModuleType

import torch
import triton
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import cache_dir

from te_compile.kernels import buffers
from te_compile.kernels.algebra import BELL, LOGISTIC, LOGISTIC_SLOPE, NORMAL_CDF, simplified
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.column_sums import added_up
from te_compile.kernels.generated import load_from
from te_compile.kernels.launch import launch
from te_compile.kernels.pointwise_parts import common_width, folding, part_text, with_parts_joined
from te_compile.kernels.pointwise_pieces import piece_arguments, piece_parameters, piece_text, read_text, span_text
from te_compile.kernels.quantize import Tile, rule_constants
from te_compile.kernels.spellings import (
    ONE_LESS_TANH_SQUARED,
    ONE_PLUS_ERF,
    ONE_PLUS_TANH,
    TIMES_SIGMOID,
    spelled,
)
from te_compile.ops.pieces import period_of, tensors_of
from te_compile.ops.pointwise import Constant, Input, Operand, Place, Spec, extent, grouped
from te_compile.ops.quantize import padded
from te_compile.recipe import ScaleRule

# What each operation of the spec language is in Triton, on fp32 numbers and int1 truths.
FORMS = {
    "float16": "rounded({0}, tl.float16)",
    "bfloat16": "rounded({0}, tl.bfloat16)",
    "number": "{0}.to(tl.float32)",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "pow": "power({0}, {1})",
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "sign": "({0} > 0).to(tl.float32) - ({0} < 0).to(tl.float32)",
    "relu": "tl.where({0} <= 0, 0.0, {0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "reciprocal": "1.0 / {0}",
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "tl.rsqrt({0})",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "expm1": "expm1({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "log1p": "log1p({0})",
    "sigmoid": "sigmoid({0})",
    "tanh": "tanh({0})",
    "erf": "tl.erf({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "not": "{0} == 0",
    "where": "tl.where({0}, {1}, {2})",
}
# And of the operations that spellings.py and algebra.py put in their place.
CHEAPER_FORMS = {
    ONE_PLUS_TANH: "one_plus_tanh({0})",
    ONE_LESS_TANH_SQUARED: "one_less_tanh_squared({0})",
    TIMES_SIGMOID: "{0} * sigmoid({1})",
    LOGISTIC: "logistic({0})",
    LOGISTIC_SLOPE: "logistic_slope({0})",
    ONE_PLUS_ERF: "one_plus_erf({0})",
    NORMAL_CDF: "normal_cdf({0}, {1}, {2})",
    BELL: "vanishing_exp2({0})",
}

TRITON_DTYPES = {
    torch.bool: "tl.uint8",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.float32: "tl.float32",
}


def _literal(constant: Constant) -> str:
    if isinstance(constant, bool):
        return str(constant)
    value = float(constant)
    if math.isinf(value):
        return f'float("{value}")'
    # Triton takes a constant below fp32's normal range for a double.
    subnormal = value != 0 and abs(value) < torch.finfo(torch.float32).tiny
    return f"tl.full((), {value!r}, tl.float32)" if subnormal else repr(value)


def _form(operation: str, operands: tuple[Operand, ...]) -> str:
    texts = (operand if isinstance(operand, str) else _literal(operand) for operand in operands)
    return {**FORMS, **CHEAPER_FORMS}[operation].format(
        *(f"({text})" if text.startswith("-") else text for text in texts)
    )


def _parameters(index: int, given: Input) -> list[str]:
    """The names by which the kernels get input ``index``: see ``_kernel_arguments``."""
    x = f"x{index}"
    if given.pieces or given.span:  # the tensors of pieces are the spec's
        return []
    if not given.parts:
        return [x, f"{x}_m", f"{x}_k"]
    of_parts = (f"{x}p{part}{end}" for part in range(len(given.parts)) for end in ("", "_a", "_s", "_g"))
    return [*of_parts, f"{x}_length"]


def _read_text(index: int, given: Input) -> list[str]:
    """The statements that read a tile of input ``index``."""
    x, lines = f"x{index}", []
    if given.span:
        return [f"{x} = {span_text(given.span)}"]
    if given.pieces:
        lines = piece_text(x, given.pieces, given.place is Place.FULL)
        loaded = read_text(x, given.pieces)
    elif given.place is Place.SCALAR:
        loaded = f"tl.load({x})"
    elif given.parts:
        lines = part_text(x, given.parts)
        rows = f"{x}_a, {x}_s, {x}_length, tile_m, tile_a, tile_s"
        loaded = f"read_part({x}_at, {rows}, m, k, in_rows, in_columns, EVEN, WHOLE, ALIGNED)"
    else:
        where = f"{x}, {x}_m, {x}_k, tile_m, tile_k, m, k, in_rows, in_columns, EVEN"
        loaded = f"read_{given.place.name.lower()}({where})"
    if given.dtype == torch.bool:
        number = f"{loaded} != 0"
    elif given.dtype == torch.bfloat16 and given.place in (Place.FULL, Place.HEAD):
        number = f"widened({loaded})"
    else:
        number = f"{loaded}.to(tl.float32)"
    return [*lines, f"{x} = {number}"]


_SOURCE = '''\
"""Generated by te_compile.kernels.pointwise from the spec

    {spec}
"""

import triton
import triton.language as tl

from te_compile.kernels.pointwise_functions import (
    corner, expm1, is_first, log1p, logistic, logistic_slope, normal_cdf, one_less_tanh_squared, one_plus_erf,
    one_plus_tanh, part_at, power, read_column, read_full, read_part, read_row, sigmoid, tanh, vanishing_exp2, whole,
    widened, write,
)
from te_compile.kernels.pointwise_pieces import columns_from, in_head, in_span, read_pieces
from te_compile.kernels.quantize import (
    fp8_codes, fp8_words, largest_of, magnitude, magnitude_of_four, must_measure, record_amax, rounded, scale_in_use,
    scaled,
)


@triton.jit
def values(
    {inputs},
    tile_m, tile_k, tile_a, tile_s, m, k, in_rows, in_columns,
    EVEN: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr, HEAD: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    {body}
    return {returned}


@triton.jit(do_not_specialize_on_alignment=[{scale_names}])
def measure(
    {inputs},
    {measured}, rows, columns,
    EVEN: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr, HEAD: tl.constexpr, HEADS: tl.constexpr,
    FLAT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    if {must_measure}:
        tile_m, tile_k, tile_a, tile_s = corner(columns, ROWS, COLUMNS, FLAT, WHOLE, False)
        m, k = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        in_rows, in_columns = tile_m + m < rows, tile_k + k < columns
        {returned} = values(
            {arguments},
            tile_m, tile_k, tile_a, tile_s, m, k, in_rows, in_columns,
            EVEN, WHOLE, ALIGNED, HEAD, HEADS, ROWS, COLUMNS,
        )
        {record_measured}


@triton.jit(do_not_specialize_on_alignment=[{scale_names}])
def produce(
    {inputs},
    {outputs}{quantized}, rows, columns, words,
    MEASURED: tl.constexpr, TARGET: tl.constexpr, EPSILON: tl.constexpr, POWER_2: tl.constexpr, E5M2: tl.constexpr,
    {layouts},
    EVEN: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr, HEAD: tl.constexpr, HEADS: tl.constexpr,
    FLAT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    {scales}
    # Backwards after a measuring pass: the L2 still holds what that read last.
    tile_m, tile_k, tile_a, tile_s = corner(columns, ROWS, COLUMNS, FLAT, WHOLE, MEASURED)
    word, k = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    in_columns = tile_k + k < columns
    {tile}
    {sums}
    {record_largest}
'''

# What one quantised value adds to the text above, with the end of its names: "" for the first, "2" for a second one.
_OF_EACH = {
    "scale_names": ('"scale{n}"', ", "),
    "measured": ("scale{n}, amax{n}", ", "),
    "must_measure": ("must_measure(scale{n})", " | "),
    "record_measured": ("record_amax(amax{n}, largest_of(magnitude({root}_all)))", "\n        "),
    "quantized": ("scale{n}, q{n}, qt{n}, amax{n}, scale_inv{n}", ", "),
    "layouts": ("ROWWISE{n}: tl.constexpr, COLUMNWISE{n}: tl.constexpr", ", "),
    "scales": (
        "used{n} = scale_in_use(scale{n}, amax{n}, MEASURED, TARGET, EPSILON, POWER_2)\n"
        "    if is_first():\n"
        "        tl.store(scale_inv{n}, tl.div_rn(tl.full((), 1.0, tl.float32), used{n}))",
        "\n    ",
    ),
    "record_largest": ("record_amax(amax{n}, largest_of(largest{n}))", "\n    "),
}


def _ends(spec: Spec) -> list[tuple[str, str]]:
    """Each value that is quantised, with the end of the names that belong to it."""
    return list(zip(spec.roots, ("", "2"), strict=False))


def source(spec: Spec) -> str:
    """The Python text of the kernels for ``spec``."""
    steps, names = simplified(spelled(spec), spec.leaving)
    parameters = [_parameters(i, given) for i, given in enumerate(spec.inputs)]
    parameters += map(piece_parameters, spec.tensors_in_pieces)
    arguments = ", ".join(name for names in parameters for name in names)
    leaving = list(spec.leaving)
    body = [line for i, given in enumerate(spec.inputs) for line in _read_text(i, given)]
    body += [f"{name} = {_form(step.operation, step.operands)}" for name, step in steps]
    body += [f"{name}_all = whole({names[name]}, in_rows, in_columns, EVEN, ROWS, COLUMNS)" for name in leaving]
    outputs = [f"e{i}" for i in range(len(spec.emitted))] + [f"s{i}" for i in range(len(spec.sums))]
    return _SOURCE.format(
        spec="\n    ".join(spec.lines()),
        inputs=",\n    ".join(", ".join(names) for names in parameters if names),
        arguments=arguments,
        outputs="".join(f"{name}, " for name in outputs),
        body="\n    ".join(body),
        returned=", ".join(f"{name}_all" for name in leaving),
        **{
            name: between.join(text.format(n=end, root=root) for root, end in _ends(spec))
            for name, (text, between) in _OF_EACH.items()
        },
        tile="\n    ".join(_tile_text(spec, leaving, arguments)),
        sums="\n    ".join(line for i, given in enumerate(spec.sums) for line in _sum_text(i, given.value)),
    )


def _tile_text(spec: Spec, leaving: list[str], arguments: str) -> list[str]:
    """What ``produce`` does with its tile."""
    text = ["tile_at = tile_m * columns + tile_k", *_quarters_text(spec, leaving, arguments)]
    return [*text, *(f"largest{end} = {_largest_text(root)}" for root, end in _ends(spec))]


def _largest_text(root: str) -> str:
    return f"magnitude_of_four({', '.join(f'{root}_{j}' for j in range(4))})"


def _sum_text(index: int, value: str) -> list[str]:
    """The statements that write a tile's part of a column sum."""
    return [
        f"sum{index} = {' + '.join(f'{value}_{j}' for j in range(4))}",
        f"tl.store(s{index} + tile_m // ROWS * columns + tile_k + k, tl.sum(sum{index}, axis=0), mask=in_columns)",
    ]


def _quarters_text(spec: Spec, leaving: list[str], arguments: str) -> list[str]:
    """Each step is written once for each of a tile's four interleaved quarters.

    Quarter j holds the rows 4·i + j. All are read before anything is stored, so that all loads are in flight at once.
    """
    compute, cast, store = [], [], []
    for j in range(4):
        compute += [
            f"m{j} = 4 * word + {j}",
            f"at{j} = m{j}[:, None] * columns + k[None, :]",  # only a tile's corner needs 64 bits
            f"in_rows{j} = tile_m + m{j} < rows",
            f"inside{j} = in_rows{j}[:, None] & in_columns[None, :]",
            f"{', '.join(f'{name}_{j}' for name in leaving)} = values(",
            f"    {arguments},",
            f"    tile_m, tile_k, tile_a, tile_s, m{j}, k, in_rows{j}, in_columns,",
            "    EVEN, WHOLE, ALIGNED, HEAD, HEADS, ROWS // 4, COLUMNS,",
            ")",
        ]
        cast += [f"scaled{end}_{j} = scaled({root}_{j}, used{end})" for root, end in _ends(spec)]
        store += [f"write(e{i} + tile_at + at{j}, {r.value}_{j}, inside{j}, EVEN)" for i, r in enumerate(spec.emitted)]
        for _, end in _ends(spec):
            codes = f"fp8_codes(scaled{end}_{j}, E5M2)"
            store += [f"if ROWWISE{end}:", f"    write(q{end} + tile_at + at{j}, {codes}, inside{j}, EVEN)"]
    transposed = [line for _, end in _ends(spec) for line in _transposed_text(end)]
    return [*compute, *cast, *store, *transposed]


def _transposed_text(end: str) -> list[str]:
    """The statements that write a tile of a qᵀ."""
    quarters = ", ".join(f"scaled{end}_{j}" for j in range(4))
    return [
        f"if COLUMNWISE{end}:",
        "    # Rows from M to the padded end are zeros in z, so their codes are the padding.",
        f"    qt_at = qt{end}.to(tl.pointer_type(tl.uint32), bitcast=True) + tile_k * words + tile_m // 4",
        "    within = in_columns[:, None] & (tile_m // 4 + word < words)[None, :]",
        f"    codes = tl.trans(fp8_words({quarters}, E5M2))",
        "    write(qt_at + k[:, None] * words + word[None, :], codes, within, EVEN)",
    ]


def _file_of(text: str) -> Path:
    """A file with this content, in Inductor's cache; several processes may write it at once."""
    folder = Path(cache_dir()) / "te_compile"
    path = folder / f"producer_{hashlib.sha256(text.encode()).hexdigest()[:24]}.py"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    return path


@functools.cache
def kernels(spec: Spec) -> ModuleType:
    """The module generated for ``spec``, with its kernels ``measure`` and ``produce``."""
    path = _file_of(source(spec))
    return load_from(f"te_compile_generated.{path.stem}", str(path))


# 32 elements a thread, and runs of 64 bytes in qᵀ; with twice as many elements the chains run out of registers. Held to
# 64 of these a multiprocessor has room for 32 warps. On an H200 the best of nine, or within 1%, for activations and for
# gates, at 90% of a copy's bandwidth for GELU of 8192 × 16384 and 96% for SwiGLU.
TILE = Tile(64, 128, 8, registers=64)
# Where more is read or columns are summed: a sum ends in an exchange between all warps of a program. On an H200 the
# best of fourteen, or within 1%: the backward of GELU with its bias gradient takes 210 µs for 8192 × 16384, and 217
# with the 72 registers that it would like; a cast with sums 157, and by tiles of 32 × 64 with two warps 188.
DENSE = Tile(64, 64, 4, registers=64)
# Where two values are quantised, which are twice as many codes to hold.
PAIRED = Tile(64, 64, 8)


def tile_for(spec: Spec) -> Tile:
    """How much a program does."""
    if spec.second:
        return PAIRED
    if spec.tensors_in_pieces and not spec.sums and _fits_heads(spec, TILE.columns):
        return TILE  # a head of 128 is read twice, the second time out of the L1: 5 µs less for 8192 × 4096 on an H200
    matrices = sum(given.place is Place.FULL for given in spec.inputs)
    return DENSE if spec.sums or matrices > 1 else TILE


def _fits_heads(spec: Spec, columns: int) -> bool:
    """Does a tile never reach across heads?"""
    return all(period_of(given.pieces) % columns == 0 for given in spec.inputs if given.pieces)


MOST_ROWS_OF_PROGRAMS = 65535  # that one launch may have
MOST = 2**31 // 256  # rows or columns: offsets within a tile, in either layout, have 32 bits

NARROWEST = 32  # columns of a tile: below it, parts are joined before


def _kernel_arguments(spec: Spec, inputs: list[Tensor], rows: int) -> list[Tensor | int]:
    """Each input as pointer, stride over rows, stride over columns, 0 where it does not vary.

    An input in parts [A, S, G, D]: of each part pointer and strides over A, S and G; then S. The tensors that come in
    pieces stand behind all others.
    """
    arguments: list[Tensor | int] = []
    in_pieces: dict[int, Tensor] = {}
    for given, tensors in grouped(spec, inputs):
        in_pieces.update(zip(tensors_of(given.pieces), tensors, strict=False))
        if given.pieces or given.span:
            continue
        x = tensors[0]
        if given.parts:
            for part in tensors:
                arguments += [_bytes(part), *part.stride()[:3]]
            arguments.append(x.shape[1])
        else:
            stride_m = x.stride(0) if given.place in (Place.FULL, Place.COLUMN) else 0
            stride_k = x.stride(-1) if given.place in (Place.FULL, Place.ROW) else 0
            arguments += [_bytes(x), stride_m, stride_k]
    for x in in_pieces.values():
        arguments += piece_arguments(_bytes(x), rows)
    return arguments


def _bytes(x: Tensor) -> Tensor:
    """``x`` as Triton takes it, which knows truths as bytes."""
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def _programs(across: int, down: int, flat: bool, turns: int) -> int | tuple[int, ...]:
    """The programs of a launch, one a tile. turns: the third dimension of their grid."""
    if flat:
        return max(1, across * down)
    return (max(1, across), max(1, down)) if turns == 1 else (across, down // turns, turns)


def fused_quantize(
    inputs: list[Tensor],
    scale: Tensor | None,
    spec: Spec,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    rule: ScaleRule,
    measure: bool,
    tile: Tile | None = None,
) -> list[Tensor]:
    """[q, qᵀ, amax, 1 / scale, emitted …, sums …] of ``spec``. ``measure``: the scale may be absent or 0.

    inputs: on one device, shaped and typed as the spec declares them, any strides.
    """
    return _produced(inputs, [scale], spec, dtype, [(rowwise, columnwise)], rule, measure, tile)


def fused_quantize_pair(
    inputs: list[Tensor],
    scales: list[Tensor | None],
    spec: Spec,
    dtype: torch.dtype,
    layouts: list[tuple[bool, bool]],
    rule: ScaleRule,
    measure: bool,
    tile: Tile | None = None,
) -> list[Tensor]:
    """[q, qᵀ, amax, 1 / scale] of the first value of ``spec`` and then of the second. ``measure``: a scale may be
    absent or 0. layouts: of each value, whether q and qᵀ are wanted. See :func:`fused_quantize` for the rest."""
    return _produced(inputs, scales, spec, dtype, layouts, rule, measure, tile)


def _produced(
    inputs: list[Tensor],
    scales: list[Tensor | None],
    spec: Spec,
    dtype: torch.dtype,
    layouts: list[tuple[bool, bool]],
    rule: ScaleRule,
    measure: bool,
    tile: Tile | None,
) -> list[Tensor]:
    rows, columns = extent(spec, inputs)
    if max(rows, columns) > MOST:
        raise ValueError(f"a producer's matrix is {rows} x {columns}: each of the two may be at most {MOST}")
    tile = tile or tile_for(spec)
    common = common_width(spec, inputs)
    if 0 < common < NARROWEST:
        spec, inputs = with_parts_joined(spec, inputs)
    elif 0 < common < tile.columns:
        tile = dataclasses.replace(tile, columns=common)
    x, module = inputs[0], kernels(spec)
    tiles_m, across = max(1, triton.cdiv(rows, tile.rows)), triton.cdiv(columns, tile.columns)
    target, epsilon, power_2 = rule_constants(rule, dtype)
    even = rows % tile.rows == 0 and columns % tile.columns == 0
    # Of a rectangle of programs each knows its tile without dividing, but it may not be deeper than that.
    flat = tiles_m > MOST_ROWS_OF_PROGRAMS
    constants, turns = folding(spec, inputs, tile.rows, flat)
    programs = _programs(across, tiles_m, flat, turns)
    shape = {"EVEN": even, **constants, "FLAT": flat, "ROWS": tile.rows, "COLUMNS": tile.columns}
    shape["num_warps"] = tile.warps
    if tile.registers is not None:
        shape["maxnreg"] = tile.registers
    arguments = _kernel_arguments(spec, inputs, rows)
    flags = dict(zip(("ROWWISE", "COLUMNWISE", "ROWWISE2", "COLUMNWISE2"), itertools.chain(*layouts), strict=False))
    with on_device_of(x):
        quantized = [buffers.quantized(x, rows, columns, dtype, *wanted, n) for n, wanted in enumerate(layouts)]
        emitted = [buffers.empty(x, (rows, columns), result.dtype) for result in spec.emitted]
        partials = [buffers.empty(x, (tiles_m, columns), torch.float32) for _ in spec.sums]
        if measure:
            amaxes = itertools.chain(*((scale, of[2]) for scale, of in zip(scales, quantized, strict=True)))
            launch(module.measure, programs, *arguments, *amaxes, rows, columns, **shape)
        written: list[Tensor | None] = []
        for scale, (q, qt, amax, scale_inv) in zip(scales, quantized, strict=True):
            written += (scale, q.view(torch.uint8), qt.view(torch.uint8), amax, scale_inv)
        launch(
            module.produce, programs, *arguments, *emitted, *partials,
            *written, rows, columns, padded(rows) // 4,
            MEASURED=measure, TARGET=target, EPSILON=epsilon, POWER_2=power_2,
            E5M2=dtype == torch.float8_e5m2, **flags, **shape,
        )  # fmt: skip
        sums = [added_up([partial], [given.dtype])[0] for partial, given in zip(partials, spec.sums, strict=True)]
    return [*itertools.chain(*quantized), *emitted, *sums]
