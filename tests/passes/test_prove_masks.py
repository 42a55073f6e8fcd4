"""Masks built from positions are proved for all sizes; no mask is proved to be what it is not at some size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compiling import compiled
from tests.positional_masks import (
    Mask,
    all_but_a_window,
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


def causal_of_narrow_integers(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1], dtype=torch.int32)
    return at[:, None] - at[None, :] >= 0


def causal_of_one_packed_sequence(x: Tensor) -> Tensor:
    batch, q, k = grid(x)
    at = torch.arange(x.shape[1]).unsqueeze(0).expand(x.shape[0], -1)
    sequence = (torch.diff(at, prepend=at[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    same = sequence[batch, q] == sequence[batch, k]
    result = q.new_ones((), dtype=torch.bool)
    return result & same.to(x.device) & (at[batch, k] <= at[batch, q])


def strictly_not_later(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return torch.logical_not(k > q)


def added(x: Tensor) -> Tensor:
    return torch.where(causal(x), torch.zeros((), dtype=x.dtype), MINIMUM)


def filled(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    return torch.zeros(x.shape[1], x.shape[1]).masked_fill(at[None, :] > at[:, None], float("-inf"))


def scaled_with_the_scores(x: Tensor) -> Tensor:
    return (torch.where(causal(x), torch.zeros((), dtype=x.dtype), MINIMUM) * 0.25).to(x.dtype) / 8.0


def causal_of_repeated_positions(x: Tensor) -> Tensor:
    batch, q, k = grid(x)
    at = torch.arange(x.shape[1]).unsqueeze(0).repeat(x.shape[0], 1)
    return at[batch, k] <= at[batch, q]


def beside_zeros(x: Tensor) -> Tensor:
    """As where there is no bias of positions."""
    n = x.shape[1]
    return torch.zeros(1, 1, n, n) + added(x)


def twice(x: Tensor) -> Tensor:
    return filled_triangle(x) + added(x) * 0.5


def where_ones_are_left(x: Tensor) -> Tensor:
    """As people write it by hand."""
    ones = torch.tril(torch.ones(x.shape[1], x.shape[1]))
    return torch.zeros(x.shape[1], x.shape[1]).masked_fill(ones[None, None] == 0, float("-inf"))


def where_ones_are_cut_off(x: Tensor) -> Tensor:
    return torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.uint8), diagonal=1)[None] < 0.5


def truths_of_ones(x: Tensor) -> Tensor:
    return x.new_ones(x.shape[1], x.shape[1]).tril().bool()


def truths_written_as_numbers(x: Tensor) -> Tensor:
    return causal(x).float().to(torch.float64).expand(x.shape[0], -1, -1, -1) > 0


def filled_of_its_kind(x: Tensor) -> Tensor:
    return x.new_full((x.shape[1], x.shape[1]), float("-inf")).triu(1)


def opposite_times_the_smallest(x: Tensor) -> Tensor:
    return (1.0 - causal(x).to(x.dtype)) * MINIMUM


def opposite_of_whole_numbers(x: Tensor) -> Tensor:
    return (1 - causal(x).long()).to(x.dtype) * MINIMUM * 0.5


def opposite_of_ones(x: Tensor) -> Tensor:
    """What a text without padding makes."""
    shown = torch.ones(x.shape[:2])[:, None, None, :].to(x.dtype)
    return (1.0 - shown) * MINIMUM


def everything_of_ones(x: Tensor) -> Tensor:
    """A text without padding, as indices pick it."""
    batch, _, k = grid(x)
    shown = torch.ones(x.shape[:2]).to(torch.bool)
    return shown[batch, k].expand(-1, -1, x.shape[1], -1)


def zeros(x: Tensor) -> Tensor:
    return torch.zeros(1, 1, x.shape[1], x.shape[1])


def triangle_for_every_head(x: Tensor) -> Tensor:
    return filled_triangle(x).unsqueeze(0).unsqueeze(0)


def filled_for_every_head(x: Tensor) -> Tensor:
    return filled(x)[None, None] * 0.5


def triangle_viewed_for_every_head(x: Tensor) -> Tensor:
    """As buffers of models are made, which here is none."""
    n = x.shape[1]
    return torch.tril(torch.ones(n, n)).view(1, 1, n, n) == 1


def triangle_cut_to_the_length(x: Tensor) -> Tensor:
    n = x.shape[1]
    return torch.full((2 * n, 2 * n), float("-inf")).triu(1)[:n, :n].repeat(x.shape[0], 1, 1, 1)


def sum_for_every_head(x: Tensor) -> Tensor:
    n = x.shape[1]
    return (filled_triangle(x) + filled(x)).reshape(1, 1, n, n).to(x.dtype)


def lower_triangle(x: Tensor) -> Tensor:
    return torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool))


def all_but_the_upper_triangle(x: Tensor) -> Tensor:
    return ~torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)


def before_the_query(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return k < q


def wrong_way_round(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return q <= k


def every_second(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return 2 * k <= q + q


def of_two_sequences(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1]) % 4
    sequence = (torch.diff(at, prepend=at[:1] - 1) != 1).cumsum(-1)
    return (sequence[:, None] == sequence[None, :]) & causal(x)


def from_a_shifted_slice(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1] + 1)
    return at[None, :-1] <= at[1:, None]


def a_little_added(x: Tensor) -> Tensor:
    return torch.where(causal(x), torch.zeros((), dtype=x.dtype), -5.0)


def written_into(x: Tensor) -> Tensor:
    mask = causal(x).clone()
    mask[:, :, 0] = True
    return mask


def written_into_a_copy(x: Tensor) -> Tensor:
    mask = added(x).clone()
    mask[:, :, 0] = 0
    return mask


def scaled_to_a_bias(x: Tensor) -> Tensor:
    return added(x) * 1e-38


def turned_round(x: Tensor) -> Tensor:
    return added(x) * -0.5


def scaled_in_place(x: Tensor) -> Tensor:
    mask = added(x)
    mask *= 1e-38
    return mask


def one_diagonal_more(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(1)


def filled_from_the_diagonal_on(x: Tensor) -> Tensor:
    return torch.full((x.shape[1], x.shape[1]), float("-inf")).triu()


def triangle_of_small_numbers(x: Tensor) -> Tensor:
    return torch.full((x.shape[1], x.shape[1]), -1e4).triu(1)


def triangle_without_a_row(x: Tensor) -> Tensor:
    infinite = torch.full((x.shape[1], x.shape[1]), float("-inf"))
    infinite[0].fill_(0.0)
    return infinite.triu(1)


def triangle_of_a_written_diagonal(x: Tensor) -> Tensor:
    shown = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    shown.ravel()[:: x.shape[1] + 1].fill_(False)
    return shown.tril()


def filled_where_numbers_were_written(x: Tensor) -> Tensor:
    at, numbers = torch.arange(x.shape[1]), torch.zeros(x.shape[1], x.shape[1])
    numbers[2:].data.fill_(MINIMUM)
    return numbers.masked_fill(at[None, :] > at[:, None], float("-inf"))


def from_truths(x: Tensor) -> Tensor:
    """Every key but the first is at 1."""
    at = torch.arange(x.shape[1])
    return at.bool()[None, :] <= at[:, None]


def from_truths_added(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    return at[None, :] + at.to(torch.bool)[:, None] <= at[:, None] + at.bool()[None, :]


def from_differences_of_bytes(x: Tensor) -> Tensor:
    """They wrap, and are never negative."""
    at = torch.arange(x.shape[1], dtype=torch.uint8)
    return at[:, None] - at[None, :] >= 0


def from_bytes(x: Tensor) -> Tensor:
    """As causal as positions are, as far as a byte counts."""
    at = torch.arange(x.shape[1], dtype=torch.int8)
    return at[None, :] <= at[:, None]


def bytes_below_zero(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[1], x.shape[1], dtype=torch.uint8) - 1 < 0


def twice_true(x: Tensor) -> Tensor:
    true = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    return true + true == 2


def from_truths_of_a_comparison(x: Tensor) -> Tensor:
    """Which are 0 at some places: as causal as the comparison."""
    _, q, k = grid(x)
    return (k <= q).long() + 0 > 0


def triangle_of_one_row(x: Tensor) -> Tensor:
    """Every query sees the first key alone."""
    n = x.shape[1]
    return torch.full((1, n), float("-inf")).triu(1).expand(n, n)


def sum_of_triangles_of_one_row(x: Tensor) -> Tensor:
    n = x.shape[1]
    return (torch.full((1, n), float("-inf")).triu(1) + torch.zeros(1, n)).expand(n, n)


def one_row_of_a_triangle(x: Tensor) -> Tensor:
    n = x.shape[1]
    return filled_triangle(x)[3:4].expand(n, n)


def triangle_that_begins_later(x: Tensor) -> Tensor:
    n = x.shape[1]
    return torch.full((n + 2, n), float("-inf")).triu(1)[2:][None]


def triangle_of_a_view_that_was_written(x: Tensor) -> Tensor:
    view = filled_triangle(x)[None]
    view[..., 0] = 0.0
    return view


def triangle_with_its_rows_moved(x: Tensor) -> Tensor:
    n = x.shape[1]
    return torch.full((n, 2 * n), float("-inf")).triu(1).view(2 * n, n)[:n]


def triangle_of_one_row_beside_zeros(x: Tensor) -> Tensor:
    n = x.shape[1]
    return torch.full((1, n), float("-inf")).triu(1) + torch.zeros(n, n)


def beside_a_number(x: Tensor) -> Tensor:
    """Which softmax cancels; but nobody adds it for that."""
    return added(x) + torch.full((x.shape[1],), 0.5)


def taken_away(x: Tensor) -> Tensor:
    return zeros(x) - added(x)


def taken_away_by_a_factor(x: Tensor) -> Tensor:
    return torch.add(zeros(x), added(x), alpha=-1)


def beside_zeros_that_were_written(x: Tensor) -> Tensor:
    bias = zeros(x)
    bias[..., 0] = 1.0
    return bias + added(x)


def zeros_that_were_written(x: Tensor) -> Tensor:
    bias = zeros(x)
    bias[..., 0] = 1.0
    return bias


def ones_of_the_wrong_half(x: Tensor) -> Tensor:
    return torch.tril(torch.ones(x.shape[1], x.shape[1])) == 0


def triangle_of_ones(x: Tensor) -> Tensor:
    """Which adds 1, and hides nothing."""
    return torch.tril(torch.ones(x.shape[1], x.shape[1]))


def triangle_of_wrapped_ones(x: Tensor) -> Tensor:
    return torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=torch.uint8)) - 2 > 100


def triangle_of_ones_that_were_written(x: Tensor) -> Tensor:
    ones = torch.tril(torch.ones(x.shape[1], x.shape[1]))
    ones[:, 0] = 0.0
    return ones > 0


def ones_as_positions(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    return at[None, :] <= torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=torch.int64))


def opposite_times_infinity(x: Tensor) -> Tensor:
    """No number where it should be 0."""
    return (1.0 - causal(x).to(x.dtype)) * float("-inf")


def opposite_of_zeros(x: Tensor) -> Tensor:
    """Which hides all."""
    return (1.0 - zeros(x)) * MINIMUM


def opposite_times_a_small_number(x: Tensor) -> Tensor:
    return (1.0 - causal(x).to(x.dtype)) * -100.0


def twice_the_opposite(x: Tensor) -> Tensor:
    return (2.0 - causal(x).to(x.dtype)) * MINIMUM


def positions_times_the_smallest(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1]).expand(x.shape[1], -1) * MINIMUM


def positions_that_begin_again(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1]).repeat(2)[: x.shape[1] + 1]
    return at[None, 1:] <= at[1:, None]


def nothing_of_zeros(x: Tensor) -> Tensor:
    return zeros(x).bool()


def triangle_of_one_column(x: Tensor) -> Tensor:
    """Which hides nothing."""
    n = x.shape[1]
    return torch.full((1, 1, n, 1), float("-inf")).triu(1).contiguous().expand(1, 1, n, n)


def truths_as_numbers(x: Tensor) -> Tensor:
    """Which add 0 or 1, and hide nothing."""
    return causal(x).to(x.dtype)


def truths_as_larger_numbers(x: Tensor) -> Tensor:
    return causal(x).to(torch.float64).to(x.dtype) * 5.0


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("mask", [
    causal, causal_of_narrow_integers, causal_of_one_packed_sequence, strictly_not_later, added, filled,
    scaled_with_the_scores, filled_triangle, lower_triangle, all_but_the_upper_triangle, beside_zeros, twice,
    where_ones_are_left, where_ones_are_cut_off, truths_of_ones, truths_written_as_numbers, filled_of_its_kind,
    opposite_times_the_smallest, opposite_of_whole_numbers, causal_of_repeated_positions, triangle_for_every_head,
    filled_for_every_head, triangle_viewed_for_every_head, triangle_cut_to_the_length, sum_for_every_head,
])  # fmt: skip
def test_causal_masks_are_proved_for_every_size(mask: Mask, dynamic: bool) -> None:
    assert proof(mask, dynamic) == "causal"


@pytest.mark.parametrize("mask", [everything, zeros, opposite_of_ones, everything_of_ones])
def test_a_mask_that_is_always_true_is_proved_to_hide_nothing(mask: Mask) -> None:
    assert proof(mask, True) == proof(mask, False) == "all"


@pytest.mark.parametrize("mask", [
    before_the_query, one_later, window, wrong_way_round, by_batch, every_second, of_two_sequences, from_data,
    from_a_shifted_slice, a_little_added, written_into, written_into_a_copy, scaled_to_a_bias, turned_round,
    scaled_in_place, one_diagonal_more, upper_triangle, filled_from_the_diagonal_on, triangle_of_small_numbers,
    triangle_without_a_row, triangle_of_a_written_diagonal, filled_where_numbers_were_written, from_truths,
    from_truths_added, from_differences_of_bytes, from_bytes, bytes_below_zero, twice_true,
    from_truths_of_a_comparison, all_but_a_window, triangle_of_one_row, triangle_of_one_column,
    truths_as_numbers, truths_as_larger_numbers, triangle_of_one_row_beside_zeros, beside_a_number, taken_away,
    taken_away_by_a_factor, beside_zeros_that_were_written, zeros_that_were_written, ones_of_the_wrong_half,
    triangle_of_ones, triangle_of_wrapped_ones, triangle_of_ones_that_were_written, ones_as_positions,
    opposite_times_infinity, opposite_of_zeros, opposite_times_a_small_number, twice_the_opposite,
    positions_times_the_smallest, positions_that_begin_again, nothing_of_zeros, sum_of_triangles_of_one_row,
    one_row_of_a_triangle, triangle_that_begins_later, triangle_of_a_view_that_was_written,
    triangle_with_its_rows_moved,
])  # fmt: skip
def test_any_other_mask_is_proved_to_be_nothing(mask: Mask) -> None:
    assert proof(mask, True) is None


@pytest.mark.parametrize("mask", [from_truths_of_a_comparison, all_but_a_window])
def test_attention_under_a_mask_without_a_proof_is_the_models(mask: Mask) -> None:
    def run(x: Tensor) -> Tensor:
        k = x[:, None]
        return F.scaled_dot_product_attention(k, k, k, attn_mask=mask(x))

    fast = compiled(run, dynamic=True)
    for length in (12, 7):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(fast(x), run(x))


@pytest.mark.parametrize("mask", [
    zeros, beside_zeros, twice, where_ones_are_left, where_ones_are_cut_off, truths_of_ones, truths_written_as_numbers,
    filled_of_its_kind, opposite_times_the_smallest, opposite_of_whole_numbers, opposite_of_ones,
    triangle_for_every_head, filled_for_every_head, triangle_viewed_for_every_head, triangle_cut_to_the_length,
    sum_for_every_head,
])  # fmt: skip
def test_attention_under_a_proved_mask_is_the_models_at_every_length(mask: Mask) -> None:
    def run(x: Tensor) -> Tensor:
        k = x[:, None]
        return F.scaled_dot_product_attention(k, k, k, attn_mask=mask(x))

    fast = compiled(run, dynamic=True)
    for recompiles, length in ((False, 12), (True, 7), (True, 30)):
        x = torch.randn(2, length, 8)
        with torch._dynamo.config.patch(error_on_recompile=recompiles):
            torch.testing.assert_close(fast(x), run(x))
