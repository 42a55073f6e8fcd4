"""cuDNN's attention is put where PyTorch would run a slower one, flash where cuDNN would change a dropout, and neither
where somebody else has decided."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from te_compile.options import Options
from te_compile.passes import attention_kernels as module
from te_compile.passes import speed
from te_compile.passes.attention_kernels import CUDNN_ATTENTION, FLASH_ATTENTION, can_run, choose_attention_kernels
from te_compile.passes.captured_nodes import value_of
from te_compile.passes.find_attentions import find_attentions
from te_compile.passes.plan import Plan
from te_compile.passes.recognise_attention import recognise_attention
from te_compile.passes.regions import regions_of
from te_compile.passes.text import ops_text
from tests.capturing import captured
from tests.kernel_order import order_of_kernels

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

HEADS, LENGTH, WIDTH = 4, 128, 64
UNTOUCHED = [1, 2, 0, 3, 4]


@pytest.fixture(autouse=True)
def a_device_with_an_old_cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where PyTorch runs flash though cuDNN is faster; on the CPU nothing of this is."""
    monkeypatch.setattr(module, "is_faster_on", lambda device: True)
    monkeypatch.setattr(module, "cudnn_version", lambda: (9, 14, 0))
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    with order_of_kernels(UNTOUCHED):
        yield


def heads(length: int = LENGTH, dtype: torch.dtype = torch.bfloat16, count: int = HEADS) -> Tensor:
    """[B, H, S, D] as a view of [B, S, H, D], as models have it."""
    return torch.randn(2, length, count, WIDTH, dtype=dtype).transpose(1, 2)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25)


def passed(
    run: Callable[..., Tensor],
    *inputs: Tensor,
    able: Callable[[str, Node], bool] = lambda kernel, node: True,
    **options: Any,
) -> tuple[int, GraphModule, Plan]:
    """``cost_model`` is off unless asked for: the tensors are tiny."""
    gm, _ = captured(run, *inputs)
    recognise_attention(gm.graph)
    regions, left = regions_of(gm)
    plan = Plan()
    find_attentions(regions, left, plan)
    count = choose_attention_kernels(regions, plan, Options.resolve({"cost_model": False, **options}), able)
    gm.graph.lint()
    return count, gm, plan


def test_attention_goes_to_cudnn() -> None:
    count, gm, plan = passed(causal, heads(), heads(), heads())
    (call,) = (node for node in gm.graph.nodes if node.target is CUDNN_ATTENTION)
    assert count == 1 and F.scaled_dot_product_attention not in {node.target for node in gm.graph.nodes}
    assert call.args[3:] == (None, True, 0.0, True, False) and call.kwargs == {"scale": 0.25}
    (attention,) = plan.attentions
    assert attention.kernel == "cudnn" and attention.node is call and attention.mask == "is_causal"


def test_the_result_lies_in_memory_as_before() -> None:
    contiguous = [heads().contiguous() for _ in range(3)]
    for inputs in ([heads(), heads(), heads()], contiguous):
        gm, _ = captured(causal, *inputs)
        (before,) = (value_of(node) for node in gm.graph.nodes if "attention" in str(node.target))
        _, changed, _ = passed(causal, *inputs)
        (output,) = changed.graph.output_node().args[0]
        assert value_of(output).stride() == before.stride() and value_of(output).shape == before.shape


def in_rows(y: Tensor) -> Tensor:
    return y.transpose(1, 2).reshape(2, LENGTH, HEADS * WIDTH)


def in_rows_by_functions(y: Tensor) -> Tensor:
    return torch.flatten(torch.permute(y, (0, 2, 1, 3)), 2) * 2


def in_order(y: Tensor) -> Tensor:
    return y.transpose(1, 2).contiguous().view(2, LENGTH, HEADS * WIDTH)


def as_it_lies(y: Tensor) -> Tensor:
    return y.contiguous().view(2, -1)


READ_IN_ORDER: list[Callable[[Tensor], Any]] = [in_rows, in_rows_by_functions, in_order, as_it_lies]
READ_AS_IT_LIES: list[Callable[[Tensor], Any]] = [
    lambda y: y,
    lambda y: y.view(2, -1),
    lambda y: y.transpose(1, 2),
    lambda y: (y.transpose(1, 2).flatten(2), y),
    lambda y: y.transpose(2, 3).reshape(2, HEADS, WIDTH, LENGTH),
    lambda y: y.transpose(1, 2).add_(1).flatten(2),
    lambda y: y.contiguous(memory_format=torch.channels_last),
    lambda y: y * 2,
]


