"""The norm's backward kernel on the hardware: every kind, dtype and length of rows, and a model's training step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops import triton_implementations as kernels
from te_compile.ops.norm import KINDS, LAYER, RMS, RMS_MIXED, norm_reference, output_dtype
from te_compile.ops.norm_backward import norm_backward_reference
from tests.gpu.test_kernels import poisoned_memory

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a CUDA device with FP8 conversion (compute capability 8.9 or later)",
)

__all__ = ["poisoned_memory"]  # a fixture that every test here uses

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-5
Task = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor | None, str]


def task(kind: str, rows: int, columns: int, dtype: torch.dtype, residual: bool = True) -> Task:
    """dy, x, weight, mean, rstd, residual and kind, with random numbers."""
    x = (1 + 2 * torch.randn(rows, columns, device="cuda")).to(dtype)
    weight = (1 + torch.randn(columns, device="cuda") / 4).to(FP32 if kind == RMS_MIXED else dtype)
    _, mean, rstd = norm_reference(x, weight, None, EPS, kind)
    dy = torch.randn(rows, columns, device="cuda").to(output_dtype(dtype, weight.dtype, kind))
    return dy, x, weight, mean, rstd, torch.randn_like(x) if residual else None, kind


def agrees(given: Task, wants_dx: bool = True) -> None:
    """Assert dx up to the roundings of its sums, and dw and db up to the order of theirs."""
    dy, x, weight, mean, rstd, _, kind = given
    bias_dtype = x.dtype if kind == LAYER else None
    dx, dw, db = kernels.norm_backward(*given, wants_dx, weight is not None, bias_dtype)
    wanted = norm_backward_reference(*given, wants_dx, weight is not None, bias_dtype)
    assert [(g.shape, g.dtype, g.stride()) for g in (dx, dw, db)] == [(w.shape, w.dtype, w.stride()) for w in wanted]
    if wants_dx:
        plain = norm_backward_reference(dy, x, weight, mean, rstd, None, kind, True, False, None)[0]
        step = torch.finfo(dx.dtype).eps
        allowed = step * (wanted[0].float().abs() + plain.float().abs()) + 1e-5
        assert bool(((dx.float() - wanted[0].float()).abs() <= allowed).all())
        if dx.dtype != FP32:
            assert float((dx != wanted[0]).float().mean()) < 0.02
    normal = (x.float() - mean if kind == LAYER else x.float()) * rstd
    if weight is not None and kind in (RMS, RMS_MIXED):
        normal = normal.to(x.dtype if kind == RMS else weight.dtype).float()
    for got, terms in ((dw, dy.float() * normal), (db, dy.float())):
        if not got.numel():
            continue
        exact, size = terms.double().sum(0), terms.double().abs().sum(0)
        rounding = 0.0 if got.dtype == FP32 else torch.finfo(got.dtype).eps
        assert bool(((got.double() - exact).abs() <= 2e-6 * size + rounding * exact.abs() + 1e-6).all())


@pytest.mark.parametrize("columns", [256, 768, 1000, 4096, 8192, 16384])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_it_is_the_reference(kind: str, dtype: torch.dtype, columns: int) -> None:
    for rows in (1000, 4096):
        given = task(kind, rows, columns, dtype)
        if max(given[0].itemsize, given[1].itemsize) * columns <= 32768:
            agrees(given)
            agrees((*given[:5], None, kind))
        agrees((*given[:5], None, kind), wants_dx=False)


@pytest.mark.parametrize("shape", [(1, 4096), (3, 72), (131, 5120), (133, 11008), (50000, 64), (40000, 8)], ids=str)
def test_shapes_that_fill_nothing(shape: tuple[int, int]) -> None:
    agrees(task(LAYER, *shape, BF16))
    agrees(task(RMS, *shape, BF16, residual=False))


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_without_a_weight(kind: str) -> None:
    dy, x, _, mean, rstd, residual, _ = task(kind, 500, 2048, BF16)
    agrees((dy.to(BF16), x, None, mean, rstd, residual, kind))


def test_rows_apart_in_memory_are_read_in_place_and_others_copied() -> None:
    dy, x, weight, mean, rstd, residual, kind = task(LAYER, 700, 1024, BF16)

    def wide(matrix: Tensor, first: int) -> Tensor:
        apart = torch.full((700, 3000), torch.nan, device="cuda", dtype=BF16)
        apart[:, first : first + 1024] = matrix
        return apart[:, first : first + 1024]

    one = torch.ones((), device="cuda", dtype=BF16)
    turned = [each.t().contiguous().t() for each in (dy, x, residual)]
    for dy_, x_, residual_ in (
        (wide(dy, 0), wide(x, 8), wide(residual, 16)),
        (wide(dy, 1), wide(x, 3), wide(residual, 5)),
        turned,
        (one.expand(700, 1024), x, residual),
        (dy[:1].expand(700, 1024), x, residual),
    ):
        agrees((dy_, x_, weight, mean, rstd, residual_, kind))


@pytest.mark.parametrize("columns", [4096, 16384])
def test_runs_repeat_bit_by_bit_and_a_cuda_graph_repeats_them(columns: int) -> None:
    given = task(LAYER, 8192, columns, BF16)
    first = kernels.norm_backward(*given, True, True, BF16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels.norm_backward(*given, True, True, BF16)
    for _ in range(10):
        graph.replay()
        for results in (kernels.norm_backward(*given, True, True, BF16), captured):
            assert all(torch.equal(result, before) for result, before in zip(results, first, strict=True))


def test_it_is_what_a_gpu_takes_and_longer_rows_are_told_why_not() -> None:
    def choice(columns: int, dtype: torch.dtype) -> tuple[str, list[str]]:
        x = torch.empty(64, columns, device="cuda", dtype=dtype)
        arguments = {"dy": x, "x": x, "weight": x[0], "residual": x, "kind": LAYER}
        arguments |= {"wants_dx": True, "wants_dw": True, "bias_dtype": None}
        return registry.choose("norm_backward", registry.Target.of(x.device), arguments)

    assert choice(16384, BF16)[0] == choice(8192, FP32)[0] == "triton"
    for columns, dtype in ((16385, BF16), (8193, FP32)):
        name, reasons = choice(columns, dtype)
        assert name == registry.REFERENCE and f"K={columns}" in reasons[0]


def test_the_device_is_as_large_as_triton_says() -> None:
    triton = pytest.importorskip("triton")
    from te_compile.kernels.norm_backward import _device_limits

    index = torch.cuda.current_device()
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    assert _device_limits(index) == (properties["multiprocessor_count"], properties["max_shared_mem"])
