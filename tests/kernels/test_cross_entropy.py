"""The kernels of the loss: the numbers of the reference, wherever rows begin, and nothing read beside them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_compile.kernels import cross_entropy
from te_compile.kernels.cross_entropy import (
    SUMMING,
    Descent,
    Walk,
    cross_entropy_backward,
    cross_entropy_backward_with_sums,
    cross_entropy_forward,
)
from te_compile.ops.cross_entropy import cross_entropy_backward_reference, cross_entropy_forward_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
IGNORED = -100
SHORT = Walk(32, 4, 1)  # several steps in few columns
LOW = Descent(2, 64, 1, 4)  # several programs either way, and several steps of each, in few rows and columns


def task(rows: int, columns: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Logits, and targets of which the second is ignored and the fourth no class."""
    logits = (4 * torch.randn(rows, columns, device=device) + 20 * torch.randn(rows, 1, device=device)).to(dtype)
    targets = torch.randint(0, columns, (rows,), device=device)
    targets[1:2], targets[3:4] = IGNORED, columns
    return logits, targets


def agrees(
    logits: Tensor, targets: Tensor, addend: Tensor | None = None, walk: Walk = SHORT, gradients: Tensor | None = None
) -> None:
    """Assert losses, logsumexp and gradients of the reference."""
    rows = logits.shape[0]
    losses, logsumexp = cross_entropy_forward(logits, targets, IGNORED, walk)
    wanted = cross_entropy_forward_reference(logits, targets, IGNORED)
    for got, want in zip((losses, logsumexp), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6, equal_nan=True)
    gradients = torch.randn(rows, device=logits.device) if gradients is None else gradients
    given = (logits, targets, wanted[1], gradients, IGNORED, addend)
    got, want = cross_entropy_backward(*given, walk), cross_entropy_backward_reference(*given)
    assert got.is_contiguous() and got.dtype == logits.dtype
    eps = torch.finfo(logits.dtype).eps
    torch.testing.assert_close(got, want, rtol=max(1e-5, eps), atol=1e-5, equal_nan=True)
    if logits.dtype != FP32:
        assert float((got != want)[targets != logits.shape[1]].float().mean()) < 0.01, "rounded once, as the reference"
    if logits.is_contiguous():
        place = logits.clone()
        assert cross_entropy_backward(place, *given[1:], walk, out=place) is place, "it may lie where the logits did"
        torch.testing.assert_close(place, got, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 7, 64, 1000, 1003, 4096])
def test_every_dtype_and_any_number_of_columns(dtype: torch.dtype, columns: int, device: str) -> None:
    logits, targets = task(11, columns, dtype, device)
    agrees(logits, targets)
    agrees(logits, targets, torch.randn(11, columns, device=device).to(dtype))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("addend", DTYPES, ids=str)
def test_the_addend_has_any_dtype(dtype: torch.dtype, addend: torch.dtype, device: str) -> None:
    logits, targets = task(5, 260, dtype, device)
    agrees(logits, targets, torch.randn(5, 260, device=device).to(addend))


@pytest.mark.parametrize("walk", [Walk(32, 1, 1), Walk(64, 4, 2), Walk(512, 8, 1)], ids=str)
@pytest.mark.parametrize("columns", [253, 2048])
def test_every_way_to_walk(walk: Walk, columns: int, device: str) -> None:
    logits, targets = task(6, columns, BF16, device)
    agrees(logits, targets, torch.randn(6, columns, device=device).to(BF16), walk)


def test_rows_apart_in_memory_and_rows_that_begin_anywhere(device: str) -> None:
    logits, targets = task(7, 250, BF16, device)

    def apart(matrix: Tensor, width: int, first: int) -> Tensor:
        wide = torch.full((matrix.shape[0], width), torch.nan, device=device, dtype=matrix.dtype)
        wide[:, first : first + matrix.shape[1]] = matrix
        return wide[:, first : first + matrix.shape[1]]

    addend = torch.randn(7, 250, device=device).to(BF16)
    for width, first in ((256, 0), (258, 8), (266, 3), (301, 1)):
        agrees(apart(logits, width, first), targets, addend)
        agrees(logits, targets, apart(addend, width, first))
    agrees(logits.t().contiguous().t(), targets, addend.t().contiguous().t())
    agrees(logits, targets, addend[:1].expand(7, 250))
    agrees(logits[:1].expand(7, 250), targets)


