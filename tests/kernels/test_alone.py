"""Matrices of few rows in one program: what kernels of many programs compute, by one launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from te_compile.kernels import alone, norm, norm_alone, pointwise
from te_compile.kernels.alone import quantize_alone
from te_compile.kernels.norm import norm_quantize
from te_compile.kernels.pointwise import fused_quantize, fused_quantize_pair
from te_compile.kernels.tiles import MOST_ALONE, Tile
from te_compile.kernels.tiles import alone as tile_alone
from te_compile.ops import calibration, triton_implementations
from te_compile.ops.fused_quantize import fused_quantize_reference
from te_compile.ops.fused_quantize_pair import fused_quantize_pair_reference
from te_compile.ops.norm import KINDS, LAYER, norm_reference
from te_compile.ops.norm_quantize import Norm, Wanted
from te_compile.ops.pointwise import Spec
from te_compile.ops.quantize import quantize_reference
from te_compile.recipe import ScaleRule
from tests.kernels.test_norm import EPS, TOLERANCES, parameters
from tests.kernels.test_pointwise import PAIR, assert_same, bytes_of, inputs_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RULES = [ScaleRule(), ScaleRule(margin=1, power_2=True)]
GIVEN = [None, 0.0, 3.0]
SPEC = Spec.parse(
    "x0: bfloat16[M, K]; x1: float32[K]; x2: bfloat16[M, 1]; x3: bool[M, K]; "
    "t0 = sigmoid(x0); t1 = mul(x0, t0); t2 = mul(t1, x1); t3 = add(t2, x2); t4 = where(x3, t3, x1); "
    "quantize t4; emit t1: bfloat16"
)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The grid of each launch that the kernels under test make."""
    grids: list[Any] = []
    for module in (alone, norm, norm_alone, pointwise):
        inner = module.launch

        def counting(kernel: Any, grid: Any, *arguments: Any, inner: Any = inner, **constants: Any) -> None:
            grids.append(grid)
            inner(kernel, grid, *arguments, **constants)

        monkeypatch.setattr(module, "launch", counting)
    return grids


def number(value: float | None, device: str) -> Tensor | None:
    return None if value is None else torch.tensor(value, device=device)


# --- which matrices ------------------------------------------------------------------------------------------------


def test_a_tile_holds_all_of_a_matrix_of_few_rows() -> None:
    assert tile_alone(8, 4096) == Tile(8, 4096, 16) and tile_alone(1, 4096) == Tile(1, 4096, 4)
    assert tile_alone(1, 1) == Tile(1, 64, 1) and tile_alone(5, 3000) == Tile(8, 4096, 16)
    for rows, columns in ((1, MOST_ALONE), (3, 4096), (32, 1024), (7, 100)):
        tile = tile_alone(rows, columns)
        assert tile and tile.rows >= rows and tile.columns >= columns and tile.rows * tile.columns <= MOST_ALONE
    for rows, columns in ((9, 4096), (8, 4097), (1, MOST_ALONE + 1), (0, 16), (16, 0)):
        assert tile_alone(rows, columns) is None


# --- norms ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("emit", [True, False], ids=["with y", "codes alone"])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_norm(
    kind: str, x_dtype: torch.dtype, given: float | None, emit: bool, device: str, launched: list[Any]
) -> None:
    """qᵀ is made as well where no scale is given: the many programs of others would have other statistics."""
    x = torch.randn(5, 200, device=device).to(x_dtype)
    weight, bias = parameters(kind, 200, x_dtype, device)
    scale, rule, columnwise = number(given, device), RULES[1], given is None
    norm, wanted = Norm(weight, bias, EPS, kind), Wanted(scale, E4M3, True, columnwise, True, rule)
    y, q, qt, amax, scale_inv, mean, rstd = norm_quantize(x, norm, wanted, given != 3.0)
    wanted_y, wanted_mean, wanted_rstd = norm_reference(x, weight, bias, EPS, kind)
    torch.testing.assert_close(y, wanted_y, rtol=TOLERANCES[y.dtype], atol=TOLERANCES[y.dtype])
    torch.testing.assert_close(rstd, wanted_rstd, rtol=1e-5, atol=0)
    torch.testing.assert_close(mean, wanted_mean, rtol=1e-5, atol=1e-5)
    assert_same([q, qt, amax, scale_inv], list(quantize_reference(y, scale, E4M3, True, columnwise, rule)))
    assert launched == [1]
    if not emit:
        silent = norm_quantize(x, norm, wanted._replace(emit=False), given != 3.0)
        assert silent[0].shape == (0,) and torch.equal(bytes_of(silent[1]), bytes_of(q))


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (16, 64), (7, 100), (1, 16384), (3, 4097)], ids=str)
def test_a_norm_of_any_shape(shape: tuple[int, int], device: str) -> None:
    x = torch.randn(shape, device=device)
    weight, bias = parameters(LAYER, shape[1], x.dtype, device)
    y, q, qt, amax, scale_inv, *_ = norm_quantize(
        x, Norm(weight, bias, EPS, LAYER), Wanted(None, E5M2, True, True, True, RULES[0]), True
    )
    torch.testing.assert_close(y, norm_reference(x, weight, bias, EPS, LAYER)[0], rtol=1e-4, atol=1e-4)
    assert_same([q, qt, amax, scale_inv], list(quantize_reference(y, None, E5M2, True, True, RULES[0])))


