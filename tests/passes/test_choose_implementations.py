"""Choosing: every te:: node bears the name of what runs it, and of what could not and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from te_compile.ops import registry
from te_compile.ops.quantize import QUANTIZE, quantize_reference
from te_compile.passes.arguments import arguments_of
from te_compile.passes.choose_implementations import choose_implementations
from te_compile.recipe import ScaleRule
from tests.capturing import traced

RULE = ScaleRule().text()


@pytest.fixture
def offered() -> Iterator[list[dict[str, Any]]]:
    """A second implementation of te::quantize for wide matrices on the CPU; the arguments it was asked about."""
    asked: list[dict[str, Any]] = []

    def check(target: registry.Target, arguments: dict[str, Any]) -> None:
        asked.append({"target": target, **arguments})
        if arguments["x"].shape[1] < 64:
            raise registry.Unsupported("too narrow")

    registry.register("quantize", "wide", priority=1000, check=check)(quantize_reference)
    yield asked
    del registry._TABLE["quantize", "wide"]


def quantize_node(width: int, dtype: torch.dtype = torch.float32) -> Node:
    """The te::quantize of a traced graph after the choice."""

    def run(x: Tensor) -> Tensor:
        return QUANTIZE(x, None, torch.float8_e4m3fn, True, False, RULE)[0].float().sin()

    gm = traced(run, torch.randn(4, width, dtype=dtype))
    assert choose_implementations(gm.graph) == 1
    gm.recompile()
    gm(torch.randn(4, width, dtype=dtype))
    (node,) = gm.graph.find_nodes(op="call_function", target=QUANTIZE)
    return node


def test_on_a_cpu_the_reference_runs() -> None:
    assert arguments_of(quantize_node(64))["implementation"] == "reference"


def test_the_best_that_fits_is_written_on_the_node(offered: list[dict[str, Any]]) -> None:
    assert arguments_of(quantize_node(64))["implementation"] == "wide"


def test_what_does_not_fit_is_passed_over_and_its_reason_kept(offered: list[dict[str, Any]]) -> None:
    node = quantize_node(32)
    assert arguments_of(node)["implementation"] == "reference"
    assert "wide: too narrow" in node.meta["te_declined"]


def test_an_implementation_is_asked_with_the_dtypes_and_shapes_of_the_graph(offered: list[dict[str, Any]]) -> None:
    quantize_node(48, torch.bfloat16)
    (asked,) = offered
    assert asked["target"] == registry.Target("cpu")
    assert asked["x"].dtype == torch.bfloat16 and tuple(asked["x"].shape) == (4, 48)
    assert asked["columnwise"] is False and asked["rule"] == RULE


def test_nodes_of_others_are_left_alone() -> None:
    gm = traced(lambda x: x.sin(), torch.randn(3))
    assert choose_implementations(gm.graph) == 0
