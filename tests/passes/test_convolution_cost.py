"""Convolutions that are no linears are part of what the device has to do, and no linear is counted twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_compile.options import Options
from te_compile.passes import speed, step_cost
from te_compile.passes.convolution_cost import convolutions_microseconds
from te_compile.passes.speed import HostCost
from te_compile.passes.step_cost import high_precision_step, too_dear_to_launch, waits_for_host
from tests.capturing import captured, regions_and_plan

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BATCH, CHANNELS, FEATURES, KERNEL = 2, 16, 24, 3
PLACES = (9, 11, 7)


@pytest.fixture(autouse=True)
def _bound_by_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates at which even small convolutions take longer for their FLOPs than for their bytes."""
    monkeypatch.setattr(speed, "CONVOLUTION_FLOPS_PER_MICROSECOND", 1e4)
    monkeypatch.setattr(speed, "FEW_CHANNELS_CONVOLUTION_FLOPS_PER_MICROSECOND", 1e3)


def convolution(dimensions: int, transposed: bool = False, **options: Any) -> nn.Module:
    name = f"Conv{'Transpose' if transposed else ''}{dimensions}d"
    made: nn.Module = getattr(nn, name)(CHANNELS, FEATURES, KERNEL, **options)
    return made


def signal(dimensions: int, channels: int = CHANNELS, **options: Any) -> Tensor:
    return torch.randn(BATCH, channels, *PLACES[:dimensions], **options)


def time_of(run: Callable[..., Any], *inputs: Tensor, training: bool = True) -> float:
    gm, _ = captured(run, *inputs)
    return convolutions_microseconds([gm.graph], (), training)


def expected(x: Tensor, y: Tensor, flops: float, gradients: int, rate: float | None = None) -> float:
    moved = 4 * (x.numel() + y.numel())
    around = 2 * moved * (3 if gradients else 1) / speed.BYTES_PER_MICROSECOND
    return (1 + gradients) * flops / (rate or speed.CONVOLUTION_FLOPS_PER_MICROSECOND) + around


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_convolution_counts_with_its_flops(dimensions: int, training: bool) -> None:
    model, x = convolution(dimensions, stride=2), signal(dimensions, requires_grad=True)
    y = model(x)
    flops = 2 * y.numel() * CHANNELS * KERNEL**dimensions
    assert time_of(model, x, training=training) == pytest.approx(expected(x, y, flops, 2 if training else 0))


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_transposed_one_does_too(dimensions: int) -> None:
    model, x = convolution(dimensions, transposed=True, stride=2), signal(dimensions, requires_grad=True)
    flops = 2 * x.numel() * FEATURES * KERNEL**dimensions
    assert time_of(model, x) == pytest.approx(expected(x, model(x), flops, 2))


@pytest.mark.parametrize(("learns", "inner"), [(False, False), (True, False), (False, True), (True, True)])
def test_gradients_count_that_somebody_wants(learns: bool, inner: bool) -> None:
    model, x = convolution(2).requires_grad_(learns), signal(2, requires_grad=inner)
    y = model(x)
    assert time_of(model, x) == pytest.approx(expected(x, y, 2 * y.numel() * CHANNELS * KERNEL**2, learns + inner))


