"""The kernel for a gather's gradient against the reference: any sizes, strides and indices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from te_compile.kernels.gather_backward import gather_backward
from te_compile.ops.gather_backward import gather_backward_reference

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_poisoned")
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def relative_positions(rows: int, places: int, columns: int) -> Tensor:
    """Those of disentangled attention: they fall along a row, and the far ones are one."""
    positions = torch.arange(rows)[:, None] - torch.arange(places)[None, :]
    return (positions + columns // 2).clamp(0, columns - 1)


def anything(rows: int, places: int, columns: int) -> Tensor:
    return torch.randint(0, columns, (rows, places))


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("indices", [relative_positions, anything])
@pytest.mark.parametrize("size", [(3, 5, 70, 20), (66, 2, 64, 130), (1, 3, 7, 300), (2, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("narrow", [torch.int32, torch.int64], ids=str)
def test_it_agrees_with_the_reference(
    size: tuple[int, int, int, int],
    indices: Callable[[int, int, int], Tensor],
    dtype: torch.dtype,
    narrow: torch.dtype,
    device: str,
) -> None:
    if dtype == torch.bfloat16 and device != "cuda":
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16")
    batch, rows, places, columns = size
    index = indices(rows, places, columns).to(device, narrow)
    dy = torch.randn(batch, rows, places, device=device).to(dtype)
    got, right = gather_backward(dy, index, columns), gather_backward_reference(dy, index, columns)
    assert got.dtype == dtype and got.shape == (batch, rows, columns) and got.is_contiguous()
    torch.testing.assert_close(got, right, rtol=2 * STEP[dtype], atol=1e-5)


def test_of_any_strides(device: str) -> None:
    dy, index = torch.randn(9, 4, 5, device=device).half().permute(2, 1, 0), anything(9, 4, 12).to(device).t()
    torch.testing.assert_close(gather_backward(dy, index, 12), gather_backward_reference(dy, index, 12))


def test_a_column_that_nothing_was_gathered_from_gets_zero(device: str) -> None:
    index = torch.full((2, 80), 3, device=device)
    got = gather_backward(torch.ones(4, 2, 80, device=device, dtype=torch.float16), index, 200)
    assert bool((got[..., 3] == 80).all()) and int(got.count_nonzero()) == 8
