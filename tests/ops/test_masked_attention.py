"""Attention under a mask that is read by tiles: PyTorch's own attention, whatever the mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_compile.ops.dropout_bits import unpacked
from te_compile.ops.mask_tiles import MASK_TILES
from te_compile.ops.masked_attention import (
    MASKED_ATTENTION,
    MASKED_ATTENTION_BACKWARD,
    MASKED_ATTENTION_FORWARD,
    bits_of_tiles,
)
from tests.compiling import relative_error
from tests.masks import KINDS, drawn_mask


def drawn(heads: int, shared: int, queries: int, keys: int) -> list[Tensor]:
    sizes = ((heads, queries), (shared, keys), (shared, keys))
    return [torch.randn(2, count, length, 16, dtype=torch.float32, requires_grad=True) for count, length in sizes]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "shared"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize(("queries", "keys"), [(70, 70), (130, 40), (1, 200)])
def test_it_is_pytorchs(kind: str, heads: int, shared: int, queries: int, keys: int) -> None:
    q, k, v = drawn(heads, shared, queries, keys)
    mask, scale = drawn_mask(kind, 2, queries, keys, "cpu"), 0.3
    out = MASKED_ATTENTION(q, k, v, *MASK_TILES(mask, True), 0.0, scale)
    everybody = [x.repeat_interleave(heads // shared, 1) for x in (k, v)]
    wanted = F.scaled_dot_product_attention(q, *everybody, attn_mask=mask.unsqueeze(1), scale=scale)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(out)
    for one, other in zip(*(torch.autograd.grad(y, (q, k, v), grad) for y in (out, wanted)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_a_query_that_sees_nothing_has_nothing() -> None:
    q, k, v = drawn(2, 2, 70, 70)
    mask = drawn_mask("random", 2, 70, 70, "cpu")
    mask[:, 3] = False
    rows, row_tiles, columns, column_tiles = MASK_TILES(mask, True)
    operands = [x.detach().transpose(1, 2) for x in (q, k, v)]
    out, logsumexp = MASKED_ATTENTION_FORWARD(*operands, rows, row_tiles, None, 0.0, 0.25)
    assert not out[:, 3].any() and bool((logsumexp[:, :, 3] == -torch.inf).all())
    given = (*operands, out, logsumexp, columns, column_tiles, None, 0.0, 0.25)
    made = MASKED_ATTENTION_BACKWARD(torch.randn_like(out), *given)
    assert not made[0][:, 3].any() and all(bool(each.isfinite().all()) for each in made)


def test_only_gradients_that_are_wanted_come() -> None:
    q, k, v = drawn(2, 2, 40, 40)
    out = MASKED_ATTENTION(q, k.detach(), v, *MASK_TILES(drawn_mask("left", 2, 40, 40, "cpu"), True), 0.0, 0.25)
    out.sum().backward()
    assert q.grad is not None and v.grad is not None and k.grad is None


def test_fake_results_have_the_shapes_of_real_ones() -> None:
    q, k, v = (x.detach().transpose(1, 2) for x in drawn(4, 2, 30, 50))
    tiles = MASK_TILES(torch.ones(1, 30, 50, dtype=torch.bool), True)
    real = MASKED_ATTENTION_FORWARD(q, k, v, *tiles[:2], None, 0.0, 0.25)
    fake = MASKED_ATTENTION_FORWARD(*(x.to("meta") for x in (q, k, v, *tiles[:2])), None, 0.0, 0.25)
    made = MASKED_ATTENTION_BACKWARD(q, q, k, v, *real, *tiles[2:], None, 0.0, 0.25)
    unreal = MASKED_ATTENTION_BACKWARD(*(x.to("meta") for x in (q, q, k, v, *real, *tiles[2:])), None, 0.0, 0.25)
    for one, other in zip((*real, *made), (*fake, *unreal), strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def test_a_dropout_keeps_what_its_bits_say() -> None:
    q, k, v = drawn(2, 2, 70, 90)
    mask, probability = drawn_mask("left", 2, 70, 90, "cpu"), 0.3
    mask[0, -1] = True  # where every query saw a single key, scores would have no gradient to compare
    torch.manual_seed(3)
    out = MASKED_ATTENTION(q, k, v, *MASK_TILES(mask, True), probability, 0.25)
    torch.manual_seed(3)
    bits = bits_of_tiles(q.transpose(1, 2), k.transpose(1, 2), probability)
    assert bits.shape == (4, 4, 128)  # whole tiles, of which the backward pass reads
    scores = (q @ k.mT * 0.25).masked_fill(~mask.unsqueeze(1), -torch.inf)
    kept = unpacked(bits, 90)[:, :70].view(scores.shape) / (1 - probability)
    wanted = scores.softmax(3).nan_to_num() * kept @ v
    torch.testing.assert_close(out, wanted, rtol=5e-3, atol=1e-3)  # 0.3 is rounded to some binary places
    grad = torch.randn_like(out)
    for one, other in zip(*(torch.autograd.grad(y, (q, k, v), grad) for y in (out, wanted)), strict=True):
        assert relative_error(one, other) < 5e-3
