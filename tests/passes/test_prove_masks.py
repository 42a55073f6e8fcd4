"""Masks built from positions are proved for all sizes; no mask is proved to be what it is not at some size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from te_compile.passes.plain_operators import plain_operators
from te_compile.passes.prove_masks import Window, proven_meaning, proven_window
from tests.capturing import captured
from tests.compiling import compiled

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Mask = Callable[[Tensor], Tensor]
MINIMUM = torch.finfo(torch.float32).min


def grid(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Indices of batch [B, 1, 1, 1], queries [1, 1, S, 1] and keys [1, 1, 1, S]."""
    batch, at = torch.arange(x.shape[0]), torch.arange(x.shape[1])
    return batch[:, None, None, None], (at + 0)[None, None, :, None], at[None, None, None, :]


def causal(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return (k <= q).expand(x.shape[0], -1, -1, -1)


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


def of_two_windows(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return torch.where(k > q - 4, 0.0, MINIMUM) + filled_triangle(x)


def filled_triangle(x: Tensor) -> Tensor:
    return torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(diagonal=1)


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


def everything(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return (q >= 0).expand(-1, -1, -1, x.shape[1]) & (k > -1)


def before_the_query(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return k < q


def one_later(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return k <= q + 1


def window(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return (k <= q) & (k > q - 4)


def wrong_way_round(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return q <= k


def by_batch(x: Tensor) -> Tensor:
    batch, q, k = grid(x)
    return (k <= q) & (k >= batch)


def every_second(x: Tensor) -> Tensor:
    _, q, k = grid(x)
    return 2 * k <= q + q


def of_two_sequences(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1]) % 4
    sequence = (torch.diff(at, prepend=at[:1] - 1) != 1).cumsum(-1)
    return (sequence[:, None] == sequence[None, :]) & causal(x)


def from_data(x: Tensor) -> Tensor:
    return causal(x) & (x[:, None, None, :, 0] < 1e9)


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


def upper_triangle(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu()


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


def bytes_below_zero(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[1], x.shape[1], dtype=torch.uint8) - 1 < 0


def twice_true(x: Tensor) -> Tensor:
    true = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    return true + true == 2


def from_truths_of_a_comparison(x: Tensor) -> Tensor:
    """Which are 0 at some places: as causal as the comparison."""
    _, q, k = grid(x)
    return (k <= q).long() + 0 > 0


def all_but_a_window(x: Tensor) -> Tensor:
    """Before it or behind it, an alternative."""
    _, q, k = grid(x)
    return ~((k <= q) & (k > q - 3))


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


def attention_mask(mask: Mask, dynamic: bool, queries: int | None = None) -> Node:
    """The mask of the one attention of a graph; ``queries``: how many of the last there are."""

    def run(x: Tensor) -> Tensor:
        k = x[:, None]
        q = k if queries is None else k[:, :, -queries:]
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask(x))

    x = torch.randn(2, 12, 8)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
    gm, _ = captured(run, x)
    plain_operators(gm.graph)  # as in the pipeline
    (attention,) = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    found = attention.kwargs["attn_mask"]
    assert isinstance(found, Node)
    return found


def proof(mask: Mask, dynamic: bool, queries: int | None = None) -> str | None:
    """What the mask is proved to mean."""
    return proven_meaning(attention_mask(mask, dynamic, queries))


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
