"""What Inductor must be told of operators that it calls as they are, before it meets them.

It would find out itself, operator by operator: at the first call of one that it has no lowering for, it makes one, and
notes for its log what the call's arguments are. Up to PyTorch 2.12 that text is written whether anyone reads it or not,
and an argument that an operator computed is told with that operator's own arguments. Where one operator's result goes
straight into the next, and a residual stream enters each layer twice, such a text doubles with every layer: four layers
took over a minute to compile, and a model of 32 would never have been done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor import exc, lowering
from torch._ops import OpOverload

from te_compile.ops.library import NAMESPACE

_NOTE = "operator_str"  # of Inductor's, which writes what a call's arguments are


def te_operators() -> Iterator[OpOverload]:
    """Every operator of ours that graphs hold in the end; those that tracing opens up are none of them."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        opened = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        if namespace == NAMESPACE and not opened:
            packet, _, overload = rest.partition(".")
            yield getattr(getattr(getattr(torch.ops, NAMESPACE), packet), overload or "default")


def tell_inductor() -> None:
    """Have Inductor know every operator of ours as one to call; those that it knows already stay as they are."""
    for operator in te_operators():
        if operator not in lowering.lowerings:
            lowering.make_fallback(operator, warn=False)


@contextmanager
def short_texts() -> Iterator[None]:
    """In here what Inductor notes about a call names the kinds of its arguments, and not all that they come from."""
    before = exc.OperatorIssue.__dict__[_NOTE]
    # Set by name, for PyTorch offers no other way to say what is noted.
    setattr(exc.OperatorIssue, _NOTE, staticmethod(_kinds_of_arguments))
    try:
        yield
    finally:
        setattr(exc.OperatorIssue, _NOTE, before)


def _kinds_of_arguments(target: Any, args: list[Any], kwargs: dict[str, Any]) -> str:
    named = [*((f"args[{index}]", value) for index, value in enumerate(args)), *kwargs.items()]
    lines = [f"target: {target}", *(f"{name}: {_short(value)}" for name, value in named)]
    return "\n".join(f"  {line}" for line in lines)


def _short(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_short, value))}]"
    try:
        return f"{type(value).__name__} {list(value.get_size())}"
    except (AttributeError, NotImplementedError, TypeError):  # no tensor, but a graph or a generator
        return type(value).__name__
