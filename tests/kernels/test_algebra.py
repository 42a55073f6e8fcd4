"""Steps written anew: they mean the same over the real numbers, cost less, and stay where nothing is gained."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from te_compile.kernels import pointwise
from te_compile.kernels.algebra import BELL, LOGISTIC, LOGISTIC_SLOPE, NORMAL_CDF, simplified
from te_compile.kernels.pointwise_functions import ERFC_RATE
from te_compile.kernels.spellings import (
    ONE_LESS_TANH_SQUARED,
    ONE_PLUS_ERF,
    ONE_PLUS_TANH,
    TIMES_SIGMOID,
    spelled,
)
from te_compile.kernels.tiles import Tile
from te_compile.ops.pointwise import OPERATIONS, Operand, Place, Spec, SpecBuilder, Step, evaluate
from te_compile.recipe import ScaleRule

GELU = (
    "x0: float32[M, K]; t0 = mul(x0, 0.5); t1 = mul(x0, x0); t2 = mul(t1, x0); t3 = mul(t2, 0.044715); "
    "t4 = add(x0, t3); t5 = mul(t4, 0.7978845608028654); t6 = tanh(t5); t7 = add(t6, 1); t8 = mul(t0, t7); quantize t8"
)
GELU_BACKWARD = (
    "x0: float32[M, K]; x1: float32[M, K]; t0 = mul(x1, x1); t1 = mul(t0, x1); t2 = mul(t1, 0.044715); "
    "t3 = add(x1, t2); t4 = mul(t3, 0.7978845608028654); t5 = tanh(t4); t6 = add(t5, 1); t7 = mul(t6, 0.5); "
    "t8 = mul(x1, 0.5); t9 = mul(t5, t5); t10 = sub(1, t9); t11 = mul(t8, t10); t12 = mul(t0, 0.134145); "
    "t13 = add(t12, 1); t14 = mul(t13, 0.7978845608028654); t15 = mul(t11, t14); t16 = add(t7, t15); "
    "t17 = mul(x0, t16); quantize t17"
)
EXACT_GELU = (
    "x0: float32[M, K]; t0 = mul(x0, 0.5); t1 = mul(x0, 0.7071067811865476); t2 = erf(t1); t3 = add(t2, 1); "
    "t4 = mul(t0, t3); quantize t4"
)
EXACT_GELU_BACKWARD = (
    "x0: float32[M, K]; x1: float32[M, K]; t0 = mul(x1, 0.7071067811865476); t1 = erf(t0); t2 = add(t1, 1); "
    "t3 = mul(t2, 0.5); t4 = mul(x1, x1); t5 = mul(t4, -0.5); t6 = exp(t5); t7 = mul(t6, 0.3989422804014327); "
    "t8 = mul(x1, t7); t9 = add(t3, t8); t10 = mul(x0, t9); quantize t10"
)
SWIGLU_BACKWARD = (
    "x0: float32[M, K]; x1: float32[M, K]; x2: float32[M, K]; t0 = neg(x1); t1 = exp(t0); t2 = add(t1, 1); "
    "t3 = div(x1, t2); t4 = mul(x0, t3); t5 = mul(x0, x2); t6 = sigmoid(x1); t7 = mul(t5, t6); t8 = sub(1, t6); "
    "t9 = mul(x1, t8); t10 = add(t9, 1); t11 = mul(t7, t10); quantize t4; quantize t11"
)


def normal_cdf(x: Tensor, rate: Tensor, bell: Tensor) -> Tensor:
    tail = bell * torch.special.erfcx((x * rate / ERFC_RATE).abs()) / 2
    return torch.where(x < 0, tail, 1 - tail)


MEANINGS = {
    BELL: torch.exp2,
    NORMAL_CDF: normal_cdf,
    ONE_PLUS_ERF: lambda u: 1 + torch.erf(u),
    LOGISTIC: lambda v: 1 / (1 + torch.exp2(v)),
    LOGISTIC_SLOPE: lambda v: v * (1 - v),
    TIMES_SIGMOID: lambda a, b: a * torch.sigmoid(b),
    ONE_PLUS_TANH: lambda u: 1 + torch.tanh(u),
    ONE_LESS_TANH_SQUARED: lambda u: 1 - torch.tanh(u) ** 2,
    **{name: operation.torch for name, operation in OPERATIONS.items()},
}


def anew(text: str) -> tuple[Spec, list[tuple[str, Step]], dict[str, str]]:
    spec = Spec.parse(text)
    return spec, *simplified(spelled(spec), spec.leaving)


def operations(text: str) -> list[str]:
    return sorted(step.operation for _, step in anew(text)[1])


def computed(named: list[tuple[str, Step]], inputs: list[Tensor]) -> dict[str, Tensor]:
    """Every value of the steps in float64."""
    values = {f"x{i}": x for i, x in enumerate(inputs)}

    def value(operand: Operand) -> Tensor:
        return values[operand] if isinstance(operand, str) else torch.tensor(float(operand), dtype=torch.float64)

    for name, step in named:
        values[name] = MEANINGS[step.operation](*map(value, step.operands))
    return values


def assert_the_same_over_the_reals(text: str) -> None:
    spec, named, names = anew(text)
    inputs = [torch.randn(256, dtype=torch.float64) * 2 for _ in spec.inputs]
    before = computed([(f"t{i}", step) for i, step in enumerate(spec.steps)], inputs)
    after = computed(named, inputs)
    for root in spec.leaving:
        torch.testing.assert_close(after[names[root]], before[root], rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------------------------------------------------------- fires


def test_gelu_costs_five_operations_around_its_logistic_function() -> None:
    assert operations(GELU) == ["add", "logistic", "mul", "mul", "mul", "mul"]  # one pair is a fused multiply-add
    assert_the_same_over_the_reals(GELU)


def test_its_backward_has_one_logistic_function_and_no_constant_twice() -> None:
    found = operations(GELU_BACKWARD)
    assert found.count("logistic") == found.count("logistic_slope") == 1 and len(found) == 12
    assert_the_same_over_the_reals(GELU_BACKWARD)


def test_the_exact_gelu_costs_four_operations_around_its_distribution_function() -> None:
    assert operations(EXACT_GELU) == ["bell", "mul", "mul", "mul", "normal_cdf"]
    assert_the_same_over_the_reals(EXACT_GELU)


def test_its_backward_has_one_bell_curve() -> None:
    found = operations(EXACT_GELU_BACKWARD)
    assert found.count("bell") == found.count("normal_cdf") == 1 and not {"exp", "erf"} & set(found)
    assert_the_same_over_the_reals(EXACT_GELU_BACKWARD)


@pytest.mark.parametrize("factor", [-1.5, 1e-3, 3e20, 1e-25])
def test_an_erf_of_any_multiple_is_that(factor: float) -> None:
    text = f"x0: float32[M, K]; t0 = mul(x0, {factor}); t1 = erf(t0); t2 = add(1, t1); quantize t2"
    found = operations(text)
    assert found.count("normal_cdf") + found.count("one_plus_erf") == 1 and "erf" not in found
    assert_the_same_over_the_reals(text)


def test_halves_that_are_added_up_are_one_choice() -> None:
    for halves in ("add(t1, t2)", "add(t2, t1)"):
        text = (
            "x0: float32[M, K]; x1: float32[M, K]; t0 = lt(x0, x1); "
            f"t1 = where(t0, 0.0, x0); t2 = where(t0, x1, 0.0); t3 = {halves}; t4 = mul(t3, x0); quantize t4"
        )
        assert operations(text) == ["add", "lt", "mul", "where"]
        assert_the_same_over_the_reals(text)


def test_choices_by_two_truths_stay_two() -> None:
    text = (
        "x0: float32[M, K]; x1: float32[M, K]; t0 = lt(x0, x1); t1 = lt(x1, x0); "
        "t2 = where(t0, 0.0, x0); t3 = where(t1, x1, 0.0); t4 = add(t2, t3); quantize t4"
    )
    assert operations(text) == ["add", "lt", "lt", "where", "where"]
    assert_the_same_over_the_reals(text)


def test_two_gradients_share_one_logistic_function() -> None:
    assert operations(SWIGLU_BACKWARD).count("logistic") == 1
    assert_the_same_over_the_reals(SWIGLU_BACKWARD)


def test_constants_of_factors_become_one() -> None:
    text = "x0: float32[M, K]; t0 = mul(x0, 3); t1 = mul(2, x0); t2 = mul(t0, t1); t3 = mul(t2, 0.5); quantize t3"
    assert operations(text) == ["mul", "mul"]
    assert_the_same_over_the_reals(text)


def test_a_factor_of_one_goes_away() -> None:
    text = "x0: float32[M, K]; t0 = mul(x0, 0.5); t1 = mul(x0, x0); t2 = mul(t0, 2); t3 = mul(t1, t2); quantize t3"
    assert operations(text) == ["mul", "mul"]
    assert_the_same_over_the_reals(text)


# -------------------------------------------------------------------------------------------------------- does not fire


@pytest.mark.parametrize(
    "text",
    [
        "x0: float32[M, K]; x1: float32[M, K]; t0 = mul(x0, x1); t1 = add(t0, x1); t2 = mul(t1, t0); quantize t2",
        "x0: float32[M, K]; x1: float32[M, K]; t0 = sigmoid(x0); t1 = mul(t0, x1); quantize t1",
        "x0: float32[M, K]; t0 = mul(x0, 3); t1 = bfloat16(t0); t2 = mul(t1, 2); quantize t2",  # a rounding between
        "x0: float32[M, K]; t0 = mul(x0, x0); t1 = mul(t0, 0.5); t2 = exp(t1); quantize t2",  # grows without limit
        "x0: float32[M, K]; x1: float32[M, K]; t0 = mul(x0, x1); t1 = mul(t0, -0.5); t2 = exp(t1); quantize t2",
        "x0: float32[M, K]; t0 = mul(x0, 1e-35); t1 = mul(t0, 1e-35); quantize t1",  # together they would be 0 in fp32
        "x0: float32[M, K]; t0 = mul(x0, 1e25); t1 = mul(t0, 1e25); quantize t1",
        "x0: float32[M, K]; t0 = mul(x0, 1e25); t1 = add(t0, 1e25); t2 = mul(t1, 1e25); quantize t2",
    ],
)
def test_nothing_changes_where_nothing_is_gained_or_something_lost(text: str) -> None:
    spec, named, names = anew(text)
    assert [step for _, step in named] == list(spec.steps) and names == {root: root for root in spec.leaving}


def test_what_leaves_besides_is_still_there() -> None:
    text = GELU + "; emit t3: float32; emit t8: float32"
    spec, _, names = anew(text)
    assert set(names) == {"t8", "t3"} == set(spec.leaving)
    assert_the_same_over_the_reals(text)


# ------------------------------------------------------------------------------------------------------------- numerics


@pytest.mark.parametrize("seed", range(40))
def test_random_formulas_mean_the_same_over_the_reals(seed: int) -> None:
    draw = random.Random(f"{torch.initial_seed()} {seed}")
    builder = SpecBuilder()
    values: list[Operand] = [builder.input(torch.float32, Place.FULL) for _ in range(3)]
    for _ in range(14):
        operation = draw.choice(["mul", "mul", "mul", "add", "add", "sub", "sigmoid", "tanh", "erf", "neg"])
        value: Operand = draw.choice(values[-5:])
        other = draw.choice([*values[-5:], draw.choice([0.5, 2, 1, -1.5, 0.25])])
        operands = (value,) if operation in ("sigmoid", "tanh", "erf", "neg") else (value, other)
        values.append(builder.step(operation, *(operands if draw.random() < 0.5 else operands[::-1])))
    bounded = builder.step("tanh", values[-1])  # products of products grow without limit
    assert_the_same_over_the_reals(builder.finish(str(bounded), [], []).text())


@pytest.mark.parametrize(
    "text",
    [GELU, GELU_BACKWARD, EXACT_GELU, EXACT_GELU_BACKWARD],
    ids=["gelu", "backward", "exact gelu", "its backward"],
)
def test_a_kernel_computes_what_the_reference_does(text: str, device: str) -> None:
    spec = Spec.parse(text + "; emit " + text.rsplit(" ", 1)[1] + ": float32")
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 40.0, -40.0, 1e-30, 3e38, -3e38, 1e13, -1e13])
    x = torch.cat([torch.randn(52) * 3, special]).view(1, -1).to(device)
    inputs = [torch.randn_like(x), x][-len(spec.inputs) :]
    scale = torch.ones((), device=device)
    arguments = (inputs, scale, spec, torch.float8_e4m3fn, True, False, ScaleRule(), False, Tile(32, 16, 4))
    found = pointwise.fused_quantize(*arguments)[4]
    _, (wanted,), _ = evaluate(spec, inputs)
    # The reference subtracts from 1 and adds to it, which loses all but a rounding of 1, a few times over.
    torch.testing.assert_close(found, wanted, rtol=4e-6, atol=2e-6, equal_nan=True)
