"""Attention that is spelled out becomes one call, exactly, whatever form it has."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from te_compile.passes.captured_nodes import value_of
from te_compile.passes.recognise_attention import recognise_attention
from te_compile.passes.text import ops_text
from tests.compiling import compiled
from tests.spelled_out import (
    BATCH,
    HEADS,
    LENGTH,
    WIDTH,
    Attention,
    assert_recognised,
    assert_stays,
    causal_mask,
    heads,
    operands,
    rewritten,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# --- forms ---------------------------------------------------------------------------------------------------------


def scaled_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.3, dim=-1, dtype=torch.float32).to(q.dtype), v)


def scaled_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q / 3.0) @ (k * 0.7).mT).softmax(-1) @ v


def divided_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.swapaxes(-1, -2)
    scores /= math.sqrt(WIDTH)
    return torch.softmax(scores, -1) @ v


def divided_by_a_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT / torch.sqrt(torch.tensor(8.0)), dim=-1) @ v


def dropped_with_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.dropout(F.softmax(q @ k.mT, dim=-1), p=0.3, training=False)
    return (weights @ v).transpose(1, 2).reshape(BATCH, LENGTH, -1)


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(0.5).softmax(dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(BATCH, LENGTH, -1)


def by_einsum_keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhkd,bhqd->bhqk", k, q).softmax(dim=-1)
    return torch.einsum("bhkd,bhqk->bhqd", v, weights)


def by_einsum_to_positions_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Its result lies in the order of the product, [batch, head, position], which a view may rely on."""
    weights = torch.einsum("bqhd,bkhd->bhqk", *(x.transpose(1, 2) for x in (q, k))).mul(0.5).softmax(dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.transpose(1, 2)).transpose(1, 2).view(-1, LENGTH, WIDTH)


def by_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.reshape(-1, LENGTH, WIDTH) for x in (q, k, v))
    return torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1), v).view(BATCH, HEADS, LENGTH, WIDTH)


def values_on_the_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As autoencoders have it, which keep pictures with channels before positions."""
    q, k, v = (x.flatten(0, 1).mT + 0 for x in (q, k, v))
    weights = torch.softmax(torch.bmm(q.permute(0, 2, 1), k) * 0.3, dim=2)
    return torch.bmm(v, weights.permute(0, 2, 1).contiguous()).reshape(BATCH, HEADS * WIDTH, 3, LENGTH // 3)


def values_on_the_left_of_what_was_dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.dropout(F.softmax(q @ k.mT, dim=-1).transpose(2, 3), p=0.3, training=False)
    return (v.mT @ weights.to(v.dtype)).view(BATCH, -1, LENGTH)


def turned_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT, dim=-1).mT.transpose(-1, -2) @ v


def turned_for_an_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhkq,bhkd->bqhd", F.softmax(q @ k.mT, dim=-1).mT, v).flatten(2)


def shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By each row's largest, as softmax does itself."""
    scores = q @ k.mT * 0.5
    return F.softmax(scores - scores.amax(dim=-1, keepdim=True), dim=-1) @ v


def shifted_apart_from_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.5
    return F.softmax(scores - torch.max(scores, -1, keepdim=True)[0].detach(), dim=-1) @ v


def by_bmm_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) + 0 for x in (q, k, v))
    return torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.2, dim=-1), v).view(-1, WIDTH)


