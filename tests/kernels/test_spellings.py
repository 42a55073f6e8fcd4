"""Cheaper spellings: which steps they replace, which they leave alone, and that the numbers stay."""

from __future__ import annotations

import pytest
import torch

from te_compile.kernels import pointwise
from te_compile.kernels.spellings import spelled
from te_compile.kernels.tiles import Tile
from te_compile.ops.pointwise import Spec, evaluate
from te_compile.recipe import ScaleRule

GELU = (
    "t1 = mul(x0, x0); t2 = mul(t1, x0); t3 = mul(t2, 0.044715); t4 = add(x0, t3); t5 = mul(t4, 0.7978845608028654); "
    "t6 = tanh(t5); t7 = {one_plus}; t8 = mul(t0, t7); quantize t8"
)
GELU_BACKWARD = """x0: float32[M, K]; t0 = tanh(x0); t1 = add(t0, 1); t2 = mul(t0, t0); t3 = sub(1, t2);
t4 = mul(t1, t3); quantize t4""".replace("\n", " ")
SILU = "x0: float32[M, K]; t0 = neg(x0); t1 = exp(t0); t2 = {one_plus}; t3 = div(x0, t2); quantize t3"


def operations(text: str) -> list[str]:
    return [step.operation for _, step in spelled(Spec.parse(text))]


@pytest.mark.parametrize("one_plus", ["add(t6, 1)", "add(1, t6)", "add(t6, 1.0)"])
def test_one_plus_tanh_fires(one_plus: str) -> None:
    found = operations("x0: float32[M, K]; t0 = mul(x0, 0.5); " + GELU.format(one_plus=one_plus))
    assert "one_plus_tanh" in found and "tanh" not in found


@pytest.mark.parametrize("one_plus", ["add(t0, 1)", "add(1, t0)"])
def test_one_plus_erf_fires(one_plus: str) -> None:
    assert operations(f"x0: float32[M, K]; t0 = erf(x0); t1 = {one_plus}; quantize t1") == ["one_plus_erf"]


def test_the_derivative_of_tanh_fires_beside_it() -> None:
    assert operations(GELU_BACKWARD) == ["one_plus_tanh", "one_less_tanh_squared", "mul"]


@pytest.mark.parametrize("one_plus", ["add(t1, 1)", "add(1, t1)"])
def test_silu_fires_and_leaves_nothing_unused(one_plus: str) -> None:
    assert operations(SILU.format(one_plus=one_plus)) == ["times_sigmoid"]


@pytest.mark.parametrize(
    "text",
    [
        "x0: float32[M, K]; t0 = tanh(x0); t1 = add(t0, 2); quantize t1",
        "x0: float32[M, K]; t0 = tanh(x0); t1 = sub(1, t0); quantize t1",
        "x0: float32[M, K]; t0 = tanh(x0); t1 = add(t0, 1); t2 = mul(t0, t1); quantize t2",  # tanh itself is wanted
        "x0: float32[M, K]; t0 = tanh(x0); t1 = add(t0, 1); quantize t1; emit t0: float32",
        "x0: float32[M, K]; t0 = tanh(x0); t1 = mul(t0, t0); t2 = sub(1, t1); t3 = mul(t1, t2); quantize t3",
        "x0: float32[M, K]; t0 = tanh(x0); t1 = mul(t0, x0); t2 = sub(1, t1); quantize t2",
        "x0: float32[M, K]; t0 = tanh(x0); t1 = mul(t0, t0); t2 = sub(2, t1); quantize t2",
        "x0: float32[M, K]; t0 = erf(x0); t1 = add(t0, 2); quantize t1",
        "x0: float32[M, K]; t0 = erf(x0); t1 = sub(1, t0); quantize t1",
        "x0: float32[M, K]; t0 = erf(x0); t1 = add(t0, 1); t2 = mul(t0, t1); quantize t2",  # erf itself is wanted
        "x0: float32[M, K]; t0 = erf(x0); t1 = mul(t0, t0); t2 = sub(1, t1); quantize t2",
        "x0: float32[M, K]; t0 = exp(x0); t1 = add(t0, 1); t2 = div(x0, t1); quantize t2",  # not of -x
        "x0: float32[M, K]; t0 = neg(x0); t1 = exp(t0); t2 = add(t1, 2); t3 = div(x0, t2); quantize t3",
        "x0: float32[M, K]; t0 = neg(x0); t1 = exp(t0); t2 = add(t1, 1); t3 = mul(x0, t2); quantize t3",
    ],
)
def test_what_means_something_else_stays(text: str) -> None:
    assert operations(text) == [step.operation for step in Spec.parse(text).steps]


def test_what_another_step_wants_is_still_computed() -> None:
    shared = "x0: float32[M, K]; t0 = neg(x0); t1 = exp(t0); t2 = add(t1, 1); t3 = div(x0, t2); t4 = mul(t3, t1)"
    assert operations(shared + "; quantize t4") == ["neg", "exp", "times_sigmoid", "mul"]


@pytest.mark.parametrize(
    "text",
    [
        "x0: float32[M, K]; t0 = tanh(x0); t1 = add(t0, 1); quantize t1",
        "x0: float32[M, K]; t0 = erf(x0); t1 = add(t0, 1); quantize t1",
        "x0: float32[M, K]; t0 = tanh(x0); t1 = mul(t0, t0); t2 = sub(1, t1); quantize t2",
        GELU_BACKWARD,
        SILU.format(one_plus="add(t1, 1)"),
    ],
)
def test_the_numbers_are_those_of_the_reference(text: str, device: str) -> None:
    spec = Spec.parse(text + "; emit " + text.rsplit(" ", 1)[1] + ": float32")
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 88.0, -88.0, 1e-30, 3e38, -3e38])
    x = torch.cat([torch.randn(54) * 4, special]).view(1, -1).to(device)
    found = pointwise.fused_quantize(
        [x], torch.ones((), device=device), spec, torch.float8_e4m3fn, True, False, ScaleRule(), False, Tile(32, 16, 4)
    )[4]
    _, (wanted,), _ = evaluate(spec, [x])
    # What the reference subtracts from 1 or adds to it has lost all but a rounding of 1, a few times over.
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-6, equal_nan=True)
