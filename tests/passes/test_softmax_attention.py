"""What is another computation than attention stays as it was, and says why."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_compile.passes.recognise_attention import STAYS
from tests.spelled_out import (
    BATCH,
    HEADS,
    LENGTH,
    Attention,
    assert_recognised,
    assert_stays,
    operands,
    results,
    rewritten,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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


def _of_queries_without_a_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(torch.matmul(q[0, 0], k.mT) * 0.25, dim=-1) @ v


def _a_difference_of_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.softmax(q @ k.mT, dim=-1)
    return (weights[:, ::2] - 0.5 * weights[:, 1::2]) @ v[:, ::2]


def _of_a_linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What each position makes of itself is weighed, as an outlook on its neighbours is."""
    batch, heads, length, width = q.shape
    outlook = F.linear(q.transpose(1, 2).flatten(2), torch.ones(heads * length, heads * width))
    scores = outlook.reshape(batch, length, heads, length).permute(0, 2, 1, 3) * 0.25
    return F.softmax(scores, dim=-1) @ v


def _of_a_convolution(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mixed = F.group_norm(F.conv2d(q, torch.ones(q.shape[1], q.shape[1], 1, 1)), 1, torch.ones(q.shape[1])).relu()
    scores = mixed.flatten(2).unflatten(2, (-1, v.shape[2]))
    return F.softmax(scores, dim=-1) @ v


def _weights_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT, dim=-1)


@pytest.mark.parametrize(("reason", "run"), [
    ("narrows torch.float64 to torch.float32", _narrowed_by_its_softmax),
    ("narrows torch.bfloat16 to torch.float16", _to_a_shorter_range_by_its_softmax),
    ("tanh", _softcapped),
    ("no product of queries and keys", _of_a_linear),
    ("no product of queries and keys", _of_a_convolution),
    ("queries are the same for all of the batch", _of_queries_without_a_batch),
    ("weights are read elsewhere", _weights_returned),
    ("weights are read in several places", _a_difference_of_weights),
    ("weights leave the graph", _weights_alone),
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


def test_queries_that_are_expanded_over_the_batch_are_recognised() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(torch.matmul(q[:1, :1].expand(*k.shape[:2], -1, -1), k.mT) * 0.25, dim=-1) @ v

    assert_recognised(run, *operands())


def test_a_softmax_of_a_softmax_stays_and_both_say_why() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(F.softmax(q @ k.mT, dim=-1), dim=-1) @ v

    count, gm, _ = rewritten(run, *operands())
    first, second = (node.meta[STAYS] for node in gm.graph.nodes if STAYS in node.meta)
    assert count == 0 and "weights go through softmax" in first and "scores go through softmax" in second


def test_what_another_product_gives_is_a_bias() -> None:
    assert_recognised(_shifted_by_the_largest_of_another, *operands())


def test_a_softmax_over_another_dimension_or_of_something_else_is_none_of_our_business() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.mT, dim=-2) @ v + F.softmax(q, dim=-1)

    for other in (run, _with_two_zeros):
        count, gm, _ = rewritten(other, *operands())
        assert count == 0 and not any(STAYS in node.meta for node in gm.graph.nodes)


def _allowed_by_the_largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.softmax(q @ k.mT, dim=-1)
    return weights >= weights.sort(dim=-1).values[..., 1:2]


def _allowed_by_their_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sizes, places = F.softmax(q @ k.mT, dim=-1).sort(dim=-1)
    return (sizes.cumsum_(-1) >= 0.2).int().gather(-1, places.argsort(-1)).bool()


def _allowed_by_places(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    places = F.softmax(q @ k.mT, dim=-1).topk(2, dim=-1).indices
    return torch.zeros(*q.shape[:-1], k.shape[-2], dtype=torch.bool).scatter(-1, places, True)


@pytest.mark.parametrize("allowed", [_allowed_by_the_largest, _allowed_by_their_sum, _allowed_by_places])
def test_weights_that_only_pick_what_another_attention_sees_are_no_attention(allowed: Attention) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed(q, k, v))

    count, gm, _ = rewritten(run, *operands())
    assert count == 0 and not any(STAYS in node.meta for node in gm.graph.nodes)


def test_weights_that_are_kept_or_meet_values_in_an_unusual_way_stay_and_say_why() -> None:
    def kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        memory = torch.zeros(*q.shape[:-1], k.shape[-2], dtype=q.dtype)
        memory.copy_(F.softmax(q @ k.mT, dim=-1))
        return memory @ v

    def picked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sizes, places = F.softmax(q @ k.mT, dim=-1).topk(2, dim=-1)
        return torch.zeros_like(q @ k.mT).scatter(-1, places, sizes) @ v

    assert_stays("weights go through copy_", kept, *operands())
    assert_stays("weights go through topk", picked, *operands())


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
