"""Rotations of heads, and whatever else moves columns within them, in the producers behind them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from te_compile.ops.fused_quantize import FUSED_QUANTIZE
from te_compile.ops.pointwise import Spec
from te_compile.passes.fuse_producers import fuse_producers
from te_compile.passes.pair_producers import pair_producers
from tests.passes.test_fuse_producers import assert_same_numbers, names, quantized, specs, traced

B, S, HEADS, D = 2, 6, 3, 64


def heads(number: int = HEADS, width: int = D) -> Tensor:
    """What attention gives back, [B, H, S, D]."""
    return torch.randn(B, number, S, width)


def tables(width: int = D, batch: int = 1) -> tuple[Tensor, Tensor]:
    """Cos and sin, [B or 1, S, D]."""
    return torch.randn(batch, S, width), torch.randn(batch, S, width)


def side_by_side(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, unsqueezed: int = 1) -> Tensor:
    """As Hugging Face's Llama writes it."""
    return x * cos.unsqueeze(unsqueezed) + rotate_half(x) * sin.unsqueeze(unsqueezed)


def partly_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Phi does: the first features only."""
    width = cos.shape[-1]
    return torch.cat((rotated(x[..., :width], cos, sin), x[..., width:]), dim=-1)


def rotated_in_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As GPT-J does: even features with odd ones."""
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def gradient_of(function: Callable[..., Tensor], shape: tuple[int, ...]) -> Callable[..., Tensor]:
    """What comes back to an input of ``shape`` from the gradient of the result, and the function's other operands."""

    def backward(gradient: Tensor, *others: Tensor) -> Tensor:
        x = gradient.new_zeros(shape).requires_grad_()
        [found] = torch.autograd.grad(function(x, *others), x, gradient)
        return found

    return backward


def traced_with_symbols(function: Callable[..., Any], dimensions: tuple[int, ...], *inputs: Tensor) -> GraphModule:
    """The ATen graph of ``function`` where the first input's ``dimensions`` are symbols, and equal sizes of others."""
    environment = ShapeEnv()
    symbols = {inputs[0].shape[dim] for dim in dimensions}
    with FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True) as mode:
        fakes = []
        for x in inputs:
            sizes = [DimDynamic.DUCK if size in symbols else DimDynamic.STATIC for size in x.shape]
            fakes.append(mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)))
        return make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="real")(*fakes)


ROTATION_BACKWARD = (
    "x0: float32[M, K of a[32:64] + a[0:32]]; x1: float32[M, D of b[32:64] + b[0:32]]; x2: bool[columns 0:32 of 64]; "
    "x3: float32[M, K of a[0:64]]; x4: float32[M, D of c[0:64]]; "
    "t0 = mul(x0, x1); t1 = where(x2, t0, 0.0); t2 = neg(t0); t3 = where(x2, 0.0, t2); t4 = add(t1, t3); "
    "t5 = mul(x3, x4); t6 = add(t4, t5); quantize t6"
)

# ------------------------------------------------------------------------------------------------------------- it fires


