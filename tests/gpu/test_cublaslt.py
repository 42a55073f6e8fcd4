"""cuBLASLt FP8 products against fp64 products of the same codes, on fresh data, into poisoned memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_compile.kernels import cublaslt, native
from te_compile.ops.registry import Target, Unsupported

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if native.missing(cuda=True):
    pytest.skip(native.missing(cuda=True), allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs FP8 tensor cores (compute capability 8.9)", allow_module_level=True)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OPERANDS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Relative Frobenius error beyond the rounding of the result: Hopper's own accumulator keeps about 14 bits.
ACCUMULATION_ERROR = {"fast": 1e-2, "split": 1e-3}
ROUNDING_ERROR = {FP32: 0.0, FP16: 1e-3, BF16: 4e-3}


class Operand:
    """A random matrix as FP8 codes with its dequantisation multiplier, and the numbers that those mean."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        x = torch.randn(rows, columns, device="cuda") * torch.exp(torch.randn((), device="cuda") / 2)
        scale = torch.finfo(dtype).max / x.abs().max().clamp(min=1e-6)
        self.codes = (x * scale).to(dtype)
        self.scale_inv = scale.reciprocal()

    def value(self) -> Tensor:
        return self.codes.float().double() * self.scale_inv.double()


def operands(m: int, n: int, k: int, dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3)) -> tuple[Operand, Operand]:
    return Operand(m, k, dtypes[0]), Operand(n, k, dtypes[1])


def product(a: Operand, b: Operand) -> Tensor:
    return a.value() @ b.value().t()


def multiply(
    a: Operand, b: Operand, bias: Tensor | None = None, dtype: torch.dtype = BF16, how: str = "fast"
) -> Tensor:
    poison(a.codes.shape[0] * b.codes.shape[0] * 4)
    return cublaslt.gemm(a.codes, b.codes, a.scale_inv, b.scale_inv, bias, dtype, how)


