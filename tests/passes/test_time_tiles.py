"""Tiles are timed once for each kind of work, the fastest is taken from then on, and a failure is nobody's loss.

A stand-in for the GPU: fake tensors that say they are on one, and a table of what each tile takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph

from te_compile.kernels import ahead, tile_choices, tiles
from te_compile.kernels.recording import here
from te_compile.kernels.tiles import Tile, Work, choose
from te_compile.ops import calibration, registry
from te_compile.ops.quantize import QUANTIZE
from te_compile.passes import time_tiles
from te_compile.passes.time_tiles import GAIN
from te_compile.recipe import ScaleRule

OWN, FASTER, SLOWER, TOO_LARGE = Tile(64, 128, 8), Tile(64, 64, 4), Tile(32, 128, 4), Tile(128, 256, 8)
TILES = (OWN, FASTER, SLOWER, TOO_LARGE)
E4M3 = torch.float8_e4m3fn


class Gpu:
    """What takes how long on it, what was measured, and what was ordered of workers."""

    def __init__(self) -> None:
        self.microseconds = {OWN: 10.0, FASTER: 8.0, SLOWER: 12.0}
        self.measured: list[Tile] = []
        self.ordered: list[Any] = []
        self.calls: list[tuple[Tensor, Tensor | None, bool]] = []

    def measure(self, work: Callable[[], Any], tile: Tile) -> float:
        """What ``_measure`` does, on a device without the registers for the largest tile."""
        if tile not in self.microseconds:
            raise RuntimeError("out of resources")
        with tiles.trying(tile):
            work()
        self.measured.append(tile)
        return self.microseconds[tile]

    def quantize(self, x: Tensor, scale: Tensor | None, *_: Any) -> None:
        """Instead of the launcher of te::quantize."""
        tile = choose(OWN, lambda: Work([x], ("quantize",), TILES))
        if here.rehearsal is not None:
            here.rehearsal.launched("quantize", (x,), {"tile": tile})
        else:
            self.calls.append((x, scale, calibration.must_measure(scale)))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gpu:
    gpu = Gpu()
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch, "Generator", lambda device, of=torch.Generator: of("cpu"))
    monkeypatch.setattr(time_tiles, "_measure", gpu.measure)
    monkeypatch.setattr(ahead, "rehearsed", lambda kernel, arguments, constants: constants["tile"])
    monkeypatch.setattr(ahead, "compile_ahead", gpu.ordered.extend)
    monkeypatch.setattr(tile_choices, "cache_dir", lambda: str(tmp_path))
    entry = registry._TABLE["quantize", "triton"]
    replaced = registry.Implementation("quantize", "triton", gpu.quantize, entry.priority, entry.check)
    monkeypatch.setitem(registry._TABLE, ("quantize", "triton"), replaced)
    forget(monkeypatch)
    return gpu


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process one that has read nothing yet."""
    chosen: dict[tuple[int, str], Tile] = {}
    for module in (tiles, tile_choices):
        monkeypatch.setattr(module, "chosen", chosen)
    monkeypatch.setattr(tile_choices, "_loaded", set())


def graph_of(*tensors: Callable[[], Tensor], device: str = "cuda", implementation: str = "triton") -> Graph:
    """Of a quantize of each of these, which are made as fakes on the device, by a scale."""
    graph, nodes = Graph(), []
    with FakeTensorMode(), torch.device(device):
        scale = graph.placeholder("scale")
        scale.meta["val"] = torch.empty(())
        for at, make in enumerate(tensors):
            x = graph.placeholder(f"x{at}")
            x.meta["val"] = make()
            arguments = (x, scale, E4M3, True, True, ScaleRule().text(), implementation)
            nodes.append(graph.call_function(QUANTIZE, arguments))
    graph.output(tuple(nodes))
    return graph


def narrow() -> Tensor:
    return torch.empty(8, 32, dtype=torch.bfloat16)


def wide() -> Tensor:
    return torch.empty(8, 64, dtype=torch.bfloat16)


def taken() -> set[Tile]:
    return set(tiles.chosen.values())


def test_each_kind_of_work_is_timed_once_with_each_tile(gpu: Gpu) -> None:
    assert time_tiles.time_tiles(graph_of(narrow, wide, narrow)) == 2
    assert sorted(map(repr, gpu.measured)) == sorted(map(repr, [OWN, FASTER, SLOWER] * 2 * time_tiles.ROUNDS))
    assert len(tiles.chosen) == 2 and taken() == {FASTER}
    assert {device for device, _ in tiles.chosen} == {0}


def test_workers_are_asked_for_the_kernels_with_all_tiles(gpu: Gpu) -> None:
    time_tiles.time_tiles(graph_of(narrow))
    assert gpu.ordered == list(TILES)


