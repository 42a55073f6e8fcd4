"""Rows of ``benchmarks.kernels`` for what takes microseconds: sums that kernels left in part, and dropout masks.

The sums are those of a GPT layer's backward: four biases, and the weights and biases of two norms. Added up at once
they take one launch, one by one six.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import kernels
from benchmarks.kernels import Row
from te_compile.kernels.column_sums import added_up, added_up_at_once
from te_compile.kernels.dropout_masks import draw_mask
from te_compile.kernels.tiles import Tile
from te_compile.ops.column_sums import column_sums_reference
from te_compile.ops.dropout_masks import dropout_mask_reference

BIASES = ((128, 12288), (128, 4096), (128, 16384), (128, 4096))
NORMS = ((132, 4096),) * 4
MASK = (8192, 4096)
PROBABILITY = 0.1


def rows() -> Iterator[Row]:
    """Those of the sums, then that of the mask."""
    yield from sum_rows()
    yield mask_row()


def sum_rows() -> Iterator[Row]:
    """The same sums in one launch and in six."""
    turns = [[torch.randn(shape, device=kernels.DEVICE) for shape in (*BIASES, *NORMS)] for _ in range(kernels.TURNS)]
    dtypes = [torch.bfloat16] * len(turns[0])
    size = 4 * sum(partial.numel() for partial in turns[0])

    def at_once(_: Tile | None, turn: int) -> Any:
        return added_up_at_once(turns[turn], dtypes)

    def one_by_one(_: Tile | None, turn: int) -> Any:
        biases, norms = turns[turn][: len(BIASES)], turns[turn][len(BIASES) :]
        launches = [*([bias] for bias in biases), norms[:2], norms[2:]]
        return [total for some in launches for total in added_up(some, dtypes[: len(some)])]

    def check(got: list[Tensor]) -> bool:
        pairs = zip(got, column_sums_reference(turns[0], dtypes), strict=True)
        return all(torch.allclose(one.float(), other.float(), rtol=0.01, atol=1e-3) for one, other in pairs)

    shape = f"{len(dtypes)} matrices"
    for name, call in (("column sums at once", at_once), ("column sums one by one", one_by_one)):
        yield Row(name, shape, size, call, check, "", single_pass=False, swept=False)


def mask_row() -> Row:
    """A byte for each element, drawn from a seed."""
    seed = torch.randint(2**60, (1,), device=kernels.DEVICE)

    def call(_: Tile | None, turn: int) -> Any:
        return draw_mask(seed, MASK, PROBABILITY)

    def check(got: Tensor) -> bool:
        return torch.equal(got, dropout_mask_reference(seed, MASK, PROBABILITY))

    rows, columns = MASK
    return Row("dropout mask", f"{rows}x{columns}", rows * columns, call, check, "", single_pass=False, swept=False)
