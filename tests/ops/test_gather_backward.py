"""``te::gather_backward``: what autograd computes for a gather; fake, choice of implementation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.gather_backward import GATHER_BACKWARD
from te_compile.ops.registry import Target


def operands(dtype: torch.dtype = torch.bfloat16, batch: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 4, 9).to(dtype), torch.randint(0, 7, (4, 9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_it_is_the_gradient_of_a_gather(dtype: torch.dtype) -> None:
    dy, index = operands(dtype)
    x = torch.randn(6, 4, 7, dtype=torch.float64, requires_grad=True)
    x.gather(2, index.expand(6, 4, 9)).backward(dy.double())
    got = GATHER_BACKWARD(dy, index, 7)
    assert got.dtype == dtype
    torch.testing.assert_close(got, x.grad.to(dtype))


@pytest.mark.parametrize("batch", [0, 3])
def test_the_fake_promises_what_the_reference_delivers(batch: int) -> None:
    dy, index = operands(batch=batch)
    real, meta = GATHER_BACKWARD(dy, index, 7), GATHER_BACKWARD(dy.to("meta"), index.to("meta"), 7)
    assert (real.shape, real.dtype, real.stride()) == (meta.shape, meta.dtype, meta.stride())


def test_the_operator_keeps_its_contract_with_pytorch() -> None:
    torch.library.opcheck(GATHER_BACKWARD, (*operands(), 7), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("target", "dtype", "chosen"),
    [
        (Target("cpu"), torch.bfloat16, registry.REFERENCE),
        (Target("cuda", (7, 5)), torch.bfloat16, registry.REFERENCE),
        (Target("cuda", (9, 0)), torch.float32, registry.REFERENCE),
        (Target("cuda", (9, 0)), torch.bfloat16, "triton"),
    ],
    ids=str,
)
def test_who_runs_it(target: Target, dtype: torch.dtype, chosen: str) -> None:
    pytest.importorskip("triton")
    dy, index = operands(dtype)
    assert registry.choose("gather_backward", target, {"dy": dy, "index": index, "columns": 7})[0] == chosen
