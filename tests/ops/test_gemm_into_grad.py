"""te::gemm_into_grad: adds to a gradient, rounding once, or is the product that te::gemm is."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from te_compile.direct import CALLS
from te_compile.ops.gemm import GEMM, gemm_reference
from te_compile.ops.gemm_into_grad import GEMM_INTO_GRAD, add_to_grad
from te_compile.ops.library import optional

M, N, K = 32, 48, 64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture
def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.randn(M, K).to(E5M2), torch.randn(N, K).to(E4M3), torch.rand(()), torch.rand(())


Operands = tuple[Tensor, Tensor, Tensor, Tensor]


class CompiledFunction(torch.autograd.Function):
    """Stands for AOTAutograd's: a graph with inputs x and weight, of which the operator makes the second's gradient."""

    call: Any = None
    results: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x + weight.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Any]:
        CompiledFunction.results.append(CompiledFunction.call())
        return grad, CompiledFunction.results[-1]


def into_parameter(weight: nn.Parameter, call: Any) -> Any:
    """What the operator gives in a backward pass that is to add to ``weight``."""
    CompiledFunction.call, CompiledFunction.results = call, []
    CompiledFunction.apply(torch.ones((), requires_grad=True), weight).backward()
    (result,) = CompiledFunction.results
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [GEMM_INTO_GRAD, CALLS.gemm_into_grad, CALLS.gemm_into_grad.site()])
def test_a_product_is_added_and_the_sum_rounded_once(operands: Operands, dtype: torch.dtype, function: Any) -> None:
    weight = nn.Parameter(torch.zeros(M, N, dtype=dtype))
    start = torch.randn(M, N).to(dtype)
    weight.grad = gradient = start.clone()
    result = into_parameter(weight, lambda: function(*operands, dtype, "split", "fc wgrad", [M, N], 1, 2))
    assert result is None and weight.grad is gradient
    a, b, a_scale_inv, b_scale_inv = operands
    exact = (a.float() @ b.float().t()) * (a_scale_inv * b_scale_inv) + start.float()
    assert torch.equal(gradient, exact.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_parameter_without_a_gradient_gets_te_gemms_product(operands: Operands, dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.zeros(M, N, dtype=dtype))
    into_parameter(weight, lambda: GEMM_INTO_GRAD(*operands, dtype, "split", "fc wgrad", [M, N], 1, 2))
    assert torch.equal(weight.grad, GEMM(*operands, None, dtype, "split", "fc wgrad"))


@pytest.mark.parametrize(("place", "inputs"), [(1, 3), (1, 1), (0, 2)])
def test_another_node_than_the_graphs_changes_nothing(operands: Operands, place: int, inputs: int) -> None:
    """Its edges are counted; and at another place there is another tensor, of another shape."""
    weight = nn.Parameter(torch.zeros(M, N))
    weight.grad = torch.zeros(M, N)
    result = into_parameter(
        weight, lambda: GEMM_INTO_GRAD(*operands, torch.float32, "split", "fc wgrad", [M, N], place, inputs)
    )
    assert torch.equal(result, weight.grad) and result is not weight.grad


def test_a_gradient_of_another_shape_is_none_to_add_to(operands: Operands) -> None:
    weight = nn.Parameter(torch.zeros(N, M))
    weight.grad = torch.zeros(N, M)
    found: list[Any] = []

    def asked() -> Tensor:
        found.append(GEMM_INTO_GRAD(*operands, torch.float32, "split", "fc wgrad", [M, N], 1, 2))
        return torch.zeros(N, M)

    into_parameter(weight, asked)
    assert found[0].shape == (M, N) and not weight.grad.any()


class Wrapper(CompiledFunction):
    """A function of the user's own, in whose backward a compiled graph's happens to run."""


def test_a_node_of_another_kind_is_not_the_graphs(operands: Operands, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.zeros(M, N))
    weight.grad = torch.zeros(M, N)
    monkeypatch.setattr(CompiledFunction, "apply", Wrapper.apply)
    result = into_parameter(weight, lambda: GEMM_INTO_GRAD(*operands, torch.float32, "split", "fc wgrad", [M, N], 1, 2))
    assert result is not None


def test_outside_of_a_backward_pass_it_is_a_product(operands: Operands) -> None:
    y = GEMM_INTO_GRAD(*operands, torch.bfloat16, "split", "fc wgrad", [M, N], 0, 1)
    assert torch.equal(y, gemm_reference(*operands, None, torch.bfloat16, "split"))


@pytest.mark.parametrize("size", [[M, N // 4, 2, 2], [2 * M, N // 2], [M // 2, 2 * N], [M * N]])
@pytest.mark.parametrize("function", [GEMM_INTO_GRAD, CALLS.gemm_into_grad.site()])
def test_a_gradient_of_another_shape_than_the_product(operands: Operands, size: list[int], function: Any) -> None:
    weight = nn.Parameter(torch.zeros(size))
    for count in (1, 2):
        into_parameter(weight, lambda: function(*operands, torch.float32, "split", "fc wgrad", size, 1, 2))
        expected = count * gemm_reference(*operands, None, torch.float32, "split")
        torch.testing.assert_close(weight.grad, expected.view(size))


def test_the_fake_result_is_like_the_real_one(operands: Operands) -> None:
    arguments = (*operands, torch.bfloat16, "split", "fc wgrad", [M, N // 4, 2, 2], 0, 1)
    torch.library.opcheck(GEMM_INTO_GRAD, arguments, test_utils="test_faketensor")
    assert "gemm_into_grad" in optional


def test_an_empty_batch_adds_nothing() -> None:
    grad, one = torch.randn(M, N), torch.ones(())
    before = grad.clone()
    assert add_to_grad(torch.empty(M, 0).to(E5M2), torch.empty(N, 0).to(E4M3), one, one, grad, "split") == ()
    assert torch.equal(grad, before)
