"""``te::gemm_into_grad``: a weight gradient that goes to the gradient that its parameter has already.

    grad += (a[M, K] · b[N, K]ᵀ) · a_scale_inv · b_scale_inv            and the result is None
    dw    = (a[M, K] · b[N, K]ᵀ) · a_scale_inv · b_scale_inv            where there is nothing to add to

``te::gemm`` with the ``.grad`` of an input of the graph for its addend and its result, in a backward that then has no
gradient left to return for that input. The sum is rounded as ``te::gemm`` rounds one: at most as often as by autograd.
Which of the two it is shows when autograd runs the backward, and not before (te_compile/accumulated_gradients.py).

``place`` says which of the ``inputs`` tensors of the graph it is about, ``size`` how that is shaped: [M, N] as a rule,
else of as many elements, for a convolution that is a linear or a linear that reads a view. The result may be None
though the schema says Tensor: PyTorch makes that an undefined tensor, as autograd does with a gradient that is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_compile.accumulated_gradients import added_to, gradient_to_add_to
from te_compile.ops import registry
from te_compile.ops.gemm import gemm_reference
from te_compile.ops.library import define
from te_compile.ops.registry import Target


@registry.register("gemm_into_grad", registry.REFERENCE)
def add_to_grad_reference(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, grad: Tensor, accumulation: str
) -> None:
    """Add the product to ``grad``: [M, N] of 16 or 32 bits, contiguous. a: [M, K], b: [N, K] FP8; scales: [] fp32."""
    grad.copy_(gemm_reference(a, b, a_scale_inv, b_scale_inv, None, grad.dtype, accumulation, grad))


def _check_cublaslt(target: Target, arguments: dict[str, Any]) -> None:
    from te_compile.kernels import cublaslt

    cublaslt.check(target, {**arguments, "addend": arguments["a"]})  # whichever: the question is if there is one


@registry.register("gemm_into_grad", "cublaslt", priority=20, check=_check_cublaslt)
def add_to_grad_cublaslt(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, grad: Tensor, accumulation: str
) -> None:
    """:func:`add_to_grad_reference` by kernels/cublaslt.py."""
    from te_compile.kernels import cublaslt

    if a.numel() and b.numel():  # else an empty batch: a sum over nothing
        cublaslt.gemm(a, b, a_scale_inv, b_scale_inv, None, grad.dtype, accumulation, addend=grad, out=grad)


def add_to_grad(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    grad: Tensor,
    accumulation: str,
    implementation: str = registry.REFERENCE,
) -> tuple[()]:
    """The product is added to ``grad`` [M, N]. Returns no tensors, as what replays a call wants it said."""
    registry.function_of("gemm_into_grad", implementation)(a, b, a_scale_inv, b_scale_inv, grad, accumulation)
    return ()


def _gemm_alone(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: None,
    out_dtype: torch.dtype,
    accumulation: str,
    label: str,
    addend: None,
    implementation: str,
) -> Tensor:
    function = registry.function_of("gemm", implementation)
    y: Tensor = function(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, accumulation, addend)
    return y


def _is_product(a: Tensor, size: list[int]) -> bool:
    """Is ``size``, of as many elements as a product of ``a``, that of the product itself?"""
    return len(size) == 2 and size[0] == a.shape[0]


def into_grad(gemm: Callable[..., Tensor], add: Callable[..., Any]) -> Callable[..., Tensor | None]:
    """The operator's code. gemm: that of te::gemm; add: :func:`add_to_grad`; or what calls either of them faster."""

    def run(
        a: Tensor,
        b: Tensor,
        a_scale_inv: Tensor,
        b_scale_inv: Tensor,
        out_dtype: torch.dtype,
        accumulation: str,
        label: str,
        size: list[int],
        place: int,
        inputs: int,
        implementation: str = registry.REFERENCE,
    ) -> Tensor | None:
        grad = gradient_to_add_to(place, inputs, size, out_dtype, a.device)
        if grad is None:
            y = gemm(a, b, a_scale_inv, b_scale_inv, None, out_dtype, accumulation, label, None, implementation)
            return y if _is_product(a, size) else y.view(size)
        matrix = grad if _is_product(a, size) else grad.view(a.shape[0], b.shape[0])
        add(a, b, a_scale_inv, b_scale_inv, matrix, accumulation, implementation)
        added_to(grad)
        return None

    return run


def _fake(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    out_dtype: torch.dtype,
    accumulation: str,
    label: str,
    size: list[int],
    place: int,
    inputs: int,
    implementation: str = registry.REFERENCE,
) -> Tensor:
    torch._check(
        a.shape[1] == b.shape[1], lambda: f"te::gemm_into_grad contracts {a.shape[1]} with {b.shape[1]} ({label})"
    )
    return a.new_empty(size, dtype=out_dtype)


GEMM_INTO_GRAD = define(
    "gemm_into_grad(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, ScalarType out_dtype, "
    'str accumulation, str label, int[] size, int place, int inputs, str implementation="reference") -> Tensor',
    into_grad(_gemm_alone, add_to_grad),
    _fake,
    may_be_none=True,
)