def test_vectors_of_numbers_lie_as_they_like(device: str) -> None:
    logits, targets = task(7, 96, BF16, device)
    for gradients in (torch.randn((), device=device).expand(7), torch.randn(14, device=device)[::2]):
        agrees(logits, targets, gradients=gradients)
    spread = torch.zeros(7, 3, dtype=torch.int64, device=device)
    spread[:, 1] = targets
    agrees(logits, spread[:, 1])


@pytest.mark.parametrize("columns", [64, 75])
def test_logits_of_rows_that_are_ignored_are_not_looked_at(columns: int, device: str) -> None:
    logits, targets = task(6, columns, BF16, device)
    targets[:] = IGNORED
    logits[0], logits[1], logits[2], addend = torch.nan, torch.inf, -torch.inf, torch.randn_like(logits)
    losses, logsumexp = cross_entropy_forward(logits, targets, IGNORED, SHORT)
    assert not losses.any() and not logsumexp.any()
    gradients = torch.full((6,), torch.nan, device=device)
    for added in (None, addend):
        got = cross_entropy_backward(logits, targets, logsumexp, gradients, IGNORED, added, SHORT)
        assert torch.equal(got, torch.zeros_like(logits) if added is None else addend)


def test_a_class_may_be_the_one_that_is_ignored(device: str) -> None:
    logits, targets = task(6, 70, FP32, device)
    targets[:] = torch.tensor([0, 1, 2, 2, 69, 3])
    losses, logsumexp = cross_entropy_forward(logits, targets, 2, SHORT)
    torch.testing.assert_close(losses, F.cross_entropy(logits, targets, ignore_index=2, reduction="none"))
    gradients = cross_entropy_backward(logits, targets, logsumexp, torch.ones_like(losses), 2, None, SHORT)
    assert not gradients[2:4].any() and (gradients[[0, 1, 4, 5]] != 0).any(1).all()


@pytest.mark.parametrize("target", [90, -1, 1 << 40, -(1 << 40)])
def test_a_target_that_is_no_class_gives_nan_in_its_row_alone(target: int, device: str) -> None:
    logits, targets = task(6, 90, BF16, device)
    targets[1], targets[3], targets[4] = 0, 1, target
    losses, logsumexp = cross_entropy_forward(logits, targets, IGNORED, SHORT)
    gradients = cross_entropy_backward(logits, targets, logsumexp, torch.ones_like(losses), IGNORED, None, SHORT)
    assert losses.isnan().nonzero().tolist() == [[4]]
    assert gradients.isnan().all(1).nonzero().tolist() == [[4]] and gradients[5].isfinite().all()


@pytest.mark.parametrize("columns", [128, 141])
def test_logits_at_the_ends_of_their_range(columns: int, device: str) -> None:
    lowest = torch.finfo(FP32).min
    logits = torch.randn(7, columns, device=device)
    targets = torch.zeros(7, dtype=torch.int64, device=device)
    logits[0, 1:] = -torch.inf  # one class is left
    logits[1, : columns // 2] = lowest
    logits[2] = lowest  # all are equal
    logits[3] = -torch.inf
    logits[4, 5] = torch.inf
    logits[5, 7] = torch.nan
    logits[6] *= 1e30
    losses, logsumexp = cross_entropy_forward(logits, targets, IGNORED, SHORT)
    want = F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(losses, want, equal_nan=True, rtol=1e-6, atol=1e-6)
    got = cross_entropy_backward(logits, targets, logsumexp, torch.ones_like(losses), IGNORED, None, SHORT)
    assert got[3:6].isnan().any(1).all() and got[[0, 1]].isfinite().all()


def test_small_losses_keep_their_digits(device: str) -> None:
    logits = torch.full((3, 200), 1000.0, device=device)  # whose logarithms of sums have no digits to spare
    targets = torch.tensor([0, 100, 199], device=device)
    logits[torch.arange(3), targets] = 1012.0
    losses, _ = cross_entropy_forward(logits, targets, IGNORED, SHORT)
    exact = F.cross_entropy(logits.double(), targets, reduction="none")
    torch.testing.assert_close(losses.double(), exact, rtol=1e-3, atol=0)


# --- with the sums of the gradient ---


def sums_agree(
    logits: Tensor, targets: Tensor, addend: Tensor | None = None, descent: Descent = LOW, dtype: torch.dtype = FP32
) -> None:
    """Assert the gradient of the kernel without sums, bit for bit, and the sums of what it stored."""
    _, logsumexp = cross_entropy_forward(logits, targets, IGNORED, SHORT)
    given = (logits, targets, logsumexp, torch.randn(logits.shape[0], device=logits.device), IGNORED, addend)
    got, sums = cross_entropy_backward_with_sums(*given, dtype, descent)
    plain = cross_entropy_backward(*given, SHORT)
    assert got.is_contiguous() and torch.equal(got.isnan(), plain.isnan())
    torch.testing.assert_close(got, plain, rtol=0, atol=0, equal_nan=True)
    assert (sums.shape, sums.dtype) == ((logits.shape[1],), dtype)
    exact = got.double().sum(0)
    torch.testing.assert_close(sums.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5, equal_nan=True)
    if logits.is_contiguous():
        place = logits.clone()
        again = cross_entropy_backward_with_sums(place, *given[1:], dtype, descent, out=place)
        assert again[0] is place
        torch.testing.assert_close(again, (got, sums), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (11, 64), (6, 1000), (5, 1003), (2, 4096)])
