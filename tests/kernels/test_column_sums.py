"""Partial rows are added up: one matrix, two or many, to their own dtypes, whatever their count."""

from __future__ import annotations

import pytest
import torch

from te_compile.kernels.column_sums import added_up, added_up_at_once
from te_compile.ops.column_sums import AT_ONCE, column_sums_reference


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


@pytest.mark.parametrize("matrices", [1, 3, AT_ONCE, 2 * AT_ONCE + 1])
def test_many_matrices_of_different_shapes_are_summed_as_each_alone(matrices: int, device: str) -> None:
    shapes = [(1 + 67 * at % 300, 1 + 45 * at % 130) for at in range(matrices)]
    partials = [torch.randn(*shape, device=device) for shape in shapes]
    dtypes = [[torch.float32, torch.bfloat16, torch.float16][at % 3] for at in range(matrices)]
    totals = added_up_at_once(partials, dtypes)
    assert [(total.dtype, total.shape) for total in totals] == [
        (dtype, (columns,)) for dtype, (_, columns) in zip(dtypes, shapes, strict=True)
    ]
    for total, partial, expected in zip(totals, partials, column_sums_reference(partials, dtypes), strict=True):
        close = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}[total.dtype]
        torch.testing.assert_close(total, expected, rtol=close, atol=1e-4)
        torch.testing.assert_close(total.double(), partial.double().sum(0), rtol=close, atol=1e-4)
