"""Kept copies of weights are made anew when a weight changed, by the kernels and by the reference alike."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from te_compile import backend
from te_compile.kernels.weight_refresh import TritonRefresher
from te_compile.ops import registry
from te_compile.ops.quantize import padded
from te_compile.ops.weight_refresh import Layout, ReferenceRefresher, Refresher, fingerprint_reference
from te_compile.ops.weights import Outputs, quantize_weights_reference
from te_compile.passes import lower
from te_compile.recipe import ScaleRule
from tests.backend.models import Chain
from tests.compiling import compiled
from tests.test_lasting_copies import Trained

E4M3 = torch.float8_e4m3fn
SHAPES = [(48, 160), (130, 272), (16, 16), (37, 50)]
KINDS = pytest.mark.parametrize("kind", [TritonRefresher, ReferenceRefresher], ids=["triton", "reference"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def layout_of(weights: list[Tensor]) -> Layout:
    shapes = tuple((weight.shape[0], weight.shape[1]) for weight in weights)
    copies = tuple((padded(rows), padded(columns)) for rows, columns in shapes)
    everywhere = (True,) * len(weights)
    numbers = tuple(range(len(weights)))
    return Layout(numbers, (0,) * len(weights), shapes, copies, everywhere, everywhere, E4M3, ScaleRule())


def quantized(layout: Layout, weights: list[Tensor], scales: Tensor | None) -> Outputs:
    flags = list(layout.rowwise), list(layout.columnwise)
    return quantize_weights_reference(layout.padded(weights), scales, layout.dtype, *flags, layout.rule)


def state_rows(scales: Tensor) -> list[Tensor]:
    """Rows of FP8 states with these scales in front."""
    return [torch.cat([scale.view(1, 1), scale.new_zeros(1, 5)], dim=1) for scale in scales]


class Kept:
    """Copies of some weights, and what refreshes them."""

    def __init__(
        self, kind: Callable[..., Refresher], dtype: torch.dtype, device: str, scaled: bool, lasting: bool = False
    ) -> None:
        self.weights = [torch.randn(shape, device=device).mul_(3.0**-i).to(dtype) for i, shape in enumerate(SHAPES)]
        self.layout = replace(layout_of(self.weights), lasting=lasting)
        self.scales = torch.rand(len(SHAPES), device=device) * 100 + 1 if scaled else None
        self.rows = None if self.scales is None else state_rows(self.scales)
        self.outputs = quantized(self.layout, self.weights, self.scales)
        self.before = [each.clone() for each in self.outputs]
        self.refresher = kind(self.layout, self.outputs, self.rows, self.weights)

    def refresh(self, amaxes: bool = True, missing: bool = False, force: bool = False) -> None:
        self.refresher(self.weights, amaxes, missing, force)

    def is_untouched(self) -> bool:
        return all(map(same, self.outputs, self.before))

    def is_right(self) -> bool:
        scales = None if self.rows is None else torch.cat([row[:, 0] for row in self.rows])
        return all(map(same, self.outputs, quantized(self.layout, self.weights, scales)))


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@DTYPES
@KINDS
@pytest.mark.parametrize("scaled", [True, False], ids=["delayed", "current"])
def test_copies_follow_their_weights_and_only_them(
    kind: Callable[..., Refresher], dtype: torch.dtype, scaled: bool, device: str
) -> None:
    kept = Kept(kind, dtype, device, scaled)
    kept.outputs[0].view(torch.uint8)[::7] ^= 1  # a copy that nobody asked to be made again is not
    kept.before[0].view(torch.uint8)[::7] ^= 1
    kept.refresh()
    assert kept.is_untouched()
    random.choice(kept.weights).mul_(-0.5)
    kept.refresh()
    assert not kept.is_untouched() and kept.is_right()
    if kept.rows is not None:
        kept.rows[1][0, 0] *= 2  # a scale that moves on is no reason, but the next change takes the new one
        before = [each.clone() for each in kept.outputs]
        kept.refresh()
        assert all(map(same, kept.outputs, before))
        kept.weights[0].neg_()
        kept.refresh()
        assert kept.is_right()


@KINDS
def test_a_forced_refresh_takes_what_is_there(kind: Callable[..., Refresher], device: str) -> None:
    for scaled, missing in ((True, False), (True, True), (False, False)):
        kept = Kept(kind, torch.bfloat16, device, scaled)
        for output in kept.outputs:
            output.view(torch.uint8).fill_(0)
        kept.refresh(missing=missing, force=True)
        assert kept.is_right()
        for weight in kept.weights:
            weight.mul_(0.3)
        kept.refresh(missing=missing, force=True)
        assert kept.is_right()
        kept.refresh(missing=missing)
        assert kept.is_right()


@KINDS
def test_an_amax_that_falls_is_seen(kind: Callable[..., Refresher], device: str) -> None:
    kept = Kept(kind, torch.float32, device, scaled=False)
    for _ in range(3):
        for weight in kept.weights:
            weight.mul_(0.25)
        kept.refresh()
        assert kept.is_right()


@KINDS
def test_a_scale_of_zero_is_measured(kind: Callable[..., Refresher], device: str) -> None:
    kept = Kept(kind, torch.bfloat16, device, scaled=True)
    assert kept.rows is not None
    kept.rows[2][0, 0] = 0
    kept.weights[0].neg_()
    kept.refresh(amaxes=False, missing=True)
    assert kept.is_right()
    kept.weights[0].mul_(2)
    kept.refresh(missing=True, force=True)
    assert kept.is_right()


@KINDS
def test_where_nobody_reads_the_amaxes_the_codes_are_right_all_the_same(
    kind: Callable[..., Refresher], device: str
) -> None:
    kept = Kept(kind, torch.bfloat16, device, scaled=True)
    kept.weights[3].neg_()
    kept.refresh(amaxes=False)
    wanted = quantized(kept.layout, kept.weights, kept.scales)
    assert all(same(kept.outputs[i], wanted[i]) for i in (0, 1, 3))


@KINDS
def test_who_forces_a_refresh_gets_the_amaxes(kind: Callable[..., Refresher], device: str) -> None:
    """The host looks at them, though the graph does not."""
    kept = Kept(kind, torch.bfloat16, device, scaled=True)
    kept.weights[1].mul_(3)
    kept.refresh(amaxes=False, force=True)
    assert kept.is_right()


@KINDS
@pytest.mark.parametrize("trains", [True, False])
def test_copies_that_last_are_cut_off_by_no_scale_that_their_weight_has_outgrown(
    trains: bool, kind: Callable[..., Refresher], device: str
) -> None:
    """Beside others that keep theirs, and as long as that is so; weights that hold infinity keep it too."""
    kept = Kept(kind, torch.bfloat16, device, scaled=True, lasting=True)
    assert kept.rows is not None and kept.scales is not None
    most = [float(448 / scale / weight.abs().max()) for scale, weight in zip(kept.scales, kept.weights, strict=True)]
    for index, times in ((0, 1.5), (1, 3), (2, 100)):
        kept.weights[index].mul_(times * most[index])
    kept.refresh(amaxes=trains)
    scales = kept.scales.clone()
    scales[0 if trains else 1 : 3] = 0  # which means one from its own amax
    assert all(map(same, kept.outputs, quantized(kept.layout, kept.weights, scales)))
    for weight in kept.weights[:2]:
        weight.mul_(0.1)
    kept.weights[2][0, 0] = float("inf")
    kept.refresh()
    assert same(kept.outputs[3], quantized(kept.layout, kept.weights, kept.scales)[3])
    kept.weights[2].fill_(1.0)
    kept.weights[1].mul_(100)
    kept.refresh(force=True)  # by who sees to that
    assert kept.is_right()


@DTYPES
def test_the_kernels_and_the_reference_know_weights_by_the_same_numbers(dtype: torch.dtype, device: str) -> None:
    kept = Kept(TritonRefresher, dtype, device, scaled=False)
    assert isinstance(kept.refresher, TritonRefresher)
    numbers = kept.refresher.fingerprints.to(torch.int64) & 0xFFFFFFFF
    assert torch.equal(numbers, fingerprint_reference(kept.layout.matrices(kept.weights)))


def test_slices_of_one_weight_are_read_where_they_lie(device: str) -> None:
    packed = torch.randn(96, 64, device=device)
    everywhere = (True,) * 3
    shapes = ((32, 64),) * 3
    layout = Layout((0, 0, 0), (0, 2048, 4096), shapes, shapes, everywhere, everywhere, E4M3, ScaleRule())
    assert all(map(torch.equal, layout.matrices([packed]), packed.chunk(3)))
    outputs = quantized(layout, [packed], None)
    refresher = TritonRefresher(layout, outputs, None, [packed])
    packed[40:].neg_()
    refresher([packed], True, False)
    assert all(map(same, outputs, quantized(layout, [packed], None)))


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models have their copies made and checked by kernels, also in Triton's interpreter."""
    operators = ("quantize_weights", "refresh_weights", "snapshot")
    chosen = dict.fromkeys(operators, "triton"), []
    assert all(registry.function_of(operator, "triton") for operator in operators)
    monkeypatch.setattr(lower, "implementations_for", lambda *_: chosen)


