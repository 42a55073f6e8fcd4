"""The gradient that cuDNN's attention reads lies as its result does, and its plan is kept under a key of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import inductor_prims
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from te_compile.ops.gemm import GEMM
from te_compile.passes import JOINT_PASSES
from te_compile.passes.lay_out_attention_gradients import (
    BACKWARD,
    DROPOUT,
    GRADIENT,
    RESULT,
    lay_out_attention_gradients,
)

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 32, 16
SHAPE = (BATCH, HEADS, LENGTH, WIDTH)
ROWS, POSITIONS, HEADS_OUTSIDE = (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 2, 3)
"""The order in memory: [B, S, H, D], [S, B, H, D], [B, H, S, D]."""

aten = torch.ops.aten
# cuDNN's operators know tensors of a GPU alone, and such as hold nothing.


def heads(order: tuple[int, ...], gap: int = 0) -> Tensor:
    """[B, H, S, D] that lies in ``order``; ``gap``: elements behind each row that belong to something else."""
    sizes = [SHAPE[place] for place in order]
    sizes[3] += gap
    matrix = torch.empty(sizes, dtype=torch.bfloat16, device="meta").narrow(3, 0, WIDTH)
    return matrix.permute([order.index(place) for place in range(4)])


def changed(
    order: tuple[int, ...], gradient: Tensor, made: Callable[[Tensor], Tensor] = lambda dy: dy, dropout: float = 0.0
) -> tuple[int, GraphModule, Node]:
    """What the pass counts for an attention whose q has ``order``, the graph then, and the backward's node."""

    def function(q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> Any:
        out, lse, _, _, q_length, k_length, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, dropout
        )
        numbers = (q_length, k_length, dropout, False)
        return BACKWARD(made(dy), q, k, v, out, lse, seed, offset, None, None, None, *numbers)

    gm = make_fx(function, tracing_mode="fake")(*(heads(order) for _ in range(3)), gradient)
    count = lay_out_attention_gradients(gm.graph)
    gm.graph.lint()
    (node,) = gm.graph.find_nodes(op="call_function", target=BACKWARD)
    return count, gm, node


def lies_as_the_result(node: Node) -> bool:
    gradient, result = (node.args[place].meta["val"] for place in (GRADIENT, RESULT))  # type: ignore[union-attr]
    return bool(gradient.stride() == result.stride() and gradient.shape == result.shape)


def copies(gm: GraphModule) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=aten.clone.default))


def has_own_key(node: Node) -> bool:
    return math.copysign(1, node.args[DROPOUT]) < 0 and node.args[DROPOUT] == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [ROWS, POSITIONS, HEADS_OUTSIDE], ids=str)
@pytest.mark.parametrize("gradient", [ROWS, POSITIONS, HEADS_OUTSIDE], ids=str)
def test_a_gradient_is_copied_where_it_lies_otherwise(order: tuple[int, ...], gradient: tuple[int, ...]) -> None:
    count, gm, node = changed(order, heads(gradient))
    assert count == 1 and lies_as_the_result(node) and has_own_key(node)
    assert copies(gm) == (order != gradient)


def test_gaps_between_rows_are_closed() -> None:
    count, gm, node = changed(ROWS, heads(ROWS, gap=16))
    assert (count, copies(gm)) == (1, 1) and lies_as_the_result(node)


def test_dimensions_of_size_one_lie_anywhere() -> None:
    def function(q: Tensor, dy: Tensor) -> Any:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, q, q, None, True)
        seed = torch.empty((), dtype=torch.int64, device="meta")
        return BACKWARD(dy, q, q, q, out, lse, seed, seed, None, None, None, LENGTH, LENGTH, 0.0, False)

    q, dy = (torch.empty(1, 1, LENGTH, WIDTH, dtype=torch.bfloat16, device="meta") for _ in range(2))
    gm = make_fx(function, tracing_mode="fake")(q, dy.as_strided(dy.shape, (7, 5, WIDTH, 1)))
    assert lay_out_attention_gradients(gm.graph) == 1 and copies(gm) == 0


def test_what_inductor_may_lay_out_as_it_likes_is_held_to_the_order() -> None:
    _, gm, node = changed(ROWS, heads(ROWS), lambda dy: dy * 2)
    (forced,) = gm.graph.find_nodes(op="call_function", target=inductor_prims.force_stride_order)
    assert node.args[GRADIENT] is forced and lies_as_the_result(node)
    # A copy of ours is written by Inductor as well.
    _, gm, node = changed(ROWS, heads(POSITIONS))
    (forced,) = gm.graph.find_nodes(op="call_function", target=inductor_prims.force_stride_order)
    assert node.args[GRADIENT] is forced and lies_as_the_result(node)


def test_what_a_product_of_ours_made_needs_no_holding() -> None:
    def product(dy: Tensor) -> Tensor:
        a = torch.empty(BATCH * LENGTH, 64, dtype=torch.float8_e5m2, device="meta")
        b = torch.empty(HEADS * WIDTH, 64, dtype=torch.float8_e4m3fn, device="meta")
        scale = torch.empty((), device="meta")
        made = GEMM(a, b, scale, scale, None, torch.bfloat16, "split", "dgrad")
        return made.view(BATCH, LENGTH, HEADS, WIDTH).transpose(1, 2)

    count, gm, node = changed(ROWS, heads(ROWS), product)
    assert count == 1 and copies(gm) == 0 and lies_as_the_result(node)
    assert not gm.graph.find_nodes(op="call_function", target=inductor_prims.force_stride_order)


def test_with_dropout_the_key_is_everybodys_and_a_models_own_order_stays() -> None:
    count, gm, node = changed(HEADS_OUTSIDE, heads(ROWS), dropout=0.125)
    assert (count, copies(gm), node.args[DROPOUT]) == (0, 0, 0.125)
    # No model that is not rewritten has rows in one order and their gradients in another.
    count, gm, node = changed(ROWS, heads(POSITIONS), dropout=0.125)
    assert (count, copies(gm), node.args[DROPOUT]) == (0, 1, 0.125) and lies_as_the_result(node)


def test_sizes_may_be_symbols() -> None:
    def function(q: Tensor, dy: Tensor) -> Any:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, q, q, None, True)
        seed = torch.empty((), dtype=torch.int64, device="meta")
        length = q.shape[2]
        return BACKWARD(dy, q, q, q, out, lse, seed, seed, None, None, None, length, length, 0.0, False)

    for gradient, wanted in ((ROWS, 0), (POSITIONS, 1)):
        gm = make_fx(function, tracing_mode="symbolic")(heads(ROWS), heads(gradient))
        assert not isinstance(next(iter(gm.graph.nodes)).meta["val"].shape[2], int)
        assert lay_out_attention_gradients(gm.graph) == 1 and copies(gm) == wanted
        (node,) = gm.graph.find_nodes(op="call_function", target=BACKWARD)
        assert node.args[GRADIENT].meta["val"].transpose(1, 2).is_contiguous()  # type: ignore[union-attr]


def test_other_attention_is_left_alone() -> None:
    def function(q: Tensor) -> Tensor:
        return aten._scaled_dot_product_flash_attention(q, q, q)[0]

    gm = make_fx(function, tracing_mode="fake")(heads(ROWS))
    assert lay_out_attention_gradients(gm.graph) == 0
    assert lay_out_attention_gradients in JOINT_PASSES
