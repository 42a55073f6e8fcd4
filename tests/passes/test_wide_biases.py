"""Biases in float32 beside scores in 16 bits, as ALiBi is made: added where that is exact enough, else they stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compiling import relative_error
from tests.spelled_out import (
    HEADS,
    LENGTH,
    assert_recognised,
    assert_stays,
    causal_mask,
    hidden,
    masks_that_hide_rows,
    operands,
    padding_mask,
    rewritten,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def alibi() -> Tensor:
    """Slopes times positions, counted from the last of 2048 as MPT does: bfloat16 cannot tell neighbours apart."""
    slopes = 2.0 ** -torch.arange(1.0, HEADS + 1).view(HEADS, 1, 1)
    first = int(torch.randint(-2047, -1000, ()))
    return slopes * torch.arange(first, first + LENGTH)


def _with_alibi(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, hidden: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) * 0.3
    scores = scores + bias[:, max(0, bias.size(1) - LENGTH) :, max(0, bias.size(2) - LENGTH) :]
    scores = scores.masked_fill(hidden, torch.finfo(q.dtype).min)
    weights = F.softmax(scores.float(), dim=-1).to(v.dtype)
    return torch.matmul(F.dropout(weights, p=0.3, training=False), v)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alibi_in_float32_is_added_in_every_dtype(dtype: torch.dtype, rows: bool) -> None:
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2  # at -1000 float32 has steps of 6e-5
    assert_recognised(_with_alibi, *operands(dtype), alibi(), hidden(rows), tolerance=tolerance)


def test_alibi_that_the_graph_makes_is_added_without_a_mask() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slopes = 1.0 / torch.pow(2, torch.arange(1, HEADS + 1).float()).view(HEADS, 1, 1)
        positions = torch.arange(1 - 2048, 1 - 2048 + LENGTH, dtype=torch.int32)
        return F.softmax(q @ k.mT * 0.3 + positions * slopes, dim=-1).to(v.dtype) @ v

    for dtype in (torch.bfloat16, torch.float16):
        assert_recognised(run, *operands(dtype), tolerance=2e-2)


def test_a_bias_in_float32_is_no_further_from_the_exact_result_than_the_model_is() -> None:
    inputs = [*(x.detach() for x in operands(torch.bfloat16)), alibi(), hidden(False)]
    _, gm, examples = rewritten(_with_alibi, *inputs)
    exact = _with_alibi(*(x if x.dtype == torch.bool else x.double() for x in inputs))
    assert relative_error(gm(*examples)[0], exact) <= 1.5 * relative_error(_with_alibi(*inputs), exact)


def test_an_added_mask_in_float32_hides_beside_a_bias_in_float32() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        return F.softmax(q @ k.mT * 0.5 + bias + mask, dim=-1).to(v.dtype) @ v

    for mask in (causal_mask(), padding_mask(hide_a_row=False), causal_mask() / 3):
        assert_recognised(run, *operands(torch.bfloat16), alibi(), mask, tolerance=2e-2)
    for mask in masks_that_hide_rows():
        q, k, v = operands(torch.bfloat16)
        assert_recognised(run, q, k, v, alibi(), mask, tolerance=2e-2, leaves=[v])


def test_keys_of_a_shifted_bias_lie_side_by_side() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.softmax(q @ k.mT + bias.permute(2, 0, 1), dim=-1).to(v.dtype) @ v

    gm = assert_recognised(run, *operands(torch.bfloat16), torch.randn(LENGTH, LENGTH, HEADS) * 9, tolerance=2e-2)
    (new,) = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    assert new.kwargs["attn_mask"].meta["example_value"].stride(-1) == 1


def test_a_narrow_bias_that_learns_beside_a_wide_one_that_does_not_gets_its_gradient() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, fixed: Tensor, learned: Tensor) -> Tensor:
        return F.softmax(q @ k.mT + fixed - learned, dim=-1).to(v.dtype) @ v

    learned = torch.randn(HEADS, LENGTH, LENGTH).bfloat16().requires_grad_()
    assert_recognised(run, *operands(torch.bfloat16), alibi(), learned, tolerance=2e-2)


def test_a_wide_bias_stays_where_the_model_keeps_more_of_it_than_16_bits_would() -> None:
    def with_wide_scores(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.softmax(q.float() @ k.float().mT + bias, dim=-1).to(v.dtype) @ v

    def by_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.softmax(q @ k.mT + bias, dim=-1).to(v.dtype) @ v

    def by_slope(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slope: Tensor) -> Tensor:
        return F.softmax(q @ k.mT + bias * slope, dim=-1).to(v.dtype) @ v

    def by_factor(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, factor: Tensor) -> Tensor:
        return F.softmax((q @ k.mT + bias) * factor, dim=-1).to(v.dtype) @ v

    narrow, slope = operands(torch.bfloat16), torch.rand(HEADS, 1, 1, requires_grad=True)
    assert_stays("would be rounded", with_wide_scores, *narrow, alibi())
    assert_stays("bias in torch.float32 that learns", by_bias, *narrow, alibi().clone().requires_grad_())
    assert_stays("bias in torch.float32 that learns", by_slope, *narrow, alibi(), slope)
    assert_stays("factor that learns", by_factor, *narrow, alibi(), slope.detach().requires_grad_())
