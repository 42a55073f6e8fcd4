"""A model compiled once for all sizes, beside one compiled for each: the same numbers, and what each pass changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from te_compile.passes import manager
from tests.backend.models import assert_close_steps
from tests.compiling import compiled, train_step

Inputs = Callable[..., Sequence[Tensor]]


def changed(record: manager.Compilation) -> Counter[str]:
    """How often each pass changed something; none that changed nothing."""
    return Counter({each.name: each.count for each in record.passes if each.count})


def finished(records: list[manager.Compilation]) -> list[manager.Compilation]:
    """Those that run: where floats are symbols, PyTorch may start again with numbers once it has seen the graph."""
    return [record for record in records if record.joint is not None]


def at_any_size(
    model: nn.Module, inputs: Inputs, sizes: Sequence[tuple[int, ...]], **options: Any
) -> tuple[manager.Compilation, manager.Compilation]:
    """The records of ``model`` trained for one size alone, and for any. ``inputs`` makes those of a size.

    The numbers of both are the same at each size, and the second is compiled once."""
    options = {"recipe": "current", **options}
    twin, batches = deepcopy(model), [inputs(*size) for size in sizes]
    torch._dynamo.reset()
    run = compiled(model, dynamic=True, **options)
    with manager.recording() as records:
        got = [train_step(model, run, *batch) for batch in batches]
    (for_any,) = finished(records)
    for batch, step in zip(batches, got, strict=True):
        torch._dynamo.reset()
        with manager.recording() as records:
            expected = train_step(twin, compiled(twin, dynamic=False, **options), *batch)
        assert_close_steps(step, expected)
    (for_one,) = finished(records)
    return for_one, for_any