def test_sums_of_any_shape(dtype: torch.dtype, rows: int, columns: int, device: str) -> None:
    logits, targets = task(rows, columns, dtype, device)
    targets[3:4] = 0
    sums_agree(logits, targets)
    sums_agree(logits, targets, torch.randn(rows, columns, device=device).to(dtype), dtype=dtype)
    sums_agree(logits, targets, torch.randn(rows, columns, device=device), SUMMING)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_have_the_dtype_asked_for(dtype: torch.dtype, device: str) -> None:
    logits, targets = task(9, 130, BF16, device)
    targets[3] = 129
    sums_agree(logits, targets, dtype=dtype)


@pytest.mark.parametrize(
    "descent", [Descent(1, 32, 1, 1), Descent(4, 256, 4, 8), Descent(2, 64, 2, 3), Descent(8, 64, 1, 64)], ids=str
)
@pytest.mark.parametrize("columns", [90, 256])
def test_every_way_to_walk_down(descent: Descent, columns: int, device: str) -> None:
    logits, targets = task(21, columns, BF16, device)
    targets[3] = 5
    sums_agree(logits, targets, torch.randn(21, columns, device=device).to(BF16), descent)


def test_rows_that_count_for_nothing_add_nothing_and_one_without_a_class_makes_all_sums_nan(device: str) -> None:
    logits, targets = task(7, 75, BF16, device)
    targets[3] = IGNORED
    logits[1], logits[3] = torch.nan, torch.inf  # both are ignored
    sums_agree(logits, targets)
    addend = torch.randn_like(logits).nan_to_num()
    sums_agree(logits, targets, addend)
    targets[:] = IGNORED
    zeros = torch.zeros(7, device=device)
    _, sums = cross_entropy_backward_with_sums(logits, targets, zeros, zeros, IGNORED, None, FP32, LOW)
    assert not sums.any()
    targets[5] = 1 << 40
    got, sums = cross_entropy_backward_with_sums(logits, targets, zeros, zeros, IGNORED, None, FP32, LOW)
    assert sums.isnan().all() and got.isnan().all(1).nonzero().tolist() == [[5]]


def test_rows_apart_in_memory_are_summed(device: str) -> None:
    logits, targets = task(7, 250, BF16, device)
    targets[3] = 249
    wide = torch.full((7, 301), torch.nan, device=device, dtype=BF16)
    for first in (0, 1, 16):
        apart = wide[:, first : first + 250]
        apart[:] = logits
        sums_agree(apart, targets)
        sums_agree(logits, targets, apart)
    sums_agree(logits.t().contiguous().t(), targets, logits[:1].expand(7, 250))
    sums_agree(logits[:1].expand(7, 250), targets)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(1, 8), (100, 50000), (1024, 30522), (8192, 32000), (32768, 30528), (70000, 65), (1 << 20, 128256)],
)
def test_partial_rows_stay_few_and_programs_many(rows: int, columns: int) -> None:
    height = cross_entropy._height(rows, columns, SUMMING)
    count, across = -(-rows // height), -(-columns // SUMMING.columns)
    assert count <= cross_entropy.MOST_PARTIALS and height % SUMMING.rows == 0
    assert count == 1 or 4 * count * columns <= cross_entropy.MOST_PARTIAL_BYTES
    is_low = height <= cross_entropy.LEAST_HEIGHT
    assert is_low or count * across >= cross_entropy.ENOUGH_PROGRAMS or count > cross_entropy.MOST_PARTIALS - 20
