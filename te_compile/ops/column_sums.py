"""``te::column_sums``: what many kernels summed in part, added up in one launch.

A kernel that walks over a matrix by tiles or rows leaves partial rows of its columns' sums, and somebody must add those
up: a bias gradient, the gradients of a norm's weight and bias. An operator that is told ``partial_sums`` returns them
as they are, fp32 [P, K], and this one takes those of a whole backward pass (passes/sum_columns_late.py). P says nothing
but how many rows add up to the sum: producers sum 64 rows each (te_compile.ops.partial_sums), a norm's backward as many
as its programs walk over.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.library import define
from te_compile.ops.pointwise import DTYPES, dtype_name

AT_ONCE = 8
"""Sums that one launch adds up."""


def text_of(dtypes: list[torch.dtype]) -> str:
    """The dtypes of sums as ``te::column_sums`` takes them."""
    return " ".join(map(dtype_name, dtypes))


def _dtypes_in(text: str) -> list[torch.dtype]:
    return [DTYPES[name] for name in text.split()]


@registry.register("column_sums", registry.REFERENCE)
def column_sums_reference(partials: list[Tensor], dtypes: list[torch.dtype]) -> list[Tensor]:
    """See the module. partials: fp32 [P, K], each its own P and K. Returns the sums, [K] each, in these dtypes."""
    return [partial.sum(0).to(dtype) for partial, dtype in zip(partials, dtypes, strict=True)]


def _column_sums(partials: list[Tensor], dtypes: str, implementation: str = registry.REFERENCE) -> list[Tensor]:
    return registry.function_of("column_sums", implementation)(partials, _dtypes_in(dtypes))


def _column_sums_fake(partials: list[Tensor], dtypes: str, implementation: str = registry.REFERENCE) -> list[Tensor]:
    given = zip(partials, _dtypes_in(dtypes), strict=True)
    return [partial.new_empty(partial.shape[1], dtype=dtype) for partial, dtype in given]


COLUMN_SUMS = define(
    'column_sums(Tensor[] partials, str dtypes, str implementation="reference") -> Tensor[]',
    _column_sums,
    _column_sums_fake,
)
