"""te::quantize: codes, amax and scale against their definition, in every dtype and for every bad number."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from te_compile.ops.quantize import ALIGNMENT, QUANTIZE, padded
from te_compile.recipe import ScaleRule

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = [E4M3, E5M2]
PLAIN = ScaleRule()


def quantize(
    x: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype = E4M3,
    rule: ScaleRule = PLAIN,
    rows: bool = True,
    columns: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return QUANTIZE(x, scale, dtype, rows, columns, rule.text())


def matrix(dtype: torch.dtype = torch.float32, rows: int | None = None, columns: int | None = None) -> Tensor:
    """Random, of a random size that FP8 GEMMs do not like."""
    shape = rows or random.randrange(1, 70), columns or random.randrange(1, 70)
    return (10 ** random.uniform(-3, 3) * torch.randn(shape)).to(dtype)


def nearest_even(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The FP8 number nearest to each fp64 value, by search over all codes; of two equally near the even code."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(dtype).double()
    finite = numbers.isfinite() & ~((numbers == 0) & (codes > 0))
    codes, numbers = codes[finite], numbers[finite]
    distance = (values.reshape(-1, 1) - numbers).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    even = nearest & (codes % 2 == 0)
    chosen = torch.where(even.any(1, keepdim=True), even, nearest).int().argmax(1)
    return numbers[chosen].reshape(values.shape)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_the_nearest_fp8_numbers_to_the_scaled_values(source: torch.dtype, dtype: torch.dtype) -> None:
    x = matrix(source)
    scale = torch.rand(()) * torch.finfo(dtype).max / x.abs().max().float().clamp(min=1e-4)
    q, _, _, scale_inv = quantize(x, scale, dtype)
    largest = torch.finfo(dtype).max
    scaled = (x.float() * scale).clamp(-largest, largest)
    torch.testing.assert_close(q.double(), nearest_even(scaled.double(), dtype), rtol=0, atol=0)
    torch.testing.assert_close(scale_inv, 1 / scale)


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_fp8_number_survives_and_ties_go_to_the_even_code(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].unique()
    one = torch.ones(())
    q, *_ = quantize(numbers[None], one, dtype)
    assert torch.equal(q.float()[0], numbers)
    ties = ((numbers[1:].double() + numbers[:-1].double()) / 2).float()
    q, *_ = quantize(ties[None], one, dtype)
    assert (q.view(torch.uint8) % 2 == 0).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_what_is_too_large_saturates_and_what_is_not_finite_becomes_nan(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([[largest * 2, -largest * 1e9, 3e38, -3e38, 1.0, float("inf"), float("-inf"), float("nan")]])
    for scale in (1.0, 1e10):  # with which finite numbers overflow in fp32
        q, *_ = quantize(x, torch.tensor(scale), dtype)
        assert q.float()[0, :4].tolist() == [largest, -largest, largest, -largest]
        assert q.float()[0, 5:].isnan().all() and q.float()[0, 4] == min(scale, largest)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33])
def test_the_transposed_copy_is_padded_with_zeros(rows: int) -> None:
    x = matrix(rows=rows)
    q, qt, *_ = quantize(x, None)
    assert qt.shape == (x.shape[1], padded(rows)) and qt.shape[1] % ALIGNMENT == 0
    assert qt.is_contiguous() and q.is_contiguous()
    codes = qt.view(torch.uint8)
    assert torch.equal(codes[:, :rows], q.view(torch.uint8).t())
    assert not codes[:, rows:].any()


@pytest.mark.parametrize(("rows", "columns"), [(True, False), (False, True), (False, False)])
def test_a_layout_that_nobody_asked_for_is_empty_and_the_rest_is_the_same(rows: bool, columns: bool) -> None:
    x = matrix()
    q, qt, *numbers = quantize(x, None, rows=rows, columns=columns)
    both_q, both_qt, *both_numbers = quantize(x, None)
    assert torch.equal(q.view(torch.uint8), both_q.view(torch.uint8)) if rows else q.shape == (0,)
    assert torch.equal(qt.view(torch.uint8), both_qt.view(torch.uint8)) if columns else qt.shape == (0,)
    assert all(map(torch.equal, numbers, both_numbers))
    assert q.dtype == qt.dtype == E4M3


def test_codes_are_contiguous_whatever_the_strides_of_the_input() -> None:
    """As the fake says: compiled code relies on it."""
    x = matrix(rows=random.randrange(2, 70), columns=random.randrange(2, 70)).t()
    q, qt, *_ = quantize(x, None)
    assert q.is_contiguous() and qt.is_contiguous()
    assert torch.equal(q.view(torch.uint8), quantize(x.contiguous(), None)[0].view(torch.uint8))


def test_results_that_nobody_asked_for_are_not_one_tensor() -> None:
    q, qt, *_ = quantize(matrix(), None, rows=False, columns=False)
    assert not torch._C._is_alias_of(q, qt)


@pytest.mark.parametrize("dtype", FORMATS)
def test_without_a_scale_the_largest_element_lands_on_the_largest_code(dtype: torch.dtype) -> None:
    x = matrix()
    q, _, amax, scale_inv = quantize(x, None, dtype)
    assert torch.equal(amax, x.abs().max())
    assert q.float().abs().max() == torch.finfo(dtype).max
    torch.testing.assert_close(scale_inv, x.abs().max() / torch.finfo(dtype).max)


def test_a_scale_of_zero_is_no_scale_yet() -> None:
    x = matrix()
    uncalibrated, absent = quantize(x, torch.zeros(())), quantize(x, None)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(uncalibrated, absent, strict=True))


def test_the_amax_is_that_of_the_data_whatever_the_scale() -> None:
    x = matrix(torch.bfloat16)
    _, _, amax, _ = quantize(x, torch.full((), 1e-3))
    assert amax.dtype == torch.float32 and torch.equal(amax, x.float().abs().max())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_element_makes_the_amax_infinite_and_the_measured_scale_one(bad: float) -> None:
    x = matrix(rows=20, columns=20)
    x[random.randrange(20), random.randrange(20)] = bad
    _, _, amax, scale_inv = quantize(x, None)
    assert amax == float("inf") and scale_inv == 1
    _, _, amax, scale_inv = quantize(x, torch.full((), 4.0))
    assert amax == float("inf") and scale_inv == 0.25


def test_zeros_have_amax_zero_and_scale_one() -> None:
    q, _, amax, scale_inv = quantize(torch.zeros(3, 5), None)
    assert amax == 0 and scale_inv == 1 and not q.float().any()


@pytest.mark.parametrize("shape", [(0, 32), (5, 0)])
def test_nothing_is_quantised_to_nothing(shape: tuple[int, int]) -> None:
    q, qt, amax, scale_inv = quantize(torch.randn(shape), None)
    assert q.shape == shape and qt.shape == (shape[1], padded(shape[0]))
    assert amax == 0 and scale_inv == 1


def test_the_rule_of_the_recipe_is_followed() -> None:
    x = matrix()
    _, _, _, margin = quantize(x, None, rule=ScaleRule(margin=2))
    _, _, _, plain = quantize(x, None)
    torch.testing.assert_close(margin, 4 * plain)
    _, _, _, power = quantize(x, None, rule=ScaleRule(power_2=True))
    assert torch.log2(power) == torch.log2(power).round() and plain <= power < 2 * plain
    tiny = torch.full((2, 2), 1e-6)
    _, _, _, floored = quantize(tiny, None, rule=ScaleRule(epsilon=1.0))
    torch.testing.assert_close(floored, torch.tensor(1 / 448.0))


@pytest.mark.parametrize(("rows", "columns"), [(True, True), (True, False), (False, True)])
def test_fake_outputs_have_the_shapes_and_dtypes_of_real_ones(rows: bool, columns: bool) -> None:
    x = matrix(torch.bfloat16)
    real = quantize(x, None, E5M2, rows=rows, columns=columns)
    with FakeTensorMode() as mode:
        fake = quantize(mode.from_tensor(x), None, E5M2, rows=rows, columns=columns)
    assert [(t.shape, t.dtype, t.stride()) for t in fake] == [(t.shape, t.dtype, t.stride()) for t in real]


def test_the_operator_is_what_torch_expects_of_one() -> None:
    torch.library.opcheck(QUANTIZE, (torch.randn(5, 32), torch.ones(()), E4M3, True, True, PLAIN.text()))
