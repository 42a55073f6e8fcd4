"""What is done to scores is told to a bias, to the queries and to one scale, and computes what it did."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_compile.passes.text import ops_text
from tests.spelled_out import (
    BATCH,
    HEADS,
    LENGTH,
    MINIMUM,
    WIDTH,
    assert_recognised,
    assert_stays,
    causal_mask,
    heads,
    hidden,
    masks_that_hide_rows,
    operands,
    padding_mask,
    rewritten,
    shown_rows,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_an_added_mask_stays_added() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.softmax(q @ k.mT * 0.5 + mask, dim=-1) @ v

    for mask in (causal_mask(), padding_mask(), causal_mask().minimum(padding_mask(hide_a_row=False))):
        assert_recognised(run, *operands(), mask)


def test_rows_hidden_entirely_agree_and_send_the_values_the_same_gradient() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.softmax(q @ k.mT * 0.5 + mask, dim=-1) @ v

    for mask in masks_that_hide_rows():
        q, k, v = operands()
        assert_recognised(run, q, k, v, mask, leaves=[v])


@pytest.mark.parametrize("number", [-1e9, MINIMUM])
def test_a_row_that_is_hidden_by_an_assignment_agrees(number: float) -> None:
    def by_assignment(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.zeros(LENGTH, LENGTH)
        mask[0] = number
        mask[2, 3:] = number
        return F.softmax(q @ k.mT * 0.5 + mask, dim=-1) @ v

    def by_a_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.zeros(LENGTH, LENGTH)
        mask[0].fill_(number)
        return F.softmax(q @ k.mT * 0.5 + mask, dim=-1) @ v

    for run in (by_assignment, by_a_view):
        q, k, v = operands()
        assert_recognised(run, q, k, v, leaves=[v])


def test_a_row_that_is_hidden_by_infinity_is_no_number_as_in_the_model() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.zeros(LENGTH, LENGTH)
        mask[0] = -math.inf
        return F.softmax(q @ k.mT * 0.5 + mask, dim=-1) @ v

    inputs = operands()
    _, gm, examples = rewritten(run, *inputs)
    wanted = run(*inputs)
    assert wanted[:, :, 0].isnan().all()
    torch.testing.assert_close(gm(*examples)[0], wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_rows_hidden_entirely_disturb_no_gradient_of_the_others() -> None:
    for mask in masks_that_hide_rows():

        def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, shown: Tensor) -> Tensor:
            return (F.softmax(q @ k.mT * 0.5 + mask, dim=-1) @ v) * shown

        assert_recognised(run, *operands(), mask, shown_rows(mask))


def test_masks_added_in_place_and_twice_and_scaled_afterwards() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, other: Tensor) -> Tensor:
        scores = q @ k.mT
        scores += bias
        return F.softmax((other + scores - bias * 0.5) / 2.0, dim=-1) @ v

    bias = torch.randn(1, HEADS, LENGTH, LENGTH, requires_grad=True)
    assert_recognised(run, *operands(), bias, torch.randn(LENGTH, requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_that_looks_at_the_scores_and_overwrites_them_in_a_statement(dtype: torch.dtype) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand_as(scores)
        scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
        return F.softmax(scores.float(), dim=-1).type_as(scores) @ v

    assert_recognised(run, *operands(dtype), tolerance=1e-5 if dtype == torch.float32 else 2e-2)


def test_alibi_through_baddbmm() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, alibi: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (x.reshape(-1, LENGTH, WIDTH) for x in (q, k, v))
        scores = alibi.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=1.0, alpha=0.25)
        scores = scores.view(BATCH, HEADS, LENGTH, -1) + mask
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).view(BATCH * HEADS, LENGTH, -1)
        return torch.bmm(weights, v).view(BATCH, HEADS, LENGTH, WIDTH).permute(0, 2, 1, 3).reshape(BATCH, LENGTH, -1)

    alibi = torch.randn(BATCH * HEADS, 1, LENGTH, requires_grad=True)
    gm = assert_recognised(run, *operands(), alibi, causal_mask().maximum(padding_mask()))
    assert ".reshape(l_q_" not in ops_text(gm.graph)


FILLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_fill": lambda scores, hidden: scores.masked_fill(hidden, MINIMUM),
    "masked_fill by -1e9": lambda scores, hidden: scores.masked_fill(hidden, -1e9),
    "masked_fill in place": lambda scores, hidden: scores.masked_fill_(hidden, MINIMUM),
    "where": lambda scores, hidden: torch.where(~hidden, scores, MINIMUM),
    "where with a tensor": lambda scores, hidden: torch.where(hidden, torch.full([], MINIMUM), scores),
}


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("fill", FILLS)
def test_overwritten_scores_pass_no_gradient_on_even_in_rows_hidden_entirely(fill: str, rows: bool) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, bias: Tensor) -> Tensor:
        return F.softmax(FILLS[fill](q @ k.mT * 0.3 + bias, hidden), dim=-1) @ v

    assert_recognised(run, *operands(), hidden(rows), torch.randn(HEADS, 1, LENGTH, requires_grad=True))


def test_overwriting_with_minus_infinity_agrees_wherever_the_model_computes_a_number() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return F.softmax((q @ k.mT).masked_fill(hidden, -math.inf), dim=-1) @ v

    assert_recognised(run, *operands(), hidden(False))


def test_two_masks_of_which_one_overwrites_agree() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, mask: Tensor) -> Tensor:
        return F.softmax(torch.where(hidden, MINIMUM, q @ k.mT) + mask, dim=-1) @ v

    assert_recognised(run, *operands(), hidden(False), torch.zeros(LENGTH))
    q, k, v = operands()
    assert_recognised(run, q, k, v, hidden(True), padding_mask(), leaves=[v])


def test_a_constant_mask_that_hides_no_row_leaves_the_queries_alone() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        return F.softmax((q @ k.mT).masked_fill(hidden, MINIMUM), dim=-1) @ v

    gm = assert_recognised(run, *operands())
    assert ops_text(gm.graph).count(".masked_fill(") == 1


@pytest.mark.parametrize(("queries", "keys"), [(6, 0), (0, 0), (0, 5)])
def test_where_there_are_no_keys_a_constant_mask_hides_none(queries: int, keys: int) -> None:
    """As of a memory that is empty."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        return F.softmax((q @ k.mT).masked_fill(hidden, -1e9), dim=-1) @ v

    q, k, v = (heads(length=length) for length in (queries, keys, keys))
    _, gm, given = rewritten(run, q, k, v)
    got = gm(*given)[0]
    assert got.shape == q.shape and torch.equal(got, run(q, k, v))


