"""Producers whose inputs are moved within heads against the reference that evaluates the same spec."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_compile.kernels import pointwise
from te_compile.kernels.pointwise_pieces import runs_of, widest_tile
from te_compile.kernels.tiles import Tile
from te_compile.ops.fused_quantize import fused_quantize_reference
from te_compile.ops.pieces import Piece
from te_compile.ops.pointwise import Spec, grouped
from te_compile.recipe import ScaleRule
from tests.kernels.test_pointwise import assert_same

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_poisoned")

E4M3 = torch.float8_e4m3fn


def rotation(width: int, rotated: int, dtype: str = "bfloat16") -> Spec:
    """The backward of a rotary embedding of the first ``rotated`` columns of heads of ``width``."""
    half = rotated // 2
    moved, of_sin = (f"{letter}[{half}:{rotated}] + {letter}[0:{half}]" for letter in "ab")
    kept, rest = (f" + a[{rotated}:{width}]", f" + {width - rotated} unread") if rotated < width else ("", "")
    return Spec.parse(
        f"x0: {dtype}[M, K of {moved}{kept}]; x1: {dtype}[M, D of {of_sin}{rest}]; "
        f"x2: bool[columns 0:{half} of {width}]; x3: {dtype}[M, K of a[0:{rotated}]{rest}]; "
        f"x4: {dtype}[M, D of c[0:{rotated}]{rest}]; "
        f"x5: bool[columns 0:{rotated} of {width}]; t0 = mul(x0, x1); t1 = neg(t0); t2 = where(x2, t0, t1); "
        f"t3 = mul(x3, x4); t4 = add(t2, t3); t5 = where(x5, t4, x0); t6 = bfloat16(t5); "
        "quantize t6; emit t6: bfloat16; sum t6: float32"
    )


def inputs_of(spec: Spec, batch: int, length: int, heads: int, width: int, tables: int, device: str) -> list[Tensor]:
    """Gradients as attention gives them back, [B, H, S, D], and cos and sin [B or 1, S, D], seen as [A, S, G, D]."""
    gradient = torch.randn(batch, heads, length, width, device=device).to(spec.inputs[0].dtype).transpose(1, 2)
    rotated = width - sum(piece.width for piece in spec.inputs[1].pieces if piece.tensor is None)
    table = torch.randn(2, tables, length, rotated, device=device).to(spec.inputs[1].dtype).unsqueeze(3)
    return [gradient, table[0], table[1]]


@pytest.mark.parametrize(
    ("width", "rotated"),
    [(64, 64), (128, 128), (64, 32), (32, 32), (96, 96), (128, 32), (32, 24)],
    ids=lambda number: str(number),
)
@pytest.mark.parametrize(("batch", "tables", "length", "heads"), [(2, 1, 32, 2), (2, 2, 21, 3), (1, 1, 33, 1)], ids=str)
def test_a_rotation_agrees_with_the_reference(
    width: int, rotated: int, batch: int, tables: int, length: int, heads: int, device: str
) -> None:
    spec = rotation(width, rotated)
    inputs = inputs_of(spec, batch, length, heads, width, tables, device)
    arguments = (inputs, torch.rand((), device=device) * 8 + 0.1, spec, E4M3, True, True, ScaleRule())
    expected = fused_quantize_reference(*arguments)
    for tile in (None, Tile(16, 32, 4)):
        assert_same(pointwise.fused_quantize(*arguments, measure=False, tile=tile), expected)
    assert_same(pointwise.fused_quantize(*arguments, measure=True), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_are_moved_as_well(dtype: str, device: str) -> None:
    spec = rotation(64, 64, dtype)
    arguments = (inputs_of(spec, 2, 32, 2, 64, 1, device), None, spec, torch.float8_e5m2, True, True, ScaleRule())
    assert_same(pointwise.fused_quantize(*arguments, measure=True), fused_quantize_reference(*arguments))


def test_several_tensors_make_one_matrix(device: str) -> None:
    """The gradients of q, k and v side by side in each head, k's with other halves first."""
    spec = Spec.parse(
        "x0: bfloat16[M, K of a[0:64] + b[32:64] + b[0:32] + 32 unread + c[0:32]]; x1: bool[columns 128:160 of 192]; "
        "t0 = where(x1, 3.0, x0); quantize t0; emit t0: bfloat16"
    )
    q, k, v = (torch.randn(2, 3, 24, 64, device=device).bfloat16().transpose(1, 2) for _ in range(3))
    arguments = ([q, k, v], torch.tensor(2.0, device=device), spec, E4M3, True, True, ScaleRule())
    expected = fused_quantize_reference(*arguments)
    three = torch.full((2, 24, 3, 32), 3.0, device=device).bfloat16()
    assert torch.equal(expected[4], torch.cat([q, k[..., 32:], k[..., :32], three, v[..., :32]], 3).reshape(48, -1))
    for tile in (None, Tile(16, 64, 4), Tile(16, 32, 4)):
        assert_same(pointwise.fused_quantize(*arguments, measure=False, tile=tile), expected)


def test_what_nobody_wants_is_not_read(device: str) -> None:
    """Columns beside the pieces may be anything, and the sum does not see them."""
    spec = Spec.parse(
        "x0: float32[M, K of 32 unread + a[32:64]]; x1: bool[columns 32:64 of 64]; t0 = where(x1, x0, 0.0); quantize t0"
    )
    x = torch.randn(1, 40, 2, 64, device=device)
    x[..., :32] = torch.nan
    arguments = ([x], None, spec, E4M3, True, True, ScaleRule())
    got = pointwise.fused_quantize(*arguments, measure=True)
    assert_same(got, fused_quantize_reference(*arguments))
    assert got[2] == x[..., 32:].abs().max()


def test_more_rows_of_tiles_than_a_rectangle_of_programs_may_have(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointwise, "MOST_ROWS_OF_PROGRAMS", 2)
    spec = rotation(64, 64)
    arguments = (inputs_of(spec, 2, 80, 2, 64, 1, device), None, spec, E4M3, True, True, ScaleRule())
    got = pointwise.fused_quantize(*arguments, measure=True, tile=Tile(32, 32, 4))
    assert_same(got, fused_quantize_reference(*arguments))


@pytest.mark.parametrize("which", ["columns apart", "heads too narrow"])
def test_what_no_tile_can_read_is_made_beforehand(which: str, device: str) -> None:
    width = 48 if which == "heads too narrow" else 64
    spec = rotation(width, width)
    inputs = inputs_of(spec, 2, 9, 2, width, 1, device)
    if which == "columns apart":
        inputs[0] = torch.randn(2, 9, 2, 2 * width, device=device).bfloat16()[..., ::2]
    assert min(widest_tile(given.pieces, tensors) for given, tensors in grouped(spec, inputs) if tensors) % 32 != 0
    arguments = (inputs, torch.tensor(2.0, device=device), spec, E4M3, True, True, ScaleRule())
    assert_same(pointwise.fused_quantize(*arguments, measure=False), fused_quantize_reference(*arguments))


def test_a_tile_is_read_from_one_tensor() -> None:
    pieces = (Piece(None, 0, 32), Piece(0, 0, 64), Piece(0, 96, 32), Piece(1, 0, 64))
    assert runs_of(pieces) == [(0, 0), (128, 1)]
    assert widest_tile(pieces, [torch.empty(1, 1, 1, 128)] * 2) == 64
