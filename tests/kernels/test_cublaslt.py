"""What surrounds the library's call, with the reference in its place; tests/gpu/test_cublaslt.py has the library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from te_compile.kernels import cublaslt
from te_compile.ops.gemm import gemm_reference


def _product(
    a: Tensor, b: Tensor, d: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, _: str, accumulation: str, **more: Any
) -> None:
    bias, addend = more.get("bias"), more["addend"]
    d.copy_(gemm_reference(a, b, a_scale_inv, b_scale_inv, bias, d.dtype, accumulation, addend))


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("added", [False, True])
def test_a_bias_that_no_epilogue_reads_is_added_and_stays_as_it_is(
    rows: int, dtype: torch.dtype, added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library adds its product to a copy, which for one row and fp32 once was the parameter itself."""
    monkeypatch.setattr(cublaslt, "_launch", _product)
    codes = [torch.randn(size, 32).to(torch.float8_e4m3fn) for size in (rows, 48)]
    scales = [torch.rand(()) + 0.5 for _ in codes]
    bias, addend = torch.randn(48, dtype=dtype), torch.randn(rows, 48) if added else None
    before = bias.clone(), None if addend is None else addend.clone()
    y = cublaslt.gemm(*codes, *scales, bias, torch.float32, "fast", addend)
    expected = gemm_reference(*codes, *scales, bias, torch.float32, "fast", addend)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(bias, before[0]) and (addend is None or torch.equal(addend, before[1]))
