"""Partial rows are added up: one matrix or two, to their own dtypes, whatever their count."""

from __future__ import annotations

import pytest
import torch

from te_compile.kernels.column_sums import added_up


@pytest.mark.parametrize("count", [1, 63, 64, 200])
@pytest.mark.parametrize("columns", [1, 32, 50])
def test_one_and_two_matrices_are_summed_over_their_rows(count: int, columns: int, device: str) -> None:
    partials = [torch.randn(count, columns, device=device) for _ in range(2)]
    (alone,) = added_up(partials[:1], [torch.float32])
    both = added_up(partials, [torch.float32, torch.bfloat16])
    assert torch.equal(alone, both[0]) and both[1].dtype == torch.bfloat16
    exact = [partial.double().sum(0) for partial in partials]
    torch.testing.assert_close(both[0].double(), exact[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(both[1].double(), exact[1], rtol=2.0**-7, atol=1e-5)
