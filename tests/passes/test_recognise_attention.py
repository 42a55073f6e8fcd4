"""Attention that is spelled out becomes one call, exactly; what is any other computation stays as it was."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_compile.passes.recognise_attention import STAYS
from te_compile.passes.text import ops_text
from tests.compiling import compiled
from tests.spelled_out import (
    BATCH,
    HEADS,
    LENGTH,
    MINIMUM,
    WIDTH,
    Attention,
    assert_recognised,
    assert_stays,
    causal_mask,
    heads,
    hidden,
    masks_that_hide_rows,
    operands,
    padding_mask,
    results,
    rewritten,
    shown_rows,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# --- forms ---------------------------------------------------------------------------------------------------------


def scaled_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.3, dim=-1, dtype=torch.float32).to(q.dtype), v)


def scaled_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q / 3.0) @ (k * 0.7).mT).softmax(-1) @ v


def divided_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.swapaxes(-1, -2)
    scores /= math.sqrt(WIDTH)
    return torch.softmax(scores, -1) @ v


def divided_by_a_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT / torch.sqrt(torch.tensor(8.0)), dim=-1) @ v


def dropped_with_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.dropout(F.softmax(q @ k.mT, dim=-1), p=0.3, training=False)
    return (weights @ v).transpose(1, 2).reshape(BATCH, LENGTH, -1)


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(0.5).softmax(dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(BATCH, LENGTH, -1)


def by_einsum_keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhkd,bhqd->bhqk", k, q).softmax(dim=-1)
    return torch.einsum("bhkd,bhqk->bhqd", v, weights)


def by_einsum_to_positions_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Its result lies in the order of the product, [batch, head, position], which a view may rely on."""
    weights = torch.einsum("bqhd,bkhd->bhqk", *(x.transpose(1, 2) for x in (q, k))).mul(0.5).softmax(dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.transpose(1, 2)).transpose(1, 2).view(-1, LENGTH, WIDTH)


def by_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.reshape(-1, LENGTH, WIDTH) for x in (q, k, v))
    return torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1), v).view(BATCH, HEADS, LENGTH, WIDTH)


def shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By each row's largest, as softmax does itself."""
    scores = q @ k.mT * 0.5
    return F.softmax(scores - scores.amax(dim=-1, keepdim=True), dim=-1) @ v


def shifted_apart_from_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.5
    return F.softmax(scores - torch.max(scores, -1, keepdim=True)[0].detach(), dim=-1) @ v


def by_bmm_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) + 0 for x in (q, k, v))
    return torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.2, dim=-1), v).view(-1, WIDTH)


