"""Attention under a mask that is proved to be a window becomes te::window_attention; anything else stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from te_compile import backend
from te_compile.inspect.attentions import AttentionRow
from te_compile.ops.window_attention import WINDOW_ATTENTION
from te_compile.passes import manager, step_cost
from te_compile.passes.captured_nodes import value_of
from te_compile.passes.find_attentions import find_attentions
from te_compile.passes.fold_masks import fold_masks
from te_compile.passes.plan import Plan
from te_compile.passes.recognise_attention import recognise_attention
from te_compile.passes.regions import regions_of
from te_compile.passes.undo_repeated_heads import undo_repeated_heads
from te_compile.passes.window_attentions import is_run_by_kernels, window_attentions
from tests.capturing import captured
from tests.compiling import compiled, relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "an_order_of_kernels_that_nobody_has_changed")

LENGTH = 24
Runs = Callable[[Any, Any, Any], bool]


def heads(count: int = 4, length: int = LENGTH, width: int = 16) -> Tensor:
    """[B, H, S, D] as a view of [B, S, H, D]."""
    return torch.randn(2, length, count, width).transpose(1, 2)


def places(x: Tensor) -> tuple[Tensor, Tensor]:
    at = torch.arange(x.shape[2], device=x.device)
    return at[:, None], at[None, :]


def sliding(x: Tensor, width: int = 5) -> Tensor:
    """As Hugging Face builds it."""
    query, key = places(x)
    return ((key <= query) & (key > query - width)).expand(x.shape[0], 1, -1, -1)


def local(x: Tensor, reach: int = 3) -> Tensor:
    query, key = places(x)
    return (query - key).abs() <= reach


def within(mask: Callable[[Tensor], Tensor], **options: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q), **options)


def passed(
    run: Callable[..., Tensor], *inputs: Tensor, runs: Runs = lambda q, k, v: True
) -> tuple[int, GraphModule, Plan]:
    gm, _ = captured(run, *inputs)
    recognise_attention(gm.graph)
    regions, left = regions_of(gm)
    fold_masks(regions)
    undo_repeated_heads(gm.graph)
    plan = Plan()
    find_attentions(regions, left, plan)
    count = window_attentions(regions, plan, runs)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    return count, gm, plan


def window_calls(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.target is WINDOW_ATTENTION]


def agrees(run: Callable[..., Tensor], *inputs: Tensor) -> tuple[Node, Plan]:
    """Assert that the pass fires once, and the same result, in the same memory order, and gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    count, gm, plan = passed(run, *leaves)
    assert count == 1
    names = [str(node.target) for node in gm.graph.find_nodes(op="placeholder")]  # in the order of their first use
    wanted, got = run(*leaves), gm(*(leaves[["L_q_", "L_k_", "L_v_"].index(name)] for name in names))[0]
    assert got.stride() == wanted.stride() and relative_error(got, wanted) < 1e-5
    grad = torch.randn_like(wanted)
    pairs = zip(*(torch.autograd.grad(y, leaves, grad) for y in (got, wanted)), strict=True)
    assert all(relative_error(one, other) < 1e-4 for one, other in pairs)
    (call,) = window_calls(gm)
    return call, plan


# ---------------------------------------------------------------------------------------------------------------- fires


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        (sliding, (4, 0)),
        (local, (3, 3)),
        (lambda x: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(1).triu(-2), (2, 1)),
        (lambda x: torch.where(sliding(x), 0.0, float("-inf")), (4, 0)),
        (lambda x: torch.zeros(LENGTH, LENGTH).masked_fill(~local(x), torch.finfo(torch.float32).min), (3, 3)),
    ],
    ids=["sliding", "local", "triangles", "added", "filled"],
)
def test_a_mask_that_is_a_window_goes_away(mask: Callable[[Tensor], Tensor], window: tuple[int, int]) -> None:
    call, plan = agrees(within(mask), heads(), heads(), heads())
    assert call.args[3:5] == window and call.args[5] == pytest.approx(16**-0.5)
    (attention,) = plan.attentions
    assert (attention.kernel, attention.mask, attention.mask_reason) == ("window", "folded_window", "")
    assert not [node for node in call.graph.nodes if node.target is torch.arange], "nothing reads the mask any more"


