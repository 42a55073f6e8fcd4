"""Producers that rotate heads as they read them, on a GPU, at the sizes of real layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_compile.ops.fused_quantize import FUSED_QUANTIZE, fused_quantize_reference
from te_compile.ops.pointwise import Spec
from te_compile.recipe import ScaleRule
from tests.gpu.test_pointwise_kernel import FP8, assert_close
from tests.kernels.test_pointwise_pieces import rotation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def inputs_of(batch: int, length: int, heads: int, width: int, rotated: int, tables: int) -> list[Tensor]:
    """A gradient as attention gives it back, [B, H, S, D], and sin and cos, all seen as [A, S, G, D]."""
    gradient = torch.randn(batch, heads, length, width, device="cuda").bfloat16().transpose(1, 2)
    table = torch.randn(2, tables, length, rotated, device="cuda").bfloat16().unsqueeze(3)
    return [gradient, table[0], table[1]]


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize(("width", "rotated"), [(128, 128), (64, 64), (128, 32), (96, 96), (64, 32)], ids=str)
@pytest.mark.parametrize(
    ("batch", "length", "heads", "tables"), [(4, 2048, 32, 1), (2, 2048, 8, 2), (3, 333, 5, 1)], ids=str
)
def test_a_rotation_agrees_with_the_reference(
    batch: int, length: int, heads: int, tables: int, width: int, rotated: int, dtype: torch.dtype
) -> None:
    from te_compile.kernels import pointwise

    spec, inputs = rotation(width, rotated), inputs_of(batch, length, heads, width, rotated, tables)
    arguments = (inputs, torch.tensor(7.0, device="cuda"), spec, dtype, True, True, ScaleRule())
    assert_close(pointwise.fused_quantize(*arguments, False), fused_quantize_reference(*arguments), exact=False)


def test_measuring_agrees_with_the_reference() -> None:
    from te_compile.kernels import pointwise

    arguments = (inputs_of(2, 512, 8, 128, 128, 1), None, rotation(128, 128), FP8[0], True, True, ScaleRule())
    assert_close(pointwise.fused_quantize(*arguments, True), fused_quantize_reference(*arguments), exact=False)


def test_later_calls_read_their_own_tensors() -> None:
    """A gradient that is read twice is one tensor of the call, whatever its address."""
    spec, rule = rotation(128, 128), ScaleRule()
    scale = torch.tensor(3.0, device="cuda")
    for _ in range(5):
        inputs = inputs_of(2, 256, 4, 128, 128, 1)
        got = FUSED_QUANTIZE(inputs, scale, spec.text(), FP8[0], True, True, rule.text(), False, "triton")
        expected = fused_quantize_reference(inputs, scale, Spec.parse(spec.text()), FP8[0], True, True, rule)
        assert_close(got, expected, exact=False)
