"""How far Triton kernels reach: where a tile begins is counted in 64 bits, and within a tile in 32, which is faster.

Tiles have up to 128 rows and as many columns, and the offsets of both are added. A matrix with more columns than these
can tell apart, or with more rows in qᵀ, which is written by words of four rows, is left to the reference. Rows that lie
too far apart are another matter: the last position of each of 64 sequences makes a small matrix with a stride of a
whole sequence, and that is copied before it is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_compile.ops.registry import Unsupported

MOST_STRIDE = 2**31 // (2 * 128)  # elements
MOST_ROWS, MOST_COLUMNS = 4 * MOST_STRIDE, MOST_STRIDE
MOST_WORDS = 2**31 - 2**16  # of the bits of one head, which a tile of them may reach beyond


def is_within_reach(rows: int, columns: int) -> bool:
    """Can kernels work on a matrix of this size?"""
    return rows <= MOST_ROWS and columns <= MOST_COLUMNS


def check_reach(rows: int | torch.SymInt, columns: int | torch.SymInt) -> None:
    """Raise Unsupported if it is known that they cannot."""
    for size, most, what in ((rows, MOST_ROWS, "rows"), (columns, MOST_COLUMNS, "columns")):
        if isinstance(size, int) and size > most:
            raise Unsupported(f"{size} {what} are more than {most}, for a tile's offsets have 32 bits")


def near(x: Tensor, *dimensions: int) -> Tensor:
    """``x``, or a copy if neighbours along one of these dimensions lie too far apart."""
    shape, strides = x.shape, x.stride()
    far = any(strides[at] > MOST_STRIDE and shape[at] > 1 for at in dimensions)
    return x.contiguous() if far else x
