"""What becomes of a graph's kernels while Inductor compiles: who orders them, and when tiles are timed."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from torch._inductor import config
from torch.fx import Graph

from te_compile import prepared_kernels
from te_compile.kernels import ahead
from te_compile.options import Options
from te_compile.passes import time_tiles
from te_compile.passes.manager import Compilation
from te_compile.passes.plan import Plan
from tests.passes.test_rehearse import graph_of


def kernels_ahead() -> prepared_kernels.KernelsAhead:
    recipe = SimpleNamespace(stateful=True)
    return prepared_kernels.KernelsAhead(Compilation(Plan(), "", ""), SimpleNamespace(recipe=recipe))  # type: ignore[arg-type]


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is ordered, each time."""
    asked: list[Any] = []
    monkeypatch.setattr(ahead, "is_possible", lambda: True)
    monkeypatch.setattr(ahead, "compile_ahead", lambda launches: asked.append(launches))
    monkeypatch.setattr(prepared_kernels, "rehearse", lambda graph, missing: [f"missing: {missing}"])
    return asked


def test_what_the_first_step_launches_is_ordered_first(orders: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_kernels, "_is_on_gpu", lambda placeholder: True)
    kernels = kernels_ahead()
    kernels.order(graph_of())
    assert orders == [["missing: True"]]
    kernels.order_later()
    assert orders == [["missing: True"], ["missing: False"]]


def test_graphs_on_a_cpu_order_nothing(orders: list[Any]) -> None:
    kernels = kernels_ahead()
    kernels.order(graph_of())
    assert orders == [] and kernels.later == []


def test_a_rehearsal_that_fails_altogether_fails_no_compilation(
    orders: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(graph: Graph, missing: bool) -> Any:
        raise KeyError("nobody thought of this")

    monkeypatch.setattr(prepared_kernels, "_is_on_gpu", lambda placeholder: True)
    monkeypatch.setattr(prepared_kernels, "rehearse", fail)
    with caplog.at_level(logging.WARNING, "te_compile"):
        kernels_ahead().order(graph_of())
    assert "nobody thought of this" in caplog.text and orders == []


# --- tiles ---


def timed_for(options: Options, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes that are recorded where a graph on a GPU is compiled."""
    monkeypatch.setattr(prepared_kernels, "_is_on_gpu", lambda placeholder: True)
    monkeypatch.setattr(time_tiles, "time_tiles", lambda graph: 3)
    compilation = Compilation(Plan(), "", "")
    prepared_kernels.TimedTiles(compilation, options, []).time(graph_of())
    return [f"{record.name} {record.count}" for record in compilation.passes]


@pytest.mark.parametrize(
    "options, is_timed",
    [
        (Options(), False),
        (Options(mode="default"), False),
        (Options(mode="reduce-overhead"), False),
        (Options(mode="max-autotune"), True),
        (Options(mode="max-autotune-no-cudagraphs"), True),
        (Options(inductor={"max_autotune": True}), True),
        (Options(inductor={"max_autotune_pointwise": True}), True),
        (Options(inductor={"max_autotune_gemm": True}), False),
        (Options(mode="max-autotune", inductor={"max_autotune": False}), False),
    ],
)
def test_tiles_are_timed_for_who_asks(options: Options, is_timed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert timed_for(options, monkeypatch) == (["time_tiles 3"] if is_timed else [])


def test_inductors_configuration_asks_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    with config.patch(max_autotune=True):
        assert timed_for(Options(), monkeypatch) == ["time_tiles 3"]


def test_a_timing_that_fails_fails_no_compilation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(graph: Graph) -> int:
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr(prepared_kernels, "_is_on_gpu", lambda placeholder: True)
    monkeypatch.setattr(time_tiles, "time_tiles", fail)
    compilation = Compilation(Plan(), "", "")
    with caplog.at_level(logging.WARNING, "te_compile"):
        prepared_kernels.TimedTiles(compilation, Options(mode="max-autotune"), []).time(graph_of())
    assert "nobody thought of this" in caplog.text and compilation.passes == []


def test_nothing_is_timed_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_tiles, "time_tiles", lambda graph: pytest.fail("a graph on the CPU was timed"))
    compilation = Compilation(Plan(), "", "")
    prepared_kernels.TimedTiles(compilation, Options(mode="max-autotune"), []).time(graph_of())
    assert compilation.passes == []