def test_groups_sum_over_their_own_channels() -> None:
    model, x = convolution(2, groups=2), signal(2)
    y = model(x)
    assert time_of(model, x) == pytest.approx(expected(x, y, 2 * y.numel() * CHANNELS // 2 * KERNEL**2, 1))


@pytest.mark.parametrize("channels", [1, 3, speed.FEW_CHANNELS])
def test_few_channels_are_slow(channels: int) -> None:
    model, x = nn.Conv2d(channels, FEATURES, KERNEL), signal(2, channels)
    y = model(x)
    few, many = speed.FEW_CHANNELS_CONVOLUTION_FLOPS_PER_MICROSECOND, speed.CONVOLUTION_FLOPS_PER_MICROSECOND
    rate = few if channels < speed.FEW_CHANNELS else many
    assert time_of(model, x) == pytest.approx(expected(x, y, 2 * y.numel() * channels * KERNEL**2, 1, rate))


def test_functions_and_what_has_a_symbolic_size_count_as_well() -> None:
    weight, x = torch.randn(FEATURES, CHANNELS, KERNEL), signal(1)
    called = time_of(lambda x: F.conv1d(input=x, weight=weight).relu(), x)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 2)
    y = F.conv1d(x, weight)
    symbolic = time_of(lambda x: F.conv1d(x, weight).relu(), x)
    assert called == symbolic == pytest.approx(expected(x, y, 2 * y.numel() * CHANNELS * KERNEL, 0))


def test_what_nobody_reads_counts_nothing() -> None:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        F.conv1d(x, weight)
        return x + 1

    assert time_of(run, signal(1), torch.randn(FEATURES, CHANNELS, KERNEL)) == 0


# --- with the linears of a step -------------------------------------------------------------------------------------


class Listening(nn.Module):
    """Features of a signal by convolutions, one of which is a linear, and linears behind them."""

    def __init__(self, convolutions: int) -> None:
        super().__init__()
        self.features = nn.ModuleList(nn.Conv1d(16, 16, KERNEL, padding=1) for _ in range(convolutions))
        self.projection, self.up, self.down = nn.Conv1d(16, 32, 1), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.features:
            x = F.gelu(each(x))
        return self.down(F.gelu(self.up(self.projection(x).transpose(1, 2))))


def test_those_that_are_linears_are_weighed_as_such() -> None:
    x = signal(1)
    _, without = regions_and_plan(Listening(0), x)
    _, plan = regions_and_plan(Listening(2), x)
    assert [site.form for site in plan.sites] == [site.form for site in without.sites]
    more = high_precision_step(plan, True).device - high_precision_step(without, True).device
    flops, moved = 2 * x.numel() * 16 * KERNEL, 8 * x.numel()
    around = 2 * 2 * moved * 3 / speed.BYTES_PER_MICROSECOND  # of two
    # The first has the gradient of its weight; the input of the projection needs none where there is no other.
    assert more == pytest.approx((2 + 3) * flops / speed.CONVOLUTION_FLOPS_PER_MICROSECOND + around)


def test_a_step_that_waits_for_its_convolutions_does_not_wait_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "HIGH_PRECISION_TRAINING", HostCost(20, 10))
    monkeypatch.setattr(speed, "FP8_TRAINING", HostCost(20, 30))
    monkeypatch.setattr(speed, "CONVOLUTION_FLOPS_PER_MICROSECOND", 1e3)
    monkeypatch.setattr(step_cost, "gain_of", lambda readers, training: 40.0 * len(readers))
    _, few = regions_and_plan(Listening(0), signal(1))
    _, many = regions_and_plan(Listening(4), signal(1))
    assert too_dear_to_launch(few, Options(), True)[0] == few.selected
    assert too_dear_to_launch(many, Options(), True)[0] == []
    assert waits_for_host(few, Options(), True) and not waits_for_host(many, Options(), True)


def test_a_gain_that_is_little_beside_the_convolutions_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "HIGH_PRECISION_TRAINING", HostCost(0, 0))
    monkeypatch.setattr(speed, "FP8_TRAINING", HostCost(0, 0))
    _, plan = regions_and_plan(Listening(4), signal(1))
    step = high_precision_step(plan, True).device
    for share, kept in ((0.5 * speed.LEAST_GAIN, 3), (2 * speed.LEAST_GAIN, 0)):
        saved = share * step / 3
        monkeypatch.setattr(step_cost, "gain_of", lambda readers, training, saved=saved: saved * len(readers))
        assert len(too_dear_to_launch(plan, Options(), True)[0]) == kept
