"""The C++ core's norm + quantize of few rows, by one cluster: y as the reference has it, and codes of that y."""

from __future__ import annotations

import pytest
import torch

from te_compile.kernels import native, native_norm
from te_compile.ops import native_implementations as kernels
from te_compile.ops import registry
from te_compile.ops.norm import KINDS, LAYER, RMS_MIXED
from te_compile.ops.norm_quantize import Norm, Wanted
from te_compile.ops.quantize import quantize_reference
from te_compile.recipe import ScaleRule

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs a CUDA device with clusters (compute capability 9.0)", allow_module_level=True)
if native.missing(cuda=True):
    pytest.skip(native.missing(cuda=True), allow_module_level=True)

from tests.gpu.test_kernels import agrees, matrix, number, poisoned_memory
from tests.gpu.test_native_norm import E4M3, EPS, RULE, is_the_reference, keeps_its_variance, parameters, repeats

__all__ = ["poisoned_memory"]  # a fixture that every test here uses

FEW = native_norm.FEW_ROWS
# One block and eight, one row of a block and two; a row of a vector, of one, two and four vectors a thread, and ends.
SHAPES = [
    (1, 4096),
    (2, 8),
    (8, 4096),
    (9, 5120),
    (FEW, 4104),
    (7, 8192),
    (FEW, 12288),
    (3, 16384),
    (FEW, 16384),
    (13, 72),
]


@pytest.mark.parametrize("scaling", ["known", "missing", "none"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kind_and_shape_is_the_reference(shape: tuple[int, int], kind: str, scaling: str) -> None:
    scale = {"known": number(40.0), "missing": number(0.0), "none": None}[scaling]
    for dtype in (torch.bfloat16, torch.float16):
        x = matrix(*shape).to(dtype).nan_to_num()
        weight, bias = parameters(kind, shape[1], dtype)
        if scaling != "missing":
            is_the_reference(x, weight, bias, kind, scale)
            continue
        # A scale of 0 is measured without being asked to: nothing has to be cleared or launched for it.
        y, q, qt, amax, scale_inv, _, _ = native_norm.norm_quantize(
            x, Norm(weight, bias, EPS, kind), Wanted(scale, E4M3, True, False, True, RULE), False
        )
        agrees((q, qt, amax, scale_inv), quantize_reference(y, None, E4M3, True, False, RULE))


@pytest.mark.parametrize("kind", KINDS)
def test_scales_follow_the_rule(kind: str) -> None:
    x, (weight, bias) = matrix(8, 4096), parameters(kind, 4096, torch.bfloat16)
    for rule in (RULE, ScaleRule(margin=2), ScaleRule(power_2=True), ScaleRule(epsilon=10.0)):
        is_the_reference(x, weight, bias, kind, None, rule)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_may_be_wider_than_x_or_absent(kind: str) -> None:
    x = matrix(11, 2048)
    is_the_reference(x, None, None, kind, None)
    if kind not in (RMS_MIXED, "rms"):  # these give y in the wider dtype, which is Triton's
        is_the_reference(x, *parameters(kind, 2048, torch.float32), kind, None)
    weight, _ = parameters(kind, 4096, torch.bfloat16)
    is_the_reference(x, weight[::2], None, kind, None)


def test_rows_apart_in_memory_are_read_in_place_and_others_copied() -> None:
    x = matrix(FEW, 4096)
    off_by_one = torch.randn(8 * 512 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(8, 512)
    for view in (x[:, :2048], x[::3], x[:, 8:1032], x[:, 1:1025], off_by_one):
        is_the_reference(view, *parameters(LAYER, view.shape[1], x.dtype), LAYER, None)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("kind", [LAYER, "rms"])
def test_a_bad_value_spoils_its_row_and_no_other(kind: str, bad: float) -> None:
    x = matrix(12, 4096)
    x[10, 4000] = bad
    wanted = Wanted(number(30.0), E4M3, True, False, False, RULE)
    _, q, _, amax, *_ = kernels.norm_quantize(x, Norm(None, None, EPS, kind), wanted)
    assert amax == torch.inf
    spoilt = q.float().isnan().any(1)
    assert spoilt[10] and int(spoilt.sum()) == 1
    is_the_reference(x, *parameters(kind, 4096, x.dtype), kind, number(30.0))


def test_a_row_of_large_numbers_that_differ_little_keeps_its_variance() -> None:
    keeps_its_variance(FEW, None)


def test_runs_repeat_bit_by_bit_and_a_cuda_graph_repeats_them() -> None:
    for rows in (3, FEW):
        x, (weight, bias) = matrix(rows, 5120), parameters(LAYER, 5120, torch.bfloat16)
        repeats(x, Norm(weight, bias, EPS, LAYER), Wanted(None, E4M3, True, False, True, RULE))


@pytest.mark.parametrize("scale", [None, 1.0])
def test_it_is_what_a_gpu_of_this_kind_takes(scale: float | None) -> None:
    given = None if scale is None else number(scale)
    for rows, name in ((FEW, "cuda"), (FEW + 1, "triton")):
        x = torch.empty(rows, 4096, device="cuda", dtype=torch.bfloat16)
        arguments = {"x": x, "weight": None, "bias": None, "kind": "rms", "scale": given, "dtype": E4M3}
        target = registry.Target.of(x.device)
        assert registry.choose("norm_quantize", target, {**arguments, "columnwise": False})[0] == name
