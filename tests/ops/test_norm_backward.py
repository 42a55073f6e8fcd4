"""``te::norm_backward``: the gradients that autograd finds, and those alone that somebody wants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from te_compile.ops.norm import KINDS, LAYER, RMS_OFFSET, norm_reference, output_dtype
from te_compile.ops.norm_backward import NORM_BACKWARD

EPS = 1e-6
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def task(kind: str, rows: int = 7, columns: int = 48, dtype: torch.dtype = torch.float32) -> list[Any]:
    """dy, x, weight, mean, rstd, residual and kind, with random numbers."""
    x = (1 + 2 * torch.randn(rows, columns)).to(dtype)
    weight = (1 + torch.randn(columns) / 4).to(dtype)
    _, mean, rstd = norm_reference(x, weight, None, EPS, kind)
    dy = torch.randn(rows, columns).to(output_dtype(dtype, dtype, kind))
    return [dy, x, weight, mean, rstd, torch.randn(rows, columns).to(dtype), kind]


def norm(x: Tensor, weight: Tensor, bias: Tensor, kind: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True) if kind == LAYER else x
    normal = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
    return normal * (1 + weight if kind == RMS_OFFSET else weight) + bias


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients_are_those_of_autograd(kind: str) -> None:
    given = task(kind)
    dy, x, weight, residual = (given[i] for i in (0, 1, 2, 5))
    leaves = [each.double().requires_grad_() for each in (x, weight, torch.zeros(48))]
    wanted = torch.autograd.grad(norm(*leaves, kind), leaves, dy.double())
    dx, dw, db = NORM_BACKWARD(*given, True, True, torch.float32)
    torch.testing.assert_close(dx.double(), wanted[0] + residual, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dw.double(), wanted[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(db.double(), wanted[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_residual_changes_no_bit_of_a_sum_taken_apart(kind: str, dtype: torch.dtype) -> None:
    dy, x, weight, mean, rstd, residual, _ = given = task(kind, dtype=dtype)
    alone = NORM_BACKWARD(dy, x, weight, mean, rstd, None, kind, True, True, None)
    together = NORM_BACKWARD(*given, True, True, None)
    assert torch.equal(together[0], alone[0] + residual) and torch.equal(together[1], alone[1])


@pytest.mark.parametrize("wants_dx", [True, False])
@pytest.mark.parametrize("wants_dw", [True, False])
@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16], ids=str)
def test_what_is_not_wanted_is_empty(wants_dx: bool, wants_dw: bool, bias_dtype: torch.dtype | None) -> None:
    given = task(LAYER)
    everything = NORM_BACKWARD(*given, True, True, torch.bfloat16)
    got = NORM_BACKWARD(*given, wants_dx, wants_dw, bias_dtype)
    for each, whole, wanted in zip(got, everything, (wants_dx, wants_dw, bias_dtype), strict=True):
        assert torch.equal(each, whole) if wanted else each.shape == (0,)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [5, 0])
def test_the_fake_predicts_shapes_dtypes_and_strides(kind: str, rows: int) -> None:
    for dtype in DTYPES:
        dy, x, weight, mean, rstd, residual, _ = task(kind, rows, 16, dtype)
        turned = [each.t().contiguous().t() for each in (dy, x, residual)]
        for dy_, x_, residual_ in ((dy, x, residual), turned, (dy[:1].expand(rows, 16) if rows else dy, x, None)):
            given = (dy_, x_, weight.float(), mean, rstd, residual_, kind)
            for wanted in ((True, True, torch.float16), (True, False, None), (False, True, None)):
                checks = ("test_schema", "test_faketensor")
                torch.library.opcheck(NORM_BACKWARD, (*given, *wanted), test_utils=checks)


def test_no_rows_have_sums_of_zero() -> None:
    dx, dw, db = NORM_BACKWARD(*task(LAYER, rows=0), True, True, torch.float32)
    assert dx.shape == (0, 48) and not dw.any() and not db.any() and dw.shape == db.shape == (48,)
