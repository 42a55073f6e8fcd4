"""Keys of functions that a user passes as options: by name and by what they compute.

A key stands on graphs and in caches, so it must be equal in another process where the function means the same there,
and differ where it does not.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor


def callable_key(function: Callable[..., Any]) -> str:
    """``module.name#digest``, where the digest changes with the code, defaults, closure and globals of ``function``."""
    named = function if hasattr(function, "__qualname__") else type(function)
    digest = hashlib.sha256(_fingerprint(function, named.__module__, ()).encode()).hexdigest()
    return f"{named.__module__}.{named.__qualname__}#{digest[:12]}".replace(" ", "")


def _fingerprint(value: Any, home: str | None, above: tuple[int, ...]) -> str:
    """A text of ``value`` that is equal in another process exactly if it means the same there.

    home: the module of the function asked about; functions of other modules count by name only. above: the ids of the
    objects that this one was reached through, so that a recursive function ends.
    """
    if id(value) in above:
        return "recursion"

    def inner(parts: Iterable[Any]) -> str:
        return f"({','.join(_fingerprint(part, home, (*above, id(value))) for part in parts)})"

    if isinstance(value, CodeType):
        return value.co_code.hex() + inner([value.co_consts, value.co_names])
    if isinstance(value, FunctionType):
        name = f"{value.__module__}.{value.__qualname__}"
        return name + inner(_what_it_reads(value)) if value.__module__ == home else name
    if isinstance(value, (type, ModuleType, BuiltinFunctionType)):
        return f"{getattr(value, '__module__', '')}.{value.__name__}"
    if isinstance(value, MethodType):
        return inner([value.__func__, value.__self__])
    if isinstance(value, functools.partial):
        return inner([value.func, value.args, value.keywords])
    if isinstance(value, Tensor):
        return f"{value.dtype}{value.tolist()}"
    if isinstance(value, (tuple, list)):
        return inner(value)
    if isinstance(value, (set, frozenset)):
        return inner(sorted(value, key=repr))
    if isinstance(value, dict):
        return inner([item for pair in value.items() for item in pair])
    if hasattr(value, "__dict__") and not isinstance(value, Enum):
        return inner([type(value), vars(type(value)).get("__call__"), vars(value)])
    return repr(value)


def _what_it_reads(function: FunctionType) -> list[Any]:
    """The code of a function and every value it takes from elsewhere: defaults, closure, globals."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    names = sorted(_names_in(function.__code__) & function.__globals__.keys())
    read = [(name, function.__globals__[name]) for name in names]
    return [function.__code__, function.__defaults__, function.__kwdefaults__, cells, read]


def _names_in(code: CodeType) -> set[str]:
    """Every global or attribute name that ``code`` or a function defined in it mentions."""
    nested = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*nested)
