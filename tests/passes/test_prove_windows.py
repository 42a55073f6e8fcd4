"""Windows are proved for all sizes, and what the last queries see; no mask is proved to be a window that it is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_compile.passes.prove_masks import Window, proven_meaning, proven_window
from tests.positional_masks import (
    Mask,
    all_but_a_window,
    attention_mask,
    by_batch,
    causal,
    everything,
    filled_triangle,
    from_data,
    grid,
    one_later,
    proof,
    upper_triangle,
    window,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

MINIMUM = torch.finfo(torch.float32).min


def of_two_windows(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return torch.where(k > q - 4, 0.0, MINIMUM) + filled_triangle(x)


def of_the_last_query(x: Tensor) -> Tensor:
    """As in a decoding step with a cache."""
    past = x.shape[1] - 1
    return torch.arange(past + 1)[None, :] <= (torch.arange(1) + past)[:, None]


def of_the_last_query_from_a_range(x: Tensor) -> Tensor:
    return ~(torch.arange(x.shape[1])[None, :] > torch.arange(x.shape[1] - 1, x.shape[1])[:, None])


def of_the_query_before(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])[None, :] <= (torch.arange(1) + x.shape[1] - 2)[:, None]


def of_the_last_two_queries(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])[None, :] <= (torch.arange(2) + x.shape[1] - 2)[:, None]


def window_of_the_last_query(x: Tensor) -> Tensor:
    past = x.shape[1] - 1
    k, q = torch.arange(x.shape[1])[None, :], (torch.arange(1) + past)[:, None]
    return (k <= q) & (k > q - 20)


def at_another_length(x: Tensor) -> Tensor:
    return ((torch.arange(1) + x.shape[1])[:, None] != 20).expand(-1, x.shape[1])


def up_to_another_length(x: Tensor) -> Tensor:
    return ((torch.arange(1) + x.shape[1])[:, None] <= 20).expand(-1, x.shape[1])


def local(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return (q - k).abs() <= 3


def local_by_operators(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return abs(k - q) < 4


def window_beyond_the_query(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return torch.logical_not(k > q + 2) & (q - 5 <= k) & everything(x)


def outside_of_the_window(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return (q - k).abs() >= 3


def window_of_twice_the_distance(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return (2 * q - 2 * k).abs() <= 4


def window_around_another_place(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return (q - k - 5).abs() <= 3


def window_as_wide_as_the_length(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return (k <= q) & (k > q - x.shape[1] // 2)


def local_that_is_written_to(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    apart = (q - k).abs()
    apart[..., 0] = 0
    return apart <= 3


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("mask", [of_the_last_query, of_the_last_query_from_a_range])
def test_the_last_query_is_proved_to_see_every_key(mask: Mask, dynamic: bool) -> None:
    assert proof(mask, dynamic, queries=1) == "all"


@pytest.mark.parametrize(("mask", "queries"), [
    (of_the_query_before, 1), (of_the_last_two_queries, 2), (window_of_the_last_query, 1), (at_another_length, 1),
    (up_to_another_length, 1),
])  # fmt: skip
def test_what_the_last_queries_see_at_some_lengths_alone_is_not_proved(mask: Mask, queries: int) -> None:
    assert proof(mask, True, queries) is None


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(("mask", "expected"), [
    (window, (3, 0)), (of_two_windows, (3, 0)), (local, (3, 3)), (local_by_operators, (3, 3)),
    (window_beyond_the_query, (5, 2)),
])  # fmt: skip
def test_windows_are_proved_for_every_size(mask: Mask, expected: Window, dynamic: bool) -> None:
    found = attention_mask(mask, dynamic)
    assert proven_window(found) == expected and proven_meaning(found) is None


@pytest.mark.parametrize("mask", [
    causal, one_later, upper_triangle, by_batch, from_data, outside_of_the_window, window_of_twice_the_distance,
    window_around_another_place, window_as_wide_as_the_length, local_that_is_written_to, all_but_a_window,
])  # fmt: skip
def test_what_is_no_window_at_every_size_is_proved_to_be_none(mask: Mask) -> None:
    assert proven_window(attention_mask(mask, True)) is None
