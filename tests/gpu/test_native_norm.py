"""The C++ core's norm + quantize on the hardware: y as the reference has it, and codes that are those of that y."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from te_compile.kernels import native, native_norm
from te_compile.ops import native_implementations as kernels
from te_compile.ops import registry
from te_compile.ops.norm import KINDS, LAYER, RMS_MIXED, norm_reference
from te_compile.ops.norm_quantize import Norm, Wanted
from te_compile.ops.quantize import quantize_reference
from te_compile.recipe import ScaleRule
from tests.gpu.test_kernels import agrees, matrix, number, poisoned_memory, same_codes

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs a CUDA device with clusters (compute capability 9.0)", allow_module_level=True)
if native.missing(cuda=True):
    pytest.skip(native.missing(cuda=True), allow_module_level=True)

__all__ = ["poisoned_memory"]  # a fixture that every test here uses

E4M3 = torch.float8_e4m3fn
RULE = ScaleRule()
EPS = 1e-5
# One block and many; rows of every size that a cluster can have; a last block that is all but empty; ends of tiles.
SHAPES = [(8192, 4096), (4097, 16384), (1, 4096), (15, 8), (17, 72), (33, 1024), (64, 1032), (300, 5120), (47, 2056)]
SHAPES += [(100, 768), (31, 11008)]


def parameters(kind: str, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    weight = (1 + torch.randn(columns, device="cuda") / 4).to(dtype)
    return weight, torch.randn(columns, device="cuda").to(dtype) if kind == LAYER else None


def is_the_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, scale: Tensor | None, rule: ScaleRule = RULE
) -> None:
    """Assert it for both layouts, for one, and without y."""
    for columnwise in (True, False):
        y, q, qt, amax, scale_inv, mean, rstd = kernels.norm_quantize(
            x, Norm(weight, bias, EPS, kind), Wanted(scale, E4M3, True, columnwise, True, rule)
        )
        wanted_y, wanted_mean, wanted_rstd = norm_reference(x, weight, bias, EPS, kind)
        assert y.dtype == wanted_y.dtype and y.shape == x.shape
        # A step of y where fp32 sums differ in order; two where the value is rounded before the weight as well.
        step = 2.0**-7 if x.dtype == torch.bfloat16 else 2.0**-9
        torch.testing.assert_close(y, wanted_y, rtol=2 * step, atol=step, equal_nan=True)
        sound = x.isfinite().all(1)
        if kind == LAYER:  # as far apart as matters: in standard deviations of the row
            assert float(((mean - wanted_mean) * wanted_rstd)[sound].abs().max()) < 1e-5
        assert mean.shape == wanted_mean.shape
        torch.testing.assert_close(rstd[sound], wanted_rstd[sound], rtol=1e-4, atol=0)
        agrees((q, qt, amax, scale_inv), quantize_reference(y, scale, E4M3, True, columnwise, rule))
    # Few rows without qᵀ are another kernel's, which adds up in another order: y is the last call's.
    columnwise = x.shape[0] > native_norm.FEW_ROWS
    silent = kernels.norm_quantize(
        x, Norm(weight, bias, EPS, kind), Wanted(scale, E4M3, not columnwise, columnwise, False, rule)
    )
    wanted = quantize_reference(y, scale, E4M3, True, True, rule)[int(columnwise)]
    left_out = silent[1 if columnwise else 2]
    assert silent[0].shape == left_out.shape == (0,) and same_codes(silent[2 if columnwise else 1], wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_kind_and_shape_is_the_reference(dtype: torch.dtype, shape: tuple[int, int], kind: str) -> None:
    x = matrix(*shape).to(dtype).nan_to_num()
    is_the_reference(x, *parameters(kind, shape[1], dtype), kind, number(40.0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_is_missing_or_zero_is_measured(kind: str) -> None:
    x = matrix(300, 5120)
    weight, bias = parameters(kind, 5120, torch.bfloat16)
    for rule in (RULE, ScaleRule(margin=2), ScaleRule(power_2=True), ScaleRule(epsilon=10.0)):
        is_the_reference(x, weight, bias, kind, None, rule)
    # A scale of 0 is measured while any state in the process waits for its first scale.
    kernel = native_norm.norm_quantize
    for given, measure in ((number(0.0), True), (number(7.0), True), (number(7.0), False)):
        y, q, qt, amax, scale_inv, _, _ = kernel(
            x, Norm(weight, bias, EPS, kind), Wanted(given, E4M3, True, True, True, RULE), measure
        )
        agrees((q, qt, amax, scale_inv), quantize_reference(y, given, E4M3, True, True, RULE))


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_may_be_wider_than_x_or_absent(kind: str) -> None:
    x = matrix(100, 2048)
    is_the_reference(x, None, None, kind, number(30.0))
    if kind not in (RMS_MIXED, "rms"):  # these give y in the wider dtype, which is Triton's
        is_the_reference(x, *parameters(kind, 2048, torch.float32), kind, number(30.0))
    weight, _ = parameters(kind, 4096, torch.bfloat16)
    is_the_reference(x, weight[::2], None, kind, number(30.0))


def test_rows_apart_in_memory_are_read_in_place_and_others_copied() -> None:
    x = matrix(400, 4096)
    off_by_one = torch.randn(64 * 512 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(64, 512)
    for view in (x[:, :2048], x[::3], x[:, 8:1032], x[:, 1:1025], x.t(), off_by_one):
        weight, bias = parameters(LAYER, view.shape[1], x.dtype)
        is_the_reference(view, weight, bias, LAYER, number(40.0))


def test_a_row_of_large_numbers_that_differ_little_keeps_its_variance() -> None:
    keeps_its_variance(64, number(1.0))


def keeps_its_variance(rows: int, scale: Tensor | None) -> None:
    x = (256 + torch.randn(rows, 16384, device="cuda")).to(torch.bfloat16)
    wanted = Wanted(scale, E4M3, True, False, False, RULE)
    *_, mean, rstd = kernels.norm_quantize(x, Norm(None, None, 0.0, LAYER), wanted)
    exact = x.double()
    torch.testing.assert_close(mean.double(), exact.mean(1, keepdim=True), rtol=1e-6, atol=0)
    exact_rstd = exact.var(1, keepdim=True, unbiased=False).rsqrt()
    torch.testing.assert_close(rstd.double(), exact_rstd, rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("kind", [LAYER, "rms"])
def test_a_bad_value_spoils_its_row_and_no_other(kind: str, bad: float) -> None:
    x = matrix(1000, 4096)
    x[123, 4000] = bad
    wanted = Wanted(number(30.0), E4M3, True, True, False, RULE)
    _, q, _, amax, *_ = kernels.norm_quantize(x, Norm(None, None, EPS, kind), wanted)
    assert amax == torch.inf
    spoilt = q.float().isnan().any(1)
    assert spoilt[123] and int(spoilt.sum()) == 1
    is_the_reference(x, *parameters(kind, 4096, x.dtype), kind, number(30.0))


def test_the_largest_finite_numbers_are_finite() -> None:
    x = torch.ones(64, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.full((256,), torch.finfo(torch.bfloat16).max, device="cuda", dtype=torch.bfloat16)
    wanted = Wanted(number(1.0), E4M3, True, True, False, RULE)
    amax = kernels.norm_quantize(x, Norm(weight, None, 0.0, "rms"), wanted)[3]
    assert amax == torch.finfo(torch.bfloat16).max


def test_runs_repeat_bit_by_bit_and_a_cuda_graph_repeats_them() -> None:
    x, (weight, bias) = matrix(8192, 4096), parameters(LAYER, 4096, torch.bfloat16)
    repeats(x, Norm(weight, bias, EPS, LAYER), Wanted(number(30.0), E4M3, True, True, True, RULE))


def repeats(*task: Any) -> None:
    """Assert that calls and replays of ``kernels.norm_quantize(*task)`` give the same bits."""
    first = kernels.norm_quantize(*task)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels.norm_quantize(*task)
    for _ in range(20):
        graph.replay()
        for results in (kernels.norm_quantize(*task), captured):
            for result, before in zip(results, first, strict=True):
                assert torch.equal(result.reshape(-1).view(torch.uint8), before.reshape(-1).view(torch.uint8))


def test_it_is_what_a_gpu_of_this_kind_takes_and_others_are_told_why_not() -> None:
    def choice(columns: int, dtype: torch.dtype, columnwise: bool = True) -> tuple[str, list[str]]:
        x = torch.empty(64, columns, device="cuda", dtype=dtype)
        arguments = {"x": x, "weight": None, "bias": None, "kind": "rms", "scale": number(1.0), "dtype": E4M3}
        arguments["columnwise"] = columnwise
        return registry.choose("norm_quantize", registry.Target.of(x.device), arguments)

    assert choice(4096, torch.bfloat16)[0] == "cuda"
    assert choice(4096, torch.bfloat16, columnwise=False)[0] == "triton"
    for columns, dtype, reason in ((4095, torch.bfloat16, "K=4095"), (4096, torch.float32, "float32")):
        name, reasons = choice(columns, dtype)
        assert name == "triton" and reason in reasons[0]
