"""The quantize kernel against the reference that defines its numbers: equal bytes, not close ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_compile.kernels.quantize import TILE as TILE_IN_USE
from te_compile.kernels.quantize import quantize
from te_compile.kernels.tiles import Tile
from te_compile.ops.quantize import quantize_reference
from te_compile.recipe import ScaleRule

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = [E4M3, E5M2]
INPUTS = [torch.bfloat16, torch.float16, torch.float32]
TILE = Tile(32, 64, 4)  # small, so that small matrices have many tiles


def matrix(rows: int, columns: int, dtype: torch.dtype, device: str) -> Tensor:
    """Values over many binades, so that some saturate, some are subnormal in FP8 and some vanish."""
    spread = torch.exp(3 * torch.randn(rows, columns, device=device))
    return (torch.randn(rows, columns, device=device) * spread).clamp(-6e4, 6e4).to(dtype)


def same_codes(got: Tensor, wanted: Tensor) -> bool:
    """Equal shape, dtype and bytes; one NaN is as good as another."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    alike = got.view(torch.uint8) == wanted.view(torch.uint8)
    return bool((alike | (got.float().isnan() & wanted.float().isnan())).all())


def agrees(
    x: Tensor, scale: Tensor | None, dtype: torch.dtype, rule: ScaleRule | None = None, tile: Tile = TILE
) -> None:
    """Assert that kernel and reference agree on all four outputs; measures exactly if the scale is absent or 0."""
    rule = rule or ScaleRule()
    measure = scale is None or float(scale) == 0
    q, qt, amax, scale_inv = quantize(x, scale, dtype, True, True, rule, measure, tile)
    wanted = quantize_reference(x, scale, dtype, True, True, rule)
    assert same_codes(q, wanted[0])
    assert same_codes(qt, wanted[1])
    assert torch.equal(amax, wanted[2])
    assert torch.equal(scale_inv, wanted[3])


@pytest.mark.parametrize("x_dtype", INPUTS, ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_a_given_scale_gives_the_bytes_of_the_reference(dtype: torch.dtype, x_dtype: torch.dtype, device: str) -> None:
    agrees(matrix(100, 150, x_dtype, device), torch.rand((), device=device) * 10 + 0.01, dtype)


@pytest.mark.parametrize("x_dtype", INPUTS, ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_without_a_scale_it_measures_one(dtype: torch.dtype, x_dtype: torch.dtype, device: str) -> None:
    agrees(matrix(100, 150, x_dtype, device), None, dtype)


def test_a_scale_of_zero_means_measure_one(device: str) -> None:
    agrees(matrix(70, 80, torch.bfloat16, device), torch.zeros((), device=device), E4M3)


def test_a_known_scale_is_kept_where_others_still_wait_for_theirs(device: str) -> None:
    x, scale = matrix(70, 80, torch.bfloat16, device), torch.tensor(0.37, device=device)
    q, _, amax, scale_inv = quantize(x, scale, E4M3, True, False, ScaleRule(), True, TILE)
    assert same_codes(q, quantize_reference(x, scale, E4M3, True, False, ScaleRule())[0])
    assert amax == x.abs().max() and scale_inv == scale.reciprocal()


@pytest.mark.parametrize(
    "rule",
    [ScaleRule(margin=2), ScaleRule(epsilon=1e9), ScaleRule(power_2=True), ScaleRule(3, 0.5, True)],
    ids=ScaleRule.text,
)
def test_every_part_of_the_scale_rule_is_followed(rule: ScaleRule, device: str) -> None:
    agrees(matrix(64, 64, torch.float32, device), None, E5M2, rule)


@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e-20, 3e38], ids=str)
def test_scales_at_the_ends_of_fp32_are_those_of_the_rule(magnitude: float, device: str) -> None:
    agrees(torch.full((16, 16), magnitude, device=device), None, E4M3)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_ties_subnormals_and_the_largest_codes_round_to_even(dtype: torch.dtype, device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    ladder = codes[codes.isfinite()].sort().values
    between = (ladder[1:] + ladder[:-1]) / 2
    near = torch.cat([torch.nextafter(between, torch.tensor(s)) for s in (-torch.inf, torch.inf)])
    beyond = ladder[-1] * torch.tensor([1.01, 1.1, -1.1, 7.0])
    x = torch.cat([ladder, between, near, beyond])
    agrees(x[torch.randperm(len(x))].unsqueeze(0).to(device), torch.ones((), device=device), dtype)


@pytest.mark.parametrize("shape", [(1, 1), (1, 200), (200, 1), (17, 33), (32, 64), (33, 65), (64, 16)], ids=str)
def test_ragged_shapes_are_padded_with_zeros(shape: tuple[int, int], device: str) -> None:
    agrees(matrix(*shape, torch.bfloat16, device), torch.ones((), device=device), E4M3)


def test_any_strides_will_do(device: str) -> None:
    x = matrix(90, 130, torch.bfloat16, device)
    for view in (x.t(), x[:, 3:77], x[5::2, ::3], x[:1].expand(40, -1)):
        agrees(view, torch.tensor(2.0, device=device), E4M3)
        agrees(view, None, E4M3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_one_value_that_is_not_finite_makes_amax_infinite(bad: float, device: str) -> None:
    x = matrix(70, 80, torch.bfloat16, device)
    x[41, 67] = bad
    for dtype in FP8:
        agrees(x, torch.tensor(1.5, device=device), dtype)
        agrees(x, None, dtype)


def test_nothing_is_lost_on_an_empty_matrix(device: str) -> None:
    for shape in ((0, 48), (32, 0)):
        x = torch.empty(shape, dtype=torch.bfloat16, device=device)
        agrees(x, None, E4M3)
        agrees(x, torch.tensor(4.0, device=device), E4M3)


def test_what_was_not_asked_for_is_empty(device: str) -> None:
    x, scale = matrix(40, 50, torch.float16, device), torch.tensor(3.0, device=device)
    q, qt, amax, _ = quantize(x, scale, E4M3, False, False, ScaleRule(), False, TILE)
    assert q.shape == qt.shape == (0,) and amax == x.abs().max().float()
    wanted = quantize_reference(x, scale, E4M3, True, True, ScaleRule())
    assert same_codes(quantize(x, scale, E4M3, False, True, ScaleRule(), False, TILE)[1], wanted[1])
    assert same_codes(quantize(x, scale, E4M3, True, False, ScaleRule(), False, TILE)[0], wanted[0])


def test_the_default_tile_agrees_too(device: str) -> None:
    agrees(matrix(150, 300, torch.bfloat16, device), None, E4M3, tile=TILE_IN_USE)
