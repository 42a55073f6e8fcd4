"""Attention of few positions goes to the memory-efficient kernel, with the operands and the bias that it reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from te_compile.options import Options
from te_compile.passes import manager
from te_compile.passes.captured_nodes import value_of
from te_compile.passes.efficient_attention import EFFICIENT_ATTENTION
from te_compile.passes.find_attentions import find_attentions
from te_compile.passes.plan import Plan
from te_compile.passes.recognise_attention import recognise_attention
from te_compile.passes.regions import regions_of
from te_compile.passes.short_attentions import short_attentions
from tests.capturing import captured
from tests.kernel_order import order_of_kernels

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BATCH, HEADS, WIDTH = 3, 2, 24
HALF = torch.bfloat16
Run = Callable[..., Tensor]


def heads(length: int = 49, width: int = WIDTH, dtype: torch.dtype = HALF, count: int = HEADS) -> Tensor:
    """[B, H, S, D], as a projection leaves them."""
    return torch.randn(BATCH, length, count, width, dtype=dtype).transpose(1, 2).requires_grad_()


def three(length: int = 49, **kind: Any) -> tuple[Tensor, Tensor, Tensor]:
    return heads(length, **kind), heads(length, **kind), heads(length, **kind)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def change(gm: GraphModule, runs: bool = True, **options: Any) -> tuple[int, Plan]:
    """Run the pass as on a device where the kernel is the fastest, if it ``runs``."""
    regions, left = regions_of(gm)
    for region in regions:
        recognise_attention(region.graph)
    plan = Plan()
    find_attentions(regions, left, plan)
    count = short_attentions(regions, plan, Options.resolve(options), lambda node: runs)
    gm.graph.lint()
    return count, plan


def passed(run: Run, *inputs: Any, runs: bool = True) -> tuple[int, GraphModule]:
    """The captured graph of ``run`` after the pass."""
    gm, _ = captured(run, *inputs)
    count, _ = change(gm, runs)
    return count, gm


def as_the_kernel_defines_it(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, saves: bool, dropout: float, causal: bool, **by: Any
) -> tuple[Tensor, ...]:
    """What the kernel computes, on a CPU, from what it could read."""
    assert not dropout and (bias is None or (bias.dtype == query.dtype and bias.stride(-1) == 1))
    assert bias is None or (bias.stride(-2) % 8 == 0 and bias.shape == (*query.shape[:3], key.shape[2]))
    hidden = None if bias is None else bias.float()
    out = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), hidden, 0.0, causal, **by)
    return (out.to(query.dtype), *(torch.empty(0),) * 3)


def results_after_and_before(run: Run, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Of the rewritten graph, with the kernel's definition in its place, and of the model in float32."""
    gm, examples = captured(run, *inputs)
    count, plan = change(gm)
    assert count == 1 and [each.kernel for each in plan.attentions] == ["short"]
    (call,) = gm.graph.find_nodes(op="call_function", target=EFFICIENT_ATTENTION)
    call.target = as_the_kernel_defines_it
    gm.recompile()
    wide = (x if x.dtype == torch.bool else x.float() for x in inputs)
    return gm(*examples)[0], run(*wide)


SHOWN = torch.rand(BATCH, 1, 1, 49) < 0.7
MASKS: dict[str, Tensor] = {
    "a bias for each head": torch.randn(1, HEADS, 49, 49, dtype=HALF),
    "a bias whose keys lie apart": torch.randn(49, 49, HEADS, dtype=HALF).permute(2, 0, 1)[None],
    "two dimensions": torch.randn(49, 49, dtype=HALF),
    "one number for all keys": torch.randn(BATCH, 1, 49, 1, dtype=HALF),
    "booleans": SHOWN | (torch.arange(49) == 3),
    "a mask for each window": torch.randn(BATCH, HEADS, 49, 49, dtype=HALF),
}


@pytest.mark.parametrize("length", [49, 48])
@pytest.mark.parametrize("form", MASKS)
def test_masks_become_biases_that_the_kernel_reads(form: str, length: int) -> None:
    mask = MASKS[form]
    mask = mask[..., : min(length, mask.shape[-1])][..., : min(length, mask.shape[-2]), :]
    got, wanted = results_after_and_before(attention, *three(length), mask)
    torch.testing.assert_close(got.float(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_without_a_mask(causal: bool) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3).transpose(1, 2).flatten(2)

    got, wanted = results_after_and_before(run, *three())
    torch.testing.assert_close(got.float(), wanted, rtol=2e-2, atol=2e-2)


def test_it_saves_something_for_a_backward_pass_only_if_there_is_one() -> None:
    for grads in (True, False):
        with torch.set_grad_enabled(grads):
            _, gm = passed(attention, *three())
        (call,) = gm.graph.find_nodes(op="call_function", target=EFFICIENT_ATTENTION)
        assert call.args[4] == grads


def test_under_autocast_operands_are_cast_as_sdpa_would() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast("cpu", HALF):
            return attention(q, k, v, mask)

    count, gm = passed(run, *three(dtype=torch.float32), torch.randn(49, 49))
    (call,) = gm.graph.find_nodes(op="call_function", target=EFFICIENT_ATTENTION)
    assert count == 1 and {value_of(each).dtype for each in call.args[:4]} == {HALF}


def dropped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1)


