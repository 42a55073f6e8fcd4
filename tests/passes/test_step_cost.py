"""The linears of a graph weighed together: what launches cost the host against what FP8 saves on the device."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from te_compile.options import Options
from te_compile.passes import select, speed, step_cost
from te_compile.passes.find_attentions import find_attentions
from te_compile.passes.input_readers import gain_of
from te_compile.passes.plan import Cause, Plan
from te_compile.passes.recognise_attention import recognise_attention
from te_compile.passes.select import select_linears
from te_compile.passes.speed import HostCost
from te_compile.passes.step_cost import high_precision_step, too_dear_to_launch, with_fp8
from tests.capturing import captured, regions_and_plan, regions_of

HIDDEN_STATE = {"cause": None, "reason": "", "ends": None, "linears": 1, "padding": (0, 0), "spell": None}


class FakeSite(SimpleNamespace):
    """A linear of some size that no graph has."""

    def __init__(self, name: str, tokens: int, features: tuple[int, int], **more: Any) -> None:
        node = Graph().placeholder(name)
        super().__init__(
            name=name, tokens=tokens, features=features, node=node, **{"x": object(), **HIDDEN_STATE, **more}
        )

    @property
    def status(self) -> str:
        return "kept" if self.cause else "fp8"


def layer(tokens: int, hidden: int, copies: int = 1) -> Plan:
    """The linears of so many GPT layers."""
    narrow, wide = hidden, 4 * hidden
    sizes = {"qkv": (narrow, 3 * narrow), "proj": (narrow, narrow), "fc1": (narrow, wide), "fc2": (wide, narrow)}
    names = [(f"{number}.{name}", size) for number in range(copies) for name, size in sizes.items()]
    return Plan(sites=[FakeSite(name, tokens, size) for name, size in names])


def kept(plan: Plan, training: bool = True, **options: Any) -> list[str]:
    sites, _ = too_dear_to_launch(plan, Options.resolve(options), training)
    return sorted(site.name for site in sites)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round prices, so that the tests do not depend on the last measurement."""
    monkeypatch.setattr(speed, "HIGH_PRECISION_TRAINING", HostCost(400, 300))
    monkeypatch.setattr(speed, "FP8_TRAINING", HostCost(900, 900))


pytestmark = pytest.mark.usefixtures("host", "fresh_dynamo")


def test_a_step_that_waits_for_the_host_stays_in_high_precision_and_says_so() -> None:
    plan = layer(1024, 512)
    assert len(kept(plan)) == 4
    _, reason = too_dear_to_launch(plan, Options(), True)
    assert "the host would need about 4500 µs a step, against 1600 µs" in reason and "cost_model=False" in reason


@pytest.mark.parametrize("copies", [1, 8])
def test_a_step_that_waits_for_the_device_goes_to_fp8(copies: int) -> None:
    assert kept(layer(8192, 4096, copies)) == []


