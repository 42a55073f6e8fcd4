"""A rehearsal runs the code behind each operator that a Triton kernel runs, on fakes, and what it cannot run it leaves
to the first launch."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from te_compile.kernels.recording import here
from te_compile.ops import registry
from te_compile.ops.quantize import QUANTIZE
from te_compile.passes.arguments import set_arguments
from te_compile.passes.rehearse import rehearse
from te_compile.recipe import ScaleRule
from tests.capturing import traced

RULE = ScaleRule().text()
E4M3 = torch.float8_e4m3fn


def two_quantizes(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    first = QUANTIZE(x, None, E4M3, True, False, RULE)[0]
    return first, QUANTIZE(y, None, E4M3, True, False, RULE)[0]


def graph_of(width: int = 32, implementation: str = "triton") -> Graph:
    """Of two quantizes, of matrices 32 and ``width`` wide."""
    gm = traced(two_quantizes, torch.randn(8, 32), torch.randn(8, width))
    for node in gm.graph.find_nodes(op="call_function", target=QUANTIZE):
        set_arguments(node, implementation=implementation)
    return gm.graph


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Instead of te::quantize by Triton: code that notes the widths it is called with, and whether scales are missing.
    It cannot run matrices 48 wide."""
    calls: list[tuple[int, bool]] = []

    def run(x: Tensor, *_: Any) -> None:
        assert isinstance(x, FakeTensor) and here.rehearsal is not None and not torch.is_grad_enabled()
        if x.shape[1] == 48:
            raise NotImplementedError("48")
        calls.append((x.shape[1], here.rehearsal.missing))

    entry = registry._TABLE["quantize", "triton"]
    replaced = registry.Implementation("quantize", "triton", run, entry.priority, entry.check)
    monkeypatch.setitem(registry._TABLE, ("quantize", "triton"), replaced)
    return calls


@pytest.mark.parametrize("missing", [False, True])
def test_each_kind_of_call_is_rehearsed_once(rehearsed: list[tuple[int, bool]], missing: bool) -> None:
    rehearse(graph_of(32), missing)
    assert rehearsed == [(32, missing)]
    rehearse(graph_of(64), missing)
    assert rehearsed[1:] == [(32, missing), (64, missing)]
    assert here.rehearsal is None


def test_other_implementations_are_not_called(rehearsed: list[tuple[int, bool]]) -> None:
    assert rehearse(graph_of(implementation="reference"), False) == []
    assert rehearse(graph_of(implementation="cuda"), False) == []
    assert rehearsed == []


def test_code_that_fails_is_told_of_and_the_rest_goes_on(
    rehearsed: list[tuple[int, bool]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "te_compile"):
        rehearse(graph_of(48), False)
    assert rehearsed == [(32, False)]
    assert "not known ahead" in caplog.text and here.rehearsal is None


def test_shapes_that_are_not_known_are_left_out(rehearsed: list[tuple[int, bool]]) -> None:
    graph = graph_of()
    gm = make_fx(two_quantizes, tracing_mode="symbolic")(torch.randn(8, 32), torch.randn(8, 64))
    for node in gm.graph.find_nodes(op="call_function", target=QUANTIZE):
        set_arguments(node, implementation="triton")
    rehearse(gm.graph, False)
    assert rehearsed == []
    rehearse(graph, False)
    assert rehearsed == [(32, False)]
