"""Attention with dropout: its bits are fair and independent, its references are what autograd says, and a module that
is compiled with it computes what the bits leave."""

from __future__ import annotations

import pytest
import torch

from te_compile.ops import dropout_bits as module
from te_compile.ops.dropout_attention import (
    DROPOUT_ATTENTION,
    DROPOUT_ATTENTION_FORWARD,
    dropout_attention_backward_reference,
    dropout_attention_reference,
)
from te_compile.ops.dropout_bits import dropout_bits_reference, kept_share, philox, unpacked
from tests.compiling import relative_error
from tests.dropout_attention import Sizes, drawn, expected

# counter and key, and what Random123 publishes for them, for Philox4x32 of seven rounds and of ten
KNOWN = {7: (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48), 10: (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)}


@pytest.mark.parametrize("rounds", KNOWN)
def test_philox_gives_the_published_numbers(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUNDS", rounds)
    zero = torch.zeros(1, dtype=torch.int64)
    assert tuple(int(word) for word in philox(zero, [zero] * 4)) == KNOWN[rounds]


def seed() -> torch.Tensor:
    return torch.randint(2**62, (1,))


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.013, 0.9])
def test_bits_are_on_as_often_as_they_should(probability: float) -> None:
    heads, queries, keys = 4, 256, 512
    keep = unpacked(dropout_bits_reference(seed(), heads, queries, keys, probability), keys).double()
    wanted = kept_share(probability) / 65536
    assert abs(wanted - (1 - probability)) <= min(probability, 1 - probability) / 500
    deviation = (wanted * (1 - wanted)) ** 0.5
    for along in ((0, 1, 2), (0, 2), (0, 1), (1, 2)):  # all, each query's, each key's, each head's
        means = keep.mean(along)
        count = keep.numel() / max(1, means.numel())
        assert ((means - wanted).abs() < 6 * deviation / count**0.5).all()
    shifted = [(keep[:, :, 1:], keep[:, :, :-1]), (keep[:, 1:], keep[:, :-1]), (keep[1:], keep[:-1])]
    for one, other in shifted:  # neighbours know nothing of each other
        covariance = ((one - wanted) * (other - wanted)).mean()
        assert covariance.abs() < 6 * deviation**2 / one.numel() ** 0.5


def test_the_share_is_of_as_few_places_as_are_close_enough() -> None:
    assert [kept_share(p) for p in (0.0, 0.5, 0.25, 1.0)] == [65536, 32768, 49152, 0]
    assert kept_share(0.1) == round(0.9 * 4096) * 16  # twelve places
    assert kept_share(2**-16) == 65535 and kept_share(1 - 2**-16) == 1  # sixteen
    for probability in torch.rand(200).clamp(2**-8, 1 - 2**-8).tolist():
        error = abs(kept_share(probability) / 65536 - (1 - probability))
        assert error <= max(min(probability, 1 - probability) / 500, 2**-17)


def test_another_seed_gives_other_bits_and_the_same_the_same() -> None:
    first, second = seed(), seed()
    bits = [dropout_bits_reference(each, 2, 64, 64, 0.5) for each in (first, second, first)]
    assert torch.equal(bits[0], bits[2])
    changed = (unpacked(bits[0], 64) != unpacked(bits[1], 64)).double().mean()
    assert 0.4 < changed < 0.6


def test_keys_past_the_last_word_are_not_looked_at() -> None:
    bits = dropout_bits_reference(seed(), 1, 3, 70, 0.5)
    assert bits.shape == (1, 4, 3) and unpacked(bits, 70).shape == (1, 3, 70)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_references_are_what_autograd_says(causal: bool) -> None:
    sizes = Sizes(2, 33, 33, 3, 16) if causal else Sizes(2, 33, 70, 3, 16)
    operands = drawn(sizes, "cpu", torch.float32)
    bits = dropout_bits_reference(seed(), 6, sizes.queries, sizes.keys, 0.2)
    out, logsumexp, gradients = expected(operands, bits, 0.2, causal, 0.3)
    given = (operands.q, operands.k, operands.v, bits)
    got = dropout_attention_reference(*given, 0.2, causal, 0.3)
    assert relative_error(got[0], out) < 1e-5 and relative_error(got[1], logsumexp) < 1e-5
    backward = dropout_attention_backward_reference(operands.grad, *given, *got, 0.2, causal, 0.3)
    for one, wanted in zip(backward, gradients, strict=True):
        assert one.is_contiguous() and relative_error(one, wanted) < 1e-5


def test_the_composite_has_these_gradients_and_follows_the_generator() -> None:
    sizes = Sizes(2, 40, 40, 2, 16)
    operands = drawn(sizes, "cpu", torch.float32)
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in (operands.q, operands.k, operands.v))
    results = []
    for number in (7, 7, 8):
        torch.manual_seed(number)
        results.append(DROPOUT_ATTENTION(q, k, v, 0.5, True, 0.25))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    torch.manual_seed(7)
    bits = dropout_bits_reference(seed(), 4, 40, 40, 0.5)
    out, _, gradients = expected(operands, bits, 0.5, True, 0.25)
    assert relative_error(results[0].transpose(1, 2), out) < 1e-5
    got = torch.autograd.grad(results[0], (q, k, v), operands.grad.transpose(1, 2))
    for one, wanted in zip(got, gradients, strict=True):
        assert relative_error(one.transpose(1, 2), wanted) < 1e-5


def test_the_operators_are_sound() -> None:
    operands = drawn(Sizes(1, 20, 20, 2, 16), "cpu", torch.float32)
    bits = dropout_bits_reference(seed(), 2, 20, 20, 0.5)
    given = (operands.q, operands.k, operands.v, bits, 0.5, False, 0.25)
    torch.library.opcheck(DROPOUT_ATTENTION_FORWARD, given)
    torch.library.opcheck(module.DROPOUT_BITS, (seed(), 2, 20, 20, 0.5, True))