def copied(reads: Callable[[Tensor], Any], dynamic: bool = False) -> bool:
    """Is the result of another kernel, which lies as [B, S, H, D], copied for ``reads``, traced with [B, H, S, D]?"""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return reads(causal(q, k, v).contiguous())

    inputs = heads(), heads(), heads()
    for each in inputs if dynamic else ():
        torch._dynamo.mark_dynamic(each, 0)
    gm, _ = captured(run, *inputs)
    (attention,) = (node for node in gm.graph.nodes if node.target is F.scaled_dot_product_attention)
    (ordered,) = attention.users
    attention.meta["example_value"] = value_of(ordered)
    ordered.replace_all_uses_with(attention)
    gm.graph.erase_node(ordered)
    gm.recompile()
    before = len(gm.graph.nodes)
    regions, left = regions_of(gm)
    plan = Plan()
    find_attentions(regions, left, plan)
    assert choose_attention_kernels(regions, plan, Options.resolve({"cost_model": False}), lambda *_: True) == 1
    gm.graph.lint()
    return len(gm.graph.nodes) > before + 1


@pytest.mark.parametrize("reads", READ_IN_ORDER, ids=lambda reads: reads.__name__)
def test_a_result_that_is_put_in_order_anyway_is_not_copied_before(reads: Callable[[Tensor], Any]) -> None:
    assert not copied(reads)


@pytest.mark.parametrize("reads", READ_AS_IT_LIES)
def test_a_result_of_which_views_may_follow_is_copied(reads: Callable[[Tensor], Any]) -> None:
    assert copied(reads)


def test_where_sizes_change_it_is_copied_for_each_answer_would_be_a_guard() -> None:
    assert copied(lambda y: y.transpose(1, 2).flatten(2), dynamic=True)
    assert not copied(lambda y: y.transpose(1, 2).flatten(2))


def test_nothing_is_saved_for_a_backward_that_cannot_come() -> None:
    with torch.no_grad():
        _, gm, _ = passed(causal, heads(), heads(), heads())
    (call,) = (node for node in gm.graph.nodes if node.target is CUDNN_ATTENTION)
    assert call.args[4] is False


def test_shared_key_heads_go_along() -> None:
    def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    count, gm, _ = passed(shared, heads(), heads(count=2), heads(count=2))
    (output,) = gm.graph.output_node().args[0]
    assert count == 1 and value_of(output).shape == (2, HEADS, LENGTH, WIDTH)


def with_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=q[..., :1].mT.expand(-1, -1, q.shape[2], -1) > 0)


def with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


def where_the_model_chooses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        return F.scaled_dot_product_attention(q, k, v)


def under_autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("run", [with_mask, with_dropout, where_the_model_chooses], ids=lambda run: run.__name__)
def test_other_calls_stay(run: Callable[..., Tensor]) -> None:
    count, gm, _ = passed(run, heads(), heads(), heads())
    assert count == 0 and "scaled_dot_product_attention" in ops_text(gm.graph)


def test_casts_of_an_autocast_are_not_lost() -> None:
    assert passed(under_autocast, *(heads(dtype=torch.float32) for _ in range(3)))[0] == 0


@pytest.mark.parametrize("lengths", [(100, 128), (128, 100)], ids=str)
def test_lengths_that_older_versions_read_past_stay(lengths: tuple[int, int]) -> None:
    queries, keys = lengths
    count, _, _ = passed(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v), heads(queries), heads(keys), heads(keys)
    )
    assert count == 0


def test_what_cudnn_cannot_run_stays() -> None:
    assert passed(causal, heads(), heads(), heads(), able=lambda kernel, node: False)[0] == 0


