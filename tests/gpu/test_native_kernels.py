"""The C++ core's own CUDA kernels against the reference, code for code."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from te_compile.kernels import native
from te_compile.kernels.recording import STREAM
from te_compile.ops.quantize import padded, quantize_reference
from te_compile.recipe import DelayedScaling, ScaleRule

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if native.missing(cuda=True):
    pytest.skip(native.missing(cuda=True), allow_module_level=True)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(1, 1), (3, 5), (1, 4096), (17, 16), (64, 64), (100, 48), (257, 130), (640, 1024)]


def quantize_by_core(
    x: Tensor, scale: Tensor | None, dtype: torch.dtype, rule: ScaleRule, measure: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, qt, amax, scale_inv, all poisoned first."""
    rows, columns = x.shape
    q = torch.full((rows, columns), 0xA5, dtype=torch.uint8, device="cuda")
    qt = torch.full((columns, padded(rows)), 0xA5, dtype=torch.uint8, device="cuda")
    amax, scale_inv = (torch.full((), torch.nan, device="cuda") for _ in range(2))
    codes = native.dtype_codes()
    native.call(
        native.module().cuda_quantize,
        0, x, codes[x.dtype], rows, columns, scale, measure,
        torch.finfo(dtype).max, rule.margin, rule.epsilon, rule.power_2, codes[dtype],
        q, qt, amax, scale_inv, STREAM,
    )  # fmt: skip
    return q.view(dtype), qt.view(dtype), amax, scale_inv


def assert_same_codes(got: Tensor, want: Tensor) -> None:
    """Equal bytes; any NaN equals any other, because hardware drops its sign."""
    nan = want.float().isnan()
    assert torch.equal(got.float().isnan(), nan)
    assert torch.equal(got.view(torch.uint8)[~nan], want.view(torch.uint8)[~nan])


def assert_as_reference(x: Tensor, scale: Tensor | None, dtype: torch.dtype, rule: ScaleRule, measure: bool) -> None:
    q, qt, amax, scale_inv = quantize_by_core(x, scale, dtype, rule, measure)
    want_q, want_qt, want_amax, want_scale_inv = quantize_reference(x, scale, dtype, True, True, rule)
    assert amax.item() == want_amax.item()
    assert scale_inv.item() == want_scale_inv.item()
    assert_same_codes(q, want_q)
    assert_same_codes(qt, want_qt)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_both_layouts_and_amax_are_the_references(
    dtype: torch.dtype, x_dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = (torch.randn(shape, device="cuda") * 3).to(x_dtype)
    assert_as_reference(x, torch.rand((), device="cuda") * 100 + 1, dtype, ScaleRule(), False)


@pytest.mark.parametrize("rule", [ScaleRule(), ScaleRule(margin=2), ScaleRule(epsilon=10.0), ScaleRule(power_2=True)])
@pytest.mark.parametrize("shape", [(3, 5), (257, 130), (640, 1024)])
def test_a_scale_is_measured_where_there_is_none(shape: tuple[int, int], rule: ScaleRule) -> None:
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    assert_as_reference(x, None, E4M3, rule, True)
    assert_as_reference(x, torch.zeros((), device="cuda"), E5M2, rule, True)
    assert_as_reference(x, torch.full((), 7.0, device="cuda"), E4M3, rule, True)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_not_finite_makes_amax_infinite(x_dtype: torch.dtype, bad: float) -> None:
    x = torch.randn(130, 96, device="cuda").to(x_dtype)
    x[129, 95] = bad
    assert_as_reference(x, torch.ones((), device="cuda"), E4M3, ScaleRule(), False)
    assert_as_reference(x, None, E4M3, ScaleRule(), True)


def test_zeros_keep_scale_one() -> None:
    x = torch.zeros(33, 48, device="cuda")
    assert_as_reference(x, None, E4M3, ScaleRule(), True)


def test_an_unaligned_view_is_read_as_it_lies() -> None:
    x = torch.randn(64 * 64 + 1, device="cuda")[1:].view(64, 64)
    assert_as_reference(x, torch.ones((), device="cuda"), E4M3, ScaleRule(), False)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0)])
def test_nothing_to_cast_has_amax_zero(shape: tuple[int, int]) -> None:
    _, _, amax, scale_inv = quantize_by_core(torch.empty(shape, device="cuda"), None, E4M3, ScaleRule(), True)
    assert amax.item() == 0.0
    assert scale_inv.item() == 1.0


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 255, 256, 257, 1024])
def test_batched_update_leaves_the_state_that_the_recipe_leaves(length: int, algorithm: str) -> None:
    recipe = DelayedScaling(margin=1, amax_history_len=length, amax_compute_algo=algorithm)
    rows = [1, 3, 0, 5] + [2] * 400  # more than one launch
    states = [torch.rand(count, 2 + length, device="cuda") * 10 for count in rows]
    want = [state.clone() for state in states]
    for _ in range(3):
        amaxes = [torch.exp(torch.randn(count, device="cuda") * 3) for count in rows]
        for amax, odd in zip(amaxes[3:], [math.inf, math.nan, 0.0] * 4, strict=False):
            amax[0] = odd
        for i, (state, amax) in enumerate(zip(want, amaxes, strict=True)):
            history, scale, skipped = recipe.updated(state[:, 2:], state[:, 0], amax, 448.0)
            want[i] = torch.cat([scale[:, None], state[:, 1:2] + skipped[:, None].float(), history], dim=1)
        native.module().cuda_update_scales(
            0, [state.data_ptr() for state in states], [amax.data_ptr() for amax in amaxes], rows,
            length, 448.0, recipe.margin, 0.0, False, algorithm == "most_recent", native.current_stream(0),
        )  # fmt: skip
    for got, expected in zip(states, want, strict=True):
        assert torch.equal(got, expected)


def test_an_update_can_be_captured_in_a_cuda_graph() -> None:
    state, amax = torch.zeros(2, 6, device="cuda"), torch.ones(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        native.module().cuda_update_scales(
            0, [state.data_ptr()], [amax.data_ptr()], [2], 4, 448.0, 0, 0.0, False, False, native.current_stream(0)
        )
    for value in (2.0, 8.0, 4.0):
        amax.fill_(value)
        graph.replay()
    assert state[0].tolist() == [56.0, 0.0, 4.0, 8.0, 2.0, 0.0]
    assert torch.equal(state[0], state[1])
