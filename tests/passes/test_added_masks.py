"""Masks of zeros and minus infinities that are added to scores are known by their booleans, and others are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from te_compile import backend
from te_compile.passes import manager
from te_compile.passes.added_masks import Shown, shown_by
from te_compile.passes.masked_attentions import masked_attentions
from te_compile.passes.writing import Writer
from tests.capturing import captured
from tests.compiling import compiled, relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "an_order_of_kernels_that_nobody_has_changed")

INF, ROWS, LENGTH = math.inf, 2, 24
Mask = Callable[[Tensor], Tensor]


def hidden_tokens() -> Tensor:
    """Which keys of which row are not there, bool [B, S]."""
    return torch.rand(ROWS, LENGTH) < 0.4


def above(diagonal: int) -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(diagonal)


def found(mask: Mask, hidden: Tensor) -> tuple[Any, GraphModule, tuple[Any, ...]]:
    """What is known of ``mask(hidden)``, and the captured graph that returns it."""
    gm, inputs = captured(mask, hidden)
    (output,) = gm.graph.output_node().args[0]
    return shown_by(output, {}), gm, inputs


def as_booleans(mask: Mask, hidden: Tensor) -> Tensor:
    """What the found booleans are, by the graph."""
    shown, gm, inputs = found(mask, hidden)
    assert isinstance(shown, Shown)
    end = gm.graph.output_node()
    end.args = ((shown.written(Writer(end)),),)
    gm.graph.lint()
    gm.recompile()
    return gm(*inputs)[0]


def filled_in_place(hidden: Tensor) -> Tensor:
    """As nn.MultiheadAttention makes them."""
    return torch.zeros_like(hidden, dtype=torch.float32).masked_fill_(hidden, -INF)


def filled_twice(hidden: Tensor) -> Tensor:
    mask = torch.zeros(ROWS, 1, LENGTH, LENGTH).masked_fill(above(1), -INF)
    return mask.masked_fill(hidden[:, None, None, :], float("-inf"))


ADDED: dict[str, Mask] = {
    "in place": filled_in_place,
    "filled": lambda hidden: torch.zeros_like(hidden, dtype=torch.bfloat16).masked_fill(hidden, -INF),
    "twice": filled_twice,
    "by a tensor": lambda hidden: torch.zeros(ROWS, LENGTH).masked_fill(hidden, torch.tensor(-INF)),
    "broadcast": lambda hidden: torch.zeros(ROWS, 1, LENGTH, LENGTH).masked_fill(hidden[:, None, None], -INF)[:, :, 3:],
    "where": lambda hidden: torch.where(hidden, -INF, 0.0),
    "where not": lambda hidden: torch.where(~hidden, 0.0, -INF)[:, None, None],
    "where, broadcast": lambda hidden: torch.where(hidden[:, None], torch.full((ROWS, 5, LENGTH), -INF), 0.0)[:, 2:],
    "triu": lambda hidden: torch.triu(torch.full((LENGTH, LENGTH), -INF), diagonal=2),
    "triu of its own": lambda hidden: torch.full((LENGTH, LENGTH), -INF).triu(),
    "a sum": lambda hidden: torch.full((LENGTH, LENGTH), -INF).triu(1) + filled_in_place(hidden)[:, None, None],
    "a sum with nothing": lambda hidden: filled_in_place(hidden) + torch.zeros(ROWS, LENGTH),
    "cast": lambda hidden: torch.where(hidden, -INF, 0.0).to(torch.float16).float(),
    "views": lambda hidden: filled_in_place(hidden).view(ROWS, 1, 1, -1).expand(-1, 3, LENGTH, -1).transpose(2, 3),
    "all keys": lambda hidden: torch.zeros(ROWS, 1, 1, LENGTH).expand(-1, -1, LENGTH, -1),
}


@pytest.mark.parametrize("mask", ADDED.values(), ids=ADDED)
def test_zeros_and_infinities_are_booleans(mask: Mask) -> None:
    hidden = hidden_tokens()
    got, wanted = as_booleans(mask, hidden), mask(hidden)
    assert got.dtype == torch.bool and torch.equal(got.expand(wanted.shape), wanted == 0)


def written_to_later(hidden: Tensor) -> Tensor:
    mask = torch.where(hidden, -INF, 0.0)
    mask[:, 0] = -3.0
    return mask


def booleans_written_to(hidden: Tensor) -> Tensor:
    seen = ~hidden
    mask = torch.where(seen, 0.0, -INF)
    seen[:, 0] = True
    return mask


def filled_by_what_changes(hidden: Tensor) -> Tensor:
    other = hidden.clone()
    mask = torch.zeros_like(hidden, dtype=torch.float32).masked_fill_(other, -INF)
    other.logical_not_()
    return mask


def zeros_filled_twice(hidden: Tensor) -> Tensor:
    mask = torch.zeros(ROWS, LENGTH)
    mask.masked_fill_(hidden, -INF)
    mask.masked_fill_(~hidden, 1.0)
    return mask.masked_fill_(hidden.flip(0), -INF)


OTHERS: dict[str, Mask] = {
    "small": lambda hidden: torch.where(hidden, torch.finfo(torch.float32).min, 0.0),
    "a bias": lambda hidden: torch.where(hidden, -INF, 0.25),
    "zeros or more": lambda hidden: torch.zeros(ROWS, LENGTH).masked_fill(hidden, INF),
    "ones": lambda hidden: torch.ones(ROWS, LENGTH).masked_fill(hidden, -INF),
    "a product": lambda hidden: hidden.float() * -INF,  # 0 · ∞ is no number
    "numbers of booleans": lambda hidden: hidden.float(),
    "what is given": lambda hidden: torch.randn(ROWS, LENGTH).masked_fill(hidden, -INF),
    "a difference": lambda hidden: torch.where(hidden, -INF, 0.0) - torch.where(hidden, -INF, 0.0),
    "below a diagonal": lambda hidden: torch.full((LENGTH, LENGTH), -INF).tril(-1),
    "written to": written_to_later,
    "its booleans are": booleans_written_to,
    "so are these": filled_by_what_changes,
    "filled again": zeros_filled_twice,
    "gathered": lambda hidden: torch.where(hidden, -INF, 0.0)[torch.randperm(ROWS)],
}


@pytest.mark.parametrize("mask", OTHERS.values(), ids=OTHERS)
def test_others_are_not(mask: Mask) -> None:
    assert found(mask, hidden_tokens())[0] is None


def test_a_mask_that_learns_is_not() -> None:
    bias = torch.zeros(ROWS, LENGTH, requires_grad=True)
    gm, _ = captured(lambda hidden, bias: bias.masked_fill(hidden, -INF), hidden_tokens(), bias)
    assert shown_by(gm.graph.output_node().args[0][0], {}) is None


def test_what_is_the_same_has_one_key() -> None:
    def run(hidden: Tensor) -> tuple[Tensor, ...]:
        mask = filled_in_place(hidden)
        return mask[:, None, None], mask[:, None, None], mask[:, None]

    gm, _ = captured(run, hidden_tokens())
    keys: list[Any] = [known.key for each in gm.graph.output_node().args[0] if (known := shown_by(each, {}))]
    assert len(keys) == 3 and keys[0] == keys[1] != keys[2] and len(set(keys)) == 2


@pytest.mark.parametrize("causal", [False, True])
def test_a_transformer_of_pytorchs_trains_by_tiles(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    runs = partial(masked_attentions, runs=lambda q, k, v, probability: True)
    monkeypatch.setattr(backend, "masked_attentions", runs)
    length = 160
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    x, hidden = torch.randn(2, length, 64), torch.arange(length)[None] >= torch.tensor([[length], [70]])
    mask = torch.ones(length, length, dtype=torch.bool).triu(1) if causal else None
    with manager.recording() as records:
        y = compiled(model, exclude=["*"], cost_model=False)(x, mask, src_key_padding_mask=hidden, is_causal=causal)
    (record,) = records
    assert [each.kernel for each in record.plan.attentions] == ["tiles", "tiles"]
    wanted = model(x, mask, src_key_padding_mask=hidden, is_causal=causal)
    assert relative_error(y, wanted) < 1e-4
    grad = torch.randn_like(y)
    pairs = zip(*(torch.autograd.grad(each, list(model.parameters()), grad) for each in (y, wanted)), strict=True)
    assert all(relative_error(one, other) < 1e-3 for one, other in pairs if other.norm() > 1e-2)