@pytest.mark.parametrize("batch", [1, B], ids=["one table", "a table for each"])
@pytest.mark.parametrize("number", [HEADS, 2], ids=["all heads", "fewer heads of k"])
def test_the_backward_of_a_rotation_is_the_producers(number: int, batch: int) -> None:
    def function(gradient: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return quantized(side_by_side(gradient_of(rotated, (B, number, S, D))(gradient, cos, sin)))

    graph = assert_same_numbers(function, heads(number), *tables(batch=batch), expected=1)
    assert specs(graph) == [ROTATION_BACKWARD]
    assert not any(f"aten.{word}" in names(graph).split() for word in ("cat", "slice.Tensor", "clone", "neg"))


def test_one_head_alone_is_a_head() -> None:
    def function(gradient: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return quantized(side_by_side(gradient_of(rotated, (B, 1, S, D))(gradient, cos, sin)))

    graph = assert_same_numbers(function, heads(1), *tables(), expected=1)
    assert "a[32:64] + a[0:32]" in specs(graph)[0] and "aten.slice.Tensor" not in names(graph)


def test_a_rotation_forward_is_the_producers_too() -> None:
    graph = assert_same_numbers(lambda *a: quantized(side_by_side(rotated(*a))), heads(), *tables(), expected=1)
    assert specs(graph) == [
        "x0: float32[M, K of a[0:64]]; x1: float32[M, D of b[0:64]]; x2: float32[M, K of a[32:64] + a[0:32]]; "
        "x3: bool[columns 0:32 of 64]; x4: float32[M, D of c[0:64]]; "
        "t0 = mul(x0, x1); t1 = neg(x2); t2 = where(x3, t1, x2); t3 = mul(t2, x4); t4 = add(t0, t3); quantize t4"
    ]


def test_tables_that_are_made_for_a_rotation_alone_do_not_keep_it_from_its_producer() -> None:
    """One for all heads is small, whatever it takes for one head."""

    def function(x: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
        return quantized(side_by_side(rotated(x, angles.cos(), angles.sin()).bfloat16()))

    graph = assert_same_numbers(function, heads(2).bfloat16(), tables()[0], expected=1)
    assert "[M, D of b[0:64]]" in specs(graph)[0]


def test_features_that_are_not_rotated_pass_by() -> None:
    def function(gradient: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return quantized(side_by_side(gradient_of(partly_rotated, (B, HEADS, S, D))(gradient, cos, sin)))

    graph = assert_same_numbers(function, heads(), *tables(32), expected=1)
    [spec] = specs(graph)
    assert "x0: float32[M, K of a[16:32] + a[0:16] + a[32:64]]" in spec and "a[0:32] + 32 unread" in spec
    assert spec.count("[M, K of") == 2


def test_heads_that_were_not_transposed_are_rotated_where_they_are() -> None:
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotated(x.view(B, S, HEADS, D), cos, sin, 2).transpose(1, 2)

    def function(gradient: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return quantized(gradient_of(forward, (B, S, HEADS * D))(gradient, cos, sin))

    graph = assert_same_numbers(function, heads(), *tables(), expected=1)
    assert "a[32:64] + a[0:32]" in specs(graph)[0] and "aten.slice.Tensor" not in names(graph)


def test_gradients_of_q_k_and_v_of_one_linear_are_rotated_and_joined() -> None:
    """GPT-NeoX: q, k and v of each head lie together, and some features of q and k are rotated."""

    def forward(packed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        q, k, v = packed.view(B, S, HEADS, 3 * D).transpose(1, 2).chunk(3, dim=-1)
        return partly_rotated(q, cos, sin), partly_rotated(k, cos, sin), v

    def function(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        x = dq.new_zeros(B, S, HEADS * 3 * D).requires_grad_()
        [gradient] = torch.autograd.grad(forward(x, cos, sin), x, [dq, dk, dv])
        return *quantized(gradient), gradient.sum((0, 1))

    graph = assert_same_numbers(function, *(heads() for _ in range(3)), *tables(32), expected=1, rtol=1e-5, atol=1e-5)
    [spec] = specs(graph)
    assert "a[16:32] + a[0:16] + a[32:64] + b[16:32] + b[0:16] + b[32:64] + c[0:64]" in spec
    assert Spec.parse(spec).matrices == 1 and spec.count("[M, K of") == 2 and "sum" in spec


def test_padding_along_the_columns_is_a_constant_there() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return quantized(side_by_side(torch.nn.functional.pad(x.exp(), (16, 16), value=0.5)))

    graph = assert_same_numbers(function, heads(width=32), expected=1)
    assert specs(graph) == [
        "x0: float32[M, K of 16 unread + a[0:32] + 16 unread]; x1: bool[columns 16:48 of 64]; "
        "x2: bool[columns 0:16 of 64]; t0 = exp(x0); t1 = where(x1, t0, 0.5); t2 = where(x2, 0.5, t1); quantize t2"
    ]


@pytest.mark.parametrize("dynamic", [0, 2], ids=["batch", "length"])
def test_symbolic_batches_and_lengths_are_rotated(dynamic: int) -> None:
    def function(gradient: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        rows = gradient * cos.unsqueeze(1)
        return quantized(side_by_side(torch.cat((-rows[..., 32:], rows[..., :32]), -1) + gradient * sin.unsqueeze(1)))

    inputs = heads(), *tables()
    graph_module = traced_with_symbols(function, (0, 2), *inputs)
    before = graph_module(*inputs)
    assert fuse_producers(graph_module.graph) == 1
    graph_module.recompile()
    [spec] = specs(graph_module.graph)
    assert "K of a[32:64] + a[0:32]" in spec
    sizes = {0: (B + 1, HEADS, S, D), 2: (B, HEADS, S + 3, D)}[dynamic]
    others = [torch.randn(1, sizes[2], D) for _ in range(2)]
    for given in (inputs, (torch.randn(sizes), *others)):
        expected = before if given is inputs else function(*given)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(graph_module(*given), expected, strict=True))


def _moved_at_random(x: Tensor, y: Tensor, table: Tensor, steps: int) -> Tensor:
    """Halves, thirds and quarters of heads exchanged, scattered and computed with."""
    for _ in range(steps):
        cut = 16 * random.randint(1, 3)
        x = random.choice(
            [
                lambda x, cut: torch.cat((x[..., cut:], x[..., :cut]), -1),
                lambda x, cut: torch.cat((y[..., :cut], x[..., cut:].neg()), -1),
                lambda x, cut: torch.slice_scatter(x.tanh(), y[..., 16:32], -1, cut - 16, cut),
                lambda x, cut: torch.nn.functional.pad(x[..., cut:], (0, cut)) * y,
                lambda x, cut: torch.roll(x, cut, -1) + x,
                lambda x, cut: x * table.unsqueeze(1),
                lambda x, cut: torch.where(x > y, x, -0.0),
            ]
        )(x, cut)
    return x


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
def test_whatever_moves_the_numbers_are_the_same(steps: int) -> None:
    seed = random.randrange(2**31)

    def function(x: Tensor, y: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        random.seed(seed)
        return quantized(side_by_side(_moved_at_random(x, y, table, steps)))

    graph_module = traced(function, *(inputs := (heads(), heads(), tables()[0])))
    before = graph_module(*inputs)
    fuse_producers(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    for a, b in zip(before, graph_module(*inputs), strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True, msg=f"seed {seed}")


# -------------------------------------------------------------------------------------------- and where it must not


def _kept(function: Callable[..., Any], *inputs: Tensor) -> str:
    """The spec's inputs after the pass, whose numbers are those of before."""
    graph_module = traced(function, *inputs)
    before = graph_module(*inputs)
    fuse_producers(graph_module.graph)
    graph_module.recompile()
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(before, graph_module(*inputs), strict=True))
    producers = graph_module.graph.find_nodes(op="call_function", target=FUSED_QUANTIZE)
    return "; ".join(producer.args[2] for producer in producers)


def test_pairs_of_neighbours_stay_outside() -> None:
    def function(gradient: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return quantized(side_by_side(gradient_of(rotated_in_pairs, (B, HEADS, S, D))(gradient, cos, sin)))

    assert _kept(function, heads(), *tables()) == "x0: float32[M, K of 192]; quantize x0"


def test_a_rotation_that_others_read_is_read() -> None:
    def function(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        turned = rotated(x, cos, sin)
        return *quantized(side_by_side(turned)), turned @ turned.transpose(2, 3)

    assert _kept(function, heads(), *tables()) == "x0: float32[M, K of 192]; quantize x0"


@pytest.mark.parametrize("width", [24, 48, 2048], ids=["narrow", "odd", "wide"])
def test_heads_of_other_widths_stay_outside(width: int) -> None:
    def function(gradient: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return quantized(side_by_side(gradient_of(rotated, (B, HEADS, S, width))(gradient, cos, sin)))

    assert " of a[" not in _kept(function, heads(width=width), *tables(width))


def test_a_shift_that_vectors_do_not_follow_stays_outside() -> None:
    def function(gradient: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return quantized(side_by_side(gradient_of(partly_rotated, (B, HEADS, S, D))(gradient, cos, sin)))

    assert "a[12:24]" not in _kept(function, heads(), *tables(24))


@pytest.mark.parametrize("which", ["every second column", "rows", "promoted", "integers"])
def test_other_slices_and_scatters_stay_outside(which: str) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        x = x.exp()
        if which == "every second column":
            moved = torch.slice_scatter(x, x[..., :32], -1, 0, D, 2)
        elif which == "rows":
            moved = torch.cat((x[:, :, 3:], x[:, :, :3]), 2)
        elif which == "promoted":
            moved = torch.cat((x[..., 32:], x[..., :32].bfloat16()), -1)
        else:
            moved = torch.cat((x[..., 32:].int(), x[..., :32].int()), -1).float()
        return quantized(side_by_side(moved * 2))

    assert "a[32:64]" not in _kept(function, heads())


def test_gradients_that_are_rotated_are_not_paired() -> None:
    """Their tensors have names of their own in each spec."""

    def function(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        there, back = rotated(x, cos, sin), rotated(x, cos, -sin)
        return *quantized(side_by_side(there)), *quantized(side_by_side(back))

    graph_module = traced(function, heads(), *tables())
    assert fuse_producers(graph_module.graph) == 2 and pair_producers(graph_module.graph) == 0


def test_tables_for_all_heads_are_read_and_not_computed_for_each() -> None:
    def function(x: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
        return quantized(side_by_side(rotated(x, angles.cos(), angles.sin())))

    spec = _kept(function, heads(), tables()[0])
    assert "b[0:64]" in spec and "cos" not in spec and "sin" not in spec


def test_heads_of_symbolic_width_stay_outside() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        half = x.shape[-1] // 2
        return quantized(side_by_side(torch.cat((-x[..., half:], x[..., :half]), -1)))

    graph_module = traced_with_symbols(function, (0, 3), heads())
    fuse_producers(graph_module.graph)
    assert not any(" of a[" in spec for spec in specs(graph_module.graph))
