"""Attention with sinks becomes te::sink_attention, and on flash kernels te::window_attention; anything else stays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import te_compile
from te_compile.ops.sink_attention import SINK_ATTENTION
from te_compile.ops.window_attention import WINDOW_ATTENTION
from te_compile.passes import step_cost
from te_compile.passes.find_attentions import find_attentions
from te_compile.passes.fold_masks import fold_masks
from te_compile.passes.move_row_masks import move_row_masks
from te_compile.passes.plan import Plan
from te_compile.passes.recognise_attention import STAYS, recognise_attention
from te_compile.passes.regions import regions_of
from te_compile.passes.text import ops_text
from te_compile.passes.undo_repeated_heads import undo_repeated_heads
from te_compile.passes.window_attentions import window_attentions
from tests.capturing import captured
from tests.compiling import relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "an_order_of_kernels_that_nobody_has_changed")

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 12, 8
MINIMUM = torch.finfo(torch.float32).min
Attention = Callable[..., Any]


def shares_of(scores: Tensor, sinks: Tensor) -> Tensor:
    """What sinks leave of each row."""
    return (torch.logsumexp(scores, dim=-1) - sinks.view(1, -1, 1)).float().sigmoid().unsqueeze(-1)


def scaled(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Granite's."""
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.3
    shares = shares_of(scores, sinks)
    weights = F.dropout(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), p=0.0)
    result = torch.matmul(weights, v)
    return (result * shares.to(result.dtype)).transpose(1, 2).contiguous()


def scaled_by_columns(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT
    return torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks.view(-1, 1, 1)) * (scores.softmax(-1) @ v)


def scaled_beside_a_column(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Sinks meet the sums once these are a column: their dimensions are those of the scores."""
    scores = q @ k.mT
    return scores.softmax(-1) @ v * (scores.logsumexp(-1).unsqueeze(-1) - sinks.view(-1, 1, 1)).sigmoid()


def operands(keys: int = HEADS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v [B, H, S, D] and a sink for each head."""
    drawn = [torch.randn(BATCH, count, LENGTH, WIDTH).to(dtype).requires_grad_() for count in (HEADS, keys, keys)]
    return [*drawn, torch.randn(HEADS).to(dtype).requires_grad_()]


def column(sinks: Tensor, scores: Tensor) -> Tensor:
    return sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[-2], -1)


def causal(q: Tensor) -> Tensor:
    at = torch.arange(LENGTH, device=q.device)
    return at[None, :] <= at[:, None]


def sliding(q: Tensor, width: int = 4) -> Tensor:
    at = torch.arange(LENGTH, device=q.device)
    return causal(q) & (at[None, :] > at[:, None] - width)


