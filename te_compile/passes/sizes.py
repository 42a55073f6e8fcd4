"""What is known about sizes, which may be symbols, without a new guard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.fx.experimental.symbolic_shapes import statically_known_true


def same(a: Any, b: Any) -> bool:
    """Are two sizes equal, as far as is known?"""
    return statically_known_true(a == b)


def all_same(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """Are two shapes of one length equal, as far as is known?"""
    return all(same(x, y) for x, y in zip(a, b, strict=True))


def product(sizes: Iterable[Any]) -> Any:
    """The product of sizes, 1 for none."""
    total: Any = 1
    for size in sizes:
        total = total * size
    return total
