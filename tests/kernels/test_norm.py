"""The norm kernel: y as the reference has it, and codes that are exactly those of the y it computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_compile.kernels.norm import norm_quantize
from te_compile.kernels.tiles import Tile
from te_compile.ops.norm import KINDS, LAYER, RMS_MIXED, norm_reference
from te_compile.ops.norm_quantize import Norm, Wanted
from te_compile.ops.quantize import quantize_reference
from te_compile.recipe import ScaleRule

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RULE = ScaleRule()
TILE = Tile(16, 64, 4)  # several blocks of columns for narrow rows
EPS = 1e-5
# One rounding of y apart; fp32 sums in another order.
TOLERANCES = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2e-6}


def parameters(kind: str, columns: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor | None]:
    """A weight, around 1, and a bias for the kind that has one; T5 keeps its weight in fp32."""
    dtype = torch.float32 if kind == RMS_MIXED else dtype
    weight = (1 + torch.randn(columns, device=device) / 4).to(dtype)
    return weight, torch.randn(columns, device=device).to(dtype) if kind == LAYER else None


def agrees(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    scale: Tensor | None,
    dtype: torch.dtype = E4M3,
    tile: Tile | None = TILE,
) -> None:
    """Assert the agreement described above, with y emitted and not."""
    measure = scale is None or float(scale) == 0

    def run(emit: bool) -> tuple[Tensor, ...]:
        wanted = Wanted(scale, dtype, True, True, emit, RULE)
        return norm_quantize(x, Norm(weight, bias, EPS, kind), wanted, measure, tile)

    y, q, qt, amax, scale_inv, mean, rstd = run(emit=True)
    wanted_y, wanted_mean, wanted_rstd = norm_reference(x, weight, bias, EPS, kind)
    assert y.dtype == wanted_y.dtype
    close = {"rtol": TOLERANCES[y.dtype], "atol": TOLERANCES[y.dtype], "equal_nan": True}
    torch.testing.assert_close(y, wanted_y, **close)
    assert mean.shape == wanted_mean.shape and rstd.shape == wanted_rstd.shape
    sound = x.isfinite().all(1)  # the mean of a row with an infinity is infinite or NaN, as the order of sums has it
    torch.testing.assert_close(rstd[sound], wanted_rstd[sound], rtol=1e-5, atol=0)
    if kind == LAYER:
        torch.testing.assert_close(mean[sound], wanted_mean[sound], rtol=1e-5, atol=1e-5)
    wanted = quantize_reference(y, scale, dtype, True, True, RULE)
    for got, expected in zip((q, qt), wanted[:2], strict=True):
        alike = got.view(torch.uint8) == expected.view(torch.uint8)
        assert got.shape == expected.shape and bool((alike | expected.float().isnan() & got.float().isnan()).all())
    assert torch.equal(amax, wanted[2]) and torch.equal(scale_inv, wanted[3])
    silent = run(emit=False)
    assert silent[0].shape == (0,)
    assert torch.equal(silent[1].view(torch.uint8), q.view(torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_kind_in_every_dtype_with_a_given_scale(kind: str, x_dtype: torch.dtype, device: str) -> None:
    x = torch.randn(37, 150, device=device).to(x_dtype)
    agrees(x, *parameters(kind, 150, x_dtype, device), kind, torch.tensor(60.0, device=device))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_measures_a_scale_that_is_missing_or_zero(kind: str, device: str) -> None:
    x = torch.randn(37, 150, device=device).to(torch.bfloat16)
    weight, bias = parameters(kind, 150, torch.bfloat16, device)
    agrees(x, weight, bias, kind, None, E5M2)
    agrees(x, weight, bias, kind, torch.zeros((), device=device))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_without_a_weight(kind: str, device: str) -> None:
    agrees(torch.randn(20, 64, device=device).to(torch.bfloat16), None, None, kind, torch.tensor(50.0, device=device))


def test_parameters_in_fp32_beside_activations_in_bf16(device: str) -> None:
    x = torch.randn(20, 96, device=device).to(torch.bfloat16)
    for kind in KINDS:
        agrees(x, *parameters(kind, 96, torch.float32, device), kind, torch.tensor(50.0, device=device))


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (16, 64), (17, 65), (5, 8), (40, 129)], ids=str)
def test_ragged_shapes_are_padded_with_zeros_and_not_with_the_bias(shape: tuple[int, int], device: str) -> None:
    x = torch.randn(shape, device=device).to(torch.bfloat16)
    agrees(x, *parameters(LAYER, shape[1], x.dtype, device), LAYER, torch.tensor(30.0, device=device))


@pytest.mark.parametrize("shape", [(33, 700), (5, 40)], ids=str)
def test_the_default_tiles_agree_too(shape: tuple[int, int], device: str) -> None:
    x = torch.randn(shape, device=device).to(torch.bfloat16)
    agrees(x, *parameters("rms", shape[1], x.dtype, device), "rms", None, tile=None)


def test_a_row_of_large_numbers_that_differ_little_keeps_its_variance(device: str) -> None:
    x = 3e4 + torch.randn(16, 1000, device=device)
    asked = Wanted(torch.ones((), device=device), E4M3, True, False, False, RULE)
    *_, mean, rstd = norm_quantize(x, Norm(None, None, 0.0, LAYER), asked, False, TILE)
    exact = x.double()
    torch.testing.assert_close(mean.double(), exact.mean(1, keepdim=True), rtol=1e-6, atol=0)
    wanted = exact.var(1, keepdim=True, unbiased=False).rsqrt()
    torch.testing.assert_close(rstd.double(), wanted, rtol=1e-3, atol=0)


def test_rows_apart_in_memory_are_read_in_place_and_others_copied(device: str) -> None:
    x = torch.randn(40, 200, device=device).to(torch.bfloat16)
    for view in (x[:, :96], x[::3], x.t()):
        agrees(view, *parameters("rms", view.shape[1], x.dtype, device), "rms", torch.tensor(40.0, device=device))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("kind", [LAYER, "rms"])
def test_a_value_that_is_not_finite_spoils_its_row_and_no_other(kind: str, bad: float, device: str) -> None:
    x = torch.randn(20, 150, device=device)
    x[7, 141] = bad
    weight, bias = parameters(kind, 150, x.dtype, device)
    scale = torch.tensor(40.0, device=device)
    wanted = Wanted(scale, E4M3, True, True, True, RULE)
    _, q, _, amax, *_ = norm_quantize(x, Norm(weight, bias, EPS, kind), wanted, False, TILE)
    assert amax == torch.inf
    spoilt = q.float().isnan().any(1)
    assert spoilt[7] and int(spoilt.sum()) == 1
    agrees(x, weight, bias, kind, scale)


def test_no_rows_give_no_codes_and_the_multiplier_of_the_scale(device: str) -> None:
    x = torch.empty(0, 64, dtype=torch.bfloat16, device=device)
    for kind in (LAYER, "rms"):
        agrees(x, *parameters(kind, 64, x.dtype, device), kind, torch.tensor(8.0, device=device))
        agrees(x, *parameters(kind, 64, x.dtype, device), kind, None)
