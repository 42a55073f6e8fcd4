"""Tiles timed on the hardware: what is found is kept, found once, and changes no bit of a training."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_compile.kernels import tile_choices, tiles
from te_compile.kernels.tiles import Tile
from te_compile.passes import time_tiles
from tests.compiling import BACKEND
from tests.needs import FP8_GPU
from tests.passes.test_time_tiles import forget

pytestmark = [*FP8_GPU, pytest.mark.usefixtures("fresh_dynamo")]
BF16, WIDTH, STEPS = torch.bfloat16, 256, 3
ASKED = {"max_autotune_pointwise": True}
Measure = Callable[[Callable[[], Any], Tile], float]


def model_and_batches() -> tuple[nn.Module, list[Tensor]]:
    layers = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    batches = [torch.randn(512, WIDTH, device="cuda", dtype=BF16) for _ in range(2 * STEPS)]
    return nn.Sequential(*layers).to("cuda", BF16), batches


def trained(model: nn.Module, batches: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """The results and all gradients of each step of a copy of ``model``."""
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    compiled = torch.compile(model, backend=BACKEND, options={"cost_model": False, **options})
    seen: list[Tensor] = []
    for x, dy in zip(batches[::2], batches[1::2], strict=True):
        x = x.clone().requires_grad_()
        y = compiled(x)
        y.backward(dy)
        assert x.grad is not None
        gradients = [parameter.grad for parameter in model.parameters()]
        seen += [y.detach(), x.grad, *(gradient.clone() for gradient in gradients if gradient is not None)]
        model.zero_grad()
    return seen


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """The microseconds that were measured, in a process with a cache of its own."""
    monkeypatch.setattr(tile_choices, "cache_dir", lambda: str(tmp_path))
    forget(monkeypatch)
    return measuring(monkeypatch, lambda microseconds, count: microseconds)


def measuring(monkeypatch: pytest.MonkeyPatch, told: Callable[[float, int], float]) -> list[float]:
    """What is measured from now on. told: what of that is believed, given how many measurements were made before."""
    found: list[float] = []
    measure: Measure = time_tiles._measure

    def noted(work: Callable[[], Any], tile: Tile) -> float:
        microseconds = measure(work, tile)
        found.append(microseconds)
        return told(microseconds, len(found))

    monkeypatch.setattr(time_tiles, "_measure", noted)
    return found


def same_bits(got: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(got) == len(wanted) and all(map(torch.equal, got, wanted))


def test_tiles_are_timed_once_and_change_no_bit(measured: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = model_and_batches()
    wanted = trained(model, batches, {})
    assert not measured and not tiles.chosen
    assert same_bits(trained(model, batches, ASKED), wanted)
    assert measured and all(0.0 < microseconds < 1000.0 for microseconds in measured)
    found = dict(tiles.chosen)
    kept = [json.loads(line) for line in tile_choices.path_for(torch.cuda.current_device()).read_text().splitlines()]
    assert found and {line["kind"] for line in kept} == {kind for _, kind in found}

    forget(monkeypatch)
    measured.clear()
    assert same_bits(trained(model, batches, ASKED), wanted)
    assert not measured and tiles.chosen == found


def test_the_tile_farthest_from_a_launchers_own_changes_no_bit(
    measured: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its own is the fastest the test above says nothing of the others: here the last one that runs wins."""
    model, batches = model_and_batches()
    wanted = trained(model, batches, {})
    measuring(monkeypatch, lambda microseconds, count: 1.0 / 2**count)
    assert same_bits(trained(model, batches, ASKED), wanted)
    assert len(set(tiles.chosen.values())) > 1, "launchers kept their own"


def test_a_call_is_timed_on_the_device_and_not_on_the_host(measured: list[float]) -> None:
    """A kernel of some microseconds, launched by a host that takes much longer."""
    x = torch.zeros(16, device="cuda")

    def work() -> None:
        sum(range(10_000))  # a tenth of a millisecond or two
        x.add_(1)

    assert time_tiles._measure(work, Tile(64, 128, 8)) < 50.0