def test_a_factor_of_scores_of_three_dimensions_is_split_as_they_are() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by = torch.linspace(0.1, 1.0, BATCH * HEADS)[:, None, None]
        scores = (q @ k.mT).view(BATCH * HEADS, LENGTH, LENGTH) * by
        return F.softmax(scores.view(BATCH, HEADS, LENGTH, LENGTH), dim=-1) @ v

    assert_recognised(run, *operands())


def test_narrower_masks_are_widened_and_wider_ones_narrowed_only_where_they_are_masks() -> None:
    def by_mask(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        mask = torch.where(hidden, MINIMUM, torch.zeros(()))
        return F.softmax(q @ k.mT + mask, dim=-1).to(v.dtype) @ v

    def by_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.softmax(q @ k.mT + bias, dim=-1).to(v.dtype) @ v

    narrow = operands(torch.bfloat16)
    assert_recognised(by_mask, *narrow, hidden(False), tolerance=2e-2)
    assert_recognised(by_mask, *narrow, hidden(True), tolerance=2e-2, leaves=[narrow[2]])
    assert_recognised(by_bias, *operands(), torch.randn(LENGTH, LENGTH).bfloat16())


def test_a_mask_added_in_float16_stays_for_it_does_not_swallow_scores() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.softmax(q @ k.mT + mask, dim=-1) @ v

    assert_stays("float16", run, *operands(torch.float16), causal_mask().clamp(min=-65504.0).half())


def test_numbers_that_are_written_into_a_mask_are_no_longer_zero_or_hidden() -> None:
    """So that they may not be rounded with it."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.where(torch.ones(LENGTH, LENGTH).tril() > 0, torch.zeros(()), MINIMUM)
        mask[1:] = 100 + torch.linspace(0, 3, LENGTH)
        return F.softmax(q @ k.mT + mask, dim=-1).to(v.dtype) @ v

    assert_recognised(run, *operands(torch.bfloat16), tolerance=2e-2)
