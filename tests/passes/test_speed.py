"""The estimates behind the cost model: bounds that any estimate must keep."""

from __future__ import annotations

import random

import pytest

from te_compile.passes import speed
from te_compile.passes.speed import HostCost, fp8_microseconds, gain_microseconds, high_precision_microseconds


@pytest.mark.parametrize("training", [True, False])
def test_a_gain_is_the_difference_of_the_two_times(training: bool) -> None:
    shape = tuple(16 * random.randint(1, 512) for _ in range(3))
    difference = high_precision_microseconds(*shape, training=training) - fp8_microseconds(*shape, training=training)
    assert gain_microseconds(*shape, training=training) == difference


@pytest.mark.parametrize("training", [True, False])
def test_large_linears_gain_and_tiny_ones_lose(training: bool) -> None:
    assert gain_microseconds(8192, 4096, 4096, training=training) > 0
    assert gain_microseconds(16, 64, 64, training=training) < 0


def test_in_the_range_where_fp8_gains_more_tokens_gain_more() -> None:
    gains = [gain_microseconds(tokens, 4096, 4096, training=True) for tokens in (4096, 8192, 16384)]
    assert gains == sorted(gains)


def test_padding_costs_time_and_a_large_head_still_gains() -> None:
    size = (8192, 4096, 50257)
    padded, aligned = (gain_microseconds(*size, padding=more, training=True) for more in ((0, 15), (0, 0)))
    assert 0 < padded < aligned
    assert gain_microseconds(8192, 1000, 17, padding=(8, 15), training=True) < 0


def test_few_tokens_are_bound_by_reading_the_weight() -> None:
    """One token or eight: the same bytes of weight, the same time."""
    one, eight = (high_precision_microseconds(tokens, 4096, 4096, training=False) for tokens in (1, 8))
    bytes_of_weight = 2 * 4096 * 4096
    assert one == pytest.approx(bytes_of_weight / speed.BYTES_PER_MICROSECOND, rel=0.01)
    assert eight == pytest.approx(one, rel=0.02)


def test_many_tokens_are_bound_by_flops() -> None:
    flops = 3 * 2 * 8192 * 4096 * 4096
    expected = flops / speed.BF16_FLOPS_PER_MICROSECOND
    assert high_precision_microseconds(8192, 4096, 4096, training=True) == pytest.approx(expected)


def test_the_layer_of_the_readme_takes_about_what_was_measured() -> None:
    """torch.compile's step of it is 16.7 ms: the estimate must be good enough to compare with a host's milliseconds."""
    linears = [(4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096)]
    time = sum(
        estimate(8192, *features, training=True)
        for features in linears
        for estimate in (high_precision_microseconds, speed.around_microseconds)
    )
    time += speed.attention_microseconds(4 * 32, 2048, 2048, 128, causal=True, training=True)
    assert time == pytest.approx(16_700, rel=0.15)


def test_a_causal_attention_is_half_of_a_full_one_and_training_costs_more() -> None:
    full, causal = (speed.attention_microseconds(8, 512, 512, 64, causal=each, training=True) for each in (False, True))
    assert full == 2 * causal
    assert speed.attention_microseconds(8, 512, 512, 64, causal=True, training=False) < causal


@pytest.mark.parametrize("gradients", [0, 1, 2])
def test_a_convolution_takes_its_flops_or_its_bytes_once_and_for_each_gradient(gradients: int) -> None:
    flops, moved, of_weight = 1e12, 1e8, 1e6
    around = 2 * moved * (3 if gradients else 1) / speed.BYTES_PER_MICROSECOND
    products = [
        speed.convolution_microseconds(each, moved, of_weight, channels=64, gradients=gradients) - around
        for each in (flops, 1e6)
    ]
    bound = flops / speed.CONVOLUTION_FLOPS_PER_MICROSECOND, (moved + of_weight) / speed.BYTES_PER_MICROSECOND
    assert products == pytest.approx([(1 + gradients) * each for each in bound])


def test_a_convolution_of_few_channels_takes_what_was_measured() -> None:
    """64 images of 224 pixels and 3 channels, cut into patches of 16 by 768 features in bf16: 381 µs."""
    patches, length, features = 64 * 14 * 14, 3 * 16 * 16, 768
    flops, moved = 2 * patches * length * features, 2 * patches * (length + features)
    time = speed.convolution_microseconds(flops, moved, 2 * length * features, channels=3, gradients=0)
    around = 2 * moved / speed.BYTES_PER_MICROSECOND
    assert time - around == pytest.approx(381, rel=0.02)
    many = speed.convolution_microseconds(flops, moved, 2 * length * features, channels=64, gradients=0)
    assert many < time


def test_a_host_pays_for_the_step_and_for_each_linear() -> None:
    assert HostCost(step=10, linear=3).of(4) == 22
    assert all(cost.step >= 0 and cost.linear > 0 for training in (True, False) for cost in speed.host_costs(training))
