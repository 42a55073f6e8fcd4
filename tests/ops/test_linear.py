"""te::linear: values and gradients outside of any compiler, and what its node says."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from te_compile.ops.linear import LINEAR, LinearConfig
from te_compile.ops.quantize import quantize_reference
from te_compile.recipe import ScaleRule
from tests.compiling import relative_error
from tests.emulation import emulated_linear

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RULE = ScaleRule()


def config(**changed: object) -> LinearConfig:
    return LinearConfig(**{"name": "fc", "forward": E4M3, "backward": E5M2, "rule": RULE.text(), **changed})


def run(
    x: Tensor, weight: Tensor, bias: Tensor | None, slot: Tensor | None = None, **changed: object
) -> tuple[Tensor, Tensor]:
    """te::linear with current scaling; the weight quantised as the graph does."""
    codes, transposed, _, scale_inv = quantize_reference(weight.detach(), None, E4M3, True, True, RULE)
    operands = x, weight, bias, codes, transposed, scale_inv, None, None, slot
    y, amax, weight_amax = LINEAR(*operands, x.dtype, config(**changed).text())
    assert weight_amax.shape == (0,), "nothing was quantised"
    return y, amax


def leaves(k: int = 32, n: int = 48) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(2, random.randrange(3, 20), k, requires_grad=True)
    return x, torch.randn(n, k, requires_grad=True), torch.randn(n, requires_grad=True)


def gradients_of(y: Tensor, dy: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """``dy`` is the same for all that are compared: made from each y, which differ in a last bit, it would now and then
    lie on the two sides of the middle between two codes."""
    return torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("transposed", [False, True])
def test_values_and_gradients_are_the_textbooks(transposed: bool) -> None:
    x, weight, bias = leaves()
    stored = weight.detach().t().contiguous().requires_grad_() if transposed else weight
    y, amax = run(x, stored, bias, transposed=transposed)
    expected = emulated_linear(x, weight, bias)
    assert relative_error(y, expected) < 1e-5 and torch.equal(amax, x.abs().max())
    dy = torch.randn_like(y)
    dx, dw, db = gradients_of(y, dy, x, stored, bias)
    expected_dx, expected_dw, expected_db = gradients_of(expected, dy, x, weight, bias)
    assert relative_error(dx, expected_dx) < 1e-5
    assert relative_error(dw.t() if transposed else dw, expected_dw) < 1e-5
    assert relative_error(db, expected_db) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_is_rounded_to_a_result_of_16_bits_and_its_gradient_is_not(dtype: torch.dtype) -> None:
    """As under autocast, where parameters have 32: a product adds no other on its way out."""
    x, weight, bias = leaves()
    codes, transposed, _, scale_inv = quantize_reference(weight.detach(), None, E4M3, True, True, RULE)
    operands = codes, transposed, scale_inv, None, None, None, dtype, config().text()
    y, *_ = LINEAR(x, weight, bias, *operands)
    rounded = bias.detach().to(dtype).requires_grad_()
    expected, *_ = LINEAR(x, weight, rounded, *operands)
    assert y.dtype == dtype and torch.equal(y, expected)
    dy = torch.randn_like(y)
    (db,) = torch.autograd.grad(y, bias, dy)
    assert db.dtype == torch.float32
    assert torch.equal(db, dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32))


@pytest.mark.parametrize("scale", [None, 0.0, 3.0])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_linear_that_quantises_its_weight_gives_the_same_bits(scale: float | None, transposed: bool) -> None:
    """By the weight's own scale, by that of a state that has seen nothing yet, and by a state's."""
    x, weight, bias = leaves(k=random.choice([32, 37]), n=random.choice([48, 43]))
    stored = weight.detach().t().contiguous().requires_grad_() if transposed else weight
    given = None if scale is None else torch.tensor(scale)
    rows, columns = stored.shape
    aligned = torch.nn.functional.pad(stored.detach(), (0, -columns % 16, 0, -rows % 16))
    codes, turned, amax, scale_inv = quantize_reference(aligned, given, E4M3, True, True, RULE)
    rest = None, None, None, x.dtype, config(transposed=transposed).text()
    expected, *_ = LINEAR(x, stored, bias, codes, turned, scale_inv, *rest)
    y, _, weight_amax = LINEAR(x, stored, bias, None, None, None, *rest, given)
    assert torch.equal(y, expected) and torch.equal(weight_amax, amax)
    dy = torch.randn_like(y)
    wanted = gradients_of(expected, dy, x, stored, bias)
    assert all(map(torch.equal, gradients_of(y, dy, x, stored, bias), wanted))


def test_the_amax_of_the_gradient_returns_as_the_gradient_of_the_slot() -> None:
    x, weight, bias = leaves()
    slot = torch.zeros((), requires_grad=True)
    y, _ = run(x, weight, bias, slot)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert torch.equal(slot.grad, dy.abs().max())


def test_a_frozen_linear_needs_no_backward_for_its_slot() -> None:
    x, weight, bias = (leaf.detach() for leaf in leaves())
    y, amax = run(x, weight, bias, torch.zeros((), requires_grad=True))
    assert not y.requires_grad and not amax.requires_grad


def test_the_amax_is_no_path_for_gradients() -> None:
    x, weight, bias = leaves()
    y, amax = run(x, weight, bias)
    assert y.requires_grad and not amax.requires_grad


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_each_gradient_alone(wanted: str) -> None:
    tensors = dict(zip(("x", "weight", "bias"), (leaf.detach() for leaf in leaves()), strict=True))
    tensors[wanted].requires_grad_()
    y, _ = run(**tensors)
    expected = emulated_linear(tensors["x"], tensors["weight"], tensors["bias"])
    dy = torch.randn_like(y)
    (got,), (other,) = gradients_of(y, dy, tensors[wanted]), gradients_of(expected, dy, tensors[wanted])
    assert got.shape == tensors[wanted].shape and relative_error(got, other) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_have_the_dtypes_of_what_they_are_of(dtype: torch.dtype) -> None:
    x, weight, bias = leaves()
    low = x.detach().to(dtype).requires_grad_()
    y, _ = run(low, weight, bias)
    assert y.dtype == dtype
    dx, dw, db = gradients_of(y, torch.randn_like(y), low, weight, bias)
    assert (dx.dtype, dw.dtype, db.dtype) == (dtype, torch.float32, torch.float32)


def test_a_result_may_be_changed_in_place() -> None:
    x, weight, bias = leaves()
    y, _ = run(x, weight, bias)
    y += 1.0
    expected = emulated_linear(x, weight, bias) + 1.0
    assert relative_error(y, expected) < 1e-5
    dy = torch.randn_like(y)
    assert relative_error(gradients_of(y, dy, weight)[0], gradients_of(expected, dy, weight)[0]) < 1e-5


@pytest.mark.parametrize("name", ["fc", "model.layers.0.mlp", "a|b odd | name", ""])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_config_is_read_back_from_its_text(name: str, transposed: bool) -> None:
    written = config(name=name, transposed=transposed, rule=ScaleRule(margin=1, power_2=True).text())
    assert LinearConfig.parse(written.text()) == written