@pytest.mark.parametrize("where", [{"device": "cpu"}, {"implementation": "reference"}, {"implementation": "cuda"}])
def test_what_no_triton_kernel_runs_on_a_gpu_is_not_timed(gpu: Gpu, where: dict[str, str]) -> None:
    assert time_tiles.time_tiles(graph_of(narrow, **where)) == 0
    assert gpu.measured == [] and gpu.ordered == [] and tiles.chosen == {}


def test_a_launcher_without_a_choice_is_not_timed(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TILES", (OWN,))
    assert time_tiles.time_tiles(graph_of(narrow)) == 0
    assert gpu.measured == [] and tiles.chosen == {}


@pytest.mark.parametrize("microseconds, best", [(10 * GAIN - 0.01, FASTER), (10 * GAIN + 0.01, OWN), (11.0, OWN)])
def test_another_tile_must_gain_more_than_noise(gpu: Gpu, microseconds: float, best: Tile) -> None:
    gpu.microseconds[FASTER] = microseconds
    assert time_tiles.time_tiles(graph_of(narrow)) == 1
    assert taken() == {best}


def test_the_better_of_two_rounds_counts(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first measurement of all, of the launcher's own tile, meets a device that was idle."""

    def measure(work: Callable[[], Any], tile: Tile) -> float:
        return gpu.measure(work, tile) * (1 if len(gpu.measured) > 1 else 2)

    monkeypatch.setattr(time_tiles, "_measure", measure)
    gpu.microseconds[FASTER] = 9.9
    time_tiles.time_tiles(graph_of(narrow))
    assert taken() == {OWN}


def test_a_later_compilation_reads_what_was_found_and_times_nothing(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    time_tiles.time_tiles(graph_of(narrow))
    found = dict(tiles.chosen)
    forget(monkeypatch)
    del gpu.measured[:], gpu.ordered[:]
    assert time_tiles.time_tiles(graph_of(narrow)) == 0
    assert gpu.measured == [] and gpu.ordered == [] and tiles.chosen == found
    assert time_tiles.time_tiles(graph_of(narrow, wide)) == 1, "what is new was not timed"
    assert len(tile_choices.path_for(0).read_text().splitlines()) == 2


def test_a_choice_that_is_not_offered_any_more_is_found_anew_once(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as earlier:
        gone = Tile(16, 16, 1)
        earlier.setitem(globals(), "TILES", (OWN, gone))
        earlier.setitem(gpu.microseconds, gone, 1.0)
        time_tiles.time_tiles(graph_of(narrow))
    assert taken() == {gone}
    forget(monkeypatch)
    assert time_tiles.time_tiles(graph_of(narrow)) == 1 and taken() == {FASTER}
    forget(monkeypatch)
    assert time_tiles.time_tiles(graph_of(narrow)) == 0 and taken() == {FASTER}


def test_a_launcher_that_cannot_be_timed_keeps_its_own_tile(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    del gpu.microseconds[OWN]
    with caplog.at_level(logging.WARNING, "te_compile"):
        assert time_tiles.time_tiles(graph_of(narrow)) == 0
    assert "keeps its own tile" in caplog.text and "out of resources" in caplog.text
    assert tiles.chosen == {} and not tile_choices.path_for(0).exists()


def test_calls_get_real_tensors_of_the_shapes_and_strides_that_they_will_get(gpu: Gpu) -> None:
    def transposed() -> Tensor:
        return torch.empty(32, 512, dtype=torch.bfloat16).narrow(1, 200, 8).t()

    time_tiles.time_tiles(graph_of(transposed))
    x, scale, _ = gpu.calls[0]
    assert not isinstance(x, FakeTensor) and x.dtype == torch.bfloat16
    assert x.shape == (8, 32) and x.stride() == (1, 512)
    assert scale is not None and scale.item() == 1.0


def test_of_a_large_storage_a_call_gets_no_more_than_it_reads(gpu: Gpu) -> None:
    """A parameter may lie far behind the start of one that holds all, and is aligned as it lies there."""

    def one_of_many() -> Tensor:
        return torch.empty(1 << 22, dtype=torch.bfloat16).narrow(0, (1 << 21) + 13, 256).view(8, 32)

    time_tiles.time_tiles(graph_of(one_of_many))
    x = gpu.calls[0][0]
    assert x.untyped_storage().nbytes() < 1024 and x.storage_offset() == 13


def test_a_scale_is_not_looked_for_though_states_still_lack_theirs(gpu: Gpu, nothing_waits: None) -> None:
    calibration.expect(0)
    time_tiles.time_tiles(graph_of(narrow))
    assert [missing for *_, missing in gpu.calls] == [False] * len(gpu.calls)
    assert calibration.must_measure(torch.ones(()))


def test_the_users_random_numbers_are_not_touched(gpu: Gpu) -> None:
    before = torch.get_rng_state()
    time_tiles.time_tiles(graph_of(narrow))
    assert torch.equal(torch.get_rng_state(), before)