def viewed_as_contiguous(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (F.softmax(q @ k.mT, dim=-1) @ v).view(BATCH * HEADS, -1).cos()


def with_a_part_switched_off(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax((q @ k.mT + 0) * 0.5 - 0.0, dim=-1) @ v


@pytest.mark.parametrize("form", [
    scaled_after, scaled_before, divided_in_place, divided_by_a_tensor, shifted, shifted_apart_from_gradients,
    dropped_with_nothing, by_einsum, by_einsum_keys_first, by_einsum_to_positions_first, by_bmm, by_bmm_alone,
    viewed_as_contiguous, with_a_part_switched_off,
])  # fmt: skip
def test_every_form_becomes_one_call(form: Attention) -> None:
    assert_recognised(form, *operands())


@pytest.mark.parametrize("form", [scaled_after, scaled_before, by_bmm])
def test_bfloat16_stays_bfloat16_and_close(form: Attention) -> None:
    assert_recognised(form, *operands(torch.bfloat16), tolerance=2e-2)


def test_the_text_of_a_rewritten_attention() -> None:
    gm = assert_recognised(scaled_after, *operands())
    assert ops_text(gm.graph) == (
        "scaled_dot_product_attention = scaled_dot_product_attention(l_q_, l_k_, l_v_, attn_mask=None, dropout_p=0.0, "
        "scale=0.3)\ncontiguous = .contiguous(scaled_dot_product_attention)\nreturn (contiguous,)"
    )


def test_a_result_in_another_order_is_not_taken_for_one_in_order_where_heads_are_as_many_as_positions() -> None:
    def reshaped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(0.3).softmax(dim=-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(BATCH, HEADS, HEADS, WIDTH).cos()

    def viewed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(0.3).softmax(dim=-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v).view(BATCH, HEADS, HEADS, WIDTH).flatten(2)

    for form in (reshaped, viewed):
        assert_recognised(form, *(heads(length=HEADS) for _ in "qkv"))


def test_scores_computed_in_float32_from_bfloat16_are_those_of_the_narrow_operands() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.to(torch.float32) @ k.to(torch.float32).transpose(-1, -2)
        return F.softmax(scores, dim=-1).to(v.dtype) @ v

    gm = assert_recognised(run, *operands(torch.bfloat16), tolerance=2e-2)
    assert ".to(" not in ops_text(gm.graph)


def test_a_scale_that_is_learned_gets_its_gradient() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return F.softmax((F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT) * scale.exp(), dim=-1) @ v

    # Its gradient sums what cancels over all queries and keys: in 400 draws two ways to say the same were 1.2e-5 apart.
    assert_recognised(run, *operands(), torch.randn(HEADS, 1, 1, requires_grad=True), tolerance=1e-4)


@pytest.mark.parametrize("step", [operator.mul, operator.truediv], ids=["multiplied", "divided"])
@pytest.mark.parametrize("write", [
    lambda factor: factor[1:].mul_(3.0), lambda factor: factor.ravel()[0].add_(1.0), lambda factor: factor.data.add_(1),
], ids=["rows", "ravel", "data"])  # fmt: skip
def test_a_factor_that_a_view_was_written_to_counts_as_it_is_then(
    write: Callable[[Tensor], Tensor], step: Callable[[Tensor, Tensor], Tensor]
) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        factor = torch.ones(HEADS, 1, 1)
        write(factor)
        return F.softmax(step(q @ k.mT * 0.3, factor), dim=-1) @ v

    assert_recognised(run, *operands(), tolerance=1e-4)  # a factor that was not seen is off by half


@pytest.mark.parametrize("copied", [Tensor.clone, lambda ones: ones.repeat(1, 1, 1)[0]], ids=["clone", "repeat"])
def test_a_factor_that_a_copy_was_written_to_counts_as_it_is_then(copied: Callable[[Tensor], Tensor]) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        factor = copied(torch.ones(HEADS, 1, 1))
        factor[1:] = 3.0
        return F.softmax(q @ k.mT * 0.3 * factor, dim=-1) @ v

    assert_recognised(run, *operands(), tolerance=1e-4)


@pytest.mark.parametrize("divisor", [
    lambda: torch.full((), 4.7, dtype=torch.int64), lambda: torch.full((), 4.7).to(torch.int64),
    lambda: torch.full((), 4.9, dtype=torch.bfloat16),
], ids=["whole", "made whole", "bfloat16"])  # fmt: skip
def test_a_number_counts_as_its_dtype_rounds_it(divisor: Callable[[], Tensor]) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.mT / divisor(), dim=-1) @ v

    assert_recognised(run, *operands())


def test_a_number_that_a_copy_was_written_to_hides_no_score() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
        number = torch.full((1,), -1e9).repeat(LENGTH)
        number[2] = 5.0
        return F.softmax(torch.where(shown, q @ k.mT, number), dim=-1) @ v

    assert_stays("go through where", run, *operands(), causal_mask() == 0)


def test_keys_of_one_head_are_broadcast() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.mT, dim=-1) @ v

    assert_recognised(run, heads(), heads(1, 7), heads(1, 7, 5))


# --- masks and biases ----------------------------------------------------------------------------------------------


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


# --- dropout -------------------------------------------------------------------------------------------------------


def test_dropout_has_the_same_mean() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(F.softmax(q @ k.mT, dim=-1), 0.25, True) @ v

    inputs = operands()
    count, gm, examples = rewritten(run, *inputs)
    assert count == 1
    (new,) = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    assert new.kwargs["dropout_p"] == 0.25
    q, k, v = (x.detach() for x in inputs)
    draws = torch.stack([gm(*examples)[0].detach() for _ in range(600)])
    assert draws.std(0).mean() > 0.01
    torch.testing.assert_close(draws.mean(0), F.softmax(q @ k.mT, dim=-1) @ v, rtol=0.2, atol=0.15)


# --- what stays ----------------------------------------------------------------------------------------------------


def _softcapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(torch.tanh(q @ k.mT / 50.0) * 50.0, dim=-1) @ v


def _with_two_zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.cat([q @ k.mT, torch.zeros(BATCH, HEADS, LENGTH, 2)], dim=-1)
    return F.softmax(scores, dim=-1)[..., :-2] @ v


def _weights_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = F.softmax(q @ k.mT, dim=-1)
    return weights @ v, weights


def _scores_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT
    return F.softmax(scores, dim=-1) @ v, scores


def _head_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT, dim=-1) * torch.rand(HEADS, 1, 1) @ v