def test_statistics_do_not_depend_on_what_is_known_and_wanted(device: str) -> None:
    x = torch.randn(6, 1000, device=device).to(torch.bfloat16)
    norm = Norm(*parameters(LAYER, 1000, x.dtype, device), EPS, LAYER)
    ways = [(None, True, True), (None, False, True), (0.0, False, True), (3.0, False, True), (3.0, False, False)]
    first, *others = (
        norm_quantize(x, norm, Wanted(number(given, device), E4M3, True, columnwise, True, RULES[0]), measure)
        for given, columnwise, measure in ways
    )
    for other in others:
        assert all(torch.equal(first[i], other[i]) for i in (0, 5, 6))


def test_a_row_of_large_numbers_that_differ_little_keeps_its_variance(device: str) -> None:
    x = 3e4 + torch.randn(16, 1000, device=device)
    wanted = Wanted(None, E4M3, True, False, False, RULES[0])
    *_, mean, rstd = norm_quantize(x, Norm(None, None, 0.0, LAYER), wanted, True)
    torch.testing.assert_close(mean[:, 0].double(), x.double().mean(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(rstd[:, 0].double(), x.double().std(1, correction=0).reciprocal(), rtol=1e-3, atol=0)


def test_a_transposed_copy_under_a_given_scale_is_for_others(device: str, launched: list[Any]) -> None:
    x, scale = torch.randn(4, 64, device=device), torch.ones((), device=device)
    norm_quantize(x, Norm(None, None, EPS, "rms"), Wanted(scale, E4M3, True, True, False, RULES[0]), False)
    assert len(launched) > 1
    many = torch.randn(MOST_ALONE // 64 + 1, 64, device=device)
    launched.clear()
    norm_quantize(many, Norm(None, None, EPS, "rms"), Wanted(None, E4M3, True, False, False, RULES[0]), True)
    assert len(launched) > 1


# --- casts and producers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("rule", RULES, ids=["exact", "power of 2"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 100), (8, 256)], ids=str)
def test_a_cast(
    shape: tuple[int, int], rule: ScaleRule, given: float | None, dtype: torch.dtype, device: str, launched: list[Any]
) -> None:
    x = torch.randn(shape[0], 2 * shape[1], device=device).to(torch.bfloat16)[:, ::2]
    scale, tile = number(given, device), tile_alone(*shape)
    assert tile is not None
    got = quantize_alone(x, scale, dtype, True, rule, tile)
    assert_same(list(got), list(quantize_reference(x, scale, dtype, True, False, rule)))
    assert launched == [1]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_shows_in_the_amax(poison: float, device: str) -> None:
    x = torch.randn(8, 64, device=device)
    x[3, 5] = poison
    tile = tile_alone(8, 64)
    assert tile is not None
    for got in (
        list(quantize_alone(x, None, E4M3, True, RULES[0], tile)),
        fused_quantize([x], None, Spec.parse("x0: float32[M, K]; quantize x0"), E4M3, True, False, RULES[0], True),
    ):
        wanted = quantize_reference(x, None, E4M3, True, False, RULES[0])
        torch.testing.assert_close(got[0].float(), wanted[0].float(), rtol=0, atol=0, equal_nan=True)
        assert got[0][3, 5].float().isnan() and got[2] == wanted[2] == torch.inf and got[3] == wanted[3]


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("shape", [(1, 50), (8, 256), (33, 17)], ids=str)
def test_a_producer(shape: tuple[int, int], given: float | None, device: str, launched: list[Any]) -> None:
    arguments = (inputs_of(SPEC, *shape, device), number(given, device), SPEC, E4M3, True, False, RULES[1])
    got = fused_quantize(*arguments, measure=True)
    assert launched == [1]
    many = fused_quantize(*arguments, measure=True, tile=Tile(32, 16, 4))
    assert all(torch.equal(bytes_of(one[None]), bytes_of(other[None])) for one, other in zip(got, many, strict=True))
    assert_same(got, fused_quantize_reference(*arguments))


@pytest.mark.parametrize("scales", [(None, None), (0.0, 2.0), (2.0, 0.0)], ids=str)
def test_two_values(scales: tuple[float | None, float | None], device: str, launched: list[Any]) -> None:
    given = [number(scale, device) for scale in scales]
    layouts = [(True, False), (True, False)]
    arguments = (inputs_of(PAIR, 7, 100, device), given, PAIR, E4M3, layouts, RULES[0])
    assert_same(fused_quantize_pair(*arguments, measure=True), fused_quantize_pair_reference(*arguments))
    assert launched == [1]


def test_what_has_sums_or_both_layouts_or_a_scale_is_for_many_programs(device: str, launched: list[Any]) -> None:
    text = "x0: float32[M, K]; t0 = relu(x0); quantize t0"
    x, scale = torch.randn(4, 32, device=device), torch.ones((), device=device)
    for spec, columnwise, known in (
        (f"{text}; sum t0: float32", False, None),
        (text, True, None),
        (text, False, scale),
    ):
        launched.clear()
        arguments = ([x], known, Spec.parse(spec), E4M3, True, columnwise, RULES[0])
        assert_same(fused_quantize(*arguments, measure=known is None), fused_quantize_reference(*arguments))
        assert launched != [1]


def test_the_operator_takes_one_program_where_a_scale_may_be_missing(
    device: str, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, scale = torch.randn(4, 32, device=device), torch.full((), 2.0, device=device)
    for may_miss, columnwise, alone_there in ((True, False, [1]), (False, False, []), (True, True, [])):
        monkeypatch.setattr(calibration, "must_measure", lambda scale, answer=may_miss: answer)
        launched.clear()
        got = triton_implementations.quantize(x, scale, E4M3, True, columnwise, RULES[0])
        assert_same(list(got), list(quantize_reference(x, scale, E4M3, True, columnwise, RULES[0])))
        assert launched == alone_there
