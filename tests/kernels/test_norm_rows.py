"""The norm kernel for rows alone: y as the reference has it, and codes that are exactly those of the y it computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_compile.kernels import norm_rows
from te_compile.kernels.norm import norm_quantize
from te_compile.kernels.norm_rows import LONGEST_ROW
from te_compile.ops.norm import KINDS, LAYER, norm_reference
from te_compile.ops.norm_quantize import Norm, Wanted
from te_compile.ops.quantize import quantize_reference
from te_compile.recipe import ScaleRule
from tests.kernels.test_norm import EPS, TOLERANCES, parameters

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RULE = ScaleRule()


@pytest.fixture(autouse=True)
def many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matrices would go to kernels/alone.py."""
    monkeypatch.setattr("te_compile.kernels.norm.alone", lambda rows, columns: None)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The columns of every call that came to this kernel."""
    columns: list[int] = []
    inner = norm_rows.norm_quantize_rows

    def counting(x: Tensor, *arguments: object) -> object:
        columns.append(x.shape[1])
        return inner(x, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("te_compile.kernels.norm.norm_quantize_rows", counting)
    return columns


def agrees(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, dtype: torch.dtype, emit: bool) -> None:
    scale = torch.tensor(40.0, device=x.device)
    norm, asked = Norm(weight, bias, EPS, kind), Wanted(scale, dtype, True, False, True, RULE)
    y, q, qt, amax, scale_inv, mean, rstd = norm_quantize(x, norm, asked, False)
    wanted_y, wanted_mean, wanted_rstd = norm_reference(x, weight, bias, EPS, kind)
    close = {"rtol": TOLERANCES[y.dtype], "atol": TOLERANCES[y.dtype], "equal_nan": True}
    torch.testing.assert_close(y, wanted_y, **close)
    torch.testing.assert_close(rstd, wanted_rstd, rtol=1e-5, atol=0, equal_nan=True)
    if kind == LAYER:
        torch.testing.assert_close(mean, wanted_mean, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert mean.shape == wanted_mean.shape and qt.shape == (0,)
    wanted = quantize_reference(y, scale, dtype, True, False, RULE)
    alike = q.view(torch.uint8) == wanted[0].view(torch.uint8)
    assert bool((alike | wanted[0].float().isnan() & q.float().isnan()).all())
    assert torch.equal(amax, wanted[2]) and torch.equal(scale_inv, wanted[3])
    if not emit:
        silent = norm_quantize(x, norm, asked._replace(emit=False), False)
        assert silent[0].shape == (0,) and torch.equal(silent[1].view(torch.uint8), q.view(torch.uint8))


@pytest.mark.parametrize("emit", [True, False], ids=["with y", "codes alone"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [150, 4200], ids=["one tile", "two tiles"])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_kind_in_every_dtype(
    kind: str, x_dtype: torch.dtype, columns: int, emit: bool, device: str, launched: list[int]
) -> None:
    x = torch.randn(13, columns, device=device).to(x_dtype)
    agrees(x, *parameters(kind, columns, x_dtype, device), kind, E4M3, emit)
    assert launched == [columns] * (1 if emit else 2)


@pytest.mark.parametrize(
    "shape",
    [(1, 1), (1, 300), (300, 16), (7, 64), (5, 2100), (5, 4096), (3, 7000), (3, 9000), (2, 4104), (3, 16384)],
    ids=str,
)
def test_rows_of_any_length(shape: tuple[int, int], device: str, launched: list[int]) -> None:
    x = torch.randn(shape, device=device).to(torch.bfloat16)
    agrees(x, *parameters(LAYER, shape[1], x.dtype, device), LAYER, E5M2, True)
    assert launched


def test_a_long_row_is_in_two_tiles_where_that_leaves_less_empty() -> None:
    parts = {columns: norm_rows._parts(columns) for columns in (8, 2560, 4096, 4104, 5120, 7000, 8192, 11008, 16384)}
    assert all(width + rest >= columns for columns, (width, rest) in parts.items())
    assert [columns for columns, (_, rest) in parts.items() if rest] == [2560, 4104, 5120, 11008]
    assert parts[2560] == (2048, 512) and parts[5120] == (4096, 1024) and parts[11008] == (8192, 4096)


def test_rows_that_lie_apart(device: str, launched: list[int]) -> None:
    x = torch.randn(20, 256, device=device).to(torch.bfloat16)[:, 32:128]
    agrees(x, *parameters("rms", 96, x.dtype, device), "rms", E4M3, True)
    assert launched


@pytest.mark.parametrize("columns", [1000, 6144], ids=["one tile", "two tiles"])
def test_a_row_of_large_numbers_that_differ_little_keeps_its_variance(
    columns: int, device: str, launched: list[int]
) -> None:
    x = 3e4 + torch.randn(16, columns, device=device)
    scale = torch.ones((), device=device)
    wanted = Wanted(scale, E4M3, True, False, False, RULE)
    *_, mean, rstd = norm_quantize(x, Norm(None, None, 0.0, LAYER), wanted, False)
    torch.testing.assert_close(mean[:, 0].double(), x.double().mean(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(rstd[:, 0].double(), x.double().std(1, correction=0).reciprocal(), rtol=1e-3, atol=0)
    assert launched


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("columns", [64, 5120], ids=["one tile", "two tiles"])
def test_what_is_not_finite_shows_in_the_amax(poison: float, columns: int, device: str, launched: list[int]) -> None:
    x = torch.randn(8, columns, device=device)
    x[3, columns - 5] = poison
    scale = torch.ones((), device=device)
    wanted = Wanted(scale, E4M3, True, False, False, RULE)
    _, q, _, amax, *_ = norm_quantize(x, Norm(None, None, EPS, "rms"), wanted, False)
    assert amax == torch.inf and q[3].float().isnan().any() and not q[4].float().isnan().any()
    assert launched


@pytest.mark.parametrize("given", [0.0, 3.0], ids=["missing", "there after all"])
@pytest.mark.parametrize("columns", [150, 4200], ids=["one tile", "two tiles"])
@pytest.mark.parametrize("kind", [LAYER, "rms"])
@pytest.mark.parametrize("rule", [RULE, ScaleRule(margin=1, power_2=True)], ids=["exact", "power of 2"])
def test_a_scale_that_may_be_missing_is_found_first_and_changes_no_statistic(
    kind: str, columns: int, given: float, rule: ScaleRule, device: str, launched: list[int]
) -> None:
    x = torch.randn(37, columns, device=device).to(torch.bfloat16)
    norm = Norm(*parameters(kind, columns, x.dtype, device), EPS, kind)
    scale = torch.tensor(given, device=device)
    y, q, _, amax, scale_inv, mean, rstd = norm_quantize(x, norm, Wanted(scale, E4M3, True, False, True, rule), True)
    wanted = quantize_reference(y, scale, E4M3, True, False, rule)
    assert torch.equal(q.view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(amax, wanted[2]) and torch.equal(scale_inv, wanted[3])
    known = norm_quantize(x, norm, Wanted(torch.ones((), device=device), E4M3, True, False, True, rule), False)
    for one, other in zip((y, mean, rstd), (known[0], *known[5:]), strict=True):
        assert torch.equal(one, other)
    assert launched == [columns] * 2


def test_other_wishes_go_to_the_two_launches(device: str, launched: list[int]) -> None:
    x, scale = torch.randn(4, 64, device=device), torch.ones((), device=device)
    norm_quantize(x, Norm(None, None, EPS, "rms"), Wanted(scale, E4M3, True, True, False, RULE), False)  # qᵀ
    norm_quantize(x, Norm(None, None, EPS, "rms"), Wanted(None, E4M3, True, False, False, RULE), True)  # no scale
    long = torch.randn(1, LONGEST_ROW + 16, device=device)
    norm_quantize(long, Norm(None, None, EPS, "rms"), Wanted(scale, E4M3, True, False, False, RULE), False)
    assert not launched


def test_long_rows_share_what_a_bias_adds_two_by_two() -> None:
    heights = {
        (columns, biased): norm_rows._height(*norm_rows._parts(columns), biased)
        for columns in (1024, 2560, 4096, 5120, 8192, 16384)
        for biased in (False, True)
    }
    assert [columns for (columns, biased), height in heights.items() if biased and height == 2] == [4096, 8192, 16384]
    assert all(heights[columns, True] == heights[columns, False] for columns in (1024, 2560, 5120))
