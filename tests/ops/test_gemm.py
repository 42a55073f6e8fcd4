"""te::gemm: the product of the numbers that the codes stand for."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from te_compile.kernels import native
from te_compile.ops import registry
from te_compile.ops.gemm import GEMM
from te_compile.ops.registry import Target, choose

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def codes(rows: int, columns: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.randn(rows, columns).to(dtype)


def operands(a_dtype: torch.dtype = E4M3, b_dtype: torch.dtype = E4M3) -> tuple[Tensor, ...]:
    """a [M, K], b [N, K], both scales, with M of any size."""
    m, n, k = random.randrange(1, 40), 16 * random.randrange(1, 4), 16 * random.randrange(1, 5)
    return codes(m, k, a_dtype), codes(n, k, b_dtype), torch.rand(()) + 0.1, torch.rand(()) + 0.1


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("a_dtype", "b_dtype"), [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
def test_the_product_of_the_dequantised_numbers(
    a_dtype: torch.dtype, b_dtype: torch.dtype, biased: bool, out_dtype: torch.dtype
) -> None:
    a, b, a_scale_inv, b_scale_inv = operands(a_dtype, b_dtype)
    bias = torch.randn(b.shape[0], dtype=out_dtype) if biased else None
    y = GEMM(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, "fast", "test")
    expected = (a.double() * a_scale_inv) @ (b.double() * b_scale_inv).t()
    expected = expected if bias is None else expected + bias.double()
    assert y.dtype == out_dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[out_dtype]
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_the_label_and_the_accumulation_change_no_number_of_the_reference() -> None:
    a, b, *scales = operands()
    results = [
        GEMM(a, b, *scales, None, torch.float32, accumulation, label)
        for accumulation in ("fast", "split")
        for label in ("", "a name")
    ]
    assert all(torch.equal(results[0], each) for each in results)


def test_zero_padding_along_the_contraction_adds_nothing() -> None:
    a, b, *scales = operands()
    longer = [torch.cat([t.float(), torch.zeros(t.shape[0], 16)], 1).to(E4M3) for t in (a, b)]
    plain = GEMM(a, b, *scales, None, torch.float32, "split", "")
    padded = GEMM(*longer, *scales, None, torch.float32, "split", "")
    torch.testing.assert_close(padded, plain, rtol=1e-5, atol=1e-4)


def test_no_rows_give_no_rows() -> None:
    _, b, *scales = operands()
    y = GEMM(codes(0, b.shape[1]), b, *scales, None, torch.bfloat16, "fast", "")
    assert y.shape == (0, b.shape[0]) and y.dtype == torch.bfloat16


def test_fake_outputs_are_those_of_real_ones_and_unequal_contractions_are_refused() -> None:
    a, b, *scales = operands()
    real = GEMM(a, b, *scales, None, torch.bfloat16, "fast", "")
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (a, b, *scales)]
        fake = GEMM(*fakes, None, torch.bfloat16, "fast", "")
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
        with pytest.raises(RuntimeError, match="contracts"):
            GEMM(fakes[0], mode.from_tensor(codes(16, a.shape[1] + 16)), *fakes[2:], None, torch.bfloat16, "fast", "x")


def arguments(**changed: Any) -> dict[str, Any]:
    return {"a": codes(32, 64), "b": codes(48, 64), "out_dtype": torch.bfloat16, "bias": None, **changed}


def reasons(target: Target, **changed: Any) -> tuple[str, str]:
    """Who runs it, and what kept aten._scaled_mm from it."""
    name, declined = choose("gemm", target, {"accumulation": "fast", "label": "", **arguments(**changed)})
    return name, next((reason for reason in declined if reason.startswith("scaled_mm: ")), "")


def test_scaled_mm_is_for_gpus_with_fp8() -> None:
    assert reasons(Target("cpu")) == (registry.REFERENCE, "scaled_mm: needs a CUDA device, not cpu")
    name, reason = reasons(Target("cuda", (8, 0)))
    assert name == registry.REFERENCE and "8.9" in reason


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"a": codes(32, 40), "b": codes(48, 40)}, "K=40"),
        ({"b": codes(40, 64)}, "N=40"),
        ({"a": codes(32, 64, E5M2), "b": codes(48, 64, E5M2)}, "E5M2 by E5M2"),
    ],
)
def test_what_the_library_cannot_multiply_falls_back_with_the_reason(changed: dict[str, Any], why: str) -> None:
    name, reason = reasons(Target("cuda", (9, 0)), **changed)
    assert name == registry.REFERENCE and why in reason


def test_scaled_mm_leaves_a_product_that_adds_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "missing", lambda cuda=False: "it is not built")
    hopper = Target("cuda", (9, 0))
    assert reasons(hopper) == ("scaled_mm", "")
    name, reason = reasons(hopper, addend=torch.zeros(32, 48).bfloat16())
    assert name == registry.REFERENCE and "adds nothing to a product" in reason


def needs_scaled_mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> None:
    """Skip where this torch multiplies such codes on a GPU alone."""
    try:
        torch._scaled_mm(a, b.t(), torch.ones(()), torch.ones(()), out_dtype=out_dtype)
    except RuntimeError as error:
        pytest.skip(f"aten._scaled_mm of torch {torch.__version__} does not run this on a CPU: {error}")


@pytest.mark.parametrize("rows", [1, 7, 32])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("a_dtype", "b_dtype"), [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
def test_scaled_mm_gives_the_numbers_of_the_reference(
    a_dtype: torch.dtype, b_dtype: torch.dtype, bias_dtype: torch.dtype | None, out_dtype: torch.dtype, rows: int
) -> None:
    a, b, (_, _, *scales) = codes(rows, 48, a_dtype), codes(32, 48, b_dtype), operands()
    needs_scaled_mm(a, b, out_dtype)
    bias = None if bias_dtype is None else torch.randn(32).to(bias_dtype)
    for accumulation in ("fast", "split"):
        given = (a, b, *scales, bias, out_dtype, accumulation, "")
        wanted, got = GEMM(*given), GEMM(*given, implementation="scaled_mm")
        assert (got.shape, got.dtype, got.stride()) == (wanted.shape, out_dtype, wanted.stride())
        # A bias of another dtype is added to what was rounded already.
        step = max(torch.finfo(out_dtype).eps, 1e-6) * float(wanted.float().abs().max())
        torch.testing.assert_close(got.float(), wanted.float(), rtol=0, atol=2 * step)


def test_scaled_mm_does_not_ask_the_library_where_there_is_nothing_to_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_scaled_mm")
    _, _, *scales = operands()
    bias = torch.randn(32).bfloat16()
    for rows, length in ((8, 0), (0, 48), (0, 0)):
        given = (codes(rows, length), codes(32, length), *scales, bias, torch.bfloat16, "fast", "")
        assert torch.equal(GEMM(*given, implementation="scaled_mm"), bias.expand(rows, 32))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scaled_mm_asks_the_library_for_what_a_gpu_has(
    bias_dtype: torch.dtype, out_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No CPU refuses the rest: a bias of another dtype, or a scale that lies between two multiples of 16 bytes."""
    asked: dict[str, Any] = {}

    def library(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        asked.update(options)
        return torch.zeros(a.shape[0], b.shape[1], dtype=options["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", library)
    scales = torch.rand(3) + 0.1
    for accumulation in ("fast", "split"):
        given = (codes(8, 48), codes(32, 48), scales[0], scales[2], torch.randn(32).to(bias_dtype), out_dtype)
        GEMM(*given, accumulation, "", implementation="scaled_mm")
        assert (asked["bias"] is not None) == (bias_dtype == out_dtype != torch.float32)
        assert asked["use_fast_accum"] == (accumulation == "fast")
        for name, scale in (("scale_a", scales[0]), ("scale_b", scales[2])):
            assert asked[name].data_ptr() % 16 == 0 and torch.equal(asked[name], scale)