def spelled_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.mT * 0.2
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    return F.dropout(weights, 0.1) @ v


def test_a_dropout_that_is_spelled_out_goes_along_with_a_mask_of_odd_rows() -> None:
    gm, _ = captured(spelled_out, *three(), torch.randn(49, 49, dtype=HALF))
    count, plan = change(gm)
    assert count == 1 and [each.kernel for each in plan.attentions] == ["short"]
    (call,) = gm.graph.find_nodes(op="call_function", target=EFFICIENT_ATTENTION)
    assert call.args[5] == 0.1


@pytest.mark.parametrize("option", [{}, {"fallback_random": True}])
def test_who_wants_the_draws_of_eager_mode_keeps_them(option: dict[str, Any]) -> None:
    gm, _ = captured(spelled_out, *three(), torch.randn(49, 49, dtype=HALF))
    assert change(gm, **option)[0] == (not option)


def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def changed_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v).mul_(2)


def batched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.vmap(attention)(q[None], k[None], v[None])


LEFT: dict[str, tuple[Run, tuple[Any, ...]]] = {
    "many positions": (attention, three(65)),
    "very few": (attention, three(15)),
    "one query": (attention, (heads(1), heads(), heads())),
    "many keys": (attention, (heads(), heads(100), heads(100))),
    "wide heads": (attention, three(width=72)),
    "float32": (attention, three(dtype=torch.float32)),
    "a dropout": (dropped, three()),
    "a dropout of SDPA's own under a mask": (dropped, (*three(), torch.randn(49, 49, dtype=HALF))),
    "a dropout that is spelled out, without a mask": (spelled_out, three()),
    "a dropout that is spelled out, with aligned rows": (spelled_out, (*three(48), torch.randn(48, 48, dtype=HALF))),
    "shared heads": (shared, (heads(), heads(count=1), heads(count=1))),
    "a bias that learns": (attention, (*three(), torch.randn(49, 49, dtype=HALF).requires_grad_())),
    "a result that is changed in place": (changed_in_place, three()),
    "inside of vmap": (batched, three()),
}


@pytest.mark.parametrize("case", LEFT)
def test_others_are_left_alone(case: str) -> None:
    run, inputs = LEFT[case]
    assert passed(run, *inputs)[0] == 0


def test_what_matters_for_gradients_matters_for_nothing_else() -> None:
    with torch.no_grad():
        assert passed(changed_in_place, *three())[0] == 1
        assert passed(attention, *three(), torch.randn(49, 49, dtype=HALF).requires_grad_())[0] == 1


def test_other_devices_and_an_order_that_the_user_has_set() -> None:
    assert passed(attention, *three(), runs=False)[0] == 0
    with order_of_kernels([0, 1, 2, 3, 4]):
        assert passed(attention, *three())[0] == 0


def test_a_batch_of_any_size() -> None:
    counts = []

    def changed(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        counts.append(change(gm)[0])
        for call in gm.graph.find_nodes(op="call_function", target=EFFICIENT_ATTENTION):
            call.target = as_the_kernel_defines_it
        gm.recompile()
        return gm.forward

    q, k, v = three()
    for each in (q, k, v):
        torch._dynamo.mark_dynamic(each, 0)
    bias = torch.randn(1, HEADS, 49, 49, dtype=HALF)
    with torch.no_grad():
        got, wanted = torch.compile(attention, backend=changed)(q, k, v, bias), attention(q, k, v, bias)
    assert counts == [1] and torch.allclose(got.float(), wanted.float(), atol=2e-2)


def test_on_a_cpu_nothing_changes() -> None:
    with manager.recording() as records:
        torch.compile(attention, backend="te_fp8", options={"compiler": "aot_eager"})(*three())
    (record,) = records
    assert [each.kernel for each in record.plan.attentions] == [""]
    assert {each.name: each.count for each in record.passes}["short_attentions"] == 0


def test_hidden_numbers_are_those_that_hide() -> None:
    shown = torch.ones(49, 49, dtype=torch.bool)
    shown[:, 1] = False
    _, gm = passed(attention, *three(), shown)
    (fill,) = (node for node in gm.graph.nodes if node.target == "masked_fill")
    assert fill.args[2] == -math.inf
