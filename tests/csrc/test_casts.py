"""The C++ core's FP8 casts against PyTorch's, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from te_compile.kernels import native

if native.missing():
    pytest.skip(native.missing(), allow_module_level=True)

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def cast_by_core(x: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Codes (as bytes) and amax; the output is poisoned first."""
    x = x.contiguous()
    q = torch.full(x.shape, 0xA5, dtype=torch.uint8)
    code = native.dtype_codes()[dtype]
    amax = native.module().host_quantize(x.data_ptr(), x.numel(), scale, code, q.data_ptr())
    return q, amax


def cast_by_torch(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x * torch.tensor(scale)).clamp(-largest, largest).to(dtype).view(torch.uint8)


def values_by_core(codes: Tensor, scale_inv: float, dtype: torch.dtype) -> Tensor:
    y = torch.full(codes.shape, 123.0)
    native.module().host_dequantize(
        codes.data_ptr(), codes.numel(), scale_inv, native.dtype_codes()[dtype], y.data_ptr()
    )
    return y


def assert_same_codes(x: Tensor, scale: float, dtype: torch.dtype) -> None:
    got, want = cast_by_core(x, scale, dtype)[0], cast_by_torch(x, scale, dtype)
    wrong = got != want
    assert not wrong.any(), f"{x[wrong][:5].tolist()} became {got[wrong][:5].tolist()}, not {want[wrong][:5].tolist()}"


def finite_values(dtype: torch.dtype) -> Tensor:
    """Every finite number of ``dtype``, ascending, as fp32."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return values[values.isfinite()].unique()


@pytest.mark.parametrize("dtype", FP8)
def test_all_256_codes_decode_as_in_torch(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(
        values_by_core(codes, 1.0, dtype), codes.view(dtype).float(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", FP8)
def test_decoding_multiplies_by_scale_inv(dtype: torch.dtype) -> None:
    codes = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    scale_inv = torch.rand(()) + 0.01
    want = codes.view(dtype).float() * scale_inv
    torch.testing.assert_close(values_by_core(codes, scale_inv.item(), dtype), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FP8)
def test_every_finite_number_survives_a_round_trip(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(dtype).float().isfinite()]
    assert torch.equal(cast_by_core(codes.view(dtype).float(), 1.0, dtype)[0], codes)


@pytest.mark.parametrize("dtype", FP8)
def test_ties_and_their_neighbours_round_as_in_torch(dtype: torch.dtype) -> None:
    values = finite_values(dtype)
    ties = (values[1:] + values[:-1]) / 2  # exact in fp32
    infinity = torch.tensor(math.inf)
    around = torch.cat([values, ties])
    x = torch.cat([around, torch.nextafter(around, infinity), torch.nextafter(around, -infinity)])
    assert_same_codes(x, 1.0, dtype)


@pytest.mark.parametrize("dtype", FP8)
def test_random_bit_patterns_cast_as_in_torch(dtype: torch.dtype) -> None:
    # Every kind of fp32 there is: subnormals, NaNs with payloads, infinities and all magnitudes.
    x = torch.randint(-(2**31), 2**31 - 1, (1 << 18,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    assert_same_codes(x, 1.0, dtype)


@pytest.mark.parametrize("scale", [1.0, 0.37, 448.0 / 3.0, 2.0**-20, 2.0**20])
@pytest.mark.parametrize("dtype", FP8)
def test_ordinary_values_cast_as_in_torch_at_any_scale(dtype: torch.dtype, scale: float) -> None:
    x = torch.randn(1 << 16) * torch.exp(torch.randn(1 << 16) * 4)
    assert_same_codes(x, scale, dtype)


@pytest.mark.parametrize("dtype", FP8)
def test_subnormal_codes_are_reached_and_exact(dtype: torch.dtype) -> None:
    smallest = torch.finfo(dtype).smallest_normal
    x = (torch.rand(1 << 14) * 2 - 1) * smallest
    assert_same_codes(x, 1.0, dtype)
    magnitudes = cast_by_core(x, 1.0, dtype)[0] & 0x7F
    assert magnitudes.unique().numel() == (8 if dtype == torch.float8_e4m3fn else 4) + 1


@pytest.mark.parametrize("dtype", FP8)
def test_what_is_too_large_saturates_and_what_is_not_finite_becomes_nan(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest * 1.01, -largest * 100, 3e38, -3e38, -0.0, math.inf, -math.inf, math.nan])
    for scale in (1.0, 1e10):  # with which finite numbers overflow in fp32
        q = cast_by_core(x, scale, dtype)[0]
        values = q.view(dtype).float()
        assert values[:4].tolist() == [largest, -largest, largest, -largest]
        assert q[4].item() == 0x80
        assert values[5:].isnan().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_amax_is_infinite_if_anything_is_not_finite(bad: float) -> None:
    x = torch.randn(997)
    assert cast_by_core(x, 1.0, torch.float8_e4m3fn)[1] == x.abs().max().item()
    x[int(torch.randint(0, 997, ()))] = bad
    assert cast_by_core(x, 1.0, torch.float8_e4m3fn)[1] == math.inf


def test_nothing_to_cast_is_no_error() -> None:
    assert native.module().host_quantize(0, 0, 1.0, native.module().FLOAT8_E4M3, 0) == 0.0


def test_bad_arguments_are_named() -> None:
    core = native.module()
    with pytest.raises(ValueError, match="count is negative"):
        core.host_quantize(0, -1, 1.0, core.FLOAT8_E4M3, 0)
    with pytest.raises(ValueError, match="x or q is null"):
        core.host_quantize(0, 1, 1.0, core.FLOAT8_E4M3, 0)
    with pytest.raises(ValueError, match="dtype must be"):
        core.host_quantize(0, 0, 1.0, core.FLOAT16, 0)