def test_a_scale_goes_along() -> None:
    call, _ = agrees(within(sliding, scale=0.7), heads(), heads(), heads())
    assert call.args[5] == 0.7


def test_copies_of_key_heads_are_not_read() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        copies = (x[:, :, None].expand(2, 2, 2, LENGTH, 16).reshape(2, 4, LENGTH, 16) for x in (k, v))
        return F.scaled_dot_product_attention(q, *copies, attn_mask=sliding(q))

    call, plan = agrees(run, heads(), heads(2), heads(2))
    assert [value_of(each).shape[1] for each in call.args[:3]] == [4, 2, 2]
    assert (plan.attentions[0].heads, plan.attentions[0].heads_reason) == ("undone", "")


def test_heads_that_the_call_itself_shares_stay_shared() -> None:
    call, _ = agrees(within(sliding, enable_gqa=True), heads(), heads(2), heads(2))
    assert value_of(call.args[1]).shape[1] == 2


def test_attention_that_is_spelled_out_is_taken() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT * 0.25).masked_fill(~sliding(q), float("-inf"))
        return F.softmax(scores, dim=-1) @ v

    call, plan = agrees(run, heads(), heads(), heads())
    assert plan.attentions[0].status == "recognised" and call.args[3:5] == (4, 0)


def test_under_autocast_operands_are_cast_as_autocast_does() -> None:
    q, k, v = heads(), heads(), heads().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        count, gm, _ = passed(within(sliding), q, k, v)
        wanted = within(sliding)(q, k, v)
    assert count == 1 and wanted.dtype == torch.bfloat16
    (call,) = window_calls(gm)
    assert [value_of(each).dtype for each in call.args[:3]] == [torch.bfloat16] * 3
    names = [str(node.target) for node in gm.graph.find_nodes(op="placeholder")]
    (got,) = gm(*({"L_q_": q, "L_k_": k, "L_v_": v}[name] for name in names))
    assert got.dtype == torch.bfloat16 and relative_error(got, wanted) < 1e-2


def test_a_length_that_is_a_symbol_is_proved() -> None:
    inputs = [heads() for _ in range(3)]
    for each in inputs:
        torch._dynamo.mark_dynamic(each, 2)
    for mask, window in ((sliding, (4, 0)), (local, (3, 3))):
        count, gm, _ = passed(within(mask), *inputs)
        assert count == 1 and window_calls(gm)[0].args[3:5] == window


def test_the_report_says_so() -> None:
    _, _, plan = passed(within(sliding), heads(), heads(), heads())
    row = AttentionRow("attn", "sdpa", mask=plan.attentions[0].mask, kernel=plan.attentions[0].kernel)
    assert row.detail == "mask folded away: a window; on kernels that skip what is outside of the window"


def test_less_is_reckoned_for_less() -> None:
    _, _, plan = passed(within(sliding), *(heads(length=256) for _ in range(3)))
    _, _, whole = passed(within(sliding), *(heads(length=256) for _ in range(3)), runs=lambda q, k, v: False)
    times = [step_cost._attention_time(each.attentions[0], training=True) for each in (plan, whole)]
    assert 0 < times[0] < times[1]


# -------------------------------------------------------------------------------------------------------- does not fire


def stays(run: Callable[..., Tensor], *inputs: Tensor) -> bool:
    count, gm, plan = passed(run, *(inputs or (heads(), heads(), heads())))
    return count == 0 and not window_calls(gm) and all(each.kernel == "" for each in plan.attentions)


def with_a_hole(x: Tensor) -> Tensor:
    query, key = places(x)
    return sliding(x) & (query - key != 2)


