"""Logits whose gradient reaches the compiled graph only if there is one (ops/deferred_gradient.py says why).

The compiled graph returns them detached, and tickets at the end of its outputs. Here they become differentiable again,
by a function whose backward leaves the gradient for the ticket's holder. It stands between the logits and the compiled
graph, so autograd runs it first, in the same pass and on the same stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from te_compile.ops.deferred_gradient import TICKET_DTYPE, Waiting


class LostGradientError(RuntimeError):
    """A gradient of logits found no backward that takes it."""


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ticket: Tensor) -> Tensor:
        ctx.waiting = Waiting(ticket)
        ctx.set_materialize_grads(False)
        return logits.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, Tensor | None]:
        if gradient is None:
            return None, None
        ctx.waiting.add(gradient)
        torch.autograd.Variable._execution_engine.queue_callback(partial(_require_taken, ctx.waiting))
        return None, torch.zeros((), dtype=TICKET_DTYPE, device="cpu")


def _require_taken(waiting: Waiting) -> None:
    """At the end of a backward pass. Forwards that were run anew during it, by checkpointing, have other tickets."""
    if waiting.take() is not None:
        raise LostGradientError(
            "a gradient of the logits did not reach the backward of the compiled graph, for that ran its forward anew, "
            "as activation checkpointing around a whole model does: compile with defer_logits=False"
        )


def attached(compiled: Callable[..., Any], outputs: Sequence[int]) -> Callable[..., Any]:
    """``compiled`` with its ``outputs`` (their places: logits of any shape) differentiable again.

    Its last outputs are their tickets, fp64 [] on the host and in this order, which are taken away. A backward pass
    raises LostGradientError if a gradient of such an output reached no backward of ``compiled``.
    """

    def run(*args: Any) -> Any:
        results = list(compiled(*args))
        tickets = results[len(results) - len(outputs) :]
        del results[len(results) - len(outputs) :]
        for place, ticket in zip(outputs, tickets, strict=True):
            results[place] = _Deferred.apply(results[place], ticket)
        return tuple(results)

    return run
