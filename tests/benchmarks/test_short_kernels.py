"""Rows of sums and masks: what is right passes, and what is not is told."""

from __future__ import annotations

import pytest
import torch

from benchmarks import kernels, short_kernels
from te_compile.ops.column_sums import column_sums_reference

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="here rows are made on the CPU")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small shapes on the CPU, and references in the place of kernels."""
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    monkeypatch.setattr(short_kernels, "BIASES", ((4, 32), (4, 48)))
    monkeypatch.setattr(short_kernels, "NORMS", ((5, 32),) * 4)
    monkeypatch.setattr(short_kernels, "MASK", (8, 64))
    monkeypatch.setattr(short_kernels, "added_up", column_sums_reference)
    monkeypatch.setattr(short_kernels, "added_up_at_once", column_sums_reference)
    monkeypatch.setattr(short_kernels, "draw_mask", short_kernels.dropout_mask_reference)


def test_sums_in_one_launch_and_in_several_are_the_same_job() -> None:
    at_once, one_by_one = short_kernels.sum_rows()
    assert at_once.bytes == one_by_one.bytes == 4 * (4 * 80 + 4 * 5 * 32)
    for row in (at_once, one_by_one):
        got = row.call(None, 0)
        assert row.check(got)
        assert not row.check([total + 1 for total in got]) and not row.check(row.call(None, 1))


def test_a_mask_has_a_byte_for_each_element() -> None:
    row = short_kernels.mask_row()
    got = row.call(None, 0)
    assert row.bytes == got.numel() and row.check(got) and not row.check(~got)
