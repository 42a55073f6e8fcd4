"""What surrounds each pass: its count and time, a lint right after it, texts for whoever listens, dumps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Graph
from torch.nn import functional as F

import te_compile
from te_compile.options import OptionError
from te_compile.passes import manager
from te_compile.passes.manager import Compilation, PassError
from te_compile.passes.plan import Plan
from tests.compiling import compiled


def two_calls() -> Graph:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.sin, (graph.call_function(torch.neg, (x,)),)))
    return graph


def test_each_run_is_recorded_in_order_with_its_count_and_time() -> None:
    compilation, graph = Compilation(Plan(), "delayed", ""), two_calls()
    assert compilation.run("first", lambda: 3, graph) == 3
    compilation.run("second", lambda: 0, graph)
    assert [(each.name, each.count) for each in compilation.passes] == [("first", 3), ("second", 0)]
    assert all(each.seconds >= 0 for each in compilation.passes)


def test_a_pass_that_leaves_a_broken_graph_is_caught_at_once() -> None:
    graph = two_calls()
    _, neg, sin, _ = graph.nodes

    def break_the_order() -> int:
        sin.append(neg)  # now its argument comes after it
        return 1

    with pytest.raises(PassError, match=r"break_the_order failed with RuntimeError: .*before it has been defined"):
        Compilation(Plan(), "delayed", "").run("break_the_order", break_the_order, graph)


@pytest.mark.parametrize(("name", "way_out"), [
    ("fold_masks", r"options=\{'skip_passes': 'fold_masks'\} compiles without it"),
    ("lower_linears", "nothing can be compiled to FP8 without it"),
])  # fmt: skip
def test_a_pass_that_fails_is_named_with_a_way_out(name: str, way_out: str) -> None:
    def work() -> int:
        raise AttributeError("'tuple' object has no attribute 'dtype'")

    said = f"the pass {name} failed with AttributeError: 'tuple' object has no attribute 'dtype'; .*{way_out}"
    with pytest.raises(PassError, match=said) as raised:
        Compilation(Plan(), "delayed", "").run(name, work, two_calls())
    assert isinstance(raised.value.__cause__, AttributeError)


@pytest.mark.parametrize("error", [OptionError("exclude"), torch._dynamo.exc.SkipFrame("elsewhere")])
def test_errors_that_tell_somebody_something_go_through(error: Exception) -> None:
    def work() -> int:
        raise error

    with pytest.raises(type(error)) as raised:
        Compilation(Plan(), "delayed", "").run("a_pass", work, two_calls())
    assert raised.value is error


def test_a_pass_that_is_left_out_neither_runs_nor_is_recorded() -> None:
    compilation = manager.begin(Plan(), "delayed", "", ("a_pass",))
    assert compilation.run("a_pass", lambda: 1 // 0, two_calls()) == 0
    assert compilation.run("another", lambda: 2, two_calls()) == 2
    assert [each.name for each in compilation.passes] == ["another"]


def test_texts_are_kept_for_whoever_listens_and_for_nobody_else() -> None:
    def texts() -> tuple[str, str]:
        compilation, graph = manager.begin(Plan(), "delayed", ""), two_calls()
        neg = list(graph.nodes)[1]

        def cos_for_neg() -> int:
            neg.target = torch.cos
            return 1

        compilation.run("cos_for_neg", cos_for_neg, graph)
        return compilation.passes[0].before, compilation.passes[0].after

    assert texts() == ("", "")
    with manager.recording() as outer:
        with manager.recording() as inner:
            before, after = texts()
        texts()
    assert "neg" in before and "cos" not in before and "cos" in after
    assert (len(inner), len(outer)) == (1, 1)


def test_ranks_dump_into_directories_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_COMPILE_DEBUG", str(tmp_path))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    for rank in (0, 3):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        Compilation(Plan(), "delayed", "").run("a_pass", lambda: 0, two_calls())
    assert sorted(each.name for each in tmp_path.iterdir()) == ["rank_0", "rank_3"]
    (graph,) = (tmp_path / "rank_3").iterdir()
    assert sorted(each.name for each in graph.iterdir()) == ["00_captured.txt", "01_a_pass.txt"]


# --- nothing runs in FP8 ----------------------------------------------------------------------------------------------


def perceptron(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).to(dtype)


def warnings_of(run: Callable[..., Any], x: Tensor, **options: Any) -> list[str]:
    """What a compilation warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(run, **options)(x)
    return [str(each.message) for each in caught if "te_fp8" in str(each.message)]


@pytest.mark.usefixtures("fresh_dynamo")
def test_who_asks_for_fp8_and_gets_none_is_warned_and_told_why() -> None:
    (warning,) = warnings_of(perceptron(torch.float64), torch.randn(4, 32, dtype=torch.float64))
    assert "none of the 2 linears" in warning and "its input is torch.float64; cast it to" in warning


@pytest.mark.usefixtures("fresh_dynamo")
def test_whoever_records_the_compilation_is_not_warned_besides() -> None:
    with manager.recording():
        assert not warnings_of(perceptron(torch.float64), torch.randn(4, 32, dtype=torch.float64))
    x = torch.randn(4, 32, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = te_compile.explain(perceptron(torch.float64), x)
    assert report.fp8_flops_fraction == 0


@pytest.mark.usefixtures("fresh_dynamo")
def test_no_warning_where_a_linear_runs_or_was_not_meant_to_or_nothing_can_be_done() -> None:
    model, weight, x = perceptron(), torch.randn(32, 32), torch.randn(4, 32)
    assert not warnings_of(lambda x: F.linear(x, model[0].weight) + F.linear(x, weight), x)
    assert not warnings_of(model, x, exclude=["*"])
    assert not warnings_of(nn.Linear(32, 4), x)  # too narrow, by rule
    assert not warnings_of(lambda x: F.linear(x, x.tanh().repeat(8, 1)), x)  # a weight made from the input
    assert not warnings_of(lambda x: x.relu(), x)
