"""Inputs whose columns are moved within heads: text, parsing and meaning."""

from __future__ import annotations

import random

import pytest
import torch

from te_compile.ops.fused_quantize import FUSED_QUANTIZE
from te_compile.ops.pieces import Piece, Span
from te_compile.ops.pointwise import Input, Place, Spec, SpecBuilder, SpecError, evaluate, extent, grouped
from te_compile.recipe import ScaleRule

HALVES = (
    "x0: bfloat16[M, K of a[32:64] + a[0:32]]; x1: float32[M, D of b[0:32] + 32 unread]; x2: bool[columns 0:32 of 64]; "
    "x3: float32[K]; x4: bfloat16[M, K of a[0:64]]; t0 = mul(x0, x1); t1 = where(x2, t0, x4); t2 = add(t1, x3); "
    "quantize t2"
)


def inputs(batch: int, length: int, heads: int) -> list[torch.Tensor]:
    """What HALVES reads, in order: the heads, a table for all of them, a row."""
    x = torch.randn(batch, heads, length, 64).bfloat16().transpose(1, 2)
    return [x, torch.randn(random.choice([1, batch]), length, 1, 32), torch.randn(64 * heads)]


def test_the_text_is_read_back() -> None:
    spec = Spec.parse(HALVES)
    assert spec.text() == HALVES and Spec.parse(spec.text()) == spec
    assert spec.inputs[0].pieces == (Piece(0, 32, 32), Piece(0, 0, 32))
    assert spec.inputs[1].pieces == (Piece(1, 0, 32), Piece(None, 0, 32))
    assert spec.inputs[2] == Input(torch.bool, Place.SPAN, span=Span(0, 32, 64))


def test_a_tensor_that_is_read_twice_is_given_once() -> None:
    spec, given = Spec.parse(HALVES), inputs(2, 3, 2)
    assert spec.tensors == 3 and spec.matrices == 1
    found = grouped(spec, given)
    assert [[each is given[0] for each in tensors] for _, tensors in found] == [[True], [False], [], [False], [True]]
    with pytest.raises(SpecError, match="2 tensors"):
        grouped(spec, given[:2])


@pytest.mark.parametrize(("batch", "length", "heads"), [(2, 3, 2), (1, 5, 1), (3, 1, 2)])
def test_columns_of_a_head_come_from_where_the_text_says(batch: int, length: int, heads: int) -> None:
    spec, given = Spec.parse(HALVES), inputs(batch, length, heads)
    x, table, row = given
    wide = x.float()
    changed = torch.cat((wide[..., 32:] * table, wide[..., 32:]), 3).reshape(batch * length, -1) + row
    z, _, _ = evaluate(spec, given)
    assert extent(spec, given) == z.shape == (batch * length, heads * 64)
    assert torch.equal(z, changed)


def test_shapes_of_the_fake_are_those_of_the_reference() -> None:
    scale = torch.tensor(2.0)
    arguments = (inputs(2, 4, 2), scale, HALVES, torch.float8_e4m3fn, True, True, ScaleRule().text())
    torch.library.opcheck(FUSED_QUANTIZE, arguments, test_utils=("test_schema", "test_faketensor"))


def test_an_empty_batch_has_no_rows() -> None:
    x, _, row = inputs(1, 3, 2)
    z, _, _ = evaluate(Spec.parse(HALVES), [x[:0], torch.randn(1, 3, 1, 32), row])
    assert z.shape == (0, 128)


def test_equal_spans_are_one() -> None:
    builder = SpecBuilder()
    assert builder.span(Span(0, 32, 64)) == builder.span(Span(0, 32, 64)) != builder.span(Span(32, 64, 64))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("bfloat16[M, K of b[0:32]]", "in their order"),
        ("bfloat16[M, K of 32 unread]", "in their order"),
        ("bfloat16[M, K of a[32:32]]", "one column or more"),
        ("bfloat16[M, K of a[0:32] + 3 of them]", "no piece"),
        ("bfloat16[K of a[0:32]]", "whole matrices"),
        ("bfloat16[M, D]", "how wide"),
        ("bfloat16[M, D of 32]", "parts"),
        ("bool[columns 32:96 of 64]", "within its period"),
        ("bool[columns 32:32 of 64]", "within its period"),
    ],
)
def test_a_wrong_text_names_the_statement(given: str, why: str) -> None:
    with pytest.raises(SpecError, match=why) as raised:
        Spec.parse(f"x0: float32[M, K]; x1: {given}; quantize x0")
    assert given in str(raised.value)
