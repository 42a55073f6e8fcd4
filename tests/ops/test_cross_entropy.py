"""``te::cross_entropy``: the loss and the gradient of ``F.cross_entropy``, rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_compile.ops.cross_entropy import (
    CROSS_ENTROPY,
    CROSS_ENTROPY_BACKWARD,
    CROSS_ENTROPY_BACKWARD_DEFERRED,
    CROSS_ENTROPY_BACKWARD_DEFERRED_WITH_SUMS,
    CROSS_ENTROPY_BACKWARD_WITH_SUMS,
    CROSS_ENTROPY_FORWARD,
    REDUCTIONS,
)
from te_compile.ops.deferred_gradient import GRADIENT_TICKET, Waiting

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
IGNORED = -100


def task(rows: int = 9, columns: int = 50, dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor]:
    """Logits of any size, and targets, every third of which is ignored."""
    logits = (4 * torch.randn(rows, columns) + 20 * torch.randn(rows, 1)).to(dtype)
    targets = torch.randint(0, columns, (rows,))
    targets[1::3] = IGNORED
    return logits, targets


def loss_and_gradient(loss: Any, logits: Tensor, upstream: Tensor | None = None) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    value = loss(leaf)
    value.backward(torch.ones_like(value) if upstream is None else upstream)
    assert leaf.grad is not None
    return value.detach(), leaf.grad


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignore_index", [IGNORED, 7])
def test_in_float32_it_is_cross_entropy(reduction: str, ignore_index: int) -> None:
    logits, targets = task()
    targets = torch.where(targets == IGNORED, ignore_index, targets)
    upstream = torch.randn(9 if reduction == "none" else ())
    got = loss_and_gradient(lambda x: CROSS_ENTROPY(x, targets, ignore_index, reduction, FP32), logits, upstream)

    def exact(x: Tensor) -> Tensor:
        return F.cross_entropy(x, targets, ignore_index=ignore_index, reduction=reduction)

    wanted = loss_and_gradient(exact, logits.double(), upstream.double())
    for each, want in zip(got, wanted, strict=True):
        assert each.dtype == FP32
        torch.testing.assert_close(each.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_narrow_logits_give_what_a_cast_to_float32_gives(dtype: torch.dtype, reduction: str) -> None:
    logits, targets = task(dtype=dtype)
    got = loss_and_gradient(lambda x: CROSS_ENTROPY(x, targets, IGNORED, reduction, FP32), logits)
    wanted = loss_and_gradient(lambda x: F.cross_entropy(x.float(), targets, reduction=reduction), logits)
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-5, atol=1e-5)
    assert got[1].dtype == dtype
    torch.testing.assert_close(got[1], wanted[1], rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_the_result_has_the_dtype_asked_for() -> None:
    logits, targets = task(dtype=BF16)
    wide = CROSS_ENTROPY(logits, targets, IGNORED, "mean", FP32)
    narrow = CROSS_ENTROPY(logits, targets, IGNORED, "mean", BF16)
    assert wide.dtype == FP32 and torch.equal(narrow, wide.to(BF16))


def test_rows_that_are_ignored_have_no_loss_and_no_gradient_whatever_their_logits_are() -> None:
    logits, targets = task()
    logits[1], logits[4, 3], logits[7] = torch.nan, torch.inf, -torch.inf
    loss, gradient = loss_and_gradient(lambda x: CROSS_ENTROPY(x, targets, IGNORED, "none", FP32), logits)
    ignored = targets == IGNORED
    assert not loss[ignored].any() and not gradient[ignored].any()
    assert loss[~ignored].all() and gradient[~ignored].isfinite().all()


def test_the_mean_over_no_row_is_nan_as_in_pytorch() -> None:
    logits, targets = task()[0], torch.full((9,), IGNORED)
    loss, gradient = loss_and_gradient(lambda x: CROSS_ENTROPY(x, targets, IGNORED, "mean", FP32), logits)
    assert loss.isnan() and F.cross_entropy(logits, targets).isnan()
    assert not gradient.any() and not CROSS_ENTROPY(logits, targets, IGNORED, "sum", FP32).any()


@pytest.mark.parametrize("target", [50, -1, 10**12, -(10**12)])
def test_a_target_that_is_no_class_gives_nan_in_its_row_alone(target: int) -> None:
    logits, targets = task()
    targets[2] = target
    loss, gradient = loss_and_gradient(lambda x: CROSS_ENTROPY(x, targets, IGNORED, "none", FP32), logits)
    assert loss.isnan().nonzero().tolist() == [[2]]
    assert gradient.isnan().all(1).nonzero().tolist() == [[2]] and gradient[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("addend_dtype", DTYPES, ids=str)
def test_the_addend_is_added_before_rounding(dtype: torch.dtype, addend_dtype: torch.dtype) -> None:
    logits, targets = task(dtype=dtype)
    _, logsumexp = CROSS_ENTROPY_FORWARD(logits, targets, IGNORED)
    gradients, addend = torch.randn(9), torch.randn(9, 50).to(addend_dtype)
    got = CROSS_ENTROPY_BACKWARD(logits, targets, logsumexp, gradients, IGNORED, addend)
    alone = CROSS_ENTROPY_BACKWARD(logits.float(), targets, logsumexp, gradients, IGNORED)
    assert got.dtype == dtype
    torch.testing.assert_close(got, (alone + addend.float()).to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "with an addend"])
def test_sums_are_those_of_the_gradient_as_it_is_stored(dtype: torch.dtype, adds: bool) -> None:
    logits, targets = task(dtype=dtype)
    targets[3] = 50  # no class
    _, logsumexp = CROSS_ENTROPY_FORWARD(logits, targets, IGNORED)
    given = (logits, targets, logsumexp, torch.randn(9), IGNORED, torch.randn(9, 50).to(dtype) if adds else None)
    wanted = CROSS_ENTROPY_BACKWARD(*given)
    for sums_dtype in DTYPES:
        got, sums = CROSS_ENTROPY_BACKWARD_WITH_SUMS(*given, sums_dtype)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
        exact = wanted.sum(0, dtype=FP32).to(sums_dtype)
        torch.testing.assert_close(sums, exact, rtol=0, atol=0, equal_nan=True)


def test_sums_are_those_of_both_gradients_where_another_one_waits() -> None:
    logits, targets = task()
    _, logsumexp = CROSS_ENTROPY_FORWARD(logits, targets, IGNORED)
    given, other = (logits, targets, logsumexp, torch.randn(9), IGNORED), torch.randn(3, 3, 50)
    for waits in (False, True):
        results = []
        for operator, rest in (
            (CROSS_ENTROPY_BACKWARD_DEFERRED, ()),
            (CROSS_ENTROPY_BACKWARD_DEFERRED_WITH_SUMS, (FP32,)),
        ):
            ticket = GRADIENT_TICKET(logsumexp)
            waiting = Waiting(ticket)
            if waits:
                waiting.add(other)
            results.append(operator(*given, ticket, *rest))
            assert waiting.take() is None
        plain, (got, sums) = results
        assert torch.equal(got, plain) and torch.equal(sums, plain.sum(0))


@pytest.mark.parametrize("sums", [False, True])
def test_logits_whose_rows_lie_apart_are_not_overwritten(sums: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient is contiguous, and the memory between the rows is somebody else's."""
    monkeypatch.setattr("te_compile.ops.cross_entropy.is_last_holder", lambda _: True)
    logits, targets = task()
    _, logsumexp = CROSS_ENTROPY_FORWARD(logits, targets, IGNORED)
    whole, rest = torch.randn(9, 64), (targets, logsumexp, torch.randn(9), IGNORED, None, *([FP32] if sums else []))
    operator = CROSS_ENTROPY_BACKWARD_WITH_SUMS if sums else CROSS_ENTROPY_BACKWARD
    whole[:, 8:58] = logits
    before, wanted = whole.clone(), operator(logits, *rest)
    for given, is_overwritten in ((whole[:, 8:58], False), (logits, True)):
        got = operator(given, *rest, overwrite=True)
        for each, want in zip(*((got, wanted) if sums else ([got], [wanted])), strict=True):
            assert each.is_contiguous() and torch.equal(each, want)
        dx = got[0] if sums else got
        assert (dx.data_ptr() == given.data_ptr()) == is_overwritten
    assert torch.equal(whole, before)


def test_a_reduction_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match="'median': unknown; choose one of mean, sum, none"):
        CROSS_ENTROPY(*task(), IGNORED, "median", FP32)


@pytest.mark.parametrize("rows", [5, 0])
def test_the_fakes_predict_shapes_dtypes_and_strides(rows: int) -> None:
    checks = ("test_schema", "test_faketensor")
    for dtype in DTYPES:
        logits, targets = task(rows, 16, dtype)
        gradients = torch.ones(()).expand(rows)
        for x in (logits, logits.t().contiguous().t(), torch.randn(rows, 40).to(dtype)[:, 8:24]):
            torch.library.opcheck(CROSS_ENTROPY_FORWARD, (x, targets, IGNORED), test_utils=checks)
            logsumexp = torch.zeros(rows)
            for addend in (None, torch.randn(rows, 16), logits):
                given = (x, targets, logsumexp, gradients, IGNORED, addend)
                torch.library.opcheck(CROSS_ENTROPY_BACKWARD, given, test_utils=checks)
                torch.library.opcheck(CROSS_ENTROPY_BACKWARD_WITH_SUMS, (*given, FP16), test_utils=checks)
