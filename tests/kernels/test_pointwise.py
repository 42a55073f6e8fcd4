"""Generated producers against the reference that evaluates the same spec."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from te_compile.kernels import pointwise
from te_compile.kernels.tiles import Tile
from te_compile.ops.fused_quantize import fused_quantize_reference
from te_compile.ops.fused_quantize_cat import fused_quantize_cat_reference
from te_compile.ops.fused_quantize_pair import fused_quantize_pair_reference
from te_compile.ops.pointwise import NUMBER, OPERATIONS, TRUTH, Place, Result, Spec, SpecBuilder
from te_compile.ops.reach import MOST_COLUMNS
from te_compile.recipe import ScaleRule

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_poisoned")

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
SMALL = Tile(32, 16, 4)  # several tiles even of small matrices: the interpreter is slow
CAST = Spec.parse("x0: float32[M, K]; quantize x0")
EVERY_PLACE = Spec.parse(
    "x0: bfloat16[M, K]; x1: bool[M, K]; x2: float32[K]; x3: bool[K]; x4: bfloat16[M, 1]; x5: float32[]; "
    "t0 = add(x0, x2); t1 = mul(t0, x4); t2 = and(x1, x3); t3 = where(t2, t1, x5); t4 = bfloat16(t3); "
    "quantize t4; emit t4: bfloat16; emit t1: float32; sum t4: float32; sum t1: bfloat16"
)


def inputs_of(spec: Spec, rows: int, columns: int, device: str) -> list[Tensor]:
    """Random inputs; matrices are column slices of wider ones, vectors every second element of longer ones."""
    made: list[Tensor] = []
    for given in spec.inputs:
        wide = torch.randn(rows, 2 * columns)[:, columns:]
        value = {
            Place.FULL: wide,
            Place.ROW: torch.randn(2 * columns)[::2],
            Place.COLUMN: torch.randn(rows, 2)[:, :1],
            Place.SCALAR: torch.randn(()),
        }[given.place]
        made.append((value > 0 if given.dtype == torch.bool else value.to(given.dtype)).to(device))
    return made


def bytes_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).cpu()


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    """Bytes of codes equal; sums, which are added up in another order, close."""
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.dtype in FP8:
            assert torch.equal(bytes_of(a), bytes_of(b))
        else:
            torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("shape", [(32, 16), (33, 17), (1, 50), (70, 1), (64, 48)])
def test_every_place_and_ragged_shapes_agree_with_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    inputs = inputs_of(EVERY_PLACE, *shape, device)
    scale = torch.rand((), device=device) * 8 + 0.1
    arguments = (inputs, scale, EVERY_PLACE, dtype, True, True, ScaleRule())
    assert_same(pointwise.fused_quantize(*arguments, measure=False, tile=SMALL), fused_quantize_reference(*arguments))


@pytest.mark.parametrize("dtype", FP8)
def test_a_plain_cast_has_exact_codes_for_every_bfloat16(dtype: torch.dtype, device: str) -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = bits[bits.isfinite()].float()[: 2**15 + 2**14].reshape(-1, 96).to(device)
    scale = torch.tensor(random.uniform(0.5, 100), device=device)
    arguments = ([x], scale, CAST, dtype, True, True, ScaleRule())
    got, expected = pointwise.fused_quantize(*arguments, measure=False), fused_quantize_reference(*arguments)
    assert torch.equal(bytes_of(got[0]), bytes_of(expected[0]))
    assert torch.equal(bytes_of(got[1]), bytes_of(expected[1]))


@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, False), (False, True), (False, False)])
def test_a_layout_that_was_not_asked_for_is_empty(rowwise: bool, columnwise: bool, device: str) -> None:
    arguments = (inputs_of(CAST, 40, 24, device), None, CAST, FP8[0], rowwise, columnwise, ScaleRule())
    got = pointwise.fused_quantize(*arguments, measure=True, tile=SMALL)
    assert_same(got, fused_quantize_reference(*arguments))
    assert got[0].numel() == (40 * 24 if rowwise else 0) and got[1].numel() == (24 * 48 if columnwise else 0)


@pytest.mark.parametrize("rows", [1, 64, 150])
def test_sums_in_part_are_those_of_64_rows_each_whatever_the_tile(rows: int, device: str) -> None:
    inputs, scale = inputs_of(EVERY_PLACE, rows, 40, device), torch.tensor(3.0, device=device)
    arguments = (inputs, scale, EVERY_PLACE, FP8[0], True, True, ScaleRule())
    got = pointwise.fused_quantize(*arguments, measure=False, tile=SMALL, partial_sums=True)
    expected = fused_quantize_reference(*arguments, partial_sums=True)
    assert_same(got[: -len(EVERY_PLACE.sums)], expected[: -len(EVERY_PLACE.sums)])
    for one, other in zip(got[-len(EVERY_PLACE.sums) :], expected[-len(EVERY_PLACE.sums) :], strict=True):
        assert one.dtype == torch.float32 and one.shape == (-(-rows // 64), 40)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_padding_of_the_transposed_codes_is_zero_where_the_producer_of_zero_is_not(device: str) -> None:
    spec = Spec.parse("x0: float32[M, K]; t0 = exp(x0); quantize t0; sum t0: float32")
    rows = random.choice([1, 17, 37])
    inputs = inputs_of(spec, rows, 20, device)
    got = pointwise.fused_quantize(inputs, None, spec, FP8[0], True, True, ScaleRule(), measure=True, tile=SMALL)
    assert not bytes_of(got[1])[:, rows:].any()
    torch.testing.assert_close(got[4], inputs[0].exp().sum(0))


@pytest.mark.parametrize("rule", [ScaleRule(), ScaleRule(margin=2), ScaleRule(power_2=True), ScaleRule(epsilon=100.0)])
@pytest.mark.parametrize("scale", [None, 0.0, 3.0], ids=["none", "unknown", "known"])
def test_measuring_finds_the_scale_that_the_reference_finds(scale: float | None, rule: ScaleRule, device: str) -> None:
    given = None if scale is None else torch.tensor(scale, device=device)
    arguments = (inputs_of(EVERY_PLACE, 37, 21, device), given, EVERY_PLACE, FP8[0], True, True, rule)
    assert_same(pointwise.fused_quantize(*arguments, measure=True, tile=SMALL), fused_quantize_reference(*arguments))


@pytest.mark.parametrize("measure", [True, False])
def test_more_rows_of_tiles_than_a_rectangle_of_programs_may_have(
    measure: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pointwise, "MOST_ROWS_OF_PROGRAMS", 2)
    scale = None if measure else torch.tensor(3.0, device=device)
    arguments = (inputs_of(EVERY_PLACE, 75, 41, device), scale, EVERY_PLACE, FP8[0], True, True, ScaleRule())
    assert_same(pointwise.fused_quantize(*arguments, measure, tile=SMALL), fused_quantize_reference(*arguments))


def test_a_matrix_too_wide_for_offsets_of_32_bits_is_refused(device: str) -> None:
    wide = torch.zeros((), dtype=torch.bfloat16, device=device).expand(1, MOST_COLUMNS + 1)
    spec = Spec.parse("x0: bfloat16[M, K]; t0 = relu(x0); quantize t0")
    with pytest.raises(ValueError, match="at most"):
        pointwise.fused_quantize([wide], None, spec, FP8[0], True, False, ScaleRule(), measure=True)


PAIR = Spec.parse(
    "x0: bfloat16[M, K]; x1: bfloat16[M, K]; x2: float32[K]; t0 = sigmoid(x0); t1 = mul(t0, x1); t2 = bfloat16(t1); "
    "t3 = mul(x0, x2); t4 = sub(t3, x1); t5 = bfloat16(t4); quantize t2; quantize t5"
)


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("shape", [(32, 16), (33, 17), (1, 50), (64, 48)])
@pytest.mark.parametrize(
    ("layouts", "scales"),
    [
        ([(True, True), (True, True)], (3.0, 0.5)),
        ([(True, False), (False, True)], (3.0, 0.5)),
        ([(True, True), (True, True)], (None, None)),
        ([(False, True), (True, True)], (0.0, 2.0)),
        ([(True, True), (True, False)], (2.0, 0.0)),
    ],
    ids=["known", "one layout each", "current", "first unknown", "second unknown"],
)
def test_two_values_agree_with_the_reference(
    layouts: list[tuple[bool, bool]],
    scales: tuple[float | None, float | None],
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: str,
) -> None:
    given = [None if scale is None else torch.tensor(scale, device=device) for scale in scales]
    arguments = (inputs_of(PAIR, *shape, device), given, PAIR, dtype, layouts, ScaleRule(margin=1))
    got = pointwise.fused_quantize_pair(*arguments, measure=None in scales or 0.0 in scales, tile=SMALL)
    assert_same(got, fused_quantize_pair_reference(*arguments))


HALVES = Spec.parse(f"{PAIR.text()}; sum t2: float32; sum t5: bfloat16")


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("shape", [(32, 16), (33, 17), (1, 50), (64, 48)])
@pytest.mark.parametrize("layouts", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("scale", [3.0, None, 0.0], ids=["known", "current", "unknown"])
@pytest.mark.parametrize("spec", [PAIR, HALVES], ids=["codes", "sums"])
def test_two_values_beside_each_other_agree_with_the_reference(
    spec: Spec,
    scale: float | None,
    layouts: tuple[bool, bool],
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: str,
) -> None:
    given = None if scale is None else torch.tensor(scale, device=device)
    arguments = (inputs_of(spec, *shape, device), given, spec, dtype, *layouts, ScaleRule(margin=1))
    got = pointwise.fused_quantize_cat(*arguments, measure=not scale, tile=SMALL)
    assert_same(got, fused_quantize_cat_reference(*arguments))


MASKED = Spec.parse(
    "x0: bfloat16[M, K]; x1: bfloat16[M, K]; x2: bool[M, 1]; t0 = sigmoid(x0); t1 = mul(t0, x1); "
    "t2 = where(x2, t1, 0.0); t3 = bfloat16(t2); t4 = where(x2, x0, 0.0); t5 = bfloat16(t4); quantize t3; quantize t5"
)


@pytest.mark.parametrize("scale", [3.0, None], ids=["known", "current"])
@pytest.mark.parametrize("shape", [(32, 16), (33, 17), (64, 48)])
def test_halves_may_be_masked_by_rows(shape: tuple[int, int], scale: float | None, device: str) -> None:
    given = None if scale is None else torch.tensor(scale, device=device)
    arguments = (inputs_of(MASKED, *shape, device), given, MASKED, FP8[1], True, True, ScaleRule())
    got = pointwise.fused_quantize_cat(*arguments, measure=not scale, tile=SMALL)
    assert_same(got, fused_quantize_cat_reference(*arguments))


@pytest.mark.parametrize("first", [True, False])
def test_the_amax_is_that_of_both_halves(first: bool, device: str) -> None:
    inputs = inputs_of(PAIR, 40, 24, device)
    inputs[2][:] = 2.0**-10 if first else 2.0**10  # by which the second half is multiplied
    inputs[1][:] *= 2.0**5 if first else 2.0**-5
    got = pointwise.fused_quantize_cat(inputs, None, PAIR, FP8[0], True, True, ScaleRule(), measure=True, tile=SMALL)
    halves = fused_quantize_pair_reference(inputs, [None, None], PAIR, FP8[0], [(True, True)] * 2, ScaleRule())
    assert got[2] == max(halves[2], halves[6])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_one_value_that_is_not_finite_makes_the_amax_infinite(poison: float, device: str) -> None:
    [x] = inputs_of(CAST, 40, 24, device)
    x[random.randrange(40), random.randrange(24)] = poison
    arguments = ([x], torch.tensor(2.0, device=device), CAST, FP8[0], True, True, ScaleRule())
    got = pointwise.fused_quantize(*arguments, measure=False, tile=SMALL)
    assert got[2] == torch.inf
    assert torch.equal(got[0].float().isnan(), ~x.isfinite())


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_means_in_triton_what_it_means_in_torch(operation: str, device: str) -> None:
    builder = SpecBuilder()
    kinds = OPERATIONS[operation].takes
    operands = [builder.input(torch.bool if kind == TRUTH else torch.float32, Place.FULL) for kind in kinds]
    z = builder.cast(builder.step(operation, *operands), torch.float32)
    assert isinstance(z, str)
    spec = builder.finish(z, [Result(z, torch.float32)], [])
    # Magnitudes from 1e-6 to 50, both signs, a few zeros and equal pairs.
    x = torch.exp(torch.empty(32, 16).uniform_(-14, 3.9)) * torch.randn(32, 16).sign()
    numbers = [x, x.flip(0) * random.uniform(0.5, 2)]
    if operation in ("log", "log2", "log1p", "sqrt", "rsqrt", "pow"):
        numbers = [each.abs() for each in numbers]
    numbers[0][0], numbers[1][1] = (0.0 if operation not in ("pow",) else 1.0), numbers[0][1]
    numbers[1][0] = 1.0
    if operation == "pow":  # its relative error is that of exponent · log2(base), so keep this one ordinary
        numbers = [numbers[0].clamp(min=1e-3), numbers[1].clamp(max=4)]
    made = iter(numbers)
    inputs = [(next(made) if kind == NUMBER else torch.rand(32, 16) > 0.5).to(device) for kind in kinds]
    arguments = (inputs, torch.ones((), device=device), spec, FP8[0], True, False, ScaleRule())
    got = pointwise.fused_quantize(*arguments, measure=False, tile=SMALL)[4]
    expected = fused_quantize_reference(*arguments)[4]
    atol = 1e-6 if operation in ("sin", "cos") else 0  # relative to 1 beside their zeros
    torch.testing.assert_close(got, expected, rtol=5e-6, atol=atol, equal_nan=True)


@pytest.mark.parametrize("function", ["tanh", "expm1", "log1p", "sigmoid", "erf"])
def test_bounded_functions_reach_their_limits_and_keep_nan(function: str, device: str) -> None:
    spec = Spec.parse(f"x0: float32[M, K]; t0 = {function}(x0); quantize t0; emit t0: float32")
    points = [torch.inf, -torch.inf if function != "log1p" else 0.0, torch.nan, 0.0, 90.0, -0.9, 1e-30, -1e-30]
    x = torch.tensor([points], device=device)
    arguments = ([x], torch.ones((), device=device), spec, FP8[0], True, False, ScaleRule())
    got = pointwise.fused_quantize(*arguments, measure=False, tile=SMALL)[4]
    torch.testing.assert_close(got, fused_quantize_reference(*arguments)[4], rtol=5e-6, atol=0, equal_nan=True)


def test_constants_of_every_size_reach_the_kernel(device: str) -> None:
    builder = SpecBuilder()
    x = builder.input(torch.float32, Place.FULL)
    value = builder.step("minimum", builder.step("maximum", x, float("-inf")), float("inf"))
    value = builder.step("add", builder.step("mul", builder.step("mul", value, 1e30), 1e-30), 1e-42)
    value = builder.step("sub", builder.step("where", builder.step("lt", value, 0), -2.5, value), -3)
    spec = builder.finish(value, [Result(value, torch.float32)], [])
    arguments = (inputs_of(spec, 8, 8, device), torch.ones((), device=device), spec, FP8[0], True, True, ScaleRule())
    assert_same(pointwise.fused_quantize(*arguments, measure=False, tile=SMALL), fused_quantize_reference(*arguments))


def test_an_empty_batch_writes_nothing_but_its_scale(device: str) -> None:
    inputs = inputs_of(EVERY_PLACE, 0, 24, device)
    arguments = (inputs, None, EVERY_PLACE, FP8[0], True, True, ScaleRule())
    assert_same(pointwise.fused_quantize(*arguments, measure=True, tile=SMALL), fused_quantize_reference(*arguments))


@pytest.mark.parametrize(
    ("widths", "heads", "rows", "head"),
    [
        ((32, 32, 32), (2, 2, 2), (2, 32), 32),  # q, k and v of each head together
        ((32, 32, 32), (1, 1, 1), (3, 21), 32),  # tiles that reach over two sequences
        ((128, 64, 64), (4, 2, 2), (2, 40), 32),  # all of q, then fewer heads of k and v
        ((96,), (3,), (1, 17), 32),  # heads alone
        ((24, 24), (2, 2), (2, 9), 24),  # too narrow for tiles of their own: joined beforehand
    ],
    ids=str,
)
def test_parts_are_read_where_they_lie(
    widths: tuple[int, ...], heads: tuple[int, ...], rows: tuple[int, int], head: int, device: str
) -> None:
    text = (
        f"x0: bfloat16[M, K of {' + '.join(map(str, widths))}]; x1: float32[M, K]; t0 = mul(x0, x1); t1 = bfloat16(t0)"
    )
    spec = Spec.parse(f"{text}; quantize t1; emit t1: bfloat16; sum t1: float32")
    batch, length = rows
    parts = [torch.randn(batch, n, length, head, device=device).bfloat16().transpose(1, 2) for n in heads]
    other = torch.randn(batch * length, sum(heads) * head, device=device)
    scale = torch.rand((), device=device) * 8 + 0.1
    arguments = ([*parts, other], scale, spec, FP8[0], True, True, ScaleRule())
    expected = fused_quantize_reference(*arguments)
    for tile in (None, Tile(16, 64, 4), Tile(16, 32, 4, 2)):
        assert_same(pointwise.fused_quantize(*arguments, measure=False, tile=tile), expected)
    assert_same(pointwise.fused_quantize(*arguments, measure=True), expected)


def test_parts_without_unit_stride_are_joined_beforehand(device: str) -> None:
    spec = Spec.parse("x0: float32[M, K of 128]; quantize x0")
    part = torch.randn(2, 8, 64, 2, device=device).transpose(2, 3)
    assert part.stride(3) == 2
    arguments = ([part], None, spec, FP8[0], True, True, ScaleRule())
    assert_same(pointwise.fused_quantize(*arguments, measure=True), fused_quantize_reference(*arguments))


@pytest.mark.parametrize(
    ("heads", "seen"),
    [((4, 4, 4), (64, 64, 256)), ((4, 2, 2), (128, 128, 256)), ((2, 4, 4), (64, 128, 128)), ((8, 2, 2), (32, 64, 64))],
    ids=str,
)
def test_parts_seen_as_heads_of_several_widths_are_read_where_they_lie(
    heads: tuple[int, ...], seen: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with one linear for q, k and v: rotations leave gradients of q and k permuted, attention that of v in rows."""

    def refuse(*_: object) -> None:
        raise AssertionError("parts were joined beforehand")

    monkeypatch.setattr(pointwise, "with_parts_joined", refuse)
    batch, length, narrow = 2, 24, min(seen)
    widths = [n * narrow for n in heads]
    parts = []
    for width, head in zip(widths, seen, strict=True):
        flat = torch.randn(batch, length, max(1, width // head), min(width, head), device=device).bfloat16()
        permuted = flat.transpose(1, 2).contiguous().transpose(1, 2)
        parts.append(permuted if head == narrow else flat)
    spec = Spec.parse(f"x0: bfloat16[M, K of {' + '.join(map(str, widths))}]; quantize x0; sum x0: float32")
    scale = torch.rand((), device=device) * 8 + 0.1
    arguments = (parts, scale, spec, FP8[0], True, True, ScaleRule())
    got = pointwise.fused_quantize(*arguments, measure=False, tile=Tile(16, 64, 4))
    assert_same(got, fused_quantize_reference(*arguments))


@pytest.mark.parametrize("rows", [16, 64, 65, 200])
def test_a_program_with_several_tiles_sums_all_of_them(rows: int, device: str) -> None:
    spec = Spec.parse(
        "x0: float32[M, K]; t0 = mul(x0, x0); quantize t0; emit t0: float32; sum t0: float32; sum x0: bfloat16"
    )
    arguments = (
        inputs_of(spec, rows, 40, device),
        torch.tensor(9.0, device=device),
        spec,
        FP8[0],
        True,
        True,
        ScaleRule(),
    )
    got = pointwise.fused_quantize(*arguments, measure=False, tile=Tile(16, 32, 4, 4))
    assert_same(got, fused_quantize_reference(*arguments))
