"""join_gradients: sums over indices and slices, and stacks, become what a producer reads in parts."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from te_compile.ops.fused_quantize import FUSED_QUANTIZE
from te_compile.passes.fuse_producers import fuse_producers
from te_compile.passes.join_gradients import join_gradients
from te_compile.passes.text import ops_text
from tests.passes.test_column_shifts import traced_with_symbols
from tests.passes.test_fuse_producers import names, quantized, specs, traced

B, S, HEADS, D = 2, 6, 3, 32
Heads = Callable[[Tensor], Any]


def heads(number: int = 3, width: int = D) -> list[Tensor]:
    """The gradients of q, k and v as attention gives them back, transposed."""
    return [torch.randn(B, S, HEADS, width).transpose(1, 2) for _ in range(number)]


def first_in_order(packed: Tensor, number: int = 3) -> Tensor:
    """timm: [3, B, H, S, D]."""
    return packed.reshape(*packed.shape[:2], number, HEADS, -1).permute(2, 0, 3, 1, 4)


def by_index(packed: Tensor) -> list[Tensor]:
    parts = first_in_order(packed)
    return [parts[0], parts[1], parts[2]]


def by_index_in_place(packed: Tensor) -> list[Tensor]:
    parts = packed.view(*packed.shape[:2], 3, HEADS, -1)
    return [parts[:, :, index].transpose(1, 2) for index in (0, -2, 2)]


def by_slices(packed: Tensor) -> list[Tensor]:
    """Phi-3."""
    n = packed.shape[-1] // 3
    parts = [packed[..., :n], packed[..., n : 2 * n], packed[..., 2 * n :]]
    return [part.view(*packed.shape[:2], HEADS, -1).transpose(1, 2) for part in parts]


SPELLINGS: dict[str, Heads] = {
    "iteration": lambda packed: list(first_in_order(packed)),
    "unbind": lambda packed: first_in_order(packed).unbind(0),
    "index": by_index,
    "index in place": by_index_in_place,
    "unbind in place": lambda p: [t.transpose(1, 2) for t in p.view(*p.shape[:2], 3, HEADS, -1).unbind(2)],
    "slices": by_slices,
}


def gradient_through(forward: Heads) -> Callable[..., tuple[Tensor, ...]]:
    """The quantised gradient of the packed tensor that ``forward`` takes apart, and its bias's."""

    def function(*gradients: Tensor) -> tuple[Tensor, ...]:
        packed = gradients[0].new_zeros(B, S, len(gradients) * HEADS * gradients[0].shape[-1]).requires_grad_()
        parts = forward(packed)
        [gradient] = torch.autograd.grad(parts, packed, list(gradients[: len(parts)]))
        flat = gradient.reshape(B * S, -1)
        return *quantized(flat), flat.sum(0)

    return function


def joined(graph_module: GraphModule, expected: int) -> str:
    """The operations of the graph after the pass."""
    assert join_gradients(graph_module.graph) == expected
    graph_module.graph.lint()
    graph_module.recompile()
    return names(graph_module.graph)


# ------------------------------------------------------------------------------------------------------------- it fires


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_producer_reads_the_gradients_where_attention_left_them(spelling: str) -> None:
    inputs = heads()
    graph_module = traced(gradient_through(SPELLINGS[spelling]), *inputs)
    before = graph_module(*inputs)
    joined(graph_module, 0 if spelling == "unbind in place" else 1)  # a cat is one already
    graph = graph_module.graph
    assert fuse_producers(graph) == 1
    assert specs(graph) == ["x0: float32[M, K of 96 + 96 + 96]; quantize x0; sum x0: float32"]
    assert not any(word in names(graph) for word in ("cat", "clone", "scatter", "add", "full"))
    graph_module.recompile()
    *codes, total = graph_module(*inputs)
    *codes_before, total_before = before
    for a, b in zip(codes, codes_before, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0)
    torch.testing.assert_close(total, total_before, rtol=1e-5, atol=1e-5)


def test_a_sum_over_indices_becomes_a_cat() -> None:
    def function(k: Tensor, v: Tensor) -> Any:
        zeros = [torch.zeros(2, B, HEADS, S, D) for _ in range(2)]
        both = zeros[0].select_scatter(v, 0, 1) + zeros[1].select_scatter(k, 0, 0)
        return quantized(both.permute(1, 3, 0, 2, 4).reshape(B * S, -1))[0]

    graph_module = traced(function, *heads(2))
    joined(graph_module, 1)
    assert ops_text(graph_module.graph) == textwrap.dedent("""\
        unsqueeze = aten.unsqueeze(k_1, 0)
        permute_1 = aten.permute(unsqueeze, [1, 3, 0, 2, 4])
        unsqueeze_1 = aten.unsqueeze(v_1, 0)
        permute_2 = aten.permute(unsqueeze_1, [1, 3, 0, 2, 4])
        cat = aten.cat([permute_1, permute_2], 2)
        view = aten.view(cat, [12, 192])
        view_1 = aten.view(view, [-1, 192])
        quantize = te.quantize(view_1, None, float8_e4m3fn, True, True, 'margin=0 epsilon=0.0 power_2=False')
        getitem = getitem(quantize, 0)
        return getitem""")


