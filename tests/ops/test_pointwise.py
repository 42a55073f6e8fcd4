"""The spec language: text, parsing and meaning."""

from __future__ import annotations

import math
import random

import pytest
import torch

from te_compile.ops.pointwise import (
    NUMBER,
    OPERATIONS,
    TRUTH,
    Place,
    Result,
    Spec,
    SpecBuilder,
    SpecError,
    evaluate,
    extent,
)

FULL, ROW, COLUMN, SCALAR = Place.FULL, Place.ROW, Place.COLUMN, Place.SCALAR


def spec_of(operation: str) -> Spec:
    """A spec that applies one operation to matrices, and makes a number of the result."""
    builder = SpecBuilder()
    operands = [
        builder.input(torch.bool if kind == TRUTH else torch.float32, FULL) for kind in OPERATIONS[operation].takes
    ]
    result = builder.cast(builder.step(operation, *operands), torch.float32)
    assert isinstance(result, str)
    return builder.finish(result, [], [])


def swiglu() -> Spec:
    builder = SpecBuilder()
    gate, up = builder.input(torch.bfloat16, FULL), builder.input(torch.bfloat16, FULL)
    product = builder.step("mul", builder.step("mul", gate, builder.step("sigmoid", gate)), up)
    z = builder.cast(product, torch.bfloat16)
    assert isinstance(z, str)
    return builder.finish(z, [Result(z, torch.bfloat16)], [Result(z, torch.float32)])


def test_text_reads_like_the_computation() -> None:
    assert swiglu().text() == (
        "x0: bfloat16[M, K]; x1: bfloat16[M, K]; t0 = sigmoid(x0); t1 = mul(x0, t0); t2 = mul(t1, x1); "
        "t3 = bfloat16(t2); quantize t3; emit t3: bfloat16; sum t3: float32"
    )


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_survives_the_text(operation: str) -> None:
    spec = spec_of(operation)
    assert Spec.parse(spec.text()) == spec


def test_constants_survive_the_text_to_the_last_bit() -> None:
    constants = [random.uniform(-1, 1) * 10.0 ** random.randint(-40, 30) for _ in range(50)]
    builder = SpecBuilder()
    value = builder.input(torch.float32, FULL)
    for constant in [*constants, math.inf, -math.inf, 0, -3]:
        value = builder.step("mul", value, constant)
    spec = builder.finish(value, [], [])
    assert [step.operands[1] for step in Spec.parse(spec.text()).steps] == [*constants, math.inf, -math.inf, 0, -3]


def test_equal_steps_are_written_once() -> None:
    builder = SpecBuilder()
    x = builder.input(torch.float32, FULL)
    assert builder.step("exp", x) == builder.step("exp", x)
    assert builder.step("exp", x) != builder.step("exp", builder.step("exp", x))


def test_a_truth_becomes_a_number_where_one_is_wanted() -> None:
    builder = SpecBuilder()
    mask, x = builder.input(torch.bool, FULL), builder.input(torch.float32, FULL)
    spec = builder.finish(builder.step("mul", mask, x), [], [])
    assert [step.operation for step in spec.steps] == ["number", "mul"]


def test_a_cast_that_rounds_nothing_leaves_no_step() -> None:
    builder = SpecBuilder()
    x = builder.input(torch.bfloat16, FULL)
    once = builder.cast(builder.step("exp", x), torch.bfloat16)
    assert builder.cast(x, torch.bfloat16) == x and builder.cast(x, torch.float32) == x
    assert builder.cast(once, torch.bfloat16) == once
    assert builder.cast(once, torch.float16) != once


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        ("t0 = frobnicate(x0)", "unknown operation 'frobnicate'"),
        ("t0 = add(x0)", "add takes 2 operands"),
        ("t0 = add(1, 2)", "one of them a value"),
        ("t0 = exp(x7)", "x7 is used before it is defined"),
        ("t0 = mul(x0, nan)", "NaN"),
        ("t5 = exp(x0)", "expected the name t0"),
        ("t0 is exp(x0)", "unknown statement"),
    ],
)
def test_a_wrong_statement_is_named_with_its_fault(statement: str, complaint: str) -> None:
    with pytest.raises(SpecError) as error:
        Spec.parse(f"x0: float32[M, K]; {statement}; quantize x0")
    assert statement in str(error.value) and complaint in str(error.value)


def test_a_spec_without_a_result_is_refused() -> None:
    with pytest.raises(SpecError, match="quantises nothing"):
        Spec.parse("x0: float32[M, K]")
    with pytest.raises(SpecError, match="truth"):
        Spec.parse("x0: float32[M, K]; t0 = lt(x0, 1); quantize t0")


