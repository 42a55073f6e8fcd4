"""What single nodes mean in a producer: truths stay truths, and what is compared is what eager mode has in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_compile.passes import manager
from te_compile.passes.fuse_producers import fuse_producers
from tests.compiling import compiled, cosine, relative_error, te_nodes, train_step
from tests.passes.test_fuse_producers import assert_same_numbers, fused, quantized, specs, steps, traced

ROWS, WIDTH = 32, 64
BF16 = torch.bfloat16


class Masked(nn.Module):
    """A linear, something of its results, and a linear."""

    def __init__(self, between: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))


# --------------------------------------------------------------------------------------------------------------- truths


def test_the_text_of_a_sum_of_truths_casts_it_to_a_truth() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return quantized(x * ((x > -1) + (x > 0)))

    (spec,) = specs(fused(traced(function, torch.randn(4, WIDTH)), 1))
    assert steps(spec) == (
        "t0 = gt(x0, -1); t1 = gt(x0, 0); t2 = number(t0); t3 = number(t1); t4 = add(t2, t3); t5 = ne(t4, 0); "
        "t6 = number(t5); t7 = mul(x0, t6); quantize t7"
    )


# Of numbers x and y and of two truths, a truth or numbers that are taken for truths.
TRUTHS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "a sum": lambda x, y, a, b: a + b,
    "a product": lambda x, y, a, b: a * b,
    "a maximum": lambda x, y, a, b: torch.maximum(a, b),
    "a minimum": lambda x, y, a, b: torch.minimum(a, b),
    "bitwise or": lambda x, y, a, b: a | b,
    "bitwise xor": lambda x, y, a, b: a ^ b,
    "bitwise not": lambda x, y, a, b: ~a,
    "logical or of numbers": lambda x, y, a, b: torch.logical_or(x.relu(), y.relu()),
    "logical and of both": lambda x, y, a, b: torch.logical_and(a, y.relu()),
    "logical not of numbers": lambda x, y, a, b: torch.logical_not(x.relu()),
    "a cast": lambda x, y, a, b: x.relu().bool(),
    "a choice of truths": lambda x, y, a, b: torch.where(x > y, a, b),
    "a comparison of truths": lambda x, y, a, b: a == b,
    "a sum that is compared": lambda x, y, a, b: (a + b) != (x > y),
}


@pytest.mark.parametrize("name", TRUTHS)
def test_a_sum_with_what_is_a_truth_by_any_operator_is_one_or_zero(name: str) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a, b = x > -0.5, y > -0.5
        return quantized(y.exp() * (TRUTHS[name](x, y, a, b) + b))

    graph = assert_same_numbers(function, torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), expected=1)
    (spec,) = specs(graph)
    assert "bool[" not in spec, "all of it is computed in the producer"


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("with_cast", [False, True], ids=["product", "cast"])
def test_a_model_that_adds_truths_trains_as_eager_mode_does(with_cast: bool) -> None:
    def between(h: Tensor) -> Tensor:
        either = (h > -10) + (h > 0)
        return h * either.to(h.dtype) if with_cast else h * either

    model, x = Masked(between), torch.randn(ROWS, WIDTH)
    expected, expected_gradients = train_step(model, model, x)
    with manager.recording() as records:
        got, gradients = train_step(model, compiled(model, cost_model=False), x)
    (record,) = records
    assert {site.name: site.status for site in record.plan.sites} == dict.fromkeys(("a", "b"), "fp8")
    assert any("gt(" in str(node.args[2]) for node in te_nodes(record, "fused_quantize"))
    assert 0 < relative_error(got, expected) < 0.08
    for name, gradient in expected_gradients.items():
        assert cosine(gradients[name], gradient) > 0.99, name
        assert relative_error(gradients[name], gradient) < 0.15, name


# ---------------------------------------------------------------------------------------------------------- comparisons


def test_two_tensors_of_16_bits_are_compared_as_they_are_in_memory() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        h = x * 0.3
        return quantized(h * (h == h.amax(-1, keepdim=True)))

    for dtype in (BF16, torch.float16):
        (spec,) = specs(fused(traced(function, torch.randn(4, WIDTH).to(dtype)), 1))
        name = str(dtype).removeprefix("torch.")
        assert steps(spec) == (
            f"t0 = mul(x0, 0.3); t1 = {name}(t0); t2 = eq(t1, x1); t3 = number(t2); t4 = mul(t0, t3); "
            f"t5 = {name}(t4); quantize t5"
        )
    (spec,) = specs(fused(traced(function, torch.randn(4, WIDTH)), 1))
    assert steps(spec) == "t0 = mul(x0, 0.3); t1 = eq(t0, x1); t2 = number(t1); t3 = mul(t0, t2); quantize t3"


def test_only_what_was_computed_is_rounded_before_it_is_compared() -> None:
    def function(x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return quantized(y * ((x < y) & (x * scale < y) & (x.float() * 0.3 < y.float())))

    inputs = torch.randn(4, WIDTH).to(BF16), torch.randn(4, WIDTH).to(BF16), torch.rand(WIDTH).to(BF16)
    (spec,) = specs(fused(traced(function, *inputs), 1))
    assert spec.count("bfloat16(") == 2, "x · scale, and what is quantised"


# Of h, which a linear made, by what was made of h.
SELECTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "the largest": lambda h: h * (h == h.amax(-1, keepdim=True)),
    "the largest four": lambda h: h * (h >= h.topk(4, -1).values[..., -1:]),
    "all but the largest": lambda h: h.masked_fill(h != h.amax(-1, keepdim=True), 0.0),
    "all but less than four": lambda h: torch.where(h < h.topk(4, -1).values[..., -1:], 0.0, h),
    "the farthest four from zero": lambda h: h * (h.abs() >= h.abs().topk(4, -1).values[..., -1:]),
    "the smallest, the other way round": lambda h: h * (h.amin(-1, keepdim=True) >= h),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", SELECTIONS)
def test_a_model_selects_what_eager_mode_selects(name: str) -> None:
    model, x = Masked(lambda h: SELECTIONS[name](h * 0.3), BF16), torch.randn(ROWS, WIDTH).to(BF16)
    with torch.no_grad():
        model.b.bias.zero_()
        expected = model(x)
        with manager.recording() as records:
            got = compiled(model, cost_model=False, exclude=["a"])(x)
    (record,) = records
    assert {site.name: site.status for site in record.plan.sites}["b"] == "fp8"
    (producer,) = te_nodes(record, "fused_quantize")
    assert "mul(x0, 0.3)" in producer.args[2], "what is compared is computed again"
    assert 0 < relative_error(got, expected) < 0.1


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "threshold": lambda x: F.threshold(x, 0.25, 0.0),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_backward_lets_through_the_gradients_that_eager_mode_lets_through(name: str) -> None:
    """Half of what a product is compared with is the product, as it is in memory, and so not more than it."""

    def result(x: Tensor, scale: Tensor, other: Tensor) -> Tensor:
        product = ACTIVATIONS[name](x) * scale
        return torch.where(product >= other, product, other)

    def function(x: Tensor, scale: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        y = result(x, scale, other)
        return quantized(*torch.autograd.grad(y, x, torch.ones_like(y)))

    x, scale = torch.randn(128, WIDTH).to(BF16), (torch.rand(WIDTH) + 0.5).to(BF16)
    once = ACTIVATIONS[name](x) * scale
    other = torch.where(torch.rand(128, WIDTH) < 0.5, once, torch.randn_like(once))
    leaf = x.clone().requires_grad_()
    y = result(leaf, scale, other)
    (expected,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    graph_module = traced(function, x, scale, other)
    assert fuse_producers(graph_module.graph) == 1
    assert "ge(" in specs(graph_module.graph)[0], "the product is made and compared in the producer"
    graph_module.recompile()
    codes, _, _, scale_inv = graph_module(x, scale, other)
    assert torch.equal(codes.float() != 0, expected != 0)
    torch.testing.assert_close(codes.float() * scale_inv, expected.float(), rtol=0.07, atol=0.0)
