"""The norm's backward kernel: dx of the reference up to a rounding, dw and db up to the order of their sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_compile.kernels.norm_backward import (
    EXCHANGES,
    MOST_AHEAD,
    Walk,
    norm_backward,
    partial_rows,
    walk_for,
)
from te_compile.ops.norm import KINDS, LAYER, RMS, RMS_MIXED, norm_reference, output_dtype
from te_compile.ops.norm_backward import norm_backward_reference

EPS = 1e-5
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Task = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor | None, str]


def task(
    kind: str,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: str,
    *,
    weighted: bool = True,
    residual: bool = True,
    parameters: torch.dtype | None = None,
) -> Task:
    """dy, x, weight, mean, rstd, residual and kind of a norm with random numbers."""
    x = (1 + 2 * torch.randn(rows, columns, device=device)).to(dtype)
    weight_dtype = parameters or (FP32 if kind == RMS_MIXED else dtype)
    weight = (1 + torch.randn(columns, device=device) / 4).to(weight_dtype) if weighted else None
    _, mean, rstd = norm_reference(x, weight, None, EPS, kind)
    y_dtype = output_dtype(dtype, None if weight is None else weight.dtype, kind)
    dy = torch.randn(rows, columns, device=device).to(y_dtype)
    added = torch.randn(rows, columns, device=device).to(dtype) if residual else None
    return dy, x, weight, mean, rstd, added, kind


def is_near(got: Tensor, want: Tensor, before_residual: Tensor, exactly: float) -> None:
    """Assert equality up to the roundings of both sums, and to the bit for all but ``exactly`` of the elements."""
    assert got.dtype == want.dtype and got.shape == want.shape and got.is_contiguous()
    step = torch.finfo(want.dtype).eps
    allowed = step * (want.float().abs() + before_residual.float().abs()) + 1e-5
    assert bool(((got.float() - want.float()).abs() <= allowed).all())
    if want.dtype != FP32:
        assert float((got != want).float().mean()) <= exactly


def is_the_sum(got: Tensor, terms: Tensor) -> None:
    """Assert that ``got`` is the sum of the rows of ``terms`` as fp32 can have it, rounded to its own dtype."""
    exact, size = terms.double().sum(0), terms.double().abs().sum(0)
    step = 0.0 if got.dtype == FP32 else torch.finfo(got.dtype).eps
    assert bool(((got.double() - exact).abs() <= 2e-6 * size + step * exact.abs() + 1e-6).all())


def agrees(given: Task, walk: Walk | None = None, sums_walk: Walk | None = None, exactly: float = 0.02) -> None:
    """Assert the agreement described above for all three gradients."""
    dy, x, weight, mean, rstd, _, kind = given
    wants_dw = weight is not None
    bias_dtype = x.dtype if kind == LAYER else None
    dx, dw, db = norm_backward(*given, True, wants_dw, bias_dtype, walk, sums_walk)
    wanted = norm_backward_reference(*given, True, wants_dw, bias_dtype)
    plain = norm_backward_reference(dy, x, weight, mean, rstd, None, kind, True, False, None)[0]
    is_near(dx, wanted[0], plain, exactly)
    assert [(g.shape, g.dtype) for g in (dw, db)] == [(w.shape, w.dtype) for w in wanted[1:]]
    if weight is not None:
        normal = (x.float() - mean if kind == LAYER else x.float()) * rstd
        if kind in (RMS, RMS_MIXED):
            normal = normal.to(x.dtype if kind == RMS else weight.dtype).float()
        is_the_sum(dw, dy.float() * normal)
    if bias_dtype is not None:
        is_the_sum(db, dy.float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_every_kind_in_every_dtype(kind: str, dtype: torch.dtype, device: str) -> None:
    agrees(task(kind, 37, 150, dtype, device))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_without_a_weight_or_a_residual(kind: str, device: str) -> None:
    agrees(task(kind, 20, 64, BF16, device, weighted=False))
    agrees(task(kind, 20, 64, BF16, device, residual=False))


def test_parameters_in_fp32_beside_activations_in_bf16(device: str) -> None:
    for kind in KINDS:
        agrees(task(kind, 20, 96, BF16, device, parameters=FP32))


@pytest.mark.parametrize("shape", [(1, 1), (1, 1000), (3, 72), (3, 1000), (40, 129), (5, 4096)], ids=str)
def test_few_rows_and_odd_columns(shape: tuple[int, int], device: str) -> None:
    agrees(task(LAYER, *shape, BF16, device), exactly=0.1)


@pytest.mark.parametrize("walk", [Walk(1, 256, 4, 1, 1), Walk(4, 256, 4, 1, 3), Walk(8, 256, 1, 2, 2)], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 64, 101])
def test_every_way_to_walk_sees_each_row_once(walk: Walk, rows: int, device: str) -> None:
    agrees(task(LAYER, rows, 200, FP32, device), walk)


def test_sums_in_a_launch_of_their_own_walk_over_blocks_of_columns(device: str) -> None:
    for columns in (256, 300):
        agrees(task(LAYER, 45, columns, FP32, device), sums_walk=Walk(4, 64, 4, 2, 2))


@pytest.mark.parametrize("wants_dw", [True, False])
@pytest.mark.parametrize("bias_dtype", [None, FP32, BF16], ids=str)
@pytest.mark.parametrize("wants_dx", [True, False])
def test_only_what_is_wanted_is_computed(
    wants_dx: bool, wants_dw: bool, bias_dtype: torch.dtype | None, device: str
) -> None:
    given = task(LAYER, 33, 96, FP32, device)
    got = norm_backward(*given, wants_dx, wants_dw, bias_dtype)
    everything = norm_backward(*given, True, True, bias_dtype or FP32)
    for each, whole, wanted in zip(got, everything, (wants_dx, wants_dw, bias_dtype is not None), strict=True):
        if wanted:
            torch.testing.assert_close(each, whole, rtol=1e-5, atol=1e-5)
        else:
            assert each.shape == (0,)


@pytest.mark.parametrize("sums_walk", [None, Walk(4, 32, 1, 1, 1)])
def test_sums_in_part_are_as_many_rows_as_the_operator_says_and_add_up(sums_walk: Walk | None, device: str) -> None:
    given = task(LAYER, 77, 96, BF16, device)
    wanted = norm_backward(*given, True, True, FP32, None, sums_walk)
    dx, dw, db = norm_backward(*given, True, True, FP32, None, sums_walk, partial_sums=True)
    assert torch.equal(dx, wanted[0]) and dw.dtype == db.dtype == FP32 and dw.shape == db.shape
    if sums_walk is None:
        assert dw.shape == (partial_rows(given[0], given[1], given[5], True, 2), 96)
    torch.testing.assert_close(dw.sum(0).to(BF16), wanted[1], rtol=2.0**-7, atol=1e-5)
    torch.testing.assert_close(db.sum(0), wanted[2], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_a_gradient_of_16_bits_gives_what_its_widened_copy_gives(kind: str, dtype: torch.dtype, device: str) -> None:
    """As under autocast, where products' gradients have 16 bits and norms run in fp32."""
    wide, *rest = task(kind, 37, 150, FP32, device)
    dy = wide.to(dtype)
    agrees((dy, *rest))
    narrow, widened = (norm_backward(each, *rest, True, True, FP32) for each in (dy, dy.float()))
    for got, want in zip(narrow, widened, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_weight_and_bias_may_differ_in_dtype(device: str) -> None:
    _, dw, db = norm_backward(*task(LAYER, 9, 64, FP32, device, parameters=BF16), True, True, FP16)
    assert (dw.dtype, db.dtype) == (BF16, FP16)


def test_rows_apart_in_memory_are_read_in_place_and_others_copied(device: str) -> None:
    dy, x, weight, mean, rstd, residual, kind = task(LAYER, 40, 96, FP32, device)

    def wide(matrix: Tensor) -> Tensor:
        apart = torch.full((40, 200), torch.nan, device=device)
        apart[:, :96] = matrix
        return apart[:, :96]

    transposed = [each.t().contiguous().t() for each in (dy, x, residual)]
    for dy_, x_, residual_ in ([wide(dy), wide(x), wide(residual)], transposed):
        assert not dy_.is_contiguous()
        agrees((dy_, x_, weight, mean, rstd, residual_, kind))
    ones = torch.ones((), device=device)
    for expanded in (ones.expand(40, 96), dy[:1].expand(40, 96), dy[:, :1].expand(40, 96)):
        agrees((expanded, x, weight, mean, rstd, residual, kind))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_a_gradient_that_is_not_finite_spoils_its_row_and_its_column(bad: float, device: str) -> None:
    dy, x, weight, mean, rstd, residual, kind = task(LAYER, 20, 150, FP32, device)
    dy[7, 141] = bad
    dx, dw, db = norm_backward(dy, x, weight, mean, rstd, residual, kind, True, True, FP32)
    rows = dx.isfinite().all(1)
    assert not bool(dx[7].isfinite().any()) and int(rows.sum()) == 19
    for sums in (dw, db):
        assert not bool(sums[141].isfinite()) and int(sums.isfinite().sum()) == 149


@pytest.mark.parametrize("shared_memory", [101376, 166912, 232448])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_what_is_under_way_fits_the_shared_memory(itemsize: int, shared_memory: int) -> None:
    for width in (2**power for power in range(16)):
        if width * itemsize > 32768:
            continue
        walk = walk_for(width, itemsize, 3, shared_memory)
        step = 3 * walk.rows * walk.columns * itemsize
        assert walk.columns == width and walk.warps <= 32 and 1 <= walk.stages <= 1 + MOST_AHEAD
        assert walk.stages == 1 or walk.programs * ((walk.stages - 1) * step + EXCHANGES) <= shared_memory
