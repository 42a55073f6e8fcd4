"""The hash of a kernel covers all that it calls, in whatever order hashes are asked for."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from te_compile.kernels.generated import load_from
from te_compile.kernels.kernel_hashes import hash_from_below

SOURCE = """
import triton.language as tl
from triton.runtime.jit import JITFunction

LARGEST = tl.constexpr({largest})


@JITFunction
def below(x):
    return x * LARGEST


@JITFunction
def between(x):
    return below(x) + 1


@JITFunction
def kernel(x):
    y = between(x)
"""
numbers = itertools.count()


def module(folder: Path, largest: int = 448) -> Any:
    """A kernel that calls a function that calls another, which reads a constant."""
    file = folder / "kernels_to_hash.py"
    file.write_text(SOURCE.format(largest=largest))
    return load_from(f"kernels_to_hash_{next(numbers)}", str(file))


@pytest.mark.parametrize("first", ["below", "between", "kernel"])
def test_the_order_in_which_hashes_are_asked_for_changes_none(first: str, tmp_path: Path) -> None:
    one, other = module(tmp_path), module(tmp_path)
    for name in (first, "below", "between", "kernel"):
        hash_from_below(getattr(one, name))
    hash_from_below(other.kernel)
    assert one.kernel.hash == other.kernel.hash == other.kernel.cache_key


def test_a_constant_two_calls_below_counts(tmp_path: Path) -> None:
    one, other = module(tmp_path), module(tmp_path, largest=57344)
    hash_from_below(one.kernel)
    hash_from_below(other.kernel)
    assert one.kernel.hash != other.kernel.hash


def test_what_is_no_triton_function_is_left_alone() -> None:
    hash_from_below(print)
    hash_from_below(object())
