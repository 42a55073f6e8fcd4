"""Which code runs an operator: the reference, a Triton kernel or a CUDA library.

Each ``te::`` operator takes the name of its implementation as its last argument, so the choice is made once, at compile
time, stands on the graph node where ``explain`` and any graph dump show it, and costs one dictionary lookup per call.
An implementation says what it cannot do by raising :class:`Unsupported`; nothing else falls through to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

REFERENCE = "reference"


class Unsupported(Exception):
    """An implementation cannot run these arguments; the message is the reason that reports show."""


@dataclass(frozen=True)
class Target:
    """Where an operator will run: ``device`` type, and for CUDA the compute capability, e.g. (9, 0)."""

    device: str
    capability: tuple[int, int] | None = None

    @staticmethod
    def of(device: torch.device) -> Target:
        """The target that ``device`` is. AMD's GPUs, which PyTorch calls cuda too, are another: our kernels speak PTX,
        and a compute capability means something else there."""
        if device.type == "cuda" and torch.version.hip is not None:
            return Target("rocm")
        if device.type == "cuda":
            return Target("cuda", torch.cuda.get_device_capability(device))
        return Target(device.type)


@dataclass(frozen=True)
class Implementation:
    """One way to run ``operator``. ``check(target, arguments)`` raises :class:`Unsupported` for what it cannot do."""

    operator: str
    name: str
    function: Callable[..., Any]
    priority: int
    check: Callable[[Target, dict[str, Any]], None]


_TABLE: dict[tuple[str, str], Implementation] = {}


def _anything(target: Target, arguments: dict[str, Any]) -> None:
    """The check of a reference: it runs everywhere."""


def register(
    operator: str,
    name: str,
    *,
    priority: int = 0,
    check: Callable[[Target, dict[str, Any]], None] = _anything,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: offer a function as implementation ``name`` of ``operator``; the highest fitting ``priority`` wins."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        _TABLE[operator, name] = Implementation(operator, name, function, priority, check)
        return function

    return add


def implementations(operator: str) -> list[Implementation]:
    """All implementations of ``operator``, best first."""
    found = [entry for (name, _), entry in _TABLE.items() if name == operator]
    return sorted(found, key=lambda entry: -entry.priority)


def offers() -> str:
    """Everything registered, as text: part of the cache key of a graph, on whose nodes the names of choices stand."""
    return ",".join(sorted(f"{entry.operator}/{entry.name}:{entry.priority}" for entry in _TABLE.values()))


def choose(operator: str, target: Target, arguments: dict[str, Any]) -> tuple[str, list[str]]:
    """The best implementation for ``arguments`` (by schema name, tensors may be fake), and why better ones cannot."""
    reasons = []
    for entry in implementations(operator):
        try:
            entry.check(target, arguments)
        except Unsupported as reason:
            reasons.append(f"{entry.name}: {reason}")
        else:
            return entry.name, reasons
    raise LookupError(f"te::{operator} has no implementation for {target}: {'; '.join(reasons) or 'none registered'}")


def are_run_by_kernels(operators: Iterable[str], device: torch.device, arguments: dict[str, Any]) -> bool:
    """Has each of ``operators`` something better than its reference for ``arguments``, all that they take, on this
    device? Arguments go by schema name; tensors may be fake."""
    target = Target.of(device)
    return all(choose(operator, target, arguments)[0] != REFERENCE for operator in operators)


def function_of(operator: str, name: str) -> Callable[..., Any]:
    """The code behind a name written on a graph node. KeyError with the known names if there is none."""
    try:
        return _TABLE[operator, name].function
    except KeyError:
        known = ", ".join(entry.name for entry in implementations(operator))
        raise KeyError(f"te::{operator} has no implementation {name!r}; known: {known}") from None
