"""Heads of odd width become a multiple of eight features wide, exactly, and the result is cut to theirs again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule

from te_compile.options import Options
from te_compile.passes.captured_nodes import argument, value_of
from te_compile.passes.find_attentions import find_attentions
from te_compile.passes.plan import Plan
from te_compile.passes.regions import regions_of
from te_compile.passes.widen_heads import widen_heads
from tests.capturing import captured

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BATCH, HEADS, QUERIES, KEYS, ODD = 2, 3, 10, 12, 20
HALF = torch.bfloat16
Run = Callable[..., Tensor]


def heads(length: int, width: int = ODD, dtype: torch.dtype = HALF, count: int = HEADS) -> Tensor:
    """[B, H, S, D], as a projection leaves them."""
    return torch.randn(BATCH, length, count, width, dtype=dtype).transpose(1, 2).requires_grad_()


def three(width: int = ODD, of_values: int = ODD, **kind: Any) -> tuple[Tensor, Tensor, Tensor]:
    return heads(QUERIES, width, **kind), heads(KEYS, width, **kind), heads(KEYS, of_values, **kind)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def change(gm: GraphModule, fuses: bool = True, **options: Any) -> int:
    """Run the pass as on a device with fused kernels, if it has them."""
    regions, left = regions_of(gm)
    plan = Plan()
    find_attentions(regions, left, plan)
    before = [(each.name, each.mask, each.status) for each in plan.attentions]
    count = widen_heads(regions, plan, Options.resolve(options), lambda node: fuses)
    gm.graph.lint()
    gm.recompile()
    assert [(each.name, each.mask, each.status) for each in plan.attentions] == before
    assert all(each.node in gm.graph.nodes for each in plan.attentions)
    return count


def widths(graph: Graph) -> list[int]:
    """Of queries, keys and values."""
    (call,) = graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    return [value_of(argument(call, place, name)).shape[-1] for place, name in enumerate(("query", "key", "value"))]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.4).transpose(1, 2).flatten(2)


def viewed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v).transpose(1, 2).contiguous().view(BATCH, QUERIES, -1)


def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)


CHANGED: dict[str, tuple[Run, tuple[Any, ...], list[int]]] = {
    "plain": (attention, three(), [24, 24, 24]),
    "causal, with a scale": (causal, three(), [24, 24, 24]),
    "a bias": (attention, (*three(), torch.randn(HEADS, QUERIES, KEYS, dtype=HALF)), [24, 24, 24]),
    "a mask": (attention, (*three(), torch.rand(QUERIES, KEYS) < 0.8), [24, 24, 24]),
    "values of another width": (attention, three(of_values=4), [24, 24, 8]),
    "odd values alone": (attention, three(16, 18), [16, 16, 24]),
    "odd queries alone": (attention, three(18, 16), [24, 24, 16]),
    "a single feature": (attention, three(1, 1), [8, 8, 8]),
    "views of the result": (viewed, three(), [24, 24, 24]),
    "shared heads": (shared, three(), [24, 24, 24]),
}


@pytest.mark.parametrize("case", CHANGED)
def test_heads_are_widened_and_cut_again(case: str) -> None:
    run, inputs, expected = CHANGED[case]
    gm, examples = captured(run, *inputs)
    (before,) = gm.graph.output_node().args[0]
    strides = value_of(before).stride()
    assert change(gm) == 1 and widths(gm.graph) == expected
    (after,) = gm.graph.output_node().args[0]
    assert value_of(after).shape == value_of(before).shape and value_of(after).stride() == strides
    leaves = [x for x in inputs if x.requires_grad]
    wide = [x.detach().float().requires_grad_(x.requires_grad) if x.dtype == HALF else x for x in inputs]
    results = []
    for y, given in ((gm(*examples)[0], leaves), (run(*wide), [x for x in wide if x.requires_grad])):
        weights = torch.linspace(-1, 2, y.numel()).view(y.shape)
        results.append([y.detach(), *torch.autograd.grad((y.float() * weights).sum(), given)])
    for got, wanted in zip(*results, strict=True):
        assert ((got.float() - wanted).norm() / wanted.norm()) < 1.5e-2


def test_under_autocast_operands_are_cast_as_sdpa_would() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast("cpu", HALF):
            return attention(q, k, v, mask)

    gm, examples = captured(run, *three(dtype=torch.float32), torch.randn(QUERIES, KEYS))
    assert change(gm) == 1
    (call,) = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    assert {value_of(each).dtype for each in (*call.args, call.kwargs["attn_mask"])} == {HALF}
    assert gm(*examples)[0].dtype == HALF


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def test_a_draw_of_eager_mode_stands_where_it_is_asked_for() -> None:
    for asked in (False, True):
        gm, _ = captured(dropped, *three())
        assert change(gm, fallback_random=asked) == (not asked)


def changed_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v).mul_(2)


def batched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.vmap(attention)(q[None], k[None], v[None])


LEFT: dict[str, tuple[Run, tuple[Any, ...]]] = {
    "a multiple of eight": (attention, three(24, 24)),
    "too wide for any": (attention, three(260, 260)),
    "float32": (attention, three(dtype=torch.float32)),
    "a result that is changed in place": (changed_in_place, three()),
    "inside of vmap": (batched, three()),
}


@pytest.mark.parametrize("case", LEFT)
def test_others_are_left_alone(case: str) -> None:
    run, inputs = LEFT[case]
    gm, _ = captured(run, *inputs)
    assert change(gm) == 0


def test_a_result_may_be_changed_in_place_where_nothing_has_a_gradient() -> None:
    with torch.no_grad():
        gm, _ = captured(changed_in_place, *three())
        assert change(gm) == 1


def test_other_devices_and_an_order_that_the_user_has_set() -> None:
    gm, _ = captured(attention, *three())
    assert change(gm, fuses=False) == 0
    before = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order([0, 1, 2, 3, 4])
    try:
        assert change(gm) == 0
    finally:
        torch._C._set_sdp_priority_order(before)


def test_a_batch_of_any_size() -> None:
    counts = []

    def changed(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        counts.append(change(gm))
        return gm.forward

    q, k, v = three()
    for each in (q, k, v):
        torch._dynamo.mark_dynamic(each, 0)
        torch._dynamo.mark_dynamic(each, 2)
    with torch.no_grad():
        got = torch.compile(attention, backend=changed)(q, k, v)
    assert counts == [1] and torch.allclose(got.float(), attention(q, k, v).float(), atol=2e-2)