def in_blocks(x: Tensor) -> Tensor:
    query, key = places(x)
    return (key <= query) & (query // 4 == key // 4)


def that_hides_a_row(x: Tensor) -> Tensor:
    query, key = places(x)
    return (key < query) & (key > query - 5)


def of_another_head(x: Tensor) -> Tensor:
    return torch.stack([sliding(x)[0, 0], local(x), sliding(x)[0, 0], sliding(x)[0, 0]])


@pytest.mark.parametrize("mask", [with_a_hole, in_blocks, that_hides_a_row, of_another_head], ids=lambda m: m.__name__)
def test_other_masks_stay(mask: Callable[[Tensor], Tensor]) -> None:
    assert stays(within(mask))


def test_a_mask_that_depends_on_data_stays() -> None:
    def padded(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=sliding(q) & real[:, None, None, :])

    assert stays(padded, heads(), heads(), heads(), torch.rand(2, LENGTH) > 0.2)


def test_a_mask_that_is_written_to_stays() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = sliding(q).contiguous()
        mask[..., 3, 2] = False
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    assert stays(run)


@pytest.mark.parametrize("options", [{"dropout_p": 0.1}, {"scale": -0.3}], ids=str)
def test_other_calls_stay(options: dict[str, float]) -> None:
    assert stays(within(sliding, **options))


def test_rows_that_are_broadcast_stay_and_a_single_head_is_shared() -> None:
    one = torch.randn(1, LENGTH, 4, 16).transpose(1, 2)
    assert stays(within(sliding), heads(), one, one)
    assert stays(within(sliding), heads(), heads(1), heads())
    call, _ = agrees(within(sliding), heads(), heads(1), heads(1))
    assert value_of(call.args[1]).shape[1] == 1


def test_queries_of_a_decoding_step_stay() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=sliding(k)[:, :, -3:])

    assert stays(run, heads(length=3), heads(), heads())


def test_a_result_that_is_written_to_stays() -> None:
    assert stays(lambda q, k, v: within(sliding)(q, k, v).mul_(2))


def test_copies_whose_source_changes_are_read_themselves() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k + 1, v + 1
        copies = [x.repeat_interleave(2, 1) for x in (k, v)]
        k.mul_(2)
        return F.scaled_dot_product_attention(q, *copies, attn_mask=sliding(q))

    count, gm, _ = passed(run, heads(), heads(2), heads(2))
    assert count == 1 and value_of(window_calls(gm)[0].args[1]).shape[1] == 4


def test_copies_that_change_are_read_themselves() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
        written = keys[:, 1].mul_(2)  # and read, for what nobody reads is taken for dead below
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=sliding(q)) + 0 * written.sum()

    call, _ = agrees(run, heads(), heads(2), heads(2))
    assert value_of(call.args[1]).shape[1] == 4


def test_who_has_set_an_order_of_kernels_keeps_it() -> None:
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert stays(within(sliding))
    torch._C._set_sdp_priority_order([2, 1, 0, 3, 4])
    assert stays(within(sliding))


def test_no_kernel_runs_it_on_a_cpu() -> None:
    q = torch.empty(1, LENGTH, 2, 64, dtype=torch.bfloat16)
    assert not is_run_by_kernels(q, q, q)


# ------------------------------------------------------------------------------------------------------------- numerics


class Block(nn.Module):
    """Grouped heads under a sliding window."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(64, n, bias=False) for n in (64, 32, 32, 64))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 16)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=sliding(q))
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_model_trains_as_under_the_mask(monkeypatch: pytest.MonkeyPatch, checkpointed: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def with_kernels(regions: Any, plan: Plan) -> int:
        return window_attentions(regions, plan, lambda q, k, v: True)

    monkeypatch.setattr(backend, "window_attentions", with_kernels)
    model, x = Block(), torch.randn(2, LENGTH, 64)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = model

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False) if checkpointed else self.block(x)

    whole = Whole()
    with manager.recording() as records:
        got = compiled(whole, exclude=["*"])(x)
    assert [each.kernel for record in records for each in record.plan.attentions] == ["window"]
    wanted, dy = model(x), torch.randn_like(got)
    pairs = zip(*(torch.autograd.grad(y, list(model.parameters()), dy) for y in (got, wanted)), strict=True)
    assert relative_error(got, wanted) < 1e-5 and all(relative_error(one, other) < 1e-4 for one, other in pairs)