def test_every_place_is_broadcast_over_the_matrix() -> None:
    rows, columns = 5, 7
    x, row = torch.randn(rows, columns), torch.randn(columns)
    column, scalar = torch.randn(rows, 1), torch.randn(())
    builder = SpecBuilder()
    names = [builder.input(torch.float32, place) for place in (FULL, ROW, COLUMN, SCALAR)]
    total = names[0]
    for name in names[1:]:
        total = builder.step("mul", total, name)
    z, _, _ = evaluate(builder.finish(total, [], []), [x, row, column, scalar])
    torch.testing.assert_close(z, x * row * column * scalar, rtol=0, atol=0)


def test_a_row_and_a_column_are_enough_to_span_the_matrix() -> None:
    builder = SpecBuilder()
    row, column = builder.input(torch.float32, ROW), builder.input(torch.float32, COLUMN)
    spec = builder.finish(builder.step("add", row, column), [], [])
    inputs = [torch.randn(4), torch.randn(3, 1)]
    assert extent(spec, inputs) == (3, 4)
    assert evaluate(spec, inputs)[0].shape == (3, 4)
    with pytest.raises(SpecError, match="how large"):
        extent(Spec.parse("x0: float32[K]; quantize x0"), inputs[:1])


def test_nothing_is_rounded_between_explicit_casts() -> None:
    x = torch.randn(64, 32).bfloat16()
    text = "x0: bfloat16[M, K]; t0 = mul(x0, 1.1); t1 = mul(t0, 1.3); t2 = bfloat16(t1); quantize t2"
    z, _, _ = evaluate(Spec.parse(text), [x])
    wide = (x.float() * 1.1 * 1.3).bfloat16().float()
    assert torch.equal(z, wide)
    assert not torch.equal(z, (x * 1.1 * 1.3).float()), (
        "rounding every step must differ somewhere, or this shows nothing"
    )


def test_emitted_values_and_sums_have_their_own_dtypes() -> None:
    gate, up = torch.randn(48, 16).bfloat16(), torch.randn(48, 16).bfloat16()
    z, [emitted], [total] = evaluate(swiglu(), [gate, up])
    assert z.dtype == torch.float32 and emitted.dtype == torch.bfloat16 and total.dtype == torch.float32
    assert torch.equal(emitted.float(), z)
    torch.testing.assert_close(total, z.double().sum(0).float())


@pytest.mark.parametrize("operation", [name for name, o in OPERATIONS.items() if set(o.takes) == {NUMBER}])
def test_a_nan_is_never_swallowed(operation: str) -> None:
    spec = spec_of(operation)
    inputs = [torch.full((2, 2), torch.nan) for _ in spec.inputs]
    z, _, _ = evaluate(spec, inputs)
    if operation in ("lt", "le", "gt", "ge", "eq", "ne"):
        assert z.unique().tolist() == [float(operation == "ne")]
    elif operation == "sign":
        assert z.unique().tolist() == [0.0]
    else:
        assert z.isnan().all()


@pytest.mark.parametrize("groups", [1, 3])
def test_parts_lie_beside_each_other_again_and_again(groups: int) -> None:
    widths = (8, 2, 5)
    text = "x0: float32[M, K of 8 + 2 + 5]; x1: float32[M, 1]; t0 = mul(x0, x1); quantize t0"
    spec = Spec.parse(text)
    assert spec.text() == text
    parts = [torch.randn(2, width * groups, 4, 1).permute(0, 2, 1, 3) for width in widths]  # [A, S, G, D] and strided
    column = torch.randn(8, 1)
    by_hand = [
        part.reshape(8, -1)[:, group * width : (group + 1) * width]
        for group in range(groups)
        for part, width in zip(parts, widths, strict=True)
    ]
    assert extent(spec, [*parts, column]) == (8, 15 * groups)
    z, _, _ = evaluate(spec, [*parts, column])
    assert torch.equal(z, torch.cat(by_hand, 1) * column)


def test_only_whole_matrices_have_parts_and_all_of_them_are_given() -> None:
    for text in ("x0: float32[K of 4 + 4]; quantize x0", "x0: float32[M, K of 4 + 0]; quantize x0"):
        with pytest.raises(SpecError, match="parts"):
            Spec.parse(text)
    with pytest.raises(SpecError, match="2 tensors"):
        extent(Spec.parse("x0: float32[M, K of 4]; quantize x0"), [torch.zeros(1, 2, 1, 4)] * 2)
