"""Attention with a bias that learns: PyTorch's own attention, and the gradient of the bias beside the others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_compile.ops.biased_attention import (
    BIASED_ATTENTION,
    BIASED_ATTENTION_BACKWARD,
    BIASED_ATTENTION_FORWARD,
    SUM_OF_SHARED,
    aligned,
)
from te_compile.ops.dropout_bits import unpacked
from te_compile.ops.masked_attention import bits_of_tiles
from tests.compiling import relative_error

BATCH = 2
OWN = [(1, 1), (1, 0), (0, 1), (0, 0)]
"""Has the bias a matrix for each row of the batch, and for each head?"""


def drawn(heads: int, shared: int, queries: int, keys: int, own: tuple[int, int] = (0, 1)) -> list[Tensor]:
    """q, k, v and a bias."""
    sizes = ((heads, queries), (shared, keys), (shared, keys))
    operands = [torch.randn(BATCH, count, length, 16, requires_grad=True) for count, length in sizes]
    of_bias = (BATCH if own[0] else 1, heads if own[1] else 1, queries, keys)
    return [*operands, torch.randn(of_bias, requires_grad=True)]


def assert_gradients_match(one: Tensor, other: Tensor, inputs: list[Tensor], bound: float = 1e-4) -> None:
    """Of two results, in aggregate and column by column."""
    grad = torch.randn_like(one)
    for got, wanted in zip(*(torch.autograd.grad(y, inputs, grad) for y in (one, other)), strict=True):
        assert got.shape == wanted.shape
        assert relative_error(got, wanted) < bound
        columns = (got - wanted).flatten(0, -2).norm(dim=0) / wanted.flatten(0, -2).norm(dim=0)
        assert columns.max() < 10 * bound


@pytest.mark.parametrize("own", OWN, ids=["own", "own-for-rows", "own-for-heads", "shared"])
@pytest.mark.parametrize(("heads", "shared"), [(2, 2), (4, 2)])
@pytest.mark.parametrize(("queries", "keys"), [(70, 70), (130, 43), (8, 200)])
def test_it_is_pytorchs(own: tuple[int, int], heads: int, shared: int, queries: int, keys: int) -> None:
    q, k, v, bias = drawn(heads, shared, queries, keys, own)
    out = BIASED_ATTENTION(q, k, v, bias, 0.0, 0.3)
    everybody = [x.repeat_interleave(heads // shared, 1) for x in (k, v)]
    wanted = F.scaled_dot_product_attention(q, *everybody, attn_mask=bias, scale=0.3)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    assert_gradients_match(out, wanted, [q, k, v, bias])


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.bfloat16).min], ids=["infinity", "lowest"])
def test_a_bias_that_hides_keys(hidden: float) -> None:
    q, k, v, bias = drawn(2, 2, 70, 90, (1, 1))
    shown = torch.rand(BATCH, 1, 70, 90) < 0.3
    shown[..., 5] = True
    added = bias.detach().where(shown, hidden).requires_grad_()
    out = BIASED_ATTENTION(q, k, v, added, 0.0, 0.25)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=0.25)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    assert_gradients_match(out, wanted, [q, k, v, added])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "of_heads"), [(1, 1), (1, 4), (BATCH, 1)])
def test_the_part_of_a_bias_that_learns_has_the_gradient(rows: int, of_heads: int, dtype: torch.dtype) -> None:
    q, k, v, _ = drawn(4, 4, 70, 90)
    learned = torch.randn(rows, of_heads, 70, 90, requires_grad=True, dtype=dtype)
    shown = torch.rand(BATCH, 1, 70, 90) < 0.5
    shown[..., 5] = True
    bias = torch.where(shown, learned.float(), torch.finfo(torch.float32).min) + torch.randn(BATCH, 4, 70, 1)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.25)
    out = BIASED_ATTENTION(q, k, v, bias.detach(), 0.0, 0.25, learned)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    assert torch.autograd.grad(out.sum(), learned, retain_graph=True)[0].dtype == dtype
    assert_gradients_match(out, wanted, [q, k, v, learned])


def test_a_query_that_sees_nothing_has_nothing() -> None:
    q, k, v, bias = (x.detach() for x in drawn(2, 2, 72, 72, (1, 1)))
    bias[:, :, 3], bias[:, :, 4] = -torch.inf, torch.finfo(torch.bfloat16).min
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    out, logsumexp = BIASED_ATTENTION_FORWARD(*rows, bias, None, 0.0, 0.25)
    assert not out[:, 3].any() and bool((logsumexp[:, :, 3:5] == -torch.inf).all())
    torch.testing.assert_close(out[:, 4], rows[2].mean(1))  # it sees all keys alike
    given = (*rows, bias, out, logsumexp, None, 0.0, 0.25, True)
    made = BIASED_ATTENTION_BACKWARD(torch.randn_like(out), *given)
    assert not made[0][:, 3:5].any() and not made[3][..., 3:5].any()
    assert all(bool(each.isfinite().all()) for each in made)


def test_a_dropout_keeps_what_its_bits_say() -> None:
    q, k, v, bias = drawn(2, 2, 70, 90)
    probability = 0.3
    torch.manual_seed(3)
    out = BIASED_ATTENTION(q, k, v, bias, probability, 0.25)
    torch.manual_seed(3)
    bits = bits_of_tiles(q.transpose(1, 2), k.transpose(1, 2), probability)
    scores = q @ k.mT * 0.25 + bias
    kept = unpacked(bits, 90)[:, :70].view(scores.shape) / (1 - probability)
    wanted = scores.softmax(3) * kept @ v
    torch.testing.assert_close(out, wanted, rtol=5e-3, atol=1e-3)  # 0.3 is rounded to some binary places
    assert_gradients_match(out, wanted, [q, k, v, bias], 5e-3)


def test_only_gradients_that_are_wanted_come() -> None:
    q, k, v, bias = drawn(2, 2, 40, 40)
    BIASED_ATTENTION(q, k.detach(), v, bias.detach(), 0.0, 0.25).sum().backward()
    assert q.grad is not None and v.grad is not None and k.grad is None and bias.grad is None
    BIASED_ATTENTION(q.detach(), k.detach(), v.detach(), bias, 0.0, 0.25).square().sum().backward()
    assert bias.grad is not None and bool(bias.grad.any())


@pytest.mark.parametrize("wants_ds", [True, False])
def test_fake_results_have_the_shapes_of_real_ones(wants_ds: bool) -> None:
    q, k, v, bias = (x.detach() for x in drawn(4, 2, 30, 50))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    bias = F.pad(bias, (0, aligned(50) - 50))
    real = BIASED_ATTENTION_FORWARD(q, k, v, bias, None, 0.0, 0.25)
    fake = BIASED_ATTENTION_FORWARD(*(x.to("meta") for x in (q, k, v, bias)), None, 0.0, 0.25)
    made = BIASED_ATTENTION_BACKWARD(q, q, k, v, bias, *real, None, 0.0, 0.25, wants_ds)
    operands = (x.to("meta") for x in (q, q, k, v, bias, *real))
    unreal = BIASED_ATTENTION_BACKWARD(*operands, None, 0.0, 0.25, wants_ds)
    if wants_ds:  # the rows of a batch that share a bias
        made, unreal = (*made, SUM_OF_SHARED(made[3], [0])), (*unreal, SUM_OF_SHARED(unreal[3], [0]))
        assert made[4].shape == (1, *made[3].shape[1:]) and torch.equal(made[4], made[3].sum(0, keepdim=True))
    for one, other in zip((*real, *made), (*fake, *unreal), strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