def viewed_as_contiguous(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (F.softmax(q @ k.mT, dim=-1) @ v).view(BATCH * HEADS, -1).cos()


def with_a_part_switched_off(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax((q @ k.mT + 0) * 0.5 - 0.0, dim=-1) @ v


@pytest.mark.parametrize("form", [
    scaled_after, scaled_before, divided_in_place, divided_by_a_tensor, shifted, shifted_apart_from_gradients,
    dropped_with_nothing, by_einsum, by_einsum_keys_first, by_einsum_to_positions_first, by_bmm, by_bmm_alone,
    viewed_as_contiguous, with_a_part_switched_off, values_on_the_left, values_on_the_left_of_what_was_dropped,
    turned_twice, turned_for_an_einsum,
])  # fmt: skip
def test_every_form_becomes_one_call(form: Attention) -> None:
    assert_recognised(form, *operands())


@pytest.mark.parametrize("form", [scaled_after, scaled_before, by_bmm])
def test_bfloat16_stays_bfloat16_and_close(form: Attention) -> None:
    assert_recognised(form, *operands(torch.bfloat16), tolerance=2e-2)


def test_weights_that_are_summed_over_queries_stay() -> None:
    def spread(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.mT, dim=-1).mT @ v

    def spread_from_the_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.mT @ F.softmax(q @ k.mT, dim=-1)

    for form in (spread, spread_from_the_left):
        assert_stays("no fused kernel computes that", form, *operands())


def test_the_text_of_a_rewritten_attention() -> None:
    gm = assert_recognised(scaled_after, *operands())
    assert ops_text(gm.graph) == (
        "scaled_dot_product_attention = scaled_dot_product_attention(l_q_, l_k_, l_v_, attn_mask=None, dropout_p=0.0, "
        "scale=0.3)\ncontiguous = .contiguous(scaled_dot_product_attention)\nreturn (contiguous,)"
    )


def test_operands_whose_channels_lie_before_positions_are_put_in_rows() -> None:
    gm = assert_recognised(values_on_the_left, *operands())
    (attention,) = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    assert [value_of(x).stride(-1) for x in attention.args] == [1, 1, 1]


@pytest.mark.parametrize("positions", [260, 392])
def test_attention_between_channels_stays(positions: int) -> None:
    """Its scores are smaller than its operands, and its heads, all positions, wider than fused kernels take them."""

    def between_channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (F.normalize(x, dim=-1) for x in (q, k))
        return (F.softmax(q @ k.mT * 0.3, dim=-1) @ v).permute(0, 3, 1, 2)

    assert_stays("its scores are smaller", between_channels, *(torch.randn(2, 3, 24, positions) for _ in "qkv"))


def test_heads_that_are_as_wide_are_recognised_where_they_have_more_keys() -> None:
    """As an autoencoder's single one."""
    assert_recognised(scaled_after, *((torch.randn(1, 1, keys, 272) / 4).requires_grad_() for keys in (30, 300, 300)))


def test_a_result_in_another_order_is_not_taken_for_one_in_order_where_heads_are_as_many_as_positions() -> None:
    def reshaped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(0.3).softmax(dim=-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(BATCH, HEADS, HEADS, WIDTH).cos()

    def viewed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(0.3).softmax(dim=-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v).view(BATCH, HEADS, HEADS, WIDTH).flatten(2)

    for form in (reshaped, viewed):
        assert_recognised(form, *(heads(length=HEADS) for _ in "qkv"))


def test_scores_computed_in_float32_from_bfloat16_are_those_of_the_narrow_operands() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.to(torch.float32) @ k.to(torch.float32).transpose(-1, -2)
        return F.softmax(scores, dim=-1).to(v.dtype) @ v

    gm = assert_recognised(run, *operands(torch.bfloat16), tolerance=2e-2)
    assert ".to(" not in ops_text(gm.graph)


def test_a_scale_that_is_learned_gets_its_gradient() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return F.softmax((F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT) * scale.exp(), dim=-1) @ v

    # Its gradient sums what cancels over all queries and keys: in 400 draws two ways to say the same were 1.2e-5 apart.
    assert_recognised(run, *operands(), torch.randn(HEADS, 1, 1, requires_grad=True), tolerance=1e-4)


@pytest.mark.parametrize("step", [operator.mul, operator.truediv], ids=["multiplied", "divided"])
@pytest.mark.parametrize("write", [
    lambda factor: factor[1:].mul_(3.0), lambda factor: factor.ravel()[0].add_(1.0), lambda factor: factor.data.add_(1),
], ids=["rows", "ravel", "data"])  # fmt: skip
def test_a_factor_that_a_view_was_written_to_counts_as_it_is_then(
    write: Callable[[Tensor], Tensor], step: Callable[[Tensor, Tensor], Tensor]
) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        factor = torch.ones(HEADS, 1, 1)
        write(factor)
        return F.softmax(step(q @ k.mT * 0.3, factor), dim=-1) @ v

    assert_recognised(run, *operands(), tolerance=1e-4)  # a factor that was not seen is off by half


@pytest.mark.parametrize("copied", [Tensor.clone, lambda ones: ones.repeat(1, 1, 1)[0]], ids=["clone", "repeat"])
def test_a_factor_that_a_copy_was_written_to_counts_as_it_is_then(copied: Callable[[Tensor], Tensor]) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        factor = copied(torch.ones(HEADS, 1, 1))
        factor[1:] = 3.0
        return F.softmax(q @ k.mT * 0.3 * factor, dim=-1) @ v

    assert_recognised(run, *operands(), tolerance=1e-4)


@pytest.mark.parametrize("divisor", [
    lambda: torch.full((), 4.7, dtype=torch.int64), lambda: torch.full((), 4.7).to(torch.int64),
    lambda: torch.full((), 4.9, dtype=torch.bfloat16),
], ids=["whole", "made whole", "bfloat16"])  # fmt: skip
def test_a_number_counts_as_its_dtype_rounds_it(divisor: Callable[[], Tensor]) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.mT / divisor(), dim=-1) @ v

    assert_recognised(run, *operands())


def test_a_number_that_a_copy_was_written_to_hides_no_score() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
        number = torch.full((1,), -1e9).repeat(LENGTH)
        number[2] = 5.0
        return F.softmax(torch.where(shown, q @ k.mT, number), dim=-1) @ v

    assert_stays("go through where", run, *operands(), causal_mask() == 0)


def test_keys_of_one_head_are_broadcast() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.mT, dim=-1) @ v

    assert_recognised(run, heads(), heads(1, 7), heads(1, 7, 5))


@pytest.mark.parametrize("keys", ["bkd", "kbd"])
def test_einsums_in_which_all_heads_of_queries_share_one_of_keys_are_recognised(keys: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.einsum(f"bhqd,{keys}->bhqk", q * 0.3, k).softmax(dim=-1)
        return torch.einsum(f"bhqk,{keys}->bqhd", weights, v).flatten(2)

    k, v = (torch.randn(BATCH, 7, WIDTH) for _ in "kv")
    if keys == "kbd":
        k, v = (x.transpose(0, 1).contiguous() for x in (k, v))
    assert_recognised(run, heads(), k.requires_grad_(), v.requires_grad_())


# --- dropout -------------------------------------------------------------------------------------------------------


def test_dropout_has_the_same_mean() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(F.softmax(q @ k.mT, dim=-1), 0.25, True) @ v

    inputs = operands()
    count, gm, examples = rewritten(run, *inputs)
    assert count == 1
    (new,) = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    assert new.kwargs["dropout_p"] == 0.25
    q, k, v = (x.detach() for x in inputs)
    draws = torch.stack([gm(*examples)[0].detach() for _ in range(600)])
    assert draws.std(0).mean() > 0.01
    torch.testing.assert_close(draws.mean(0), F.softmax(q @ k.mT, dim=-1) @ v, rtol=0.2, atol=0.15)


# --- borders -------------------------------------------------------------------------------------------------------


def test_a_rewrite_that_is_taken_back_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """Values have a batch that queries and keys have not."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q[:1] @ k[:1].mT, dim=-1) @ v

    torch_logger = logging.getLogger("torch")
    torch_logger.addHandler(caplog.handler)
    try:
        assert_stays("PyTorch refuses it", run, *operands())
    finally:
        torch_logger.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_what_is_ignored_and_has_a_gradient_stays() -> None:
    """Of zeros, where a fused call has none."""

    def run(q: Tensor, k: Tensor, v: Tensor, ignored: Tensor) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        return torch.bmm(F.softmax(torch.baddbmm(ignored, q, k.mT, beta=0, alpha=0.25), dim=-1), v)

    ignored = torch.randn(BATCH * HEADS, LENGTH, LENGTH)
    assert rewritten(run, *operands(), ignored)[0] == 1
    assert rewritten(run, *operands(), ignored.requires_grad_())[0] == 0


def test_scores_of_integers_compute_what_they_did() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.mT, dim=-1, dtype=torch.float32) @ v

    q, k = (torch.randint(-2, 3, (BATCH, HEADS, LENGTH, 16)) for _ in range(2))
    v = torch.randn(BATCH, HEADS, LENGTH, 16)
    torch.testing.assert_close(compiled(run)(q, k, v), run(q, k, v))


def test_autocast_inside_the_graph_is_a_border() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.softmax(q @ k.mT, dim=-1) @ v

    assert_stays("several dtypes", run, *operands())


def test_under_autocast_around_the_call_the_result_keeps_its_dtype() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.mT * 0.3, dim=-1) @ v

    with torch.autocast("cpu", torch.bfloat16):
        assert_recognised(run, *operands(), tolerance=5e-2)


def test_with_symbolic_sizes_attention_is_recognised_too() -> None:
    inputs = operands()
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 2)
    count, gm, examples = rewritten(scaled_after, *inputs)
    assert count == 1
    longer = [heads(length=9) for _ in inputs]
    replaced = {id(old): new for old, new in zip(inputs, longer, strict=True)} | {LENGTH: 9, BATCH: BATCH}
    arguments = [replaced[id(x) if isinstance(x, Tensor) else int(x)] for x in examples]
    wanted = scaled_after(*longer)
    torch.testing.assert_close(gm(*arguments)[0], wanted, rtol=1e-5, atol=1e-5)


class Scaled(nn.Module):
    """Attention with its scale and its dropout as attributes, which are symbolic where all is dynamic."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling, self.dropout = 0.3, 0.25

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = F.softmax(torch.matmul(q, k.mT) * self.scaling, dim=-1)
        return torch.matmul(F.dropout(weights, self.dropout, training=self.training), v)


@pytest.mark.parametrize("train", [False, True])
def test_where_all_is_dynamic_a_symbolic_scale_is_no_obstacle(train: bool) -> None:
    graphs: list[tuple[GraphModule, list[Any]]] = []

    def keep(gm: GraphModule, examples: list[Any]) -> Callable[..., Any]:
        assert any(isinstance(value_of(node), torch.SymFloat) for node in gm.graph.nodes)
        assert recognise_attention(gm.graph) == 1
        gm.recompile()
        graphs.append((gm, examples))
        return gm.forward

    model = Scaled().train(train)
    run = torch.compile(model, backend=keep, dynamic=True, fullgraph=True)
    for model.scaling in (0.3, 0.7):  # one graph has to do for both
        inputs = operands()
        got, wanted = run(*inputs), model(*inputs)
        if not train:
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1
    (call,) = graphs[0][0].graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    assert call.kwargs["dropout_p"] == (0.25 if train else 0.0)
