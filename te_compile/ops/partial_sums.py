"""Sums over the columns of a matrix as producers leave them: a row for each 64 of the matrix, fp32, to be added up."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 64
"""Of the matrix, in each partial row: as many as a producer's tile has."""


def partial_rows(rows: int) -> int:
    """How many partial rows there are of so many rows."""
    return -(-rows // ROWS)


def partial_sums_of(z: Tensor) -> Tensor:
    """The sums over each ``ROWS`` rows of z: fp32 [M, K] to [P, K]."""
    padding = partial_rows(z.shape[0]) * ROWS - z.shape[0]
    return torch.nn.functional.pad(z, (0, 0, 0, padding)).unflatten(0, (-1, ROWS)).sum(1)
