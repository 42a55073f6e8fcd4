"""Producers that read heads, and tensors to be joined, where they lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_compile.ops.fused_quantize import FUSED_QUANTIZE
from te_compile.passes.arguments import arguments_of
from te_compile.passes.fuse_producers import fuse_producers
from tests.any_size import at_any_size
from tests.compiling import te_nodes
from tests.passes.test_fuse_producers import assert_same_numbers, names, quantized, specs, traced

B, S, HEADS, D = 2, 6, 3, 32


def heads(number: int = HEADS, width: int = D) -> Tensor:
    """What attention gives back, [B, H, S, D]."""
    return torch.randn(B, number, S, width)


def side_by_side(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(B, S, -1)


def test_heads_are_quantised_without_a_copy() -> None:
    graph = assert_same_numbers(lambda x: quantized(side_by_side(x)), heads(), expected=1)
    assert specs(graph) == [f"x0: float32[M, K of {HEADS * D}]; quantize x0"]
    assert "clone" not in names(graph)


def test_what_is_computed_of_heads_reads_them_where_they_lie() -> None:
    def function(x: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        return quantized(side_by_side(x) * torch.sigmoid(gate))

    graph = assert_same_numbers(function, heads(), torch.randn(B, S, HEADS * D), expected=1)
    assert "[M, K of 96]" in specs(graph)[0] and "clone" not in names(graph)


@pytest.mark.parametrize("layout", ["each head together", "each tensor together", "fewer heads of k and v"])
def test_gradients_of_q_k_and_v_are_joined_by_the_producer(layout: str) -> None:
    def interleaved(q: Tensor, k: Tensor, v: Tensor) -> Any:
        joined = torch.cat([t.transpose(1, 2) for t in (q, k, v)], -1).reshape(B * S, -1)
        return *quantized(joined), joined.sum(0)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        joined = torch.cat([side_by_side(t) for t in (q, k, v)], 2)
        return *quantized(joined), joined.sum((0, 1))

    function: Callable[..., Any] = interleaved if layout == "each head together" else packed
    fewer = 1 if layout == "fewer heads of k and v" else HEADS
    inputs = heads(), heads(fewer), heads(fewer)
    graph = assert_same_numbers(function, *inputs, expected=1, rtol=1e-5, atol=1e-5)
    widths = "32 + 32 + 32" if function is interleaved else f"96 + {fewer * D} + {fewer * D}"
    assert specs(graph) == [f"x0: float32[M, K of {widths}]; quantize x0; sum x0: float32"]
    assert not any(word in names(graph) for word in ("cat", "clone"))


def test_a_cast_of_a_column_sum_is_the_producers() -> None:
    def function(x: Tensor) -> Any:
        return *quantized(x), x.sum(0, dtype=torch.float32).to(torch.bfloat16)

    graph = assert_same_numbers(function, torch.randn(8, 64).bfloat16(), expected=1, rtol=2**-7, atol=1e-3)
    assert specs(graph) == ["x0: bfloat16[M, K]; quantize x0; sum x0: bfloat16"]
    assert "convert" not in names(graph)


def test_parts_that_cat_would_promote_are_joined_as_before() -> None:
    def function(q: Tensor, k: Tensor) -> Any:
        return quantized(torch.cat([side_by_side(q), side_by_side(k)], 2))

    graph_module = traced(function, heads().bfloat16(), heads())
    fuse_producers(graph_module.graph)
    assert "cat" in names(graph_module.graph)


@pytest.mark.parametrize("which", ["other reader", "narrow heads", "joined along rows", "too many"])
def test_what_cannot_be_read_in_parts_is_joined_as_before(which: str) -> None:
    def function(*parts: Tensor) -> Any:
        joined = torch.cat([t.transpose(1, 2) for t in parts], 1 if which == "joined along rows" else -1)
        flat = joined.reshape(-1, joined.shape[-2] * joined.shape[-1])
        return *quantized(flat), flat.sum(0), *([flat.exp().sum()] if which == "other reader" else [])

    width = 24 if which == "narrow heads" else D
    parts = [heads(width=width) for _ in range(5 if which == "too many" else 3)]
    graph_module = traced(function, *parts)
    fuse_producers(graph_module.graph)
    (producer,) = graph_module.graph.find_nodes(op="call_function", target=FUSED_QUANTIZE)
    assert len(producer.args[0]) == 1 and " of " not in producer.args[2]
    assert "cat" in names(graph_module.graph)


class Capped(nn.Module):
    """Attention that no fused kernel runs; the gradients of q and v lie in memory by heads. Both of each head together,
    or each of a projection of its own."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.q, self.k, self.v, self.out = (nn.Linear(2 * D, 2 * D) for _ in range(4))
        self.qv = nn.Linear(2 * D, 4 * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (2, D)) for project in (self.q, self.k, self.v))
        if self.packed:
            q, v = self.qv(x).unflatten(-1, (2, 2 * D)).chunk(2, -1)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return self.out(((q @ k.mT).tanh().softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("packed", "expected"), [(True, "K of 32 + 32"), (False, "K of 64")])
def test_heads_are_read_where_they_lie_where_batch_and_length_are_both_symbols(packed: bool, expected: str) -> None:
    sizes = ((2, 24), (5, 7), (3, 33))
    records = at_any_size(Capped(packed), lambda b, t: [torch.randn(b, t, 2 * D, requires_grad=True)], sizes)
    for_one, for_any = (
        Counter(str(arguments_of(node)["spec"]) for node in te_nodes(record, "fused_quantize")) for record in records
    )
    assert for_any == for_one and any(expected in spec for spec in for_any)
