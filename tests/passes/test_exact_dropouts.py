"""A dropout that a model spells out keeps its probability where attention has a mask."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from te_compile.passes import manager
from te_compile.passes.efficient_attention import EFFICIENT_ATTENTION
from te_compile.passes.exact_dropouts import exact_dropouts
from te_compile.passes.find_attentions import find_attentions
from te_compile.passes.leave_cudnn import PRODUCTS
from te_compile.passes.plan import Plan
from te_compile.passes.recognise_attention import recognise_attention
from te_compile.passes.regions import regions_of
from tests.capturing import captured

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 32, 16
Run = Callable[..., Tensor]


def heads(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(BATCH, LENGTH, HEADS, WIDTH, dtype=dtype).transpose(1, 2).requires_grad_()


def bias(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(1, HEADS, LENGTH, LENGTH, dtype=dtype)


def spelled_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float = 0.1) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5 + mask
    return F.dropout(torch.softmax(scores, dim=-1), dropout) @ v


def change(gm: GraphModule, rounds: bool = True, efficient: bool = True) -> tuple[int, Plan]:
    """Run the pass as on a device where SDPA is cuDNN's, if it ``rounds``."""
    regions, left = regions_of(gm)
    for region in regions:
        recognise_attention(region.graph)
    plan = Plan()
    find_attentions(regions, left, plan)
    count = exact_dropouts(regions, plan, lambda _: rounds, lambda _: efficient)
    gm.graph.lint()
    gm.recompile()
    return count, plan


def targets(gm: GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes]


def test_a_bias_goes_to_the_memory_efficient_kernel() -> None:
    gm, _ = captured(spelled_out, heads(), heads(), heads(), bias())
    count, plan = change(gm)
    assert count == 1 and [each.kernel for each in plan.attentions] == ["exact"]
    (call,) = gm.graph.find_nodes(op="call_function", target=EFFICIENT_ATTENTION)
    assert call.args[5] == 0.1 and F.scaled_dot_product_attention not in targets(gm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_that_cannot_be_called_products_draw(dtype: torch.dtype) -> None:
    inputs = (heads(dtype), heads(dtype), heads(dtype), bias(dtype))
    gm, examples = captured(spelled_out, *inputs)
    count, plan = change(gm, efficient=False)
    assert count == 1 and [each.kernel for each in plan.attentions] == ["exact"]
    assert PRODUCTS in targets(gm) and F.scaled_dot_product_attention not in targets(gm)
    # The mean over many draws is what there is without a dropout. Its variance goes with p / (1 - p): 29% more for an
    # eighth than for a tenth.
    got = torch.stack([gm(*examples)[0].detach().float() for _ in range(600)])
    wanted = spelled_out(*inputs, dropout=0.0).detach().float()
    kept = float((got.mean(0) * wanted).sum() / wanted.square().sum())
    assert abs(kept - 1) < 0.02
    spread = float((got - wanted).square().mean())
    other = torch.stack([spelled_out(*inputs).detach().float() for _ in range(600)])
    assert abs(spread / float((other - wanted).square().mean()) - 1) < 0.1


def test_products_have_the_order_that_views_see() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return spelled_out(q, k, v, mask).transpose(1, 2).reshape(BATCH, LENGTH, HEADS * WIDTH)

    gm, examples = captured(run, heads(), heads(), heads(), bias())
    change(gm, efficient=False)
    assert gm(*examples)[0].shape == (BATCH, LENGTH, HEADS * WIDTH)


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1)


def without_one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return spelled_out(q, k, v, mask, 0.0)


LEFT: dict[str, tuple[Run, bool]] = {
    "a probability of two sixteenths": (partial(spelled_out, dropout=0.125), True),
    "no dropout": (without_one, True),
    "the model's own call of SDPA": (by_sdpa, True),
    "another kernel's": (spelled_out, False),
}


@pytest.mark.parametrize("case", LEFT)
def test_others_are_left_alone(case: str) -> None:
    run, rounds = LEFT[case]
    gm, _ = captured(run, heads(), heads(), heads(), bias())
    assert change(gm, rounds=rounds)[0] == 0


def test_on_a_cpu_nothing_changes() -> None:
    with manager.recording() as records:
        fast = torch.compile(spelled_out, backend="te_fp8", options={"compiler": "aot_eager"})
        fast(heads(), heads(), heads(), bias())
    (record,) = records
    assert {each.name: each.count for each in record.passes}["exact_dropouts"] == 0
    assert [each.kernel for each in record.plan.attentions] == [""]