@pytest.mark.usefixtures("fresh_dynamo", "by_kernels")
@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "for CUDA graphs"])
def test_what_an_evaluation_cuts_off_is_said_and_mended(
    graphs: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tests/test_lasting_copies.py has it of the reference."""
    monkeypatch.setattr(backend, "captures_cuda_graphs", lambda options: graphs)
    trained = Trained(device)
    assert trained.evaluate() < 0.1
    trained.load(20.0)
    with pytest.warns(UserWarning, match="reaches 20 times as far as its FP8 scale"):
        assert trained.evaluate() > 0.5
    trained.train(2)
    assert trained.evaluate() < 0.1
    trained.model.weight.data.mul_(30.0)
    trained.model.bias.data.mul_(30.0)
    assert trained.evaluate() < 0.1 and max(trained.train(2)) < 0.1


@pytest.mark.usefixtures("fresh_dynamo", "by_kernels")
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_model_reads_copies_that_the_kernels_made_and_check(recipe: str, device: str) -> None:
    """The whole road."""
    model, x = Chain().to(device), torch.randn(5, 32, device=device)
    fast = compiled(model, recipe=recipe, cost_model=False)
    plain = compiled(model, recipe=recipe, cost_model=False, cache_weights=False)
    plain(x).sum().backward()
    with torch.no_grad():
        for change in (lambda w: None, lambda w: w.data.neg_(), lambda w: w.mul_(2), lambda w: w.data.mul_(0.3)):
            change(model.b.weight)
            assert torch.equal(fast(x), plain(x))
            assert torch.equal(fast(x), plain(x))
