"""What surrounds the library's call, with the reference in its place; tests/gpu/test_cublaslt.py has the library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from te_compile.kernels import cublaslt, native
from te_compile.ops.gemm import gemm_reference
from te_compile.ops.registry import Target, Unsupported


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


def test_what_is_added_may_begin_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of the user's own, say; the library refuses it, and what it refuses when it is called stops the step."""
    seen: list[Tensor] = []
    monkeypatch.setattr(cublaslt, "_launch", lambda *_, addend, **__: seen.append(addend))
    codes = [torch.randn(size, 32).to(torch.float8_e4m3fn) for size in (4, 48)]
    begins_badly = torch.randn(4 * 48 + 1)[1:].view(4, 48)
    cublaslt.gemm(*codes, *[torch.ones(())] * 2, None, torch.float32, "fast", begins_badly)
    assert seen[0].data_ptr() % 16 == 0 and torch.equal(seen[0], begins_badly)
    cublaslt.gemm(*codes, *[torch.ones(())] * 2, None, torch.float32, "fast", seen[0], out=seen[0])
    assert seen[1] is seen[0]


def test_the_library_is_asked_for_what_will_run_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(native, "missing", lambda cuda=False: "")
    monkeypatch.setattr(cublaslt, "_refused", lambda *form: asked.append(form) or "not on this one")
    with FakeTensorMode():
        a, b = (torch.empty(32, 32, dtype=torch.float8_e4m3fn, device="cuda:1") for _ in range(2))
        for bias in (torch.bfloat16, torch.float32):
            given = {"a": a, "b": b, "out_dtype": torch.bfloat16, "bias": torch.empty(32, dtype=bias, device="cuda:1")}
            with pytest.raises(Unsupported, match="not on this one"):
                cublaslt.check(Target("cuda", (8, 9)), given)
    devices, dtypes, biased, added = ([form[at] for form in asked] for at in (0, 6, 7, 8))
    assert devices == [1, 1]
    assert (dtypes, biased, added) == ([torch.bfloat16, torch.float32], [True, False], [False, True])
