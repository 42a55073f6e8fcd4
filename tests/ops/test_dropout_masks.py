"""The mask of an ordinary dropout is fair and follows its seed, and te::dropout multiplies by it both ways."""

from __future__ import annotations

import pytest
import torch

from te_compile.ops.dropout_bits import nearest_share
from te_compile.ops.dropout_masks import DROPOUT, DROPOUT_MASK, dropout_mask_reference


def seed() -> torch.Tensor:
    return torch.randint(2**62, (1,))


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.013, 0.9])
def test_elements_are_kept_as_often_as_they_should(probability: float) -> None:
    keep = dropout_mask_reference(seed(), (512, 1024), probability).double()
    wanted = nearest_share(probability) / 65536
    deviation = (wanted * (1 - wanted)) ** 0.5
    for along in ((0, 1), (0,), (1,)):  # all, each column's, each row's
        means = keep.mean(along)
        count = keep.numel() / max(1, means.numel())
        assert ((means - wanted).abs() < 6 * deviation / count**0.5).all()
    flat = keep.flatten()
    for apart in (1, 16, 512, 1024):  # in a word, in the next, in the other half of one, in another group
        covariance = ((flat[apart:] - wanted) * (flat[:-apart] - wanted)).mean()
        assert covariance.abs() < 6 * deviation**2 / flat.numel() ** 0.5


def test_the_share_has_all_sixteen_places() -> None:
    assert [nearest_share(p) for p in (0.0, 0.5, 2**-16, 1 - 2**-16, 1.0)] == [65536, 32768, 65535, 1, 0]
    for probability in [0.1, 0.3, *torch.rand(200).tolist()]:
        assert abs(nearest_share(probability) / 65536 - (1 - probability)) <= 2**-17


def test_another_seed_gives_another_mask_and_the_same_the_same() -> None:
    first, second = seed(), seed()
    masks = [dropout_mask_reference(each, (64, 65), 0.5) for each in (first, second, first)]
    assert torch.equal(masks[0], masks[2])
    assert 0.4 < (masks[0] != masks[1]).double().mean() < 0.6


@pytest.mark.parametrize("size", [(), (0,), (3, 0, 5), (1,), (5, 7), (2, 3, 1025)])
def test_a_mask_has_the_size_that_was_asked_for(size: tuple[int, ...]) -> None:
    mask = DROPOUT_MASK(seed(), size, 0.25)
    assert mask.shape == size and mask.dtype == torch.bool and mask.is_contiguous()


def test_a_longer_mask_begins_like_a_shorter_one() -> None:
    key = seed()
    whole = dropout_mask_reference(key, (5000,), 0.3)
    assert torch.equal(dropout_mask_reference(key, (1234,), 0.3), whole[:1234])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_composite_multiplies_by_the_mask_both_ways_and_follows_the_generator(dtype: torch.dtype) -> None:
    x = torch.randn(6, 50).to(dtype).requires_grad_()
    results = []
    for number in (7, 7, 8):
        torch.manual_seed(number)
        results.append(DROPOUT(x, 0.4))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    torch.manual_seed(7)
    mask, growth = dropout_mask_reference(seed(), (6, 50), 0.4), 65536 / nearest_share(0.4)
    assert results[0].dtype == dtype and torch.equal(results[0], x * mask * growth)
    grad = torch.randn(6, 50).to(dtype)
    (got,) = torch.autograd.grad(results[0], x, grad)
    assert got.dtype == dtype and torch.equal(got, grad * mask * growth)


def test_the_operator_is_sound() -> None:
    torch.library.opcheck(DROPOUT_MASK, (seed(), (3, 40), 0.5))
