"""The hash of a kernel's source, the same in every process.

Triton looks for a compiled kernel by a hash over its source, that of the functions it calls, and the global constants
that any of them reads. Up to 3.6 it gathers the constants of a called function before it has looked into that function,
so those count only if somebody else needed the function's hash before. What a worker compiled would not be found by a
process that launched its kernels in another order. Where every function is hashed after those that it calls, the
constants of all count, in every process.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from triton.runtime.jit import JITCallable


def hash_from_below(function: Any) -> None:
    """Have Triton hash what ``function`` calls, and what that calls, and then itself. No work if it was done before;
    to be called before anything else asks for the hash."""
    if isinstance(function, JITCallable) and function.hash is None:
        for called in _called(function):
            if called is not function:
                hash_from_below(called)
        function.cache_key  # noqa: B018  (a property that keeps what it finds)


def _called(function: Any) -> Iterator[Any]:
    """The Triton functions that are named in it, by a name of their own or as parts of a module."""
    code: CodeType = function.fn.__code__
    for name in code.co_names:
        value = function.fn.__globals__.get(name)
        parts = [getattr(value, part, None) for part in code.co_names] if isinstance(value, ModuleType) else []
        yield from (each for each in (value, *parts) if isinstance(each, JITCallable))