@pytest.mark.parametrize("number", [2, 4])
def test_two_and_four_parts_are_joined_as_well(number: int) -> None:
    graph_module = traced(gradient_through(lambda p: list(first_in_order(p, number))), *heads(number))
    assert "scatter" not in joined(graph_module, 1)


@pytest.mark.parametrize("spelling", ["iteration", "unbind"])
@pytest.mark.parametrize("dynamic", [0, 2], ids=["batch", "length"])
def test_symbolic_batches_and_lengths_are_joined(spelling: str, dynamic: int) -> None:
    def function(*gradients: Tensor) -> Any:
        batch, _, length, _ = gradients[0].shape
        packed = gradients[0].new_zeros(batch, length, 3 * HEADS * D).requires_grad_()
        [gradient] = torch.autograd.grad(SPELLINGS[spelling](packed), packed, list(gradients))
        return quantized(gradient)

    graph_module = traced_with_symbols(function, (dynamic,), *(torch.randn(5, HEADS, 7, D) for _ in range(3)))
    joined(graph_module, 1)
    fuse_producers(graph_module.graph)
    assert specs(graph_module.graph) == ["x0: float32[M, K of 96 + 96 + 96]; quantize x0"]


# ------------------------------------------------------------------------------------------- it does not fire elsewhere


def _without_one(packed: Tensor) -> list[Tensor]:
    parts = first_in_order(packed)
    return [parts[0], parts[2]]


def _one_twice(packed: Tensor) -> list[Tensor]:
    q, k, v = by_index(packed)
    return [q, k, v + first_in_order(packed)[2]]


def _whole_beside_parts(packed: Tensor) -> list[Tensor]:
    q, k, v = by_index(packed)
    return [q, k, v + first_in_order(packed).sum(0)]


def _overlapping(packed: Tensor) -> list[Tensor]:
    q, k, _ = by_slices(packed)
    n = HEADS * D
    return [q, k, packed[..., n // 2 : n // 2 + n].view(B, S, HEADS, -1).transpose(1, 2)]


@pytest.mark.parametrize("forward", [_without_one, _one_twice, _whole_beside_parts, _overlapping])
def test_a_sum_that_is_no_join_stays(forward: Heads) -> None:
    graph_module = traced(gradient_through(forward), *heads())
    before = ops_text(graph_module.graph)
    joined(graph_module, 0)
    assert ops_text(graph_module.graph) == before


@pytest.mark.parametrize("which", ["narrow heads", "too many"])
def test_what_no_producer_reads_in_parts_stays(which: str) -> None:
    width, number = (24, 3) if which == "narrow heads" else (D, 5)
    graph_module = traced(gradient_through(lambda p: list(first_in_order(p, number))), *heads(number, width))
    before = ops_text(graph_module.graph)
    joined(graph_module, 0)
    assert ops_text(graph_module.graph) == before


@pytest.mark.parametrize("of", ["a part among zeros", "some of the sum", "the sum", "its copy", "the stack"])
def test_what_others_read_stays(of: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        parts = [torch.zeros(3, *q.shape).select_scatter(t, 0, index) for index, t in enumerate((q, k, v))]
        some = parts[0] + parts[1]
        total = torch.stack([q, k, v]) if of == "the stack" else some + parts[2]
        copy = total.permute(1, 3, 0, 2, 4).contiguous()
        read = {"a part among zeros": parts[0], "some of the sum": some, "its copy": copy}.get(of, total)
        return *quantized(copy.view(B * S, -1)), read.exp()

    graph_module = traced(function, *heads())
    before = ops_text(graph_module.graph)
    joined(graph_module, 0)
    assert ops_text(graph_module.graph) == before


@pytest.mark.parametrize("which", ["not zero", "another dtype", "scaled", "in steps"])
def test_other_sums_stay(which: str) -> None:
    def function(k: Tensor, v: Tensor) -> Any:
        empty = torch.full((2, *k.shape), 1.0 if which == "not zero" else 0.0)
        if which == "in steps":
            first, second = (empty.slice_scatter(t.unsqueeze(0), 0, at, 3, 2) for at, t in enumerate((k, v)))
        else:
            k = k.bfloat16() if which == "another dtype" else k
            first, second = (empty.select_scatter(t, 0, at) for at, t in enumerate((k, v)))
        both = torch.add(first, second, alpha=2 if which == "scaled" else 1)
        return quantized(both.permute(1, 3, 0, 2, 4).reshape(B * S, -1))

    graph_module = traced(function, *heads(2))
    joined(graph_module, 0)
    fuse_producers(graph_module.graph)
    assert "scatter" in names(graph_module.graph)
    for producer in graph_module.graph.find_nodes(op="call_function", target=FUSED_QUANTIZE):
        assert len(producer.args[0]) == 1