def poison(size: int) -> None:
    """Leave NaNs in the memory that PyTorch will hand out next."""
    blocks = [torch.full((max(size, 4) // 4,), torch.nan, device="cuda") for _ in range(3)]
    del blocks


def skip_if_refused(a: Operand, b: Operand, dtype: torch.dtype) -> None:
    """fp16 results are documented, and up to the installed library; bf16 and fp32 must work."""
    arguments = {"a": a.codes, "b": b.codes, "bias": None, "out_dtype": dtype, "accumulation": "fast"}
    try:
        cublaslt.check(Target.of(a.codes.device), arguments)
    except Unsupported as reason:
        assert dtype == FP16, reason
        with pytest.raises(Unsupported):
            multiply(a, b, None, dtype)
        pytest.skip(str(reason))


def assert_close(got: Tensor, want: Tensor, how: str = "fast", factor: float = 1.0) -> None:
    """Close as a whole, and in each column: a dead column hides in an aggregate."""
    assert got.shape == want.shape
    allowed = factor * ACCUMULATION_ERROR[how] + ROUNDING_ERROR[got.dtype]
    error = got.double() - want
    assert error.norm() <= allowed * want.norm(), f"relative error {(error.norm() / want.norm()).item():.2e}"
    # A single column of few rows has less to average over.
    per_column = error.norm(dim=0) / want.norm(dim=0).clamp(min=want.norm(dim=0).mean() / 4)
    assert per_column.max() <= 6 * allowed, f"column {per_column.argmax().item()}: {per_column.max().item():.2e}"


@pytest.mark.parametrize("how", ["fast", "split"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("dtypes", OPERANDS, ids=["e4m3-e4m3", "e5m2-e4m3", "e4m3-e5m2"])
def test_product_matches_the_codes_it_was_given(
    dtypes: tuple[torch.dtype, torch.dtype], dtype: torch.dtype, how: str
) -> None:
    a, b = operands(256, 384, 512, dtypes)
    skip_if_refused(a, b, dtype)
    assert_close(multiply(a, b, None, dtype, how), product(a, b), how)


@pytest.mark.parametrize("m", [1, 2, 3, 7, 17, 100, 255, 4097])
def test_any_number_of_rows_works(m: int) -> None:
    a, b = operands(m, 272, 144)
    assert_close(multiply(a, b), product(a, b))


@pytest.mark.parametrize("how", ["fast", "split"])
def test_a_long_contraction_keeps_its_accuracy(how: str) -> None:
    a, b = operands(128, 256, 16384)
    assert_close(multiply(a, b, None, FP32, how), product(a, b), how, factor=3.0)


def test_split_accumulation_is_the_more_accurate() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper's accumulator is short")
    a, b = operands(512, 512, 8192)
    want = product(a, b)
    errors = [(multiply(a, b, None, FP32, how).double() - want).norm() for how in ("fast", "split")]
    assert errors[1] < errors[0]


@pytest.mark.parametrize("bias_dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_bias_of_any_dtype_is_added_to_each_row(dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    a, b = operands(200, 160, 256)
    skip_if_refused(a, b, dtype)
    want = product(a, b)
    bias = (torch.randn(160, device="cuda") * want.std()).to(bias_dtype)
    assert_close(multiply(a, b, bias, dtype), want + bias.double())


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_accumulation_adds_once_even_while_algorithms_are_timed(dtype: torch.dtype) -> None:
    m, n, k = (16 * int(torch.randint(8, 40, ())) for _ in range(3))  # a shape that has no plan yet
    a, b = operands(m, n, k, (E5M2, E4M3))
    want = product(a, b)
    out = (torch.randn(m, n, device="cuda") * want.std()).to(dtype)
    want = out.double() + want
    y = cublaslt.gemm(a.codes, b.codes, a.scale_inv, b.scale_inv, None, dtype, "split", addend=out, out=out)
    assert y.data_ptr() == out.data_ptr()
    assert_close(out, want, "split")


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("biased", [False, True])
def test_an_addend_is_added_and_stays_as_it_was(dtype: torch.dtype, biased: bool) -> None:
    m, n, k = (16 * int(torch.randint(8, 40, ())) for _ in range(3))
    a, b = operands(m, n, k)
    want = product(a, b)
    addend = (torch.randn(m, 2 * n, device="cuda") * want.std()).to(dtype)[:, :n]  # rows may lie apart
    bias = (torch.randn(n, device="cuda") * want.std()).to(BF16) if biased else None
    before = addend.clone()
    want = want + addend.double() + (0 if bias is None else bias.double())
    y = cublaslt.gemm(a.codes, b.codes, a.scale_inv, b.scale_inv, bias, dtype, "fast", addend=addend)
    assert_close(y, want)
    assert torch.equal(addend, before)


def test_accumulating_many_micro_batches_equals_their_sum() -> None:
    out = torch.zeros(256, 320, device="cuda")
    want = torch.zeros(256, 320, device="cuda", dtype=torch.float64)
    for _ in range(4):
        a, b = operands(256, 320, 512, (E5M2, E4M3))
        want += product(a, b)
        cublaslt.gemm(a.codes, b.codes, a.scale_inv, b.scale_inv, None, FP32, "split", addend=out, out=out)
    assert_close(out, want, "split")


def test_writing_into_a_given_tensor_ignores_what_it_holds() -> None:
    a, b = operands(96, 128, 256)
    out = torch.full((96, 128), torch.nan, device="cuda", dtype=BF16)
    cublaslt.gemm(a.codes, b.codes, a.scale_inv, b.scale_inv, None, BF16, "fast", out=out)
    assert_close(out, product(a, b))


def test_rows_may_lie_apart() -> None:
    a, b = operands(64, 96, 128)
    wide_a = torch.full((64, 256), 2.0, device="cuda").to(E4M3)
    wide_b = torch.full((96, 192), 3.0, device="cuda").to(E4M3)
    wide_a.view(torch.uint8)[:, :128] = a.codes.view(torch.uint8)
    wide_b.view(torch.uint8)[:, 16:144] = b.codes.view(torch.uint8)
    y = cublaslt.gemm(wide_a[:, :128], wide_b[:, 16:144], a.scale_inv, b.scale_inv, None, BF16, "fast")
    assert_close(y, product(a, b))


def test_scales_and_bias_may_be_elements_of_larger_tensors() -> None:
    a, b = operands(64, 96, 128)
    scales = torch.stack([a.scale_inv, a.scale_inv, b.scale_inv, b.scale_inv])
    bias = torch.randn(97, device="cuda", dtype=BF16)[1:]
    y = cublaslt.gemm(a.codes, b.codes, scales[1], scales[3], bias, BF16, "fast")
    assert_close(y, product(a, b) + bias.double())


def test_no_rows_give_no_rows_and_a_zero_bias_gradient() -> None:
    a, b = operands(16, 64, 128)
    a.codes = a.codes[:0]
    assert multiply(a, b).shape == (0, 64)
    aux = torch.empty(0, 64, device="cuda", dtype=BF16)
    dx, db = cublaslt.gemm_dgelu(a.codes, b.codes, a.scale_inv, b.scale_inv, aux, "split", True)
    assert dx.shape == (0, 64)
    assert db is not None
    assert db.tolist() == [0.0] * 64


def test_nan_stays_in_its_row() -> None:
    a, b = operands(32, 64, 128)
    a.codes.view(torch.uint8)[5, 7] = 0x7F  # NaN
    y = multiply(a, b)
    assert y[5].isnan().all()
    assert y[torch.arange(32, device="cuda") != 5].isfinite().all()


def test_the_same_product_twice_has_the_same_bits() -> None:
    # Recomputation under activation checkpointing relies on it, the timed first call included.
    a, b = operands(333, 1024, 2048)
    first = multiply(a, b, None, FP32, "split")
    for _ in range(3):
        assert torch.equal(multiply(a, b, None, FP32, "split"), first)


@pytest.mark.parametrize("dtypes", OPERANDS, ids=["e4m3-e4m3", "e5m2-e4m3", "e4m3-e5m2"])
@pytest.mark.parametrize("how", ["fast", "split"])
def test_scaled_mm_gives_the_same_numbers(dtypes: tuple[torch.dtype, torch.dtype], how: str) -> None:
    a, b = operands(320, 512, 1024, dtypes)
    theirs = torch._scaled_mm(
        a.codes, b.codes.t(), scale_a=a.scale_inv, scale_b=b.scale_inv, out_dtype=BF16, use_fast_accum=how == "fast"
    )
    ours = multiply(a, b, None, BF16, how)
    want = product(a, b)
    assert (ours.double() - theirs.double()).norm() <= 5e-3 * want.norm()
    assert_close(theirs, want, how)


# --- epilogues ------------------------------------------------------------------------------------------------------


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("m", [64, 77])
def test_gelu_epilogue_keeps_its_input(m: int, biased: bool) -> None:
    a, b = operands(m, 192, 256)
    b.scale_inv = b.scale_inv / product(a, b).std().float()
    bias = torch.randn(192, device="cuda", dtype=BF16) if biased else None
    poison(m * 192 * 2)
    y, aux = cublaslt.gemm_gelu_aux(a.codes, b.codes, a.scale_inv, b.scale_inv, bias, "fast")
    want = product(a, b) + (bias.double() if bias is not None else 0)
    assert_close(aux, want)
    assert (y.double() - tanh_gelu(want)).norm() <= 1e-2 * tanh_gelu(want).norm()


@pytest.mark.parametrize("bias_gradient", [True, False])
@pytest.mark.parametrize("m", [64, 77])
def test_gelu_gradient_epilogue_is_the_gradient(m: int, bias_gradient: bool) -> None:
    a, b = operands(m, 192, 256, (E5M2, E4M3))
    aux = torch.randn(m, 192, device="cuda", dtype=BF16)
    x = aux.double().requires_grad_()
    tanh_gelu(x).backward(product(a, b))
    assert x.grad is not None
    poison(m * 192 * 2)
    dx, db = cublaslt.gemm_dgelu(a.codes, b.codes, a.scale_inv, b.scale_inv, aux, "split", bias_gradient)
    assert (dx.double() - x.grad).norm() <= 1e-2 * x.grad.norm()
    if bias_gradient:
        assert db is not None
        sums = x.grad.sum(dim=0)
        assert (db.double() - sums).norm() <= 1e-2 * sums.norm()
    else:
        assert db is None


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("biased", [True, False])
def test_fp8_result_is_scaled_and_measured(biased: bool, gelu: bool) -> None:
    a, b = operands(128, 256, 512)
    b.scale_inv = b.scale_inv / product(a, b).std().float()
    bias = torch.randn(256, device="cuda", dtype=BF16) if biased else None
    want = product(a, b) + (bias.double() if bias is not None else 0)
    want = tanh_gelu(want) if gelu else want
    scale = (448.0 / want.abs().max()).float()
    poison(128 * 256)
    q, amax, aux = cublaslt.gemm_to_fp8(
        a.codes, b.codes, a.scale_inv, b.scale_inv, bias, scale, E4M3, "fast", gelu=gelu
    )
    assert (aux is not None) == gelu
    assert amax.item() == pytest.approx(want.abs().max().item(), rel=1e-2)
    exact = (want * scale).clamp(-448, 448)
    # E4M3 rounds by at most 1/16 of the value, or half a subnormal step of 2^-9; the product adds its own error.
    error = (q.double() - exact).abs()
    assert (error <= exact.abs() / 16 * 1.1 + 2.0**-10 + 2e-2 * exact.std()).all()
    assert (q.view(torch.uint8) == exact.float().to(E4M3).view(torch.uint8)).float().mean() > 0.7


# --- plans ----------------------------------------------------------------------------------------------------------


def new_shape() -> tuple[int, int, int]:
    """A shape that no other test here is likely to have planned."""
    m, n, k = (16 * int(torch.randint(40, 120, ())) for _ in range(3))
    return m + 1, n, k


def test_a_plan_is_made_and_timed_once_a_shape() -> None:
    core = native.module()
    a, b = operands(*new_shape())
    before = core.cublaslt_plans()
    for _ in range(3):
        multiply(a, b)
    after = core.cublaslt_plans()
    assert after[0] == before[0] + 1
    assert after[1] in (before[1], before[1] + 1)  # with a single suggestion there is nothing to time
    multiply(a, b, None, BF16, "split")
    assert core.cublaslt_plans()[0] == after[0] + 1


def test_a_new_shape_can_be_captured_in_a_cuda_graph() -> None:
    a, b = operands(*new_shape())
    multiply(*operands(64, 64, 64))  # the library itself is up
    timed = native.module().cublaslt_plans()[1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = cublaslt.gemm(a.codes, b.codes, a.scale_inv, b.scale_inv, None, BF16, "fast")
    assert native.module().cublaslt_plans()[1] == timed
    y.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert_close(y, product(a, b))
    fresh = Operand(*a.codes.shape, E4M3)
    a.codes.copy_(fresh.codes)
    a.scale_inv.copy_(fresh.scale_inv)
    graph.replay()
    assert_close(y, product(a, b))
    assert_close(multiply(a, b), product(a, b))  # and timed afterwards, outside


def test_work_follows_the_current_stream() -> None:
    a, b = operands(512, 512, 512)
    want = product(a, b)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        y = cublaslt.gemm(a.codes, b.codes, a.scale_inv, b.scale_inv, None, BF16, "fast")
        a.codes.view(torch.uint8).zero_()  # after the product in stream order
    side.synchronize()
    assert_close(y, want)


def test_threads_share_plans_without_mixing_their_pointers() -> None:
    failures: list[str] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                a, b = operands(160, 224, 352)
                bias = torch.randn(224, device="cuda", dtype=BF16)
                try:
                    y = cublaslt.gemm(a.codes, b.codes, a.scale_inv, b.scale_inv, bias, BF16, "fast")
                    assert_close(y, product(a, b) + bias.double())
                except Exception as failure:  # what a thread raises is otherwise lost
                    failures.append(repr(failure))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_deterministic_mode_takes_the_first_suggestion() -> None:
    a, b = operands(*new_shape())
    timed = native.module().cublaslt_plans()[1]
    torch.use_deterministic_algorithms(True)
    try:
        y = cublaslt.gemm(a.codes, b.codes, a.scale_inv, b.scale_inv, None, BF16, "fast")
    finally:
        torch.use_deterministic_algorithms(False)
    assert native.module().cublaslt_plans()[1] == timed
    assert_close(y, product(a, b))


def in_a_process(caches: Path, **environment: str) -> dict[str, Any]:
    """What tests/programs/products_on_gpu.py finds with these caches."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.programs.products_on_gpu"],
        env={**os.environ, "TE_COMPILE_GEMM_CACHE": "1", "TORCHINDUCTOR_CACHE_DIR": str(caches), **environment},
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_a_later_process_times_nothing_and_gets_the_same_bits(tmp_path: Path) -> None:
    first, later = in_a_process(tmp_path), in_a_process(tmp_path)
    assert first["timed"] > 0 and first["kept"] >= first["timed"]
    assert later == {**first, "timed": 0}
    [file] = (tmp_path / "te_compile").glob("gemm_choices_*")
    assert len(file.read_text().splitlines()) == first["timed"]
    assert in_a_process(tmp_path, TE_COMPILE_GEMM_CACHE="0")["timed"] == first["timed"]


def test_a_caller_without_a_workspace_is_lent_one() -> None:
    core, codes = native.module(), native.dtype_codes()
    a, b = operands(256, 512, 4096)
    y = torch.full((256, 512), torch.nan, device="cuda", dtype=BF16)
    core.cublaslt_gemm(
        0, a.codes.data_ptr(), b.codes.data_ptr(), y.data_ptr(), a.scale_inv.data_ptr(), b.scale_inv.data_ptr(),
        0, 0, 0, 0, 0, 256, 512, 4096, 4096, 4096, 512, 0, 0, codes[E4M3], codes[E4M3], codes[BF16], codes[BF16],
        codes[BF16], core.EPILOGUE_NONE, True, 0, 0, 8, native.current_stream(0),
    )  # fmt: skip
    assert_close(y, product(a, b))


# --- refusals -------------------------------------------------------------------------------------------------------


def test_e5m2_by_e5m2_is_unsupported() -> None:
    a, b = operands(64, 64, 64, (E5M2, E5M2))
    with pytest.raises(Unsupported, match="E5M2 by E5M2"):
        multiply(a, b)


def test_a_contraction_of_odd_length_is_unsupported() -> None:
    a, b = operands(64, 64, 72)
    with pytest.raises(Unsupported, match="multiple of 16"):
        multiply(a, b)


def test_unequal_contractions_are_an_error() -> None:
    a, b = Operand(64, 64, E4M3), Operand(64, 128, E4M3)
    with pytest.raises(ValueError, match=r"\[M, K\], \[N, K\]"):
        multiply(a, b)


@pytest.mark.parametrize("dtypes", OPERANDS, ids=["e4m3-e4m3", "e5m2-e4m3", "e4m3-e5m2"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_the_compile_time_check_agrees_with_what_runs(
    dtypes: tuple[torch.dtype, torch.dtype], dtype: torch.dtype
) -> None:
    a, b = operands(48, 112, 80, dtypes)
    skip_if_refused(a, b, dtype)
    assert_close(multiply(a, b, None, dtype, "split"), product(a, b), "split")
