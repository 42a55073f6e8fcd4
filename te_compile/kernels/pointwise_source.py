"""The text of a producer's kernels, written from its spec; pointwise.py launches them.

The generated file holds one function with the spec's statements, one a line, and kernels around it that differ only
in what they do with z: ``measure`` takes its amax when no scale is known, ``produce`` writes everything else, and
``alone`` does both where one program holds all of z (kernels/alone.py).

A program of ``produce`` owns one tile, in four quarters of interleaved rows, so that a thread holds four rows of one
column and qᵀ can be transposed four codes at a time: through shared memory as 32-bit words, in one exchange, where
bytes would take four. Column sums leave as one partial row per tile. Triton needs the source of a kernel in a file; its
name is a hash of its content, so processes share it and a changed generator never meets a stale one.
"""

from __future__ import annotations

import functools
import hashlib
import math
from pathlib import Path
from types import ModuleType

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from te_compile.kernels.algebra import BELL, LOGISTIC, LOGISTIC_SLOPE, NORMAL_CDF, simplified
from te_compile.kernels.generated import load_from
from te_compile.kernels.pointwise_parts import part_text
from te_compile.kernels.pointwise_pieces import piece_parameters, piece_text, read_text, span_text
from te_compile.kernels.spellings import (
    ONE_LESS_TANH_SQUARED,
    ONE_PLUS_ERF,
    ONE_PLUS_TANH,
    TIMES_SIGMOID,
    spelled,
)
from te_compile.ops.pointwise import Constant, Input, Operand, Place, Spec

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
    """The names by which the kernels get input ``index``: see ``_kernel_arguments`` in pointwise.py."""
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
"""Generated by te_compile.kernels.pointwise_source from the spec

    {spec}
"""

import triton
import triton.language as tl

from te_compile.kernels.alone import scale_of_all
from te_compile.kernels.pointwise_functions import (
    corner, expm1, is_first, log1p, logistic, logistic_slope, normal_cdf, one_less_tanh_squared, one_plus_erf,
    one_plus_tanh, part_at, power, read_column, read_full, read_part, read_row, sigmoid, tanh, vanishing_exp2, whole,
    widened, write,
)
from te_compile.kernels.pointwise_pieces import columns_from, in_head, in_span, read_pieces
from te_compile.kernels.programmatic import let_next_begin
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
    {layouts},{beside}
    EVEN: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr, HEAD: tl.constexpr, HEADS: tl.constexpr,
    FLAT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, NEXT: tl.constexpr,
):
    let_next_begin(NEXT)
    {scales}
    # Backwards after a measuring pass: the L2 still holds what that read last.
    tile_m, tile_k, tile_a, tile_s = corner(columns, ROWS, COLUMNS, FLAT, WHOLE, MEASURED)
    word, k = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    in_columns = tile_k + k < columns
    {tile}
    {sums}
    {record_largest}
'''

_ALONE = """

@triton.jit(do_not_specialize_on_alignment=[{scale_names}])
def alone(
    {inputs},
    {outputs}{quantized_rows}, rows, columns,
    TARGET: tl.constexpr, EPSILON: tl.constexpr, POWER_2: tl.constexpr, E5M2: tl.constexpr, {rowwise},
    EVEN: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr, HEAD: tl.constexpr, HEADS: tl.constexpr,
    FLAT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, NEXT: tl.constexpr,
):
    let_next_begin(NEXT)
    tile_m, tile_k, tile_a, tile_s = corner(columns, ROWS, COLUMNS, FLAT, WHOLE, False)
    m, k = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    in_rows, in_columns = m < rows, k < columns
    at, inside = m[:, None] * columns + k[None, :], in_rows[:, None] & in_columns[None, :]
    {returned} = values(
        {arguments},
        tile_m, tile_k, tile_a, tile_s, m, k, in_rows, in_columns,
        EVEN, WHOLE, ALIGNED, HEAD, HEADS, ROWS, COLUMNS,
    )
    {emit}
    {cast}
"""

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
    "quantized_rows": ("scale{n}, q{n}, amax{n}, scale_inv{n}", ", "),
    "rowwise": ("ROWWISE{n}: tl.constexpr", ", "),
    "cast": (
        "used{n} = scale_of_all(\n"
        "        largest_of(magnitude({root}_all)), scale{n}, amax{n}, scale_inv{n}, TARGET, EPSILON, POWER_2\n"
        "    )\n"
        "    if ROWWISE{n}:\n"
        "        write(q{n} + at, fp8_codes(scaled({root}_all, used{n}), E5M2), inside, EVEN)",
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
    emit = [f"write(e{i} + at, {given.value}_all, inside, EVEN)" for i, given in enumerate(spec.emitted)]
    text = _SOURCE if spec.sums else _SOURCE + _ALONE  # sums are of whole tiles
    return text.format(
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
        beside=" BESIDE: tl.constexpr," if spec.second else "",
        emit="\n    ".join(emit),
        tile="\n    ".join(_tile_text(spec, leaving, arguments)),
        sums="\n    ".join(line for i, given in enumerate(spec.sums) for line in _sum_text(i, given.value)),
    )


def _tile_text(spec: Spec, leaving: list[str], arguments: str) -> list[str]:
    """What ``produce`` does with its tile."""
    text = [f"tile_at = tile_m * {_row_text(spec)} + tile_k", *_quarters_text(spec, leaving, arguments)]
    return [*text, *(f"largest{end} = {_largest_text(root)}" for root, end in _ends(spec))]


def _row_text(spec: Spec) -> str:
    """How far apart the rows of what is written are. Two values may lie beside each other, in one matrix."""
    return "(columns * BESIDE)" if spec.second else "columns"


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
            f"at{j} = m{j}[:, None] * {_row_text(spec)} + k[None, :]",  # only a tile's corner needs 64 bits
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


def file_of(text: str) -> Path:
    """A file with this content, in Inductor's cache, which users may share; several processes may write it at once."""
    folder = Path(cache_dir()) / "te_compile"
    path = folder / f"producer_{hashlib.sha256(text.encode()).hexdigest()[:24]}.py"
    if not path.exists():
        from torch._inductor.codecache import write_atomic  # takes a second, and is there once something is compiled

        write_atomic(str(path), text, make_dirs=True)
    return path


@functools.cache
def kernels(spec: Spec) -> ModuleType:
    """The module generated for ``spec``, with its kernels ``measure``, ``produce`` and, without sums, ``alone``."""
    path = file_of(source(spec))
    return load_from(f"te_compile_generated.{path.stem}", str(path))
