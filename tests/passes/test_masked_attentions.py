"""Attention under masks of which nothing is known becomes te::masked_attention; any other call stays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from te_compile import backend
from te_compile.inspect.attentions import AttentionRow
from te_compile.ops.mask_tiles import MASK_TILES
from te_compile.ops.masked_attention import MASKED_ATTENTION
from te_compile.options import Options
from te_compile.passes import manager
from te_compile.passes import masked_attentions as module
from te_compile.passes.find_attentions import find_attentions
from te_compile.passes.fold_masks import fold_masks
from te_compile.passes.masked_attentions import masked_attentions
from te_compile.passes.plan import Plan
from te_compile.passes.regions import regions_of
from tests.capturing import captured
from tests.compiling import compiled, relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "an_order_of_kernels_that_nobody_has_changed")

LENGTH, WIDTH, HEADS = 256, 16, 4


def packed(length: int = LENGTH) -> Tensor:
    """What one projection writes, [B, S, 3 · H · D]."""
    return torch.randn(2, length, 3 * HEADS * WIDTH, requires_grad=True)


def padding(length: int = LENGTH) -> Tensor:
    """Which tokens are there: int64 [B, S], one row of which is shorter."""
    there = torch.ones(2, length, dtype=torch.long)
    there[0, torch.randint(1, length, ()).item() :] = 0
    return there


def heads(x: Tensor, shared: int = HEADS) -> list[Tensor]:
    """q, k and v as views of it, of keys and values so many heads and copies of them: [B, H, S, D]."""
    q, k, v = (each.transpose(1, 2) for each in x.unflatten(2, (3, HEADS, WIDTH)).unbind(2))
    return [q, *(each[:, :shared].repeat_interleave(HEADS // shared, 1) for each in (k, v))]


def causal(there: Tensor) -> Tensor:
    """[B, 1, S, S], as Hugging Face builds it."""
    place = torch.arange(there.shape[1], device=there.device)
    return (place <= place[:, None]) & there[:, None, None, :].bool()


def keys_alone(there: Tensor) -> Tensor:
    """[B, 1, 1, S], to be broadcast."""
    return there[:, None, None, :].bool()


def attend(
    x: Tensor, there: Tensor, mask: Callable[[Tensor], Tensor] = causal, shared: int = HEADS, **options: Any
) -> Tensor:
    return F.scaled_dot_product_attention(*heads(x, shared), attn_mask=mask(there), **options)


def passed(run: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[int, GraphModule, Plan]:
    """``cost_model`` is off unless asked for: the tensors are tiny."""
    gm, given = captured(run, *inputs)
    regions, left = regions_of(gm)
    fold_masks(regions)
    plan = Plan()
    find_attentions(regions, left, plan)
    chosen = Options.resolve({"cost_model": False, **options})
    count = masked_attentions(regions, plan, chosen, lambda q, k, v, probability: True)
    gm.graph.lint()
    gm.recompile()
    gm.given = given
    return count, gm, plan


def result_of(gm: GraphModule) -> Tensor:
    """What the captured graph returns for what it was captured with."""
    return gm(*gm.given)[0]


def calls_of(gm: GraphModule, target: Any) -> list[Any]:
    return [node for node in gm.graph.nodes if node.target is target]


def stays(run: Callable[..., Any], *inputs: Any, **options: Any) -> bool:
    count, gm, plan = passed(run, *inputs, **options)
    return count == 0 and not calls_of(gm, MASKED_ATTENTION) and {each.kernel for each in plan.attentions} == {""}


# ---------------------------------------------------------------------------------------------------------------- fires


@pytest.mark.parametrize("mask", [causal, keys_alone, lambda there: causal(there).expand(2, HEADS, LENGTH, LENGTH)])
def test_a_mask_of_padding_goes_to_tiles(mask: Callable[[Tensor], Tensor]) -> None:
    x, there = packed(), padding()
    count, gm, plan = passed(partial(attend, mask=mask, scale=0.3), x, there)
    (call,) = calls_of(gm, MASKED_ATTENTION)
    (attention,) = plan.attentions
    assert count == 1 and call.args[-2:] == (0.0, 0.3)
    assert (attention.kernel, attention.mask, attention.node) == ("tiles", "kept", call)
    row = AttentionRow("attn", "sdpa", mask=attention.mask, mask_reason="why", kernel=attention.kernel)
    assert row.detail == "mask kept: why; on te_compile's kernels, which skip the tiles that it hides"
    assert relative_error(result_of(gm), attend(x, there, mask, scale=0.3)) < 1e-5


@pytest.mark.parametrize("dim", [2, 3])
def test_a_mask_of_fewer_dimensions_is_one_for_all_rows(dim: int) -> None:
    x, drawn = packed(), torch.rand((1,) * (dim - 2) + (LENGTH, LENGTH)) < 0.5
    run = partial(attend, mask=lambda given: given)
    count, gm, _ = passed(run, x, drawn)
    assert count == 1 and relative_error(result_of(gm), run(x, drawn)) < 1e-5


def test_a_mask_that_is_a_constant_but_no_window_goes_there_too() -> None:
    def checkered(there: Tensor) -> Tensor:
        place = torch.arange(LENGTH)
        return (place[:, None] + place) % 2 == 0

    x, there = packed(), padding()
    count, gm, _ = passed(partial(attend, mask=checkered), x, there)
    assert count == 1 and relative_error(result_of(gm), attend(x, there, checkered)) < 1e-5


def test_layers_share_what_is_made_of_a_mask() -> None:
    def run(x: Tensor, there: Tensor) -> Tensor:
        mask = causal(there)
        y = F.scaled_dot_product_attention(*heads(x), attn_mask=mask)
        return F.scaled_dot_product_attention(y, *heads(x)[1:], attn_mask=mask)

    x, there = packed(), padding()
    count, gm, _ = passed(run, x, there)
    assert count == 2 and len(calls_of(gm, MASK_TILES)) == 1
    assert relative_error(result_of(gm), run(x, there)) < 1e-5


def test_a_mask_that_is_added_is_known_by_what_it_is_made_of() -> None:
    """Each layer looks at it in its own way."""

    def run(x: Tensor, there: Tensor) -> Tensor:
        hidden = there == 0
        mask, (q, k, v) = torch.zeros_like(hidden, dtype=x.dtype).masked_fill_(hidden, -torch.inf), heads(x)
        for _ in range(2):
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        return q

    x, there = packed(), padding()
    count, gm, _ = passed(run, x, there)
    assert count == 2 and len(calls_of(gm, MASKED_ATTENTION)) == 2 and len(calls_of(gm, MASK_TILES)) == 1
    assert relative_error(result_of(gm), run(x, there)) < 1e-5


def test_a_mask_that_is_broadcast_for_other_queries_is_another() -> None:
    """As an encoder's is, which its decoder looks through as well."""

    def run(x: Tensor, there: Tensor, shorter: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = heads(x)
        mask = keys_alone(there)
        first = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return first, F.scaled_dot_product_attention(heads(shorter)[0], k, v, attn_mask=mask)

    given = packed(), padding(), packed(LENGTH + 70)
    count, gm, _ = passed(run, *given)
    assert count == 2 and len(calls_of(gm, MASK_TILES)) == 2
    for one, other in zip(gm(*gm.given), run(*given), strict=True):
        assert relative_error(one, other) < 1e-5


def test_a_window_with_a_dropout_says_no_more_than_is_true() -> None:
    def window(there: Tensor) -> Tensor:
        place = torch.arange(there.shape[1])
        return (place <= place[:, None]) & (place > place[:, None] - 40)

    _, _, plan = passed(partial(attend, mask=window, dropout_p=0.1), packed(), padding())
    assert [(each.kernel, each.mask, each.mask_reason) for each in plan.attentions] == [("tiles", "kept", "")]


def test_of_a_mask_that_is_written_to_every_layer_makes_its_own() -> None:
    def run(x: Tensor, there: Tensor) -> Tensor:
        mask = causal(there)
        y = F.scaled_dot_product_attention(*heads(x), attn_mask=mask)
        mask[:, :, :, 0] = True
        return y + F.scaled_dot_product_attention(*heads(x), attn_mask=mask)

    x, there = packed(), padding()
    count, gm, _ = passed(run, x, there)
    assert count == 2 and len(calls_of(gm, MASK_TILES)) == 2
    assert relative_error(result_of(gm), run(x, there)) < 1e-5


def test_copies_of_key_heads_are_read_where_they_were_copied_from() -> None:
    x, there = packed(), padding()
    count, gm, plan = passed(partial(attend, shared=2), x, there)
    (call,) = calls_of(gm, MASKED_ATTENTION)
    assert count == 1 and [each.meta["example_value"].shape[1] for each in call.args[:3]] == [4, 2, 2]
    assert plan.attentions[0].heads == "undone"
    assert relative_error(result_of(gm), attend(x, there, shared=2)) < 1e-5


def test_copies_that_change_are_read_themselves() -> None:
    def run(x: Tensor, there: Tensor) -> Tensor:
        q, k, v = heads(x, shared=2)
        k[:, 1].mul_(2.0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal(there))

    x, there = packed(), padding()
    count, gm, _ = passed(run, x, there)
    (call,) = calls_of(gm, MASKED_ATTENTION)
    assert count == 1 and [each.meta["example_value"].shape[1] for each in call.args[:3]] == [4, 4, 4]
    assert relative_error(result_of(gm), run(x, there)) < 1e-5


def test_a_dropout_goes_along() -> None:
    x, there = packed(), padding()
    count, gm, _ = passed(partial(attend, shared=2, dropout_p=0.25), x, there)
    (call,) = calls_of(gm, MASKED_ATTENTION)
    assert count == 1 and call.args[-2] == 0.25
    assert [each.meta["example_value"].shape[1] for each in call.args[:3]] == [4, 4, 4]  # each drops its own
    drawn = torch.stack([result_of(gm) for _ in range(64)])
    assert not torch.equal(drawn[0], drawn[1]) and relative_error(drawn.mean(0), attend(x, there, shared=2)) < 0.2


def test_lengths_may_be_symbols() -> None:
    x, there = packed(), padding()
    torch._dynamo.mark_dynamic(x, 1)
    torch._dynamo.mark_dynamic(there, 1)
    for mask in (causal, keys_alone):
        count, gm, _ = passed(partial(attend, mask=mask), x, there)
        assert count == 1 and len(calls_of(gm, MASKED_ATTENTION)) == 1


@pytest.mark.parametrize("training", [True, False])
def test_what_a_backward_pass_reads_is_made_for_one(training: bool) -> None:
    with torch.set_grad_enabled(training):
        _, gm, _ = passed(attend, packed(), padding())
    (call,) = calls_of(gm, MASK_TILES)
    assert call.args[1] is training


# ---------------------------------------------------------------------------------------------------------------- stays


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_kernels_hide_before_they_scale(scale: float) -> None:
    assert stays(partial(attend, scale=scale), packed(), padding())


def test_a_mask_that_adds_small_numbers_stays() -> None:
    def added(there: Tensor) -> Tensor:
        return torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(~causal(there), -1e4)

    assert stays(partial(attend, mask=added), packed(), padding())


def test_a_mask_for_each_head_stays() -> None:
    drawn = torch.rand(2, HEADS, LENGTH, LENGTH) < 0.5
    assert stays(partial(attend, mask=lambda given: given), packed(), drawn)


def test_without_a_mask_or_with_one_that_is_folded_it_stays() -> None:
    assert stays(partial(attend, mask=lambda there: None), packed(), padding())
    assert stays(partial(attend, mask=lambda there: causal(torch.ones(there.shape))), packed(), padding())


def test_few_queries_stay() -> None:
    length = module.FEWEST_QUERIES - 1
    assert stays(attend, packed(length), padding(length))


def test_a_result_that_gradients_read_and_the_model_writes_to_stays() -> None:
    def run(x: Tensor, there: Tensor) -> Tensor:
        return attend(x, there).mul_(2.0)

    assert stays(run, packed(), padding())
    with torch.no_grad():
        assert passed(run, packed(), padding())[0] == 1


def test_a_dropout_that_eager_mode_is_to_draw_stays() -> None:
    assert stays(partial(attend, dropout_p=0.25), packed(), padding(), fallback_random=True)


def test_an_order_of_kernels_that_the_user_has_set_stands() -> None:
    def run(x: Tensor, there: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attend(x, there)

    assert stays(run, packed(), padding())
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    try:
        assert stays(attend, packed(), padding())
    finally:
        torch.backends.cuda.enable_mem_efficient_sdp(True)


def test_inside_vmap_it_stays() -> None:
    def run(x: Tensor, there: Tensor) -> Tensor:
        return torch.func.vmap(lambda each: attend(each, there))(x.unsqueeze(0))

    assert stays(run, packed(), padding())


def test_a_step_that_waits_for_the_host_keeps_pytorchs_kernel() -> None:
    assert stays(attend, packed(), padding(), cost_model=True)


def test_without_a_kernel_it_stays() -> None:
    model = Block()
    with manager.recording() as records:
        compiled(model, exclude=["*"], cost_model=False)(torch.randn(2, LENGTH, 64), padding())
    assert [each.kernel for record in records for each in record.plan.attentions] == [""]


# ------------------------------------------------------------------------------------------------------------- numerics


class Block(nn.Module):
    """One layer of attention over padded rows."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(64, 3 * HEADS * WIDTH), nn.Linear(64, 64), dropout

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return self.out(attend(self.qkv(x), there, dropout_p=dropout).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_trains_as_without(monkeypatch: pytest.MonkeyPatch, autocast: bool) -> None:
    monkeypatch.setattr(
        backend, "masked_attentions", partial(masked_attentions, runs=lambda q, k, v, probability: True)
    )
    model, x, there = Block(), torch.randn(2, LENGTH, 64), padding()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with manager.recording() as records:
            y = compiled(model, exclude=["*"], cost_model=False)(x, there)
        wanted = model(x, there)
    assert [each.kernel for record in records for each in record.plan.attentions] == ["tiles"]
    bound = 2e-2 if autocast else 1e-4
    assert y.dtype == wanted.dtype and relative_error(y, wanted) < bound
    grad = torch.randn_like(y)
    pairs = zip(*(torch.autograd.grad(each, list(model.parameters()), grad) for each in (y, wanted)), strict=True)
    # The bias of keys shifts all scores of a query alike: its gradient is rounding.
    assert all(relative_error(one, other) < bound for one, other in pairs if other.dim() == 2)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_lengths_may_vary_from_call_to_call(monkeypatch: pytest.MonkeyPatch, dropout: float) -> None:
    monkeypatch.setattr(
        backend, "masked_attentions", partial(masked_attentions, runs=lambda q, k, v, probability: True)
    )
    model = Block(dropout)
    fast, draws = compiled(model, exclude=["*"], cost_model=False), 48 if dropout else 1
    with manager.recording() as records:
        for length in (256, 300, 391):
            x, there = torch.randn(2, length, 64), padding(length)
            mean = torch.stack([fast(x, there).detach() for _ in range(draws)]).mean(0)
            model.eval()
            assert relative_error(mean, model(x, there)) < (0.2 if dropout else 1e-4)
            model.train()
    assert len(records) == 2  # for the first length, and for any
