"""Generated producers on a GPU, at the sizes of real layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_compile.kernels.tiles import Tile
from te_compile.ops.fused_quantize import fused_quantize_reference
from te_compile.ops.pointwise import Place, Spec
from te_compile.recipe import ScaleRule

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
SPECS = {
    "cast": "x0: bfloat16[M, K]; quantize x0",
    "cast with bias gradient": "x0: bfloat16[M, K]; quantize x0; sum x0: float32",
    "relu squared": "x0: bfloat16[M, K]; t0 = relu(x0); t1 = mul(t0, t0); t2 = bfloat16(t1); quantize t2",
    # A bias in fp32: a sum of two numbers in bf16 often lies halfway between two others, as does its GELU where that is
    # the identity but for a last bit of erf.
    "gelu": "x0: bfloat16[M, K]; x1: float32[K]; t0 = add(x0, x1); t1 = mul(t0, 0.5); "
    "t2 = mul(t0, 0.7071067811865476); t3 = erf(t2); t4 = add(t3, 1); t5 = mul(t1, t4); t6 = bfloat16(t5); quantize t6",
    "tanh gelu": "x0: bfloat16[M, K]; t0 = mul(x0, 0.5); t1 = mul(x0, x0); t2 = mul(t1, x0); t3 = mul(t2, 0.044715); "
    "t4 = add(x0, t3); t5 = mul(t4, 0.7978845608028654); t6 = tanh(t5); t7 = add(t6, 1); t8 = mul(t0, t7); "
    "t9 = bfloat16(t8); quantize t9",
    "gelu backward": "x0: bfloat16[M, K]; x1: bfloat16[M, K]; t0 = mul(x1, 0.7071067811865476); t1 = erf(t0); "
    "t2 = add(t1, 1); t3 = mul(t2, 0.5); t4 = mul(x1, x1); t5 = mul(t4, -0.5); t6 = exp(t5); "
    "t7 = mul(t6, 0.3989422804014327); t8 = mul(x1, t7); t9 = add(t3, t8); t10 = mul(x0, t9); t11 = bfloat16(t10); "
    "quantize t11; sum t11: bfloat16",
    "swiglu": "x0: bfloat16[M, K]; x1: bfloat16[M, K]; t0 = neg(x0); t1 = exp(t0); t2 = add(t1, 1); t3 = div(x0, t2); "
    "t4 = bfloat16(t3); t5 = mul(t4, x1); t6 = bfloat16(t5); quantize t6",
    "gate backward": "x0: bfloat16[M, K]; x1: bfloat16[M, K]; x2: bfloat16[M, K]; t0 = mul(x0, x1); t1 = sigmoid(x2); "
    "t2 = mul(t0, t1); t3 = sub(1, t1); t4 = mul(x2, t3); t5 = add(t4, 1); t6 = mul(t2, t5); t7 = bfloat16(t6); "
    "quantize t7",
    "dropout": "x0: bool[M, K]; x1: float16[M, K]; t0 = number(x0); t1 = mul(t0, x1); "
    "t2 = mul(t1, 1.1111111111111112); t3 = float16(t2); quantize t3",
    "residual": "x0: bfloat16[M, K]; x1: bfloat16[M, K]; t0 = add(x0, x1); t1 = bfloat16(t0); quantize t1; "
    "emit t1: bfloat16; sum t1: float32",
    "norm apply": "x0: bfloat16[M, K]; x1: float32[M, 1]; x2: bfloat16[K]; t0 = mul(x0, x1); t1 = bfloat16(t0); "
    "t2 = mul(t1, x2); t3 = bfloat16(t2); quantize t3; emit t3: bfloat16",
}


def inputs_of(spec: Spec, rows: int, columns: int, strided: bool = False) -> list[Tensor]:
    """Random inputs on the GPU; with ``strided``, matrices are column slices of one twice as wide."""
    made: list[Tensor] = []
    for given in spec.inputs:
        shape = {
            Place.FULL: (rows, 2 * columns if strided else columns),
            Place.ROW: (columns,),
            Place.COLUMN: (rows, 1),
            Place.SCALAR: (),
        }[given.place]
        value = torch.randn(shape, device="cuda")
        value = value[:, -columns:] if given.place is Place.FULL else value
        made.append(value > 0 if given.dtype == torch.bool else value.to(given.dtype))
    return made


def ordered(codes: Tensor) -> Tensor:
    """FP8 codes as integers in the order of the numbers, so that neighbours differ by 1."""
    bits = codes.contiguous().view(torch.int8).int()
    return torch.where(bits < 0, -(bits & 0x7F), bits)


def assert_close(got: list[Tensor], expected: list[Tensor], exact: bool) -> None:
    """Codes equal, or one step apart in a few places where fp32 rounds otherwise (fused multiply-add, erf)."""
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.dtype in FP8:
            apart = (ordered(a) - ordered(b)).abs()
            assert int(apart.max()) <= (0 if exact else 1)
            assert float((apart > 0).float().mean()) < 2e-3
        elif a.dim() == 1:  # a sum of thousands of terms, of either sign
            torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)
        else:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("shape", [(8192, 4096), (2048, 16384), (1000, 1040), (77, 4096), (1, 4096)], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_a_generated_kernel_agrees_with_the_reference(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    from te_compile.kernels import pointwise

    spec = Spec.parse(SPECS[name])
    arguments = (inputs_of(spec, *shape), torch.tensor(7.0, device="cuda"), spec, dtype, True, True, ScaleRule())
    got, expected = pointwise.fused_quantize(*arguments, measure=False), fused_quantize_reference(*arguments)
    assert_close(got, expected, exact=name.startswith("cast"))


@pytest.mark.parametrize("scale", [None, 0.0, 3.0], ids=["none", "unknown", "known"])
@pytest.mark.parametrize("name", ["swiglu", "gelu backward", "cast"])
def test_measuring_agrees_with_the_reference(name: str, scale: float | None) -> None:
    from te_compile.kernels import pointwise

    spec = Spec.parse(SPECS[name])
    given = None if scale is None else torch.tensor(scale, device="cuda")
    arguments = (inputs_of(spec, 4096, 4096), given, spec, FP8[0], True, True, ScaleRule())
    got, expected = pointwise.fused_quantize(*arguments, measure=True), fused_quantize_reference(*arguments)
    assert_close(got, expected, exact=name == "cast")


@pytest.mark.parametrize("tile", [Tile(128, 128, 8), Tile(128, 64, 4), Tile(64, 128, 8), Tile(64, 64, 4)], ids=str)
@pytest.mark.parametrize("shape", [(1024, 1024), (1000, 1040), (333, 208)], ids=str)
def test_every_tile_stores_the_bytes_of_a_plain_cast(tile: Tile, shape: tuple[int, int]) -> None:
    from te_compile.kernels import pointwise

    spec = Spec.parse(SPECS["cast"])
    arguments = (inputs_of(spec, *shape, strided=True), None, spec, FP8[0], True, True, ScaleRule())
    got, expected = pointwise.fused_quantize(*arguments, measure=True, tile=tile), fused_quantize_reference(*arguments)
    assert torch.equal(got[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(got[1].view(torch.uint8), expected[1].view(torch.uint8))
    assert torch.equal(got[2], expected[2]) and torch.equal(got[3], expected[3])


def test_column_sums_are_the_same_in_every_run() -> None:
    from te_compile.kernels import pointwise

    spec = Spec.parse(SPECS["cast with bias gradient"])
    arguments = (inputs_of(spec, 8192, 1024), torch.ones((), device="cuda"), spec, FP8[1], True, True, ScaleRule())
    first = pointwise.fused_quantize(*arguments, measure=False)[4]
    assert all(torch.equal(pointwise.fused_quantize(*arguments, measure=False)[4], first) for _ in range(5))


def test_more_than_two_billion_elements_are_addressed() -> None:
    from te_compile.kernels import pointwise

    spec = Spec.parse(SPECS["cast"])
    rows, columns = 2**16 + 64, 2**15
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-1, -1] = 3.0
    arguments = ([x], torch.ones((), device="cuda"), spec, FP8[0], True, True, ScaleRule())
    q, qt, amax, *_ = pointwise.fused_quantize(*arguments, measure=False)
    assert amax == 3 and q[-1, -1].float() == 3 and qt[-1, rows - 1].float() == 3
    assert int(q.view(torch.uint8).count_nonzero()) == int(qt.view(torch.uint8).count_nonzero()) == 1