def test_free_launches_let_every_gain_count(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = layer(16384, 1024)
    assert kept(plan)
    monkeypatch.setattr(speed, "FP8_TRAINING", speed.HIGH_PRECISION_TRAINING)
    assert kept(plan) == []


@pytest.mark.parametrize("options", [{"mode": "reduce-overhead"}, {"triton.cudagraphs": True}])
def test_under_cuda_graphs_the_host_launches_nothing(options: dict[str, Any]) -> None:
    plan = layer(2048, 1024)
    assert kept(plan) and not kept(plan, **options)


def test_a_replayed_decoding_step_gains_by_what_its_weights_are_more_than_looking_after_their_copies_takes() -> None:
    small, large = layer(8, 1600, copies=8), layer(8, 8192, copies=8)
    options = {"mode": "reduce-overhead"}
    assert len(kept(large, training=False)) == 0 and not kept(large, training=False, **options)
    assert len(kept(small, training=False, **options)) == 32
    _, reason = too_dear_to_launch(small, Options.resolve(options), False)
    assert "the GPU would need about" in reason and "reduce-overhead" not in reason


def test_more_tokens_never_take_a_linear_out_of_fp8() -> None:
    counts = [len(kept(layer(tokens, 2048))) for tokens in (1024, 2048, 4096, 8192, 16384, 32768)]
    assert counts == sorted(counts, reverse=True) and counts[0] == 4 and counts[-1] == 0


def test_equal_linears_of_a_stack_stay_together() -> None:
    for tokens, hidden in itertools.product((2048, 3072, 4096, 6144), (1024, 2048, 3072)):
        names = kept(layer(tokens, hidden, copies=6))
        assert all(names.count(name) == 1 and f"{5}.{name[2:]}" in names for name in names)


def test_what_is_chosen_is_never_slower_by_estimate_than_either_extreme() -> None:
    for tokens, hidden in itertools.product((1024, 2048, 4096, 8192), (512, 1024, 2048, 4096)):
        plan = layer(tokens, hidden, copies=2)
        out = set(kept(plan))
        as_it_is = high_precision_step(plan, True)
        chosen = with_fp8(as_it_is, [site for site in plan.sites if site.name not in out], True)
        assert chosen.time <= as_it_is.time
        if not out:
            assert chosen.time <= (1 - speed.LEAST_GAIN) * as_it_is.time


def test_a_host_that_is_spared_something_is_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoding step is all launches; one of many tokens gains on the device, whatever the host's part in it."""
    monkeypatch.setattr(speed, "HIGH_PRECISION_INFERENCE", HostCost(100, 50))
    monkeypatch.setattr(speed, "FP8_INFERENCE", HostCost(90, 20))
    decoding, prefill = layer(8, 4096, copies=4), layer(8192, 2048, copies=4)
    assert len(kept(decoding, training=False)) == 16 and kept(prefill, training=False) == []
    as_it_is = high_precision_step(decoding, False)
    in_fp8 = with_fp8(as_it_is, decoding.sites, False)
    assert in_fp8.host == as_it_is.host and in_fp8.device < as_it_is.device


def test_a_gain_within_the_error_of_the_estimate_changes_nothing() -> None:
    plan = Plan(sites=[FakeSite("fp8", 8192, (1024, 1024)), FakeSite("head", 8192, (1024, 65536), cause=Cause.RULE)])
    assert gain_of(plan.sites[:1], True) > 0
    assert kept(plan) == ["fp8"]


def test_each_linear_is_weighed_once_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers may all differ in width."""
    weighed: list[str] = []

    def counted(readers: list[Any], training: bool) -> float:
        weighed.extend(site.name for site in readers)
        return gain_of(readers, training)

    monkeypatch.setattr(step_cost, "gain_of", counted)
    plan = Plan(sites=[FakeSite(str(width), 4096, (1024, 1024 + 16 * width)) for width in range(50)])
    too_dear_to_launch(plan, Options(), True)
    assert sorted(weighed, key=int) == [str(width) for width in range(50)]


def test_linears_that_read_one_input_stay_together() -> None:
    """By itself q, which saves most, would seem to lose what the copy of the input takes, which k and v need too."""
    hidden = 4096
    sites = []
    for number in range(16):
        x = object()
        for name, size in {"q": (hidden, hidden), "k": (hidden, 1024), "v": (hidden, 1024)}.items():
            sites.append(FakeSite(f"{number}.{name}", 8, size, x=x))
        sites.append(FakeSite(f"{number}.down", 8, (14336, hidden)))
        sites.append(FakeSite(f"{number}.odd", 8, (hidden, 256)))
    q, k = sites[:2]
    assert gain_of([q], False) < gain_of([q, k], False) and gain_of(sites[:3], False) > 0
    assert gain_of(sites[4:5], False) < 0
    out = kept(Plan(sites=sites), training=False, mode="reduce-overhead")
    assert out == sorted(f"{number}.odd" for number in range(16))


def test_experts_that_share_rows_are_one_launch_and_a_batch_of_products_is_many() -> None:
    grouped = Plan(sites=[FakeSite("experts", 8192, (1024, 1024), linears=8, ends=object())])
    batched = Plan(sites=[FakeSite("experts", 1024, (1024, 1024), linears=8)])
    assert high_precision_step(batched, True).host - high_precision_step(grouped, True).host == 7 * 300


# --- on captured graphs --------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Projections around F.scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, 16)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2))


class Routed(nn.Module):
    """A linear between many kernels that run along rows."""

    def __init__(self, kernels: int) -> None:
        super().__init__()
        self.fc, self.kernels = nn.Linear(64, 64), kernels

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.kernels):
            x = torch.softmax(x, dim=-1)
        return self.fc(x)


def test_kernels_beyond_those_around_a_linear_count_as_time_of_the_host() -> None:
    def host_with(kernels: int) -> float:
        x = torch.randn(32, 64, requires_grad=True)
        return high_precision_step(regions_and_plan(Routed(kernels), x)[1], True).host

    assert host_with(0) == host_with(1) == 400 + 300
    assert host_with(11) == 400 + 12 * 300 / 2


def test_kernels_without_a_gradient_cost_what_they_do_in_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "HIGH_PRECISION_INFERENCE", HostCost(100, 50))
    _, plan = regions_and_plan(Routed(11), torch.randn(32, 64))
    assert high_precision_step(plan, True).host == 400 + 300 / 2 + 11 * 50 / 2
    with torch.no_grad():
        _, plan = regions_and_plan(Routed(11), torch.randn(32, 64))
    assert high_precision_step(plan, False).host == 100 + 12 * 50 / 2


@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_as_time_of_the_device(causal: bool) -> None:
    gm, _ = captured(Attention(), torch.randn(2, 32, 64), causal)
    plan = Plan()
    find_attentions(*regions_of(gm), plan)
    flops = 4 * (2 * 4) * 32 * 32 * 16 * (0.5 if causal else 1)
    expected = 3.5 * flops / speed.ATTENTION_FLOPS_PER_MICROSECOND
    assert high_precision_step(plan, True).device == pytest.approx(expected)


@pytest.mark.parametrize(
    ("learns", "dropout", "rate"),
    [
        (True, 0.1, speed.LEARNED_BIAS_ATTENTION_FLOPS_PER_MICROSECOND),
        (False, 0.1, speed.DROPOUT_ATTENTION_FLOPS_PER_MICROSECOND),
        (False, 0.0, speed.ATTENTION_FLOPS_PER_MICROSECOND),
    ],
)
def test_attention_takes_the_time_of_the_kernel_that_it_will_have(learns: bool, dropout: float, rate: float) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)

    q, k, v = (torch.randn(2, 4, 32, 16, requires_grad=True) for _ in range(3))
    gm, _ = captured(attend, q, k, v, torch.randn(1, 4, 32, 32, requires_grad=learns))
    plan = Plan()
    find_attentions(*regions_of(gm), plan)
    flops = 3.5 * 4 * (2 * 4) * 32 * 32 * 16
    assert high_precision_step(plan, True).device == pytest.approx(flops / rate)
    plan.attentions = [replace(each, kernel="biased") for each in plan.attentions]
    assert high_precision_step(plan, True).device == pytest.approx(flops / speed.BIASED_ATTENTION_FLOPS_PER_MICROSECOND)


@pytest.mark.parametrize("training", [False, True])
def test_attention_that_stays_counts_as_moving_its_scores(training: bool) -> None:
    def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(torch.tanh(q @ k.mT), -1) @ v

    gm, _ = captured(capped, *(torch.randn(2, 4, 32, 16) for _ in range(3)))
    recognise_attention(gm.graph)
    plan = Plan()
    find_attentions(*regions_of(gm), plan)
    assert [attention.status for attention in plan.attentions] == ["stays"]
    scores = 2 * 4 * 32 * 32
    expected = 2 * scores * (11 if training else 4) / speed.BYTES_PER_MICROSECOND
    assert high_precision_step(plan, training).device == pytest.approx(expected)


def test_a_call_that_stays_is_not_counted() -> None:
    def flexible(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v)

    gm, _ = captured(flexible, *(torch.randn(2, 4, 32, 16) for _ in range(3)))
    plan = Plan()
    find_attentions(*regions_of(gm), plan)
    assert [attention.status for attention in plan.attentions] == ["stays"]
    assert high_precision_step(plan, True).device == 0


def test_the_rule_reads_real_sites_and_asks_only_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan = regions_and_plan(Attention(), torch.randn(2, 32, 64))
    assert select_linears(plan, Options()) == 2
    out, _ = too_dear_to_launch(plan, Options(), True)
    assert out == sorted(plan.selected, key=lambda site: gain_of([site], True), reverse=True)
    select._only_what_the_step_gains_from(plan, Options())
    assert plan.selected == [] and all(site.cause is Cause.RULE for site in plan.sites)
