"""Sharing: equal quantizes merge, different ones do not, and no number changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from te_compile.ops.quantize import QUANTIZE
from te_compile.passes.share_inputs import share_inputs
from te_compile.passes.text import ops_text
from te_compile.recipe import ScaleRule
from tests.capturing import traced

RULE = ScaleRule().text()
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def quantize(x: Tensor, scale: Tensor | None = None, dtype: torch.dtype = E4M3, rule: str = RULE) -> Tensor:
    return QUANTIZE(x, scale, dtype, True, True, rule)[0].float()


def test_two_quantizes_of_one_value_become_one() -> None:
    x = torch.randn(8, 32)
    gm = traced(lambda x: quantize(x) + quantize(x), x)
    expected = gm(x)
    assert share_inputs(gm.graph) == 1
    gm.graph.lint()
    gm.recompile()
    assert len(gm.graph.find_nodes(op="call_function", target=QUANTIZE)) == 1
    assert torch.equal(gm(x), expected)


def test_equal_views_on_the_way_do_not_hide_that_the_value_is_one() -> None:
    gm = traced(lambda x: quantize(x.reshape(-1, 32)) + quantize(x.reshape(-1, 32)), torch.randn(2, 4, 32))
    assert ops_text(gm.graph).count("view") >= 2
    assert share_inputs(gm.graph) == 1
    gm.graph.eliminate_dead_code()
    names = [line.split(" = ")[1].partition("(")[0] for line in ops_text(gm.graph).splitlines()[:-1]]
    assert names == ["aten.view", "te.quantize", "getitem", "aten._to_copy", "aten._to_copy", "aten.add.Tensor"]


def test_equal_scales_selected_twice_are_one_scale() -> None:
    def run(x: Tensor, scales: Tensor) -> Tensor:
        return quantize(x, scales.select(0, 1)) + quantize(x, scales.select(0, 1))

    assert share_inputs(traced(run, torch.randn(8, 32), torch.rand(3)).graph) == 1


@pytest.mark.parametrize(
    "run",
    [
        lambda x, s: quantize(x) + quantize(x + 1),
        lambda x, s: quantize(x) + quantize(x, dtype=E5M2),
        lambda x, s: quantize(x, s.select(0, 0)) + quantize(x, s.select(0, 1)),
        lambda x, s: quantize(x) + quantize(x, s.select(0, 0)),
        lambda x, s: quantize(x) + quantize(x, rule=ScaleRule(margin=1).text()),
        lambda x, s: quantize(x.view(32, 8)).view(8, 32) + quantize(x),
    ],
    ids=["values", "dtypes", "scales", "recipes", "rules", "shapes"],
)
def test_different_ones_stay_apart(run: object) -> None:
    gm = traced(run, torch.randn(8, 32), torch.rand(2))
    assert share_inputs(gm.graph) == 0
    assert len(gm.graph.find_nodes(op="call_function", target=QUANTIZE)) == 2


def test_a_recomputed_quantize_is_not_merged_with_one_that_is_not() -> None:
    gm = traced(lambda x: quantize(x) + quantize(x), torch.randn(8, 32))
    second = gm.graph.find_nodes(op="call_function", target=QUANTIZE)[1]
    second.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    assert share_inputs(gm.graph) == 0


def test_arithmetic_is_left_to_inductor() -> None:
    gm = traced(lambda x: x.sin() + x.sin(), torch.randn(8))
    before = ops_text(gm.graph)
    assert share_inputs(gm.graph) == 0
    assert ops_text(gm.graph) == before
