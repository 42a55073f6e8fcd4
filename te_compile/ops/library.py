"""The ``te::`` operator library: one place that owns the namespace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "te"
# A fragment, because another package in the process may have claimed the namespace first.
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
implementations: dict[str, Callable[..., Any]] = {}
"""By operator's name, the code that runs it on every device."""

asking: set[str] = set()
"""Operators whose code asks each time for more than its arguments say: no call of theirs stands for another."""

overwriting: set[str] = set()
"""Operators whose result may lie where their first tensor did, if their arguments permit it."""

optional: set[str] = set()
"""Operators whose code may return None where their schema says Tensor: one that already is where it belongs."""


def define(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    asks: bool = False,
    may_be_none: bool = False,
    overwrites: bool = False,
    draws: bool = False,
) -> Any:
    """Define an opaque operator: ``implementation`` runs it on every device, ``fake`` gives its result shapes.

    asks: it is one of :data:`asking`; may_be_none: of :data:`optional`; overwrites: of :data:`overwriting`; draws: it
    takes numbers from the generator.

    Returns the overload, e.g. ``torch.ops.te.quantize.default``, the target that graph passes look for.
    """
    name = schema.split("(", 1)[0]
    tags = [torch.Tag.needs_exact_strides]  # Inductor's rule for operators that say nothing
    _LIBRARY.define(schema, tags=(*tags, torch.Tag.nondeterministic_seeded) if draws else tags)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    implementations[name] = implementation
    if asks:
        asking.add(name)
    if may_be_none:
        optional.add(name)
    if overwrites:
        overwriting.add(name)
    return getattr(torch.ops.te, name).default


def define_composite(schema: str, function: Callable[..., Any]) -> Any:
    """Define an operator that tracing opens up: after AOTAutograd, graphs hold what ``function`` calls instead.

    Its autograd is whatever ``function`` does, so it can apply a ``torch.autograd.Function`` and still be a plain,
    cacheable operator on the graph that Dynamo hands over.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    return getattr(torch.ops.te, name).default
