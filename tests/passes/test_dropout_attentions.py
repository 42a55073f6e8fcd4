"""Attention with dropout becomes te::dropout_attention where its kernels run it, and stays where anything differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from te_compile.ops import registry
from te_compile.ops.dropout_attention import DROPOUT_ATTENTION
from te_compile.ops.dropout_bits import kept_share
from te_compile.ops.triton_implementations import check_dropout_attention
from te_compile.options import Options
from te_compile.passes import attention_kernels
from te_compile.passes import dropout_attentions as module
from te_compile.passes.attention_kernels import choose_attention_kernels
from te_compile.passes.captured_nodes import value_of
from te_compile.passes.find_attentions import find_attentions
from te_compile.passes.plan import Plan
from te_compile.passes.recognise_attention import recognise_attention
from te_compile.passes.regions import regions_of
from tests.capturing import captured

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

ATTEND: Any = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the references were kernels, and PyTorch in the order that it has of itself."""
    monkeypatch.setattr(attention_kernels, "is_faster_on", lambda device: True)
    monkeypatch.setattr(module, "_is_run_by_kernels", lambda node: True)
    before = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order(attention_kernels._CUDNN_FIRST)
    yield
    torch._C._set_sdp_priority_order(before)


def heads(length: int = 64, count: int = 2, width: int = 32, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(2, length, count, width, dtype=dtype).transpose(1, 2)


def passed(run: Callable[..., Any], *inputs: Tensor, **options: Any) -> tuple[int, GraphModule, Plan]:
    gm, _ = captured(run, *inputs)
    recognise_attention(gm.graph)
    regions, left = regions_of(gm)
    plan = Plan()
    find_attentions(regions, left, plan)
    chosen = Options.resolve({"cost_model": False, **options})
    count = choose_attention_kernels(regions, plan, chosen, lambda kernel, node: False)
    gm.graph.lint()
    return count, gm, plan


def spelled_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(F.softmax(q @ k.mT * 0.125, dim=-1), 0.1) @ v


@pytest.mark.parametrize("causal", [False, True])
def test_a_call_of_sdpa_is_taken(causal: bool) -> None:
    run = partial(ATTEND, dropout_p=0.1, is_causal=causal, scale=0.5)
    count, gm, plan = passed(lambda q, k, v: run(q, k, v), heads(), heads(), heads())
    (call,) = (node for node in gm.graph.nodes if node.target is DROPOUT_ATTENTION)
    assert count == 1 and call.args[3:] == (0.1, causal, 0.5)
    (attention,) = plan.attentions
    assert attention.kernel == "te" and attention.node is call


def test_attention_that_is_spelled_out_is_taken_and_lies_as_before() -> None:
    for inputs in ([heads() for _ in range(3)], [heads().contiguous() for _ in range(3)]):
        before, _ = captured(spelled_out, *inputs)
        count, gm, _ = passed(spelled_out, *inputs)
        (new,), (old,) = (each.graph.output_node().args[0] for each in (gm, before))
        assert count == 1 and value_of(new).stride() == value_of(old).stride()


def test_keys_may_be_more_than_queries() -> None:
    assert passed(lambda q, k, v: ATTEND(q, k, v, dropout_p=0.1), heads(64), heads(80), heads(80))[0] == 1


def with_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ATTEND(q, k, v, attn_mask=q[..., :1].mT.expand(-1, -1, q.shape[2], -1) > 0, dropout_p=0.1)


def without_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ATTEND(q, k, v)


def changed_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ATTEND(q, k, v, dropout_p=0.1).mul_(2)


def in_sixteenths(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ATTEND(q, k, v, dropout_p=0.125)


@pytest.mark.parametrize(
    "run", [with_mask, without_dropout, changed_in_place, in_sixteenths], ids=lambda run: run.__name__
)
def test_other_calls_stay(run: Callable[..., Tensor]) -> None:
    assert passed(run, heads(), heads(), heads())[0] == 0


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        ((heads(64), heads(80), heads(80)), {"is_causal": True}),
        ((heads(), heads(count=1), heads(count=1)), {"enable_gqa": True}),
        ((heads(), heads(), heads(width=16)), {}),
    ],
    ids=["causal, other lengths", "shared heads", "other widths"],
)
def test_other_shapes_stay(inputs: tuple[Tensor, ...], options: dict[str, Any]) -> None:
    assert passed(lambda *given: ATTEND(*given, dropout_p=0.1, **options), *inputs)[0] == 0


def test_lengths_that_are_symbols_stay() -> None:
    q, k, v = heads(), heads(), heads()
    for each in (q, k, v):
        torch._dynamo.mark_dynamic(each, 2)
    assert passed(lambda q, k, v: ATTEND(q, k, v, dropout_p=0.1), q, k, v)[0] == 0


def test_an_order_that_the_user_has_set_stands() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ATTEND(q, k, v, dropout_p=0.1)

    torch._C._set_sdp_priority_order([2, 1, 0, 3, 4])
    assert passed(run, heads(), heads(), heads())[0] == 0
    torch._C._set_sdp_priority_order(attention_kernels._UNTOUCHED_ORDER)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        assert passed(run, heads(), heads(), heads())[0] == 0
    assert passed(run, heads(), heads(), heads())[0] == 1


def test_eager_modes_own_draws_stay_where_they_are_asked_for() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ATTEND(q, k, v, dropout_p=0.1)

    inputs = heads(), heads(), heads()
    assert passed(run, *inputs)[0] == 1
    assert passed(run, *inputs, fallback_random=True)[0] == 0
    with config.patch(fallback_random=True):
        assert passed(run, *inputs)[0] == 0


def test_what_kernels_do_not_run_says_why() -> None:
    hopper, q = registry.Target("cuda", (9, 0)), heads().transpose(1, 2)
    wide, single = heads(width=144).transpose(1, 2), q.float()
    cases = [
        (registry.Target("cpu"), q, 0.1, "CUDA device"),
        (registry.Target("cuda", (8, 9)), q, 0.1, "compute capability 9.0"),
        (hopper, wide, 0.1, "144 features"),
        (hopper, single, 0.1, "not of 16 bits"),
        (hopper, q, 1e-9, "drops none or all"),
    ]
    for target, x, probability, why in cases:
        with pytest.raises(registry.Unsupported, match=why):
            check_dropout_attention(target, {"q": x, "k": x, "v": x, "probability": probability})
    check_dropout_attention(hopper, {"q": q, "k": q, "v": q, "probability": 0.1})


class Attends(nn.Module):
    """Uniform attention whose values are the identity: its result shows what was kept."""

    def forward(self, x: Tensor) -> Tensor:
        none = torch.zeros_like(x)
        return ATTEND(none, none, x, dropout_p=0.3)


def test_a_compiled_model_drops_as_many_as_it_should_and_has_its_gradients() -> None:
    length = 64
    x = torch.eye(length).expand(2, 3, length, length).contiguous().requires_grad_()
    compiled = torch.compile(Attends(), backend="te_fp8", options={"cost_model": False})
    torch.manual_seed(3)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(3)
    again = compiled(x)
    assert torch.equal(first, again) and not torch.equal(first, second)
    whole = 65536 / kept_share(0.3) / length
    kept = first > 0
    torch.testing.assert_close(first, kept * whole)
    assert 0.67 < kept.double().mean() < 0.73
    (gradient,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(gradient, (kept.sum(2) * whole)[..., None].expand_as(x))
