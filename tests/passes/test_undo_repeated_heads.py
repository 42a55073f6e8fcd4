"""Copies of key heads go where a kernel knows shared heads, and stay where none does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph

import te_compile
from te_compile.passes.plain_operators import plain_operators
from te_compile.passes.text import ops_text
from te_compile.passes.undo_repeated_heads import undo_repeated_heads
from tests.capturing import rewritten

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BATCH, HEADS, SHARED, LENGTH, WIDTH = 2, 6, 3, 5, 8
Repeat = Callable[[Tensor], Tensor]


def by_expansion(x: Tensor) -> Tensor:
    copies = x[:, :, None, :, :].expand(BATCH, x.shape[1], HEADS // x.shape[1], *x.shape[2:])
    return copies.reshape(BATCH, HEADS, *x.shape[2:])


def by_unsqueeze(x: Tensor) -> Tensor:
    return x.unsqueeze(2).expand(-1, -1, HEADS // x.shape[1], -1, -1).flatten(1, 2)


def by_interleaving(x: Tensor) -> Tensor:
    return torch.repeat_interleave(x, HEADS // x.shape[1], dim=1)


def by_interleaving_with_names(x: Tensor) -> Tensor:
    return x.repeat_interleave(repeats=HEADS // x.shape[1], dim=1)


def by_a_function_with_names(x: Tensor) -> Tensor:
    return torch.repeat_interleave(input=x, dim=-3, repeats=HEADS // x.shape[1])


def by_whole_copies(x: Tensor) -> Tensor:
    return x.repeat(1, HEADS // x.shape[1], 1, 1)


def of_the_length(x: Tensor) -> Tensor:
    return x[:, :, None, :, :].expand(BATCH, 3, 2, LENGTH, WIDTH).reshape(BATCH, 6, LENGTH, WIDTH).roll(1, 1)


def heads(count: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(BATCH, count, LENGTH, WIDTH).to(dtype).requires_grad_()


def changed(run: Callable[..., Tensor], *inputs: Tensor, tolerance: float = 5e-2) -> tuple[int, str]:
    """How many attentions of ``run`` were changed, and its text."""

    def change(graph: Graph) -> int:
        plain_operators(graph)  # as in the pipeline
        return undo_repeated_heads(graph)

    count, graph = rewritten(change, run, *inputs, tolerance=tolerance)
    return count, ops_text(graph)


@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize("repeat", [
    by_expansion, by_unsqueeze, by_interleaving, by_interleaving_with_names, by_a_function_with_names,
])  # fmt: skip
def test_repeated_heads_are_read_where_they_are(repeat: Repeat, shared: int) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeat(k), repeat(v), is_causal=True, scale=0.3)

    count, text = changed(run, heads(HEADS), heads(shared), heads(shared))
    assert count == 1 and "enable_gqa=True" in text
    assert "expand" not in text and "repeat" not in text


@pytest.mark.parametrize("repeat", [by_whole_copies, of_the_length])
def test_heads_in_another_order_stay(repeat: Repeat) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeat(k), repeat(v))

    assert changed(run, heads(HEADS), heads(SHARED), heads(SHARED))[0] == 0


def test_keys_without_values_or_with_a_mask_or_in_float32_stay() -> None:
    def keys_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, by_expansion(k), v)

    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, by_expansion(k), by_expansion(v), attn_mask=mask)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, by_expansion(k), by_expansion(v))

    mask = torch.rand(LENGTH, LENGTH) < 0.7
    mask[:, 0] = True
    assert changed(keys_alone, heads(HEADS), heads(SHARED), heads(HEADS))[0] == 0
    assert changed(masked, heads(HEADS), heads(SHARED), heads(SHARED), mask)[0] == 0
    wide = [heads(count, torch.float32) for count in (HEADS, SHARED, SHARED)]
    assert changed(plain, *wide, tolerance=1e-5)[0] == 0


def _a_slice(keys: Tensor) -> None:
    keys[..., : WIDTH // 2] = keys[..., WIDTH // 2 :].neg()


@pytest.mark.parametrize("repeat", [by_interleaving, by_interleaving_with_names])
@pytest.mark.parametrize(
    "write",
    [_a_slice, lambda keys: keys[:, 0].mul_(2.0), lambda keys: keys.view(-1, LENGTH)[0].zero_()],
    ids=["a slice", "a head", "through a view"],
)
def test_copies_that_are_written_into_are_read_themselves(write: Callable[[Tensor], object], repeat: Repeat) -> None:
    """As a rotary embedding in place does."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = repeat(k), repeat(v)
        write(keys)
        return F.scaled_dot_product_attention(q, keys, values)

    def of_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = repeat(k), repeat(v)
        write(values)
        return F.scaled_dot_product_attention(q, keys, values)

    assert changed(run, heads(HEADS), heads(SHARED), heads(SHARED))[0] == 0
    assert changed(of_values, heads(HEADS), heads(SHARED), heads(SHARED))[0] == 0


def test_heads_written_into_after_they_were_copied_stay() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k * 2.0
        keys, values = by_interleaving(k), by_interleaving(v)
        k.mul_(3.0)
        return F.scaled_dot_product_attention(q, keys, values) + k.sum()

    assert changed(run, heads(HEADS), heads(SHARED), heads(SHARED))[0] == 0


class Masked(nn.Module):
    """Attention with shared heads and a mask or a bias: learned, given or a window's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.bias = kind, nn.Parameter(torch.randn(LENGTH, LENGTH))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        places = torch.arange(LENGTH)
        behind = places[:, None] - places
        mask = {"learned": self.bias, "given": given, "window": (behind >= 0) & (behind < 2)}[self.kind]
        return F.scaled_dot_product_attention(q, by_expansion(k), by_expansion(v), attn_mask=mask)


@pytest.mark.parametrize(
    ("kind", "of_the_mask", "advice"),
    [
        ("learned", "nothing to do: it has to be added", "nothing to do: the mask has to stay"),
        ("given", "call without it where it hides nothing", "take the advice on the mask"),
        ("window", "use bfloat16 or float16 on a GPU", "take the advice on the mask"),
    ],
)
def test_heads_that_stay_copied_for_a_mask_need_what_the_mask_needs(kind: str, of_the_mask: str, advice: str) -> None:
    q, k, v = (heads(count, torch.float32) for count in (HEADS, SHARED, SHARED))
    [attention] = te_compile.explain(Masked(kind), q, k, v, torch.randn(LENGTH, LENGTH)).attentions
    assert (attention.mask, attention.heads) == ("kept", "copied")
    assert of_the_mask in attention.mask_reason
    assert attention.heads_reason == f"with a mask no fused kernel shares them; {advice}"
