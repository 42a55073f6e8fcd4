"""The options that a compiled model was compiled with, so that a look at it need not be told them again.

torch.compile keeps them where nothing public leads; where they are not found, a look has the defaults, as for a model
that is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

_NEXT = "_torchdynamo_orig_backend"  # from what Dynamo calls to what torch.compile was given


def options_of(model: object) -> dict[str, Any] | None:
    """``options`` of the ``torch.compile(…, backend="te_fp8")`` that made ``model``, or that compiled it in place, its
    ``mode`` among them; None for what te_fp8 has not compiled."""
    from te_compile.backend import te_fp8

    for backend in _backends_of(model):
        if getattr(backend, "compiler_fn", None) is te_fp8:
            given = getattr(backend, "kwargs", {})
            mode = {} if given.get("mode") is None else {"mode": given["mode"]}
            return {**mode, **(given.get("options") or {})}
    return None


def _backends_of(model: object) -> Iterator[object]:
    if isinstance(model, OptimizedModule):
        called: list[object] = [getattr(model.dynamo_ctx, "callback", None)]
    elif isinstance(model, nn.Module):
        called = _closed_over(model._compiled_call_impl)
    else:
        called = _closed_over(model) if hasattr(model, "_torchdynamo_orig_callable") else []
    for each in called:
        while (inner := getattr(each, _NEXT, None)) is not None:
            each = inner
        yield each


def _closed_over(function: Callable[..., Any] | object | None) -> list[object]:
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells]
