"""What is known about sizes, which may be symbols, without a new guard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true


def same(a: Any, b: Any) -> bool:
    """Are two sizes equal, as far as is known?"""
    return statically_known_true(a == b)


def all_same(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """Are two shapes of one length equal, as far as is known?"""
    return all(same(x, y) for x, y in zip(a, b, strict=True))


def lie_alike(one: Tensor, other: Tensor) -> bool:
    """Do the elements of two tensors of one shape lie in the same order, as far as is known? A dimension of size 1 may
    have any stride."""
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(same(size, 1) or same(stride, wanted) for size, stride, wanted in strides)


def product(sizes: Iterable[Any]) -> Any:
    """The product of sizes, 1 for none."""
    total: Any = 1
    for size in sizes:
        total = total * size
    return total
