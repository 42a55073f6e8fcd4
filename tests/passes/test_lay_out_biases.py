"""Biases are laid out for fused kernels, and one that learns goes to the kernel that gives it its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from te_compile.options import Options
from te_compile.passes.captured_nodes import argument, value_of
from te_compile.passes.efficient_attention import EFFICIENT_ATTENTION
from te_compile.passes.find_attentions import find_attentions
from te_compile.passes.lay_out_biases import lay_out_biases
from te_compile.passes.plan import Plan
from te_compile.passes.regions import regions_of
from tests.capturing import captured
from tests.kernel_order import order_of_kernels

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 32, 16
Run = Callable[..., Tensor]


def heads(length: int = LENGTH, count: int = HEADS, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(BATCH, length, count, WIDTH, dtype=dtype).transpose(1, 2).requires_grad_()


def table(learns: bool = False, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A number for each distance and head, as relative positions have it."""
    return torch.randn(2 * LENGTH, HEADS, dtype=dtype, requires_grad=learns)


def relative(table: Tensor, queries: int, keys: int) -> Tensor:
    """[1, H, queries, keys], whose elements lie as many apart as there are heads."""
    distance = torch.arange(queries)[:, None] - torch.arange(keys)[None, :] + LENGTH
    return table[distance].permute(2, 0, 1).unsqueeze(0)


def attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    bias = relative(table, q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.5)


def change(gm: GraphModule, reads: bool = True, **options: Any) -> tuple[int, Plan]:
    """Run the pass as on a device where a fused kernel reads a bias, if it ``reads`` one."""
    regions, left = regions_of(gm)
    plan = Plan()
    find_attentions(regions, left, plan)
    count = lay_out_biases(regions, plan, Options.resolve(options), lambda node: reads)
    gm.graph.lint()
    gm.recompile()
    return count, plan


def passed(run: Run, *inputs: Tensor, reads: bool = True) -> tuple[int, GraphModule, Plan]:
    """The captured graph of ``run`` after the pass."""
    gm, _ = captured(run, *inputs)
    count, plan = change(gm, reads)
    return count, gm, plan


def mask_strides(gm: GraphModule) -> tuple[int, ...]:
    (call,) = (node for node in gm.graph.nodes if node.target is F.scaled_dot_product_attention)
    return tuple(value_of(argument(call, 3, "attn_mask")).stride())


def test_a_bias_that_learns_goes_to_the_kernel_that_lets_it() -> None:
    count, gm, plan = passed(attention, heads(), heads(), heads(), table(learns=True))
    (call,) = gm.graph.find_nodes(op="call_function", target=EFFICIENT_ATTENTION)
    bias = value_of(call.args[3])
    assert count == 1 and not gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    assert bias.shape == (BATCH, HEADS, LENGTH, LENGTH) and bias.stride() == (0, LENGTH * LENGTH, LENGTH, 1)
    assert call.args[4:] == (True, 0.0, False) and call.kwargs == {"scale": 0.5}
    assert [each.kernel for each in plan.attentions] == ["efficient"] and plan.attentions[0].node is call


@pytest.mark.parametrize("keys", [24, 21])
def test_only_rows_that_start_at_aligned_places_can_be_read(keys: int) -> None:
    count, gm, _ = passed(attention, heads(), heads(keys), heads(keys), table(learns=True))
    assert count == len(gm.graph.find_nodes(op="call_function", target=EFFICIENT_ATTENTION)) == (keys % 8 == 0)


def test_the_result_lies_in_memory_as_before() -> None:
    gm, _ = captured(attention, heads(), heads(), heads(), table(learns=True))
    (before,) = gm.graph.output_node().args[0]
    _, changed, _ = passed(attention, heads(), heads(), heads(), table(learns=True))
    (after,) = changed.graph.output_node().args[0]
    assert value_of(after).stride() == value_of(before).stride() and value_of(after).shape == value_of(before).shape


@pytest.mark.parametrize("expanded", [False, True])
def test_another_bias_is_laid_out_and_shared_by_the_batch_as_before(expanded: bool) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        bias = relative(table, q.shape[2], k.shape[2])
        if expanded:
            bias = bias.expand(q.shape[0], -1, -1, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    inputs = heads(), heads(), heads(), table()
    gm, examples = captured(run, *inputs)
    count, plan = change(gm)
    assert count == 1 and [each.kernel for each in plan.attentions] == [""]
    assert mask_strides(gm)[1:] == (LENGTH * LENGTH, LENGTH, 1) and (mask_strides(gm)[0] == 0) == expanded
    assert torch.equal(gm(*examples)[0], run(*inputs))


def test_without_gradients_nothing_learns() -> None:
    with torch.no_grad():
        count, gm, _ = passed(attention, heads(), heads(), heads(), table(learns=True))
    assert count == 1 and mask_strides(gm)[-1] == 1


def test_a_batch_of_any_size() -> None:
    counts = []

    def changed(gm: GraphModule, example_inputs: list[object]) -> Callable[..., object]:
        counts.append(change(gm)[0])
        return gm.forward

    q, k, v = heads(), heads(), heads()
    for each in (q, k, v):
        torch._dynamo.mark_dynamic(each, 0)
    numbers = table()
    with torch.no_grad():
        got = torch.compile(attention, backend=changed)(q, k, v, numbers)
        assert counts == [1] and torch.equal(got, attention(q, k, v, numbers))


LEFT: dict[str, tuple[Run, tuple[Tensor, ...]]] = {
    "keys lie side by side": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        (torch.randn(HEADS, LENGTH, LENGTH, dtype=torch.bfloat16),),
    ),
    "no mask": (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v), (table(),)),
}


@pytest.mark.parametrize("case", LEFT)
def test_others_are_left_alone(case: str) -> None:
    run, mask = LEFT[case]
    count, gm, _ = passed(run, heads(), heads(), heads(), *mask)
    assert count == 0 and gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)


def test_float32_and_other_devices_are_left_alone() -> None:
    wide = [heads(dtype=torch.float32) for _ in range(3)]
    assert passed(attention, *wide, table(learns=True, dtype=torch.float32))[0] == 0
    assert passed(attention, heads(), heads(), heads(), table(learns=True), reads=False)[0] == 0


@pytest.mark.parametrize("learns", [False, True])
def test_eager_modes_draws_are_left_alone_where_they_are_asked_for(learns: bool) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        bias = relative(table, q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=0.1)

    for asked in (False, True):
        gm, _ = captured(run, heads(), heads(), heads(), table(learns))
        assert change(gm, fallback_random=asked)[0] == (not asked)


@pytest.mark.parametrize("learns", [False, True])
def test_a_result_that_is_changed_in_place_is_left_alone(learns: bool) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return attention(q, k, v, table).mul_(2)

    inputs = heads(), heads(), heads(), table(learns)
    assert passed(run, *inputs)[0] == 0
    with torch.no_grad():
        assert passed(run, *inputs)[0] == 1


def test_heads_that_sdpa_would_share_are_left_alone() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        bias = relative(table, LENGTH, LENGTH)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)

    assert passed(run, heads(), heads(count=2), heads(count=2), table(learns=True))[0] == 0


def test_an_order_of_kernels_that_the_user_has_set_stands() -> None:
    with order_of_kernels([0, 1, 2, 3, 4]):
        assert passed(attention, heads(), heads(), heads(), table(learns=True))[0] == 0