def test_what_is_asked_of_pytorch_can_be_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device the answer is no, but it is one, for a PyTorch that is built for CUDA, too."""

    def no_driver(*_: Any) -> bool:
        raise RuntimeError("CUDA driver version is insufficient")

    if not torch.cuda.is_available():
        monkeypatch.setattr(torch._C, "_can_use_cudnn_attention", no_driver)
        monkeypatch.setattr(torch._C, "_can_use_flash_attention", no_driver)
    assert passed(causal, heads(), heads(), heads(), able=can_run)[0] == 0


def spelled_out(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    return F.dropout(F.softmax(q @ k.mT * 0.125, dim=-1), dropout) @ v


CUDNN_FIRST = [3, 1, 2, 0, 4]


def test_a_recognised_dropout_has_no_draw_to_keep() -> None:
    count, gm, _ = passed(lambda q, k, v: spelled_out(q, k, v, 0.125), heads(), heads(), heads())
    (call,) = (node for node in gm.graph.nodes if node.target is CUDNN_ATTENTION)
    assert count == 1 and call.args[5] == 0.125


def test_a_recognised_dropout_keeps_its_probability() -> None:
    """cuDNN knows sixteenths only."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return spelled_out(q, k, v, 0.1)

    assert passed(run, heads(), heads(), heads())[0] == 0  # PyTorch takes flash
    torch._C._set_sdp_priority_order(CUDNN_FIRST)
    count, gm, plan = passed(run, heads(), heads(), heads())
    (call,) = (node for node in gm.graph.nodes if node.target is FLASH_ATTENTION)
    assert count == 1 and call.args[3:] == (0.1, False, False)
    assert [attention.kernel for attention in plan.attentions] == ["flash"]


def test_a_dropout_that_the_model_asks_sdpa_for_is_between_the_two() -> None:
    torch._C._set_sdp_priority_order(CUDNN_FIRST)
    odd = partial(F.scaled_dot_product_attention, dropout_p=0.1)
    assert passed(lambda q, k, v: odd(q, k, v), heads(), heads(), heads())[0] == 0


def test_sixteenths_may_run_on_cudnn() -> None:
    torch._C._set_sdp_priority_order(CUDNN_FIRST)
    assert passed(lambda q, k, v: spelled_out(q, k, v, 0.125), heads(), heads(), heads())[0] == 0


def test_without_flash_the_choice_is_pytorchs() -> None:
    torch._C._set_sdp_priority_order(CUDNN_FIRST)
    found = passed(
        lambda q, k, v: spelled_out(q, k, v, 0.1),
        heads(),
        heads(),
        heads(),
        able=lambda kernel, node: kernel != "flash",
    )
    assert found[0] == 0


def test_an_order_of_the_users_stands() -> None:
    torch._C._set_sdp_priority_order([1, 3, 2, 0, 4])
    assert passed(causal, heads(), heads(), heads())[0] == 0


def test_a_kernel_that_is_switched_off_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        assert passed(causal, heads(), heads(), heads())[0] == 0
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert passed(causal, heads(), heads(), heads())[0] == 0


def test_versions_that_nobody_tried_stay_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cudnn_version", lambda: (9, 5, 1))
    assert passed(causal, heads(), heads(), heads())[0] == 0


@pytest.mark.parametrize("training", [False, True])
def test_a_step_that_waits_for_the_host_keeps_pytorchs_kernel(monkeypatch: pytest.MonkeyPatch, training: bool) -> None:
    inputs = [heads() for _ in range(3)]
    dear, free = speed.HostCost(step=1e3, linear=0.0), speed.HostCost(step=0.0, linear=0.0)
    with torch.set_grad_enabled(training):
        for price, expected in ((dear, 0), (free, 1)):
            monkeypatch.setattr(speed, "host_costs", lambda training, price=price: (price, price))
            count, _, plan = passed(causal, *inputs, cost_model=True)
            assert count == expected and plan.attentions[0].kernel == ("cudnn" if expected else "")
        monkeypatch.setattr(speed, "host_costs", lambda training: (dear, dear))
        assert passed(causal, *inputs, cost_model=True, mode="reduce-overhead")[0] == 1, "CUDA graphs launch for it"
        assert passed(causal, *inputs, cost_model=False)[0] == 1


def test_a_dropout_that_cudnn_would_change_goes_to_flash_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._C._set_sdp_priority_order(CUDNN_FIRST)
    dear = speed.HostCost(step=1e6, linear=0.0)
    monkeypatch.setattr(speed, "host_costs", lambda training: (dear, dear))
    run = partial(spelled_out, dropout=0.1)
    _, gm, _ = passed(run, heads(), heads(), heads(), cost_model=True)
    assert any(node.target is FLASH_ATTENTION for node in gm.graph.nodes)
