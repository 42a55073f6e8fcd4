"""Fingerprints of weights: what changes them, and where they look."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from te_compile.ops.weight_refresh import (
    LINE_BYTES,
    LINES,
    MOST_LINES,
    STRIDE_BYTES,
    fingerprint_reference,
    line_places,
)

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "every sign": torch.Tensor.neg_,
    "every exponent": lambda w: w.mul_(2),
    "the order": lambda w: w.copy_(w.flip(0).clone()),
    "two rows": lambda w: w[:2].copy_(w[:2].flip(0).clone()),
    "a step of an optimizer": lambda w: w.add_(torch.randn_like(w), alpha=1e-2),
    "the last bit of all": lambda w: w.view(torch.int16 if w.element_size() == 2 else torch.int32).bitwise_xor_(1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_whole_weight_is_seen(change: str, dtype: torch.dtype) -> None:
    weights = [torch.randn(random.randrange(2, 200), random.randrange(64, 300)).to(dtype) for _ in range(3)]
    before = fingerprint_reference(weights)
    assert torch.equal(before, fingerprint_reference([weight.clone() for weight in weights]))
    if change == "two rows":
        weights[0] = weights[0][:2].contiguous()
        before = fingerprint_reference(weights)
    CHANGES[change](random.choice(weights) if change != "two rows" else weights[0])
    assert not torch.equal(before, fingerprint_reference(weights))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_change_of_one_row_is_seen_where_a_row_is_a_stretch_or_longer(dtype: torch.dtype) -> None:
    columns = STRIDE_BYTES // dtype.itemsize * random.randrange(1, 4)
    weight = torch.randn(random.randrange(20, 200), columns).to(dtype)
    before = fingerprint_reference([weight])
    weight[random.randrange(len(weight))].fill_(1.0)
    assert not torch.equal(before, fingerprint_reference([weight]))


def test_a_line_of_every_stretch_is_looked_at_and_not_always_the_same_columns() -> None:
    rows, columns = random.randrange(50, 200), STRIDE_BYTES // 2  # bf16: a row is a stretch
    (places,) = line_places((rows * columns,), 2)
    assert torch.equal(places // columns, torch.arange(rows))
    assert len(set((places % columns).tolist())) == STRIDE_BYTES // LINE_BYTES, "every place in a stretch has its turn"
    assert int(places.max()) + LINE_BYTES // 2 <= rows * columns


def test_every_matrix_is_looked_at_and_no_line_leaves_it() -> None:
    lengths = tuple(random.randrange(256, 20000) for _ in range(20))
    for places, length in zip(line_places(lengths, 4), lengths, strict=True):
        assert len(places) >= 1 and int(places.min()) >= 0 and int(places.max()) + LINE_BYTES // 4 <= length


def test_the_work_is_bounded_for_the_largest_models() -> None:
    places = line_places((1 << 33,) * 7, 2)
    assert MOST_LINES // 2 < sum(map(len, places)) <= MOST_LINES + 7


def test_lines_are_gathered_in_few_numbers() -> None:
    weight = torch.randn(1000, 4096)
    lines = sum(map(len, line_places((weight.numel(),), 4)))
    assert fingerprint_reference([weight]).shape == (-(-lines // LINES),)
