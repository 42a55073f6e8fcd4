"""te::grouped_linear: values and gradients of a mixture's experts outside of any compiler."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from te_compile.ops.grouped_linear import GROUPED_LINEAR, OWNED_ROWS
from te_compile.ops.linear import LinearConfig
from te_compile.ops.quantize import quantize_reference
from te_compile.recipe import ScaleRule
from tests.compiling import relative_error
from tests.emulation import emulated_experts

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RULE = ScaleRule()
EXPERTS, K, N = 5, 32, 48


def run(
    x: Tensor, weight: Tensor, ends: Tensor, slot: Tensor | None = None, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """te::grouped_linear with current scaling; the weight quantised as the graph does."""
    config = LinearConfig("experts", E4M3, E5M2, RULE.text(), transposed)
    codes, turned, _, scale_inv = quantize_reference(weight.detach().flatten(0, 1), None, E4M3, True, True, RULE)
    operands = x, weight, ends, codes, turned, scale_inv, None, None, slot
    y, amax, weight_amax = GROUPED_LINEAR(*operands, x.dtype, config.text())
    assert weight_amax.shape == (0,), "nothing was quantised"
    return y, amax


@pytest.mark.parametrize("scale", [None, 3.0])
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_that_quantise_their_weight_give_the_same_bits(scale: float | None, transposed: bool) -> None:
    x, weight, ends = drawn()
    stored = weight.detach().transpose(1, 2).contiguous().requires_grad_() if transposed else weight
    given = None if scale is None else torch.tensor(scale)
    matrix = stored.detach().flatten(0, 1)
    codes, turned, amax, scale_inv = quantize_reference(matrix, given, E4M3, True, True, RULE)
    rest = None, None, None, x.dtype, LinearConfig("experts", E4M3, E5M2, RULE.text(), transposed).text()
    expected, *_ = GROUPED_LINEAR(x, stored, ends, codes, turned, scale_inv, *rest)
    y, _, weight_amax = GROUPED_LINEAR(x, stored, ends, None, None, None, *rest, given)
    assert torch.equal(y, expected) and torch.equal(weight_amax, amax)
    dy = torch.randn_like(y)
    wanted = torch.autograd.grad(expected, (x, stored), dy)
    assert all(map(torch.equal, torch.autograd.grad(y, (x, stored), dy), wanted))


def drawn(rest: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, a weight [E, N, K], and ends that leave one expert without rows and ``rest`` rows without an expert."""
    counts = [random.randrange(1, 25) for _ in range(EXPERTS - 1)]
    counts.insert(random.randrange(EXPERTS), 0)
    x = torch.randn(sum(counts) + rest, K)
    weight = torch.randn(EXPERTS, N, K)
    return x.requires_grad_(), weight.requires_grad_(), torch.tensor(counts).cumsum(0).int()


def gradients_of(y: Tensor, dy: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """``dy`` is the same for all that are compared: made from each y, which differ in a last bit, it would now and then
    lie on the two sides of the middle between two codes."""
    return torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("transposed", [False, True])
def test_values_and_gradients_are_the_textbooks(transposed: bool) -> None:
    x, weight, ends = drawn()
    stored = weight.detach().mT.contiguous().requires_grad_() if transposed else weight
    y, amax = run(x, stored, ends, transposed=transposed)
    expected = emulated_experts(x, weight.mT, ends)
    assert relative_error(y, expected) < 1e-5 and torch.equal(amax, x.abs().max())
    dy = torch.randn_like(y)
    dx, dw = gradients_of(y, dy, x, stored)
    expected_dx, expected_dw = gradients_of(expected, dy, x, weight)
    assert relative_error(dx, expected_dx) < 1e-5
    assert relative_error(dw.mT if transposed else dw, expected_dw) < 1e-5


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    x, weight, ends = drawn()
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    y, _ = run(x, weight, ends)
    (dw,) = gradients_of(y, torch.randn_like(y), weight)
    assert [bool(part.any()) for part in dw] == (counts > 0).tolist()


def test_rows_of_no_expert_hold_anything_and_change_nothing() -> None:
    x, weight, ends = drawn(rest=6)
    owned = int(ends[-1])
    y, amax = run(OWNED_ROWS(x, ends), weight, ends)
    dy = torch.randn_like(y)
    expected = torch.autograd.grad(y, (x, weight), dy)
    slot = torch.zeros((), requires_grad=True)
    with torch.no_grad():
        x[owned:] = random.choice((float("nan"), float("inf"), 1e30))
    again, amax_again = run(OWNED_ROWS(x, ends), weight, ends, slot)
    assert torch.equal(y, again) and torch.equal(amax, amax_again) and not y[owned:].any()
    held = dy.clone()
    held[owned:] = float("nan")
    *got, grad_amax = torch.autograd.grad(again, (x, weight, slot), held)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert torch.equal(grad_amax, dy[:owned].abs().max()) and not got[0][owned:].any()


def test_a_frozen_product_needs_no_backward_for_its_slot() -> None:
    x, weight, ends = drawn()
    y, amax = run(x.detach(), weight.detach(), ends, torch.zeros((), requires_grad=True))
    assert not y.requires_grad and not amax.requires_grad


@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_each_gradient_alone(wanted: str) -> None:
    x, weight, ends = drawn()
    leaves = {"x": x.detach(), "weight": weight.detach()}
    leaves[wanted].requires_grad_()
    y, _ = run(leaves["x"], leaves["weight"], ends)
    expected = emulated_experts(leaves["x"], leaves["weight"].mT, ends)
    dy = torch.randn_like(y)
    (got,), (other,) = gradients_of(y, dy, leaves[wanted]), gradients_of(expected, dy, leaves[wanted])
    assert relative_error(got, other) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_have_the_dtypes_of_what_they_are_of(dtype: torch.dtype) -> None:
    x, weight, ends = drawn()
    low = x.detach().to(dtype).requires_grad_()
    y, _ = run(low, weight, ends)
    dx, dw = gradients_of(y, torch.randn_like(y), low, weight)
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, torch.float32)


def test_a_result_may_be_changed_in_place() -> None:
    x, weight, ends = drawn()
    y, _ = run(x, weight, ends)
    y += 1.0
    expected = emulated_experts(x, weight.mT, ends) + 1.0
    assert relative_error(y, expected) < 1e-5
    dy = torch.randn_like(y)
    assert relative_error(gradients_of(y, dy, weight)[0], gradients_of(expected, dy, weight)[0]) < 1e-5
