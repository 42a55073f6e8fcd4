"""te::grouped_gemm and te::grouped_wgrad: what each expert's own product would give."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from te_compile.kernels import native
from te_compile.ops.gemm import GEMM
from te_compile.ops.grouped_gemm import GROUPED_GEMM, GROUPED_WGRAD
from te_compile.ops.quantize import transposed_reference
from te_compile.ops.registry import Target, choose

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
K, N = 32, 48
HOPPER = Target("cuda", (9, 0))
ADA = Target("cuda", (8, 9))


def drawn_counts() -> list[int]:
    """Five experts, one of them without rows."""
    counts = [random.randrange(1, 30) for _ in range(4)]
    counts.insert(random.randrange(5), 0)
    return counts


def ends_of(counts: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(dtype)


def operands(rows: int, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a, b and both scales of a product of rows."""
    scales = torch.rand(()) + 0.1, torch.rand(()) + 0.1
    return torch.randn(rows, K).to(E5M2), torch.randn(experts, N, K).to(E4M3), *scales


def parts(t: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
    return t[: sum(counts)].split(counts)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rest", [0, 7])
def test_each_group_is_a_product_of_its_own_and_the_rest_is_zero(rest: int, out_dtype: torch.dtype) -> None:
    counts = drawn_counts()
    a, b, *scales = operands(sum(counts) + rest, 5)
    y = GROUPED_GEMM(a, b, *scales, ends_of(counts, random.choice((torch.int32, torch.int64))), out_dtype, "fast", "")
    assert y.dtype == out_dtype and not y[sum(counts) :].any()
    for got, rows, expert in zip(parts(y, counts), parts(a, counts), b, strict=True):
        assert torch.equal(got, GEMM(rows, expert, *scales, None, out_dtype, "fast", ""))


@pytest.mark.parametrize("rest", [0, 7])
def test_each_weight_gradient_sums_over_the_rows_of_its_group(rest: int) -> None:
    counts = drawn_counts()
    dy, x = torch.randn(sum(counts) + rest, N).to(E5M2), torch.randn(sum(counts) + rest, K).to(E4M3)
    scales = torch.rand(()) + 0.1, torch.rand(()) + 0.1
    operands = transposed_reference(dy), transposed_reference(x), *scales
    dw = GROUPED_WGRAD(*operands, ends_of(counts), torch.float32, "split", "")
    for got, its_dy, its_x, count in zip(dw, parts(dy, counts), parts(x, counts), counts, strict=True):
        expected = (its_dy.double() * scales[0]).t() @ (its_x.double() * scales[1])
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5 * (1 + float(expected.abs().sum())))
        assert count or not got.any()


def test_no_rows_at_all() -> None:
    a, b, *scales = operands(0, 3)
    ends = ends_of([0, 0, 0])
    assert GROUPED_GEMM(a, b, *scales, ends, torch.bfloat16, "fast", "").shape == (0, N)
    empty = a.new_zeros(K, 0), a.new_zeros(N, 0)
    assert not GROUPED_WGRAD(*empty, *scales, ends, torch.float32, "split", "").any()


def test_shapes_are_known_without_running() -> None:
    counts = drawn_counts()
    a, b, *scales = operands(sum(counts), 5)
    wide = transposed_reference(torch.randn(sum(counts), N).to(E5M2))
    for operator, tensors in ((GROUPED_GEMM, (a, b)), (GROUPED_WGRAD, (transposed_reference(a), wide))):
        arguments = (*tensors, *scales, ends_of(counts))
        real = operator(*arguments, torch.bfloat16, "split", "")
        with FakeTensorMode() as mode:
            fake = operator(*(mode.from_tensor(each) for each in arguments), torch.bfloat16, "split", "")
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_operands_that_do_not_fit_are_refused_before_anything_runs() -> None:
    a, b, *scales = operands(9, 3)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(each) for each in (a, b, *scales, ends_of([4, 5]))]
        with pytest.raises(RuntimeError, match="2 groups of rows, 3 experts"):
            GROUPED_GEMM(*fakes, torch.bfloat16, "fast", "a name")
        with pytest.raises(RuntimeError, match="a name"):
            GROUPED_WGRAD(fakes[0], fakes[0].new_empty(16, 7), *fakes[2:], torch.bfloat16, "fast", "a name")


@pytest.mark.parametrize("operator", ["grouped_gemm", "grouped_wgrad"])
def test_triton_runs_them_on_a_gpu_with_fp8(operator: str) -> None:
    pytest.importorskip("triton", reason="without Triton there is the reference alone")
    shapes = ((5, K), (2, N, K)) if operator == "grouped_gemm" else ((N, 16), (K, 16))
    a, b = (torch.zeros(shape, dtype=E4M3) for shape in shapes)
    arguments = {"a": a, "b": b, "ends": ends_of([2, 3]), "out_dtype": torch.bfloat16, "accumulation": "split"}
    assert choose(operator, ADA, arguments)[0] == "triton"
    for target, why in ((Target("cpu"), "CUDA"), (Target("cuda", (8, 0)), "8.9")):
        name, reasons = choose(operator, target, arguments)
        assert name == "reference" and any(why in reason for reason in reasons)


def test_on_hopper_the_core_makes_those_that_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="without Triton there is the reference alone")
    monkeypatch.setattr(native, "missing", lambda cuda=False: "")
    a, b = (torch.zeros(width, 16, dtype=E4M3) for width in (N, K))
    given = {"a": a, "b": b, "ends": ends_of([2, 3]), "out_dtype": torch.bfloat16, "accumulation": "split"}
    assert choose("grouped_wgrad", HOPPER, given)[0] == "cuda"
    weights = torch.zeros(2, N, 16, dtype=E4M3)
    assert choose("grouped_gemm", HOPPER, given | {"b": weights, "accumulation": "fast"})[0] == "cuda"
    many = given | {"b": torch.zeros(1025, N, 16, dtype=E4M3), "ends": ends_of([0] * 1025)}
    assert choose("grouped_gemm", HOPPER, many)[0] == "triton"
    for change, why in (
        ({"a": a.to(torch.float8_e5m2), "b": b.to(torch.float8_e5m2)}, "no E5M2 with E5M2"),
        ({"ends": ends_of([2, 3]).long()}, "int64"),
        ({"accumulation": "fast"}, "'fast'"),
    ):
        name, reasons = choose("grouped_wgrad", HOPPER, given | change)
        assert name == "triton" and any(why in reason for reason in reasons), reasons


def test_triton_declines_what_it_cannot_read() -> None:
    pytest.importorskip("triton", reason="without Triton there is the reference alone")
    a = torch.zeros(5, K, dtype=E4M3)
    for b, why in (
        (torch.zeros(2, N, 40, dtype=E4M3), "K=40"),
        (torch.zeros(2, K, N, dtype=E4M3).transpose(1, 2), "contraction"),
        (torch.zeros(2, N, K, dtype=torch.bfloat16), "bfloat16"),
    ):
        name, reasons = choose("grouped_gemm", HOPPER, {"a": a, "b": b, "out_dtype": torch.bfloat16})
        assert name == "reference" and any(why in reason for reason in reasons), reasons
