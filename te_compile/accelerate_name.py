"""Teach accelerate the name "te_fp8", so that ``TrainingArguments(torch_compile_backend="te_fp8")`` is accepted.

torch finds backends by entry point, but accelerate checks the name against an enumeration of its own first, and offers
no place to add one. Importing te_compile adds it: at once if accelerate is loaded already, otherwise at the moment it
is. Nothing is imported on its behalf.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

HOME = "accelerate.utils.dataclasses"
NAME = "TE_FP8"


def _missing(enumeration: type[Any], value: object) -> Any:
    """``Enum._missing_``: asked for values that the enumeration does not have."""
    if value != NAME:
        return None
    member: Any = str.__new__(enumeration, NAME)
    member._name_ = member._value_ = NAME
    enumeration._value2member_map_[NAME] = member
    enumeration._member_map_[NAME] = member  # where Python before 3.11.4 finds it again to copy it
    return member


def _add_to(module: ModuleType) -> None:
    backends: Any = getattr(module, "DynamoBackend", None)
    # Another version of accelerate may have opened the enumeration, or dropped it: then there is nothing to do.
    if backends is not None and NAME not in backends.__members__:
        backends._missing_ = classmethod(_missing)


class _Finder:
    """Finds accelerate's module as ever, and adds the name once it has run."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != HOME:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def run_and_add(module: ModuleType) -> None:
            run(module)
            _add_to(module)

        loader.exec_module = run_and_add
        return spec


def teach() -> None:
    """Make accelerate accept the name, now or when it is imported. Calling it again changes nothing."""
    if HOME in sys.modules:
        _add_to(sys.modules[HOME])
    elif _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