def _without_gradients_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        scores = q @ k.mT
    return F.softmax(scores, dim=-1) @ v


def _values_written_into_meanwhile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = k * 1.0
    scores = q @ k.mT
    k.view(-1).mul_(2.0)
    return F.softmax(scores, dim=-1) @ (v + k)


def _keys_written_into_by_position(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = k * 1.0
    scores = q @ k.mT
    F.hardtanh(k, -0.1, 0.1, True)
    return F.softmax(scores, dim=-1) @ (v + k)


def _multiplied_by_a_negative_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT * -0.5, dim=-1) @ v


def _of_negative_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q * 0.5 @ (k / -4.0).mT, dim=-1) @ v


def _negative_by_baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.baddbmm(torch.ones(BATCH * HEADS, 1, LENGTH).cumsum(-1), q, k.mT, alpha=-0.25)
    return torch.bmm(F.softmax(scores, dim=-1), v)


def _multiplied_by_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT * 0.0, dim=-1) @ v


def _shifted_by_the_largest_of_a_column(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return F.softmax(scores - scores.amax(dim=-2, keepdim=True), dim=-1) @ v


def _shifted_by_what_is_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT
    largest = scores.amax(dim=-1, keepdim=True)
    return F.softmax(scores - largest, dim=-1) @ v, largest


def _shifted_by_the_largest_of_another(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores, others = q @ k.mT, k @ q.mT
    return F.softmax(scores - others.cos().amax(dim=-2, keepdim=True), dim=-1) @ v


def _result_written_into(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    result = F.softmax(q @ k.mT, dim=-1) @ v
    result.flatten(1, 2).mul_(0.5)
    return result


def _narrowed_by_its_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In float64 the number hides a row and leaves its softmax uniform; in float32 it is infinite."""
    q, k, v = (x.double() for x in (q, k, v))
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float64)
    mask[1] = torch.finfo(torch.float64).min
    return F.softmax(q @ k.mT + mask, dim=-1, dtype=torch.float32).double() @ v


def _to_a_shorter_range_by_its_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.bfloat16() for x in (q, k, v))
    return F.softmax(q @ k.mT, dim=-1, dtype=torch.float16).bfloat16() @ v


@pytest.mark.parametrize(("reason", "run"), [
    ("narrows torch.float64 to torch.float32", _narrowed_by_its_softmax),
    ("narrows torch.bfloat16 to torch.float16", _to_a_shorter_range_by_its_softmax),
    ("tanh", _softcapped),
    ("weights are read elsewhere", _weights_returned),
    ("scores are read elsewhere", _scores_returned),
    ("weights go through mul", _head_mask),
    ("gradients or autocast are switched", _without_gradients_inside),
    ("changed in place", _values_written_into_meanwhile),
    ("changed in place", _keys_written_into_by_position),
    ("multiplied by -0.5", _multiplied_by_a_negative_number),
    ("multiplied by -0.125", _of_negative_keys),
    ("multiplied by -0.25", _negative_by_baddbmm),
    ("multiplied by 0", _multiplied_by_nothing),
    ("its result is changed in place", _result_written_into),
    ("scores are read elsewhere", _shifted_by_the_largest_of_a_column),
    ("scores are read elsewhere", _shifted_by_what_is_returned),
])  # fmt: skip
def test_what_is_more_than_attention_stays(reason: str, run: Attention) -> None:
    assert_stays(reason, run, *operands())


def test_a_softmax_of_a_softmax_stays_and_both_say_why() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(F.softmax(q @ k.mT, dim=-1), dim=-1) @ v

    count, gm, _ = rewritten(run, *operands())
    first, second = (node.meta[STAYS] for node in gm.graph.nodes if STAYS in node.meta)
    assert count == 0 and "weights go through softmax" in first and "scores go through softmax" in second


def test_a_rewrite_that_is_taken_back_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """Values have a batch that queries and keys have not."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q[:1] @ k[:1].mT, dim=-1) @ v

    torch_logger = logging.getLogger("torch")
    torch_logger.addHandler(caplog.handler)
    try:
        assert_stays("PyTorch refuses it", run, *operands())
    finally:
        torch_logger.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_what_is_ignored_and_has_a_gradient_stays() -> None:
    """Of zeros, where a fused call has none."""

    def run(q: Tensor, k: Tensor, v: Tensor, ignored: Tensor) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        return torch.bmm(F.softmax(torch.baddbmm(ignored, q, k.mT, beta=0, alpha=0.25), dim=-1), v)

    ignored = torch.randn(BATCH * HEADS, LENGTH, LENGTH)
    assert rewritten(run, *operands(), ignored)[0] == 1
    assert rewritten(run, *operands(), ignored.requires_grad_())[0] == 0


def test_scores_of_integers_compute_what_they_did() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.mT, dim=-1, dtype=torch.float32) @ v

    q, k = (torch.randint(-2, 3, (BATCH, HEADS, LENGTH, 16)) for _ in range(2))
    v = torch.randn(BATCH, HEADS, LENGTH, 16)
    torch.testing.assert_close(compiled(run)(q, k, v), run(q, k, v))


def test_what_another_product_gives_is_a_bias() -> None:
    assert_recognised(_shifted_by_the_largest_of_another, *operands())


def test_a_softmax_over_another_dimension_or_of_something_else_is_none_of_our_business() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.mT, dim=-2) @ v + F.softmax(q, dim=-1)

    for other in (run, _with_two_zeros):
        count, gm, _ = rewritten(other, *operands())
        assert count == 0 and not any(STAYS in node.meta for node in gm.graph.nodes)


def test_a_sum_over_what_one_operand_broadcasts_is_no_product_of_matrices() -> None:
    """einsum repeats a letter's only element, as matmul does not."""

    def of_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bhqk,bhkd->bhqd", F.softmax(q @ k.mT, dim=-1), v[:, :, :1])

    def of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k[..., :1]), dim=-1) @ v

    for run in (of_values, of_keys):
        inputs = operands()
        count, gm, examples = rewritten(run, *inputs)
        assert count == 0
        for got, wanted in zip(results(gm, examples, inputs), results(run, inputs, inputs), strict=True):
            torch.testing.assert_close(got, wanted)


