"""What the passes did to attention, its mask and its key heads stands in the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_compile.backend import te_fp8
from te_compile.passes import manager
from te_compile.passes.plan import Attention
from tests.static_keys import StaticKeys

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

HEADS, LENGTH, WIDTH = 4, 8, 16


def heads(count: int = HEADS, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(2, count, LENGTH, WIDTH, dtype=dtype)


def qkv() -> list[Tensor]:
    return [heads() for _ in range(3)]


def found(run: Callable[..., Any], *inputs: Any) -> list[Attention]:
    with manager.recording() as compilations:
        torch.compile(run, backend=te_fp8, options={"compiler": "aot_eager"})(*inputs)
    return [each for compilation in compilations for each in compilation.plan.attentions]


def called(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def spelled_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT * 0.25, dim=-1) @ v


def soft_capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(torch.tanh(q @ k.mT), dim=-1) @ v


def under_a_made_mask(made: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v: called(q, k, v, made(torch.arange(LENGTH)))


def test_attention_is_called_recognised_or_stays() -> None:
    (call,), (recognised,), (stays,) = (found(run, *qkv()) for run in (called, spelled_out, soft_capped))
    assert (call.status, call.mask, call.heads) == ("sdpa", "none", "")
    assert (recognised.status, recognised.reason) == ("recognised", "")
    assert (stays.status, stays.mask) == ("stays", "") and "tanh before softmax" in stays.reason


def test_a_graph_without_attention_has_none() -> None:
    assert not found(lambda x: F.softmax(x, dim=-1) * 2, heads())


@pytest.mark.parametrize(("mask", "reason", "made"), [
    ("folded_causal", "", lambda at: at[:, None] >= at),
    ("folded_all", "", lambda at: (at[:, None] + at) >= 0),
    ("kept", "sliding window", lambda at: (at[:, None] >= at) & (at[:, None] - at < 3)),
    ("kept", "it is a bias", lambda at: (at[:, None] - at).to(torch.bfloat16)),
])  # fmt: skip
def test_what_became_of_a_mask_is_told(mask: str, reason: str, made: Callable[[Tensor], Tensor]) -> None:
    (attention,) = found(under_a_made_mask(made), *qkv())
    assert attention.mask == mask and reason in attention.mask_reason and bool(reason) == bool(attention.mask_reason)


def test_a_mask_from_outside_is_kept_under_its_name() -> None:
    def padded(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        at = torch.arange(LENGTH)
        return called(q, k, v, (at[:, None] >= at) & padding[:, None, None, :])

    (attention,) = found(padded, *qkv(), torch.ones(2, LENGTH, dtype=torch.bool))
    assert attention.mask == "kept" and "depends on padding, whose values" in attention.mask_reason


def test_a_mask_made_outside_of_a_checkpoint_is_kept_under_its_inputs_name() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        return checkpoint(called, q, k, v, padding[:, None, None, :] > 0, use_reentrant=False)

    operands = [x.requires_grad_() for x in qkv()]
    (attention,) = found(run, *operands, torch.ones(2, LENGTH))
    assert "depends on padding, whose values" in attention.mask_reason


def test_the_calls_own_flag_is_no_folded_mask() -> None:
    (attention,) = found(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *qkv())
    assert attention.mask == "is_causal"


def shared(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return called(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1), mask)


def test_copies_of_key_heads_are_undone_or_say_why_not() -> None:
    narrow = (heads(), heads(HEADS // 2), heads(HEADS // 2))
    (undone,), (masked,) = found(shared, *narrow), found(shared, *narrow, torch.ones(LENGTH, LENGTH).bool())
    (wide,) = found(shared, *(x.float() for x in narrow))
    assert (undone.heads, undone.heads_reason) == ("undone", "")
    assert masked.heads == "copied" and "with a mask" in masked.heads_reason
    assert wide.heads == "copied" and "torch.float32" in wide.heads_reason


def test_an_attention_of_torch_nn_that_stays_closed_is_told() -> None:
    (attention,) = found(StaticKeys(32, 2), torch.randn(LENGTH, 2, 32))
    assert attention.status == "stays" and "static_k" in attention.reason


def test_the_module_of_a_softmax_is_no_attention_of_its_own() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.softmax = nn.Softmax(dim=-1)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.softmax(torch.tanh(q @ k.mT)) @ v

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Own()

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.attention(q, k, v)

    (attention,) = found(Outer(), *qkv())
    assert attention.name == "attention"