def added(mask: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda q: torch.where(mask(q), 0.0, torch.finfo(q.dtype).min).to(q.dtype)


def shifted(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Attention | None = None) -> Tensor:
    """GPT-OSS's."""
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.3
    if mask is not None:
        scores = scores + mask(q)
    logits = torch.cat([scores, column(sinks, scores)], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    weights = F.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1]
    return torch.matmul(F.dropout(weights, p=0.0).to(v.dtype), v).transpose(1, 2).contiguous()


def widened(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Scores and sinks in float32, softmax at once."""
    scores = torch.matmul(q.float(), k.float().transpose(2, 3)) * 0.3
    weights = F.softmax(torch.cat([scores, column(sinks.float(), scores)], dim=-1), dim=-1)[..., :-1].to(v.dtype)
    return torch.matmul(weights, v)


def in_front(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT
    return torch.concat((column(sinks, scores), scores), -1).softmax(-1)[:, :, :, 1:] @ v


def of_each_query(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT / 3
    own = (q.sum(-1) * sinks[:, None]).unsqueeze(-1)
    return torch.cat([scores, own], dim=3).softmax(dim=3)[..., :LENGTH] @ v


def overwritten(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Where some queries see no key at all."""
    hidden = torch.arange(LENGTH, device=q.device)[:, None] % 3 == torch.arange(LENGTH, device=q.device)[None, :] * 0
    scores = (q @ k.mT).masked_fill(hidden, float("-inf"))
    return torch.cat([scores, column(sinks, scores)], -1).softmax(-1)[..., :-1] @ v


def flattened(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Batch and heads in one dimension."""
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.bmm(q, k.mT)
    ends = sinks.repeat(BATCH)[:, None, None].expand(-1, LENGTH, 1)
    return torch.bmm(torch.cat([scores, ends], -1).softmax(-1)[..., :-1], v)


def recognised(run: Attention, *inputs: Tensor) -> tuple[int, GraphModule, list[Any]]:
    gm, examples = captured(run, *inputs)
    count = recognise_attention(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return count, gm, examples


def agree(gm: Callable[..., Any], examples: list[Any], run: Attention, inputs: list[Tensor], tolerance: float) -> None:
    """Assert equal results, and equal gradients for random ones."""
    leaves = [x for x in inputs if x.requires_grad]
    wanted, got = run(*inputs), gm(*examples)[0]
    assert got.dtype == wanted.dtype and got.shape == wanted.shape and relative_error(got, wanted) < tolerance
    grad = torch.randn_like(wanted)
    # A sink's gradient sums over all queries, and what cancels there leaves the roundings of what was added.
    rounding = 2.0**-24 * float((grad * wanted).abs().sum())
    for one, other in zip(*(torch.autograd.grad(y, leaves, grad) for y in (got, wanted)), strict=True):
        assert one.dtype == other.dtype
        assert (one - other).norm() < tolerance * other.norm() + rounding


# ---------------------------------------------------------------------------------------------------------------- fires


@pytest.mark.parametrize(
    "run",
    [
        shifted,
        widened,
        in_front,
        of_each_query,
        overwritten,
        flattened,
        scaled,
        scaled_by_columns,
        scaled_beside_a_column,
    ],
)
def test_it_is_recognised_and_gives_the_same(run: Attention) -> None:
    inputs = operands()
    count, gm, examples = recognised(run, *inputs)
    text = ops_text(gm.graph)
    assert count == 1 and "softmax" not in text and "cat(" not in text and " max" not in text, text
    agree(gm, examples, run, inputs, 1e-5)


@pytest.mark.parametrize("run", [shifted, widened, in_front, scaled])
def test_16_bits_are_at_least_as_close_to_float64(run: Attention) -> None:
    """Over several draws together: the gradient of four sinks may nearly cancel in one."""
    draws = [in_16_and_64_bits(run) for _ in range(8)]
    kinds = [[joined(each) for each in zip(*of_kind, strict=True)] for of_kind in zip(*draws, strict=True)]
    for theirs, ours, right in zip(*kinds, strict=True):
        assert ours.dtype == torch.bfloat16
        assert relative_error(ours, right) < max(1.5 * relative_error(theirs, right), 2e-2)


def in_16_and_64_bits(run: Attention) -> tuple[list[Tensor], ...]:
    """The result of ``run`` and all gradients in bf16 as they are written, as they are recognised, and in fp64."""
    inputs = operands(dtype=torch.bfloat16)
    count, gm, examples = recognised(run, *inputs)
    assert count == 1
    exact = [x.detach().double().requires_grad_() for x in inputs]
    results = [run(*inputs), gm(*examples)[0], run(*exact)]
    grad = torch.randn_like(results[0])
    return tuple(
        [y, *torch.autograd.grad(y, leaves, grad.to(y.dtype))]
        for y, leaves in zip(results, (inputs, inputs, exact), strict=True)
    )


def joined(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in tensors])


def with_passes(run: Attention, *inputs: Tensor, runs: bool = True) -> tuple[Node, Plan, GraphModule, list[Any]]:
    """The one attention of ``run`` behind the passes that deal with masks and heads. runs: is there a kernel?"""
    gm, examples = captured(run, *inputs)
    assert recognise_attention(gm.graph) == 1
    regions, left = regions_of(gm)
    fold_masks(regions)
    move_row_masks(gm.graph)
    undo_repeated_heads(gm.graph)
    plan = Plan()
    find_attentions(regions, left, plan)
    window_attentions(regions, plan, lambda *_: runs)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    (call,) = (node for node in gm.graph.nodes if node.target in (SINK_ATTENTION, WINDOW_ATTENTION))
    return call, plan, gm, examples


@pytest.mark.parametrize(
    ("mask", "shown", "means", "kernel"),
    [
        (None, (-1, -1), "none", "sinks"),
        (added(causal), (-1, 0), "folded_causal", "sinks"),
        (added(sliding), (3, 0), "folded_window", "window"),
    ],
    ids=["none", "causal", "window"],
)
def test_on_flash_its_mask_goes_away(mask: Any, shown: tuple[int, int], means: str, kernel: str) -> None:
    def run(*inputs: Tensor) -> Tensor:
        return shifted(*inputs, mask=mask)

    inputs = operands()
    call, plan, gm, examples = with_passes(run, *inputs)
    assert call.target is WINDOW_ATTENTION and call.args[3:5] == shown and call.args[5] == 0.3
    (attention,) = plan.attentions
    assert (attention.status, attention.mask, attention.mask_reason, attention.kernel) == ("sinks", means, "", kernel)
    assert not gm.graph.find_nodes(op="call_function", target=torch.arange)
    assert step_cost._attention_time(attention, training=True) > 0
    agree(gm, examples, run, inputs, 1e-5)


def test_without_flash_the_mask_folds_all_the_same() -> None:
    def run(*inputs: Tensor) -> Tensor:
        return shifted(*inputs, mask=added(causal))

    inputs = operands()
    call, plan, gm, examples = with_passes(run, *inputs, runs=False)
    assert call.target is SINK_ATTENTION and call.kwargs["is_causal"] and call.kwargs["attn_mask"] is None
    assert plan.attentions[0].kernel == ""
    agree(gm, examples, run, inputs, 1e-5)


def test_copies_of_key_heads_are_not_read() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        copies = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(BATCH, HEADS, LENGTH, WIDTH) for x in (k, v))
        return shifted(q, *copies, sinks, mask=added(causal))

    inputs = operands(keys=2, dtype=torch.bfloat16)
    call, plan, _, _ = with_passes(run, *inputs)
    assert call.args[1].meta["example_value"].shape[1] == 2 and plan.attentions[0].heads == "undone"


def test_a_mask_from_outside_stays() -> None:
    given = torch.where(torch.rand(BATCH, 1, 1, LENGTH) < 0.3, MINIMUM, 0.0)
    inputs = operands()
    call, plan, gm, examples = with_passes(lambda *x: shifted(*x[:4], mask=lambda q: x[4]), *inputs, given)
    assert call.target is SINK_ATTENTION and call.kwargs["attn_mask"] is not None
    assert plan.attentions[0].mask == "kept" and "unknown when compiling" in plan.attentions[0].mask_reason
    agree(gm, examples, lambda *x: shifted(*x[:4], mask=lambda q: x[4]), [*inputs, given], 1e-5)


def test_autocast_casts_the_operands() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        scores = q @ k.mT
        return torch.cat([scores, column(sinks, scores)], -1).softmax(-1)[..., :-1] @ v

    inputs = operands()
    with torch.autocast("cpu", torch.bfloat16):
        count, gm, examples = recognised(run, *inputs)
        assert count == 1
        got, wanted = gm(*examples)[0], run(*inputs)
    assert got.dtype == wanted.dtype == torch.bfloat16 and relative_error(got, wanted) < 1e-2


class Block(nn.Module):
    """An attention with sinks, between linears that run in FP8."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(shifted(q, k, v, self.sinks, mask=added(causal)).flatten(2))


def test_explain_tells_of_it() -> None:
    report = te_compile.explain(Block(), torch.randn(BATCH, LENGTH, 64))
    (row,) = report.attentions
    assert (row.status, row.runs_as, row.mask) == ("sinks", "attention with sinks, recognised", "folded_causal")
    assert "attention with sinks, recognised" in report.to_html()


# --------------------------------------------------------------------------------------------------------- leaves alone


def dropped(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT
    return F.dropout(torch.cat([scores, column(sinks, scores)], -1).softmax(-1)[..., :-1], 0.1) @ v


def with_a_value(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT
    return torch.cat([scores, column(sinks, scores)], -1).softmax(-1) @ F.pad(v, (0, 0, 0, 1), value=2.0)


def without_a_key(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """What is cut off is a key, and the sink has a value."""
    scores = q @ k.mT
    return torch.cat([scores, column(sinks, scores)], -1).softmax(-1)[..., 1:] @ v


def scaled_behind(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT
    return (torch.cat([scores, column(sinks, scores)], -1) * 2).softmax(-1)[..., :-1] @ v


def shifted_before(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """The sinks are not what is shifted."""
    scores = q @ k.mT
    scores = scores - scores.amax(-1, keepdim=True)
    return torch.cat([scores, column(sinks, scores)], -1).softmax(-1)[..., :-1] @ v


def twice(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT
    both = torch.cat([column(sinks, scores), torch.cat([scores, column(sinks, scores)], -1)], -1)
    return both.softmax(-1)[..., 1:-1] @ v


def read(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT
    weights = torch.cat([scores, column(sinks, scores)], -1).softmax(-1)
    return weights[..., :-1] @ v, weights[..., -1]


def scaled_the_other_way(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT
    return scores.softmax(-1) @ v * torch.sigmoid(sinks.view(-1, 1) - scores.logsumexp(-1)).unsqueeze(-1)


def scaled_twice(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT
    return scores.softmax(-1) @ v * shares_of(scores, sinks).sigmoid()


def scaled_and_read(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT
    result = scores.softmax(-1) @ v
    return result * shares_of(scores, sinks), result


def scaled_by_what_is_read(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT
    shares = shares_of(scores, sinks)
    return scores.softmax(-1) @ v * shares, shares


def scaled_and_shifted(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """What is summed up is not what softmax may forget."""
    scores = q @ k.mT
    scores = scores - scores.amax(-1, keepdim=True)
    return scores.softmax(-1) @ v * shares_of(scores, sinks)


def scaled_by_twice_the_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT
    shares = torch.sub(scores.logsumexp(-1), sinks.view(1, -1, 1), alpha=2).sigmoid().unsqueeze(-1)
    return scores.softmax(-1) @ v * shares


def of_heads_in_another_order(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT
    order = torch.arange(HEADS - 1, -1, -1)
    return torch.cat([scores, column(sinks, scores)], -1).softmax(-1)[:, order, :, :-1] @ v


def scaled_by_queries(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """The sum over queries, not keys."""
    scores = q @ k.mT
    shares = (torch.logsumexp(scores, dim=-2) - sinks.view(1, -1, 1)).sigmoid().unsqueeze(-1)
    return scores.softmax(-1) @ v * shares


def with_a_bias_of_each_query(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Which no softmax cancels that sinks are part of."""
    scores = q @ k.mT + q.sum(-1, keepdim=True)
    return torch.cat([scores, column(sinks, scores)], -1).softmax(-1)[..., :-1] @ v


def every_other(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT
    return torch.cat([scores, column(sinks, scores)], -1).softmax(-1)[..., :-1:2] @ v[:, :, ::2]


def two_columns(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT
    return torch.cat([scores, column(sinks, scores).expand(-1, -1, -1, 2)], -1).softmax(-1)[..., :-2] @ v


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (dropped, "dropped"),
        (with_a_value, "values of their own"),
        (without_a_key, "go through getitem"),
        (scaled_behind, "changed once more"),
        (shifted_before, "shifted"),
        (twice, "beside its scores twice"),
        (read, "read elsewhere"),
        (every_other, "go through getitem"),
        (of_heads_in_another_order, "go through getitem"),
        (scaled_and_shifted, "scores are read elsewhere"),
        (scaled_by_twice_the_sinks, "scores are read elsewhere"),
        (with_a_bias_of_each_query, "expand it to the keys"),
        (scaled_the_other_way, "scores are read elsewhere"),
        (scaled_twice, "scores are read elsewhere"),
        (scaled_and_read, "scores are read elsewhere"),
        (scaled_by_what_is_read, "scores are read elsewhere"),
        (scaled_by_queries, "scores are read elsewhere"),
    ],
)
def test_anything_else_stays(run: Attention, reason: str) -> None:
    count, gm, _ = recognised(run, *operands())
    (why,) = (node.meta[STAYS] for node in gm.graph.nodes if STAYS in node.meta)
    assert count == 0 and reason in why, why


def filled(number: float, hides: bool) -> Attention:
    """With queries that see no key, if ``hides``, or all of them some, in scores that are overwritten."""

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=q.device).tril(-1 if hides else 0)
        scores = (q @ k.mT).masked_fill(~seen, number)
        return torch.cat([scores, column(sinks, scores)], -1).softmax(-1)[..., :-1] @ v

    return run


@pytest.mark.parametrize("low", [-1e4, -2e4, 0.0])
@pytest.mark.parametrize("number", [-1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("hides", [False, True])
def test_rows_of_what_overwrites_stand_beside_sinks_that_are_as_low(hides: bool, number: float, low: float) -> None:
    q, k, v, sinks = operands()
    inputs = [q, k, v, (sinks.detach() * 0 + low).requires_grad_()]
    run = filled(number, hides)
    count, gm, examples = recognised(run, *inputs)
    assert count == (not hides or number < -1e30)
    agree(gm, examples, run, inputs, 1e-5)


def test_float64_stays() -> None:
    count, gm, _ = recognised(shifted, *operands(dtype=torch.float64))
    (why,) = (node.meta[STAYS] for node in gm.graph.nodes if STAYS in node.meta)
    assert count == 0 and "float64" in why


def test_two_columns_are_no_sinks() -> None:
    assert recognised(two_columns, *operands())[0] == 0


def test_sinks_that_are_changed_behind_it_stay() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        scores, ends = q @ k.mT, sinks * 2
        out = torch.cat([scores, column(ends, scores)], -1).softmax(-1)[..., :-1] @ v
        return out, ends.add_(1)

    count, gm, _ = recognised(run, *operands())
    (why,) = (node.meta[STAYS] for node in gm.graph.nodes if STAYS in node.meta)
    assert count == 0 and "changed in place" in why


def test_fp8_attention_leaves_it_in_high_precision() -> None:
    recipe = te_compile.DelayedScaling(fp8_dpa=True)
    report = te_compile.explain(Block(), torch.randn(BATCH, LENGTH, 64), options={"recipe": recipe})
    (row,) = report.attentions
    assert row.precision == "kept" and "sinks" in row.precision_reason