def test_autocast_inside_the_graph_is_a_border() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.softmax(q @ k.mT, dim=-1) @ v

    assert_stays("several dtypes", run, *operands())


def test_under_autocast_around_the_call_the_result_keeps_its_dtype() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.mT * 0.3, dim=-1) @ v

    with torch.autocast("cpu", torch.bfloat16):
        assert_recognised(run, *operands(), tolerance=5e-2)


def test_a_mask_added_in_float16_stays_for_it_does_not_swallow_scores() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.softmax(q @ k.mT + mask, dim=-1) @ v

    assert_stays("float16", run, *operands(torch.float16), causal_mask().clamp(min=-65504.0).half())


def test_with_symbolic_sizes_attention_is_recognised_too() -> None:
    inputs = operands()
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 2)
    count, gm, examples = rewritten(scaled_after, *inputs)
    assert count == 1
    longer = [heads(length=9) for _ in inputs]
    replaced = {id(old): new for old, new in zip(inputs, longer, strict=True)} | {LENGTH: 9, BATCH: BATCH}
    arguments = [replaced[id(x) if isinstance(x, Tensor) else int(x)] for x in examples]
    wanted = scaled_after(*longer)
    torch.testing.assert_close(gm(*arguments)[0], wanted, rtol=1e-5, atol=1e-5)


def test_numbers_that_are_written_into_a_mask_are_no_longer_zero_or_hidden() -> None:
    """So that they may not be rounded with it."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.where(torch.ones(LENGTH, LENGTH).tril() > 0, torch.zeros(()), MINIMUM)
        mask[1:] = 100 + torch.linspace(0, 3, LENGTH)
        return F.softmax(q @ k.mT + mask, dim=-1).to(v.dtype) @ v

    assert_recognised(run, *operands(torch.bfloat16), tolerance=2e-2)
