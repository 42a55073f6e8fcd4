"""``te::quantize_weights``: many weights at once are each what one alone would be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_compile.ops.quantize import padded, quantize_reference
from te_compile.ops.weights import QUANTIZE_WEIGHTS, column_places, copies_of, places, row_places
from te_compile.recipe import ScaleRule

E4M3 = torch.float8_e4m3fn
RULE = ScaleRule()
SHAPES = [(48, 32), (7, 5), (16, 160)]


def drawn() -> list[Tensor]:
    return [torch.randn(shape) * 10.0**-i for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("given", [True, False], ids=["scales", "measured"])
def test_each_weight_is_quantised_as_if_alone(given: bool) -> None:
    weights = drawn()
    scales = torch.rand(3) * 10 + 1 if given else None
    codes, transposed, amax, scale_inv = QUANTIZE_WEIGHTS(weights, scales, E4M3, [True] * 3, [True] * 3, RULE.text())
    rows, _ = row_places(weights, [True] * 3)
    columns, _ = column_places(weights, [True] * 3)
    for i, weight in enumerate(weights):
        q, qt, a, s = quantize_reference(weight, None if scales is None else scales[i], E4M3, True, True, RULE)
        assert torch.equal(codes[rows[i] : rows[i] + q.numel()].view(q.shape).float(), q.float())
        assert torch.equal(transposed[columns[i] : columns[i] + qt.numel()].view(qt.shape).float(), qt.float())
        assert amax[i] == a and bool((scale_inv[i] == s).all())
        assert scale_inv[i].data_ptr() % 16 == scale_inv.data_ptr() % 16  # what a GEMM demands of a scale's address


def test_parts_start_at_multiples_of_16_and_do_not_overlap() -> None:
    lengths = torch.randint(1, 100, (20,)).tolist()
    wanted = (torch.rand(20) < 0.7).tolist()
    starts, length = places(lengths, wanted)
    end = 0
    for start, size, asked in zip(starts, lengths, wanted, strict=True):
        assert (start is not None) == asked
        if start is not None:
            assert start % 16 == 0 and end <= start < end + 16
            end = start + size
    assert length == padded(end)


def test_a_layout_nobody_wants_takes_no_space() -> None:
    weights = drawn()
    codes, transposed, _, _ = QUANTIZE_WEIGHTS(weights, None, E4M3, [True, False, False], [False] * 3, RULE.text())
    assert codes.shape == (48 * 32,) and transposed.shape == (0,)


def test_schema_and_fake_tell_the_truth() -> None:
    arguments = (drawn(), torch.rand(3) + 1, E4M3, [True, False, True], [True, True, False], RULE.text())
    torch.library.opcheck(QUANTIZE_WEIGHTS, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("by", ["states", "themselves"])
def test_copies_are_cast_by_the_scales_that_stand_in_the_states(by: str) -> None:
    weights = [torch.randn(32, 16), torch.randn(8, 48)]
    states = [torch.rand(2, 6) + 1 for _ in weights]
    rows = [state[1:2] for state in states] if by == "states" else None
    flags = ([True, False], [True, True])
    got = copies_of(weights, rows, E4M3, *flags, RULE.text(), "reference", "reference")
    scales = torch.stack([state[1, 0] for state in states]) if by == "states" else None
    wanted = QUANTIZE_WEIGHTS(weights, scales, E4M3, *flags, RULE.text())
    assert len(got) == 4 + (by == "states") and len(wanted) == 4
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got[:4], wanted, strict=True))
    assert scales is None or torch.equal(got[4], scales)
