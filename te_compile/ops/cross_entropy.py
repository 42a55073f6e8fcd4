"""``te::cross_entropy``: the loss of a language model over class indices, which touches the logits once each way.

For a row x of V logits, its target t and the gradient g of its loss:

    lse  = log Σ exp(x)          loss = lse - x[t]          dx = (exp(x - lse) - [column = t]) · g

In plain ATen the forward pass is a reduction and a gather, and the backward pass is pointwise over the logits but for
a sum that the formula above does not need. Each reads tensors of [tokens, vocabulary], which are the largest of a
training step. Opaque, one kernel reads the logits once and one reads them and writes their gradient.

The arithmetic is fp32 whatever the logits are, and the gradient is rounded once, to their dtype: a model that casts its
logits to float32 first, as most do, gets the numbers that it got, and the logits are read as they were before the cast.

A row whose target is ``ignore_index`` has loss and gradient 0, whatever its logits are. One whose target is no class
has NaN for both: PyTorch stops there, where a kernel cannot, and it must neither read past the row nor hide that.

Models return their logits beside the loss, so autograd adds two gradients of them. passes/fuse_loss_backward.py makes
the other one ``addend``, which is added before rounding. The sum of the gradient over all rows is what the bias of the
head gets: passes/sum_loss_gradients.py has the operator that writes the gradient return that too,
``te::cross_entropy_backward_with_sums``.

With ``overwrite`` the gradient takes the memory of the logits, where that call is the last that holds it
(last_holder.py; passes/overwrite_logits.py says when it may ask).

``te::cross_entropy`` is what graphs from Dynamo hold (passes/lower_losses.py); tracing opens it into the two operators
and, for mean and sum over rows, plain ATen, where [tokens] numbers cost nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.deferred_gradient import GRADIENT_TICKET, take
from te_compile.ops.last_holder import is_last_holder
from te_compile.ops.library import define, define_composite

REDUCTIONS = ("mean", "sum", "none")


def _kinds(targets: Tensor, columns: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Which rows are ignored and which have a target that is a class: bool [N] each."""
    ignored = targets == ignore_index
    return ignored, (targets >= 0) & (targets < columns) & ~ignored


@registry.register("cross_entropy_forward", registry.REFERENCE)
def cross_entropy_forward_reference(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """See the module. logits: [N, V] bf16, fp16 or fp32, any strides; targets: int64 [N].

    Returns losses: fp32 [N]; logsumexp: fp32 [N], 0 in rows that are ignored.
    """
    wide = logits.float()
    ignored, valid = _kinds(targets, logits.shape[1], ignore_index)
    picked = torch.where(valid, targets, 0)[:, None]
    losses = -wide.log_softmax(1).gather(1, picked)[:, 0]
    losses = torch.where(valid, losses, torch.where(ignored, 0.0, torch.nan))
    return losses, torch.where(ignored, 0.0, wide.logsumexp(1))


@registry.register("cross_entropy_backward_deferred", registry.REFERENCE)
@registry.register("cross_entropy_backward", registry.REFERENCE)
def cross_entropy_backward_reference(
    logits: Tensor,
    targets: Tensor,
    logsumexp: Tensor,
    gradients: Tensor,
    ignore_index: int,
    addend: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """See the module. logsumexp: as forward returned it; gradients: fp32 [N], of the losses, any stride; addend: [N, V]
    bf16, fp16 or fp32, any strides; out: where to write, which may be the logits if they are contiguous.

    Returns dlogits: [N, V] contiguous, of the dtype of the logits; ``out`` if that is given.
    """
    columns = logits.shape[1]
    ignored, valid = _kinds(targets, columns, ignore_index)
    scale = torch.where(valid, gradients, torch.nan)[:, None]
    hit = torch.arange(columns, device=logits.device) == targets[:, None]
    dx = ((logits.float() - logsumexp[:, None]).exp() - hit.float()) * scale
    dx = torch.where(ignored[:, None], 0.0, dx)
    dx = (dx if addend is None else dx + addend.float()).to(logits.dtype).contiguous()
    return dx if out is None else out.copy_(dx)


@registry.register("cross_entropy_backward_deferred_with_sums", registry.REFERENCE)
@registry.register("cross_entropy_backward_with_sums", registry.REFERENCE)
def cross_entropy_backward_with_sums_reference(
    logits: Tensor,
    targets: Tensor,
    logsumexp: Tensor,
    gradients: Tensor,
    ignore_index: int,
    addend: Tensor | None,
    sums_dtype: torch.dtype,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``cross_entropy_backward_reference``.

    Returns dlogits, and the sum of its rows as they are stored: [V] in ``sums_dtype``, summed in fp32.
    """
    dx = cross_entropy_backward_reference(logits, targets, logsumexp, gradients, ignore_index, addend, out)
    return dx, dx.float().sum(0).to(sums_dtype)


def _forward(
    logits: Tensor, targets: Tensor, ignore_index: int, implementation: str = registry.REFERENCE
) -> tuple[Tensor, Tensor]:
    return registry.function_of("cross_entropy_forward", implementation)(logits, targets, ignore_index)


def _forward_fake(logits: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    losses, logsumexp = (logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(2))
    return losses, logsumexp


CROSS_ENTROPY_FORWARD = define(
    'cross_entropy_forward(Tensor logits, Tensor targets, int ignore_index, str implementation="reference") '
    "-> (Tensor losses, Tensor logsumexp)",
    _forward,
    _forward_fake,
)


def _place(logits: Tensor, overwrite: bool) -> Tensor | None:
    """Where the gradient is written, if not to new memory."""
    return logits if overwrite and logits.is_contiguous() and is_last_holder(logits) else None


def _backward(
    logits: Tensor,
    targets: Tensor,
    logsumexp: Tensor,
    gradients: Tensor,
    ignore_index: int,
    addend: Tensor | None = None,
    overwrite: bool = False,
    implementation: str = registry.REFERENCE,
) -> Tensor:
    function = registry.function_of("cross_entropy_backward", implementation)
    return function(logits, targets, logsumexp, gradients, ignore_index, addend, _place(logits, overwrite))


def _backward_fake(logits: Tensor, *_: Any, **__: Any) -> Tensor:
    return logits.new_empty(logits.shape)


CROSS_ENTROPY_BACKWARD = define(
    "cross_entropy_backward(Tensor logits, Tensor targets, Tensor logsumexp, Tensor gradients, int ignore_index, "
    'Tensor? addend=None, bool overwrite=False, str implementation="reference") -> Tensor',
    _backward,
    _backward_fake,
    overwrites=True,
)


def _backward_with_sums(
    logits: Tensor,
    targets: Tensor,
    logsumexp: Tensor,
    gradients: Tensor,
    ignore_index: int,
    addend: Tensor | None,
    sums_dtype: torch.dtype,
    overwrite: bool = False,
    implementation: str = registry.REFERENCE,
) -> tuple[Tensor, Tensor]:
    function = registry.function_of("cross_entropy_backward_with_sums", implementation)
    out = _place(logits, overwrite)
    return function(logits, targets, logsumexp, gradients, ignore_index, addend, sums_dtype, out)


def _backward_with_sums_fake(
    logits: Tensor,
    targets: Tensor,
    logsumexp: Tensor,
    gradients: Tensor,
    ignore_index: int,
    other: Tensor | None,
    sums_dtype: torch.dtype,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape), logits.new_empty(logits.shape[1], dtype=sums_dtype)


CROSS_ENTROPY_BACKWARD_WITH_SUMS = define(
    "cross_entropy_backward_with_sums(Tensor logits, Tensor targets, Tensor logsumexp, Tensor gradients, "
    "int ignore_index, Tensor? addend, ScalarType sums_dtype, bool overwrite=False, "
    'str implementation="reference") -> (Tensor dlogits, Tensor sums)',
    _backward_with_sums,
    _backward_with_sums_fake,
    overwrites=True,
)


def _waiting(ticket: Tensor, logits: Tensor) -> Tensor | None:
    """The gradient that waits under ``ticket`` for these logits, if there is one."""
    addend = take(ticket)
    return None if addend is None else addend.reshape(logits.shape)


def _backward_deferred(
    logits: Tensor,
    targets: Tensor,
    logsumexp: Tensor,
    gradients: Tensor,
    ignore_index: int,
    ticket: Tensor,
    overwrite: bool = False,
    implementation: str = registry.REFERENCE,
) -> Tensor:
    addend = _waiting(ticket, logits)
    return _backward(logits, targets, logsumexp, gradients, ignore_index, addend, overwrite, implementation)


CROSS_ENTROPY_BACKWARD_DEFERRED = define(
    "cross_entropy_backward_deferred(Tensor logits, Tensor targets, Tensor logsumexp, Tensor gradients, "
    'int ignore_index, Tensor ticket, bool overwrite=False, str implementation="reference") -> Tensor',
    _backward_deferred,
    _backward_fake,
    asks=True,
    overwrites=True,
)


def _backward_deferred_with_sums(
    logits: Tensor,
    targets: Tensor,
    logsumexp: Tensor,
    gradients: Tensor,
    ignore_index: int,
    ticket: Tensor,
    sums_dtype: torch.dtype,
    overwrite: bool = False,
    implementation: str = registry.REFERENCE,
) -> tuple[Tensor, Tensor]:
    addend = _waiting(ticket, logits)
    operands = (logits, targets, logsumexp, gradients, ignore_index, addend, sums_dtype)
    return _backward_with_sums(*operands, overwrite, implementation)


CROSS_ENTROPY_BACKWARD_DEFERRED_WITH_SUMS = define(
    "cross_entropy_backward_deferred_with_sums(Tensor logits, Tensor targets, Tensor logsumexp, Tensor gradients, "
    "int ignore_index, Tensor ticket, ScalarType sums_dtype, bool overwrite=False, "
    'str implementation="reference") -> (Tensor dlogits, Tensor sums)',
    _backward_deferred_with_sums,
    _backward_with_sums_fake,
    asks=True,
    overwrites=True,
)


class _Losses(torch.autograd.Function):
    """The losses of all rows, fp32 [N], of logits [N, V]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        losses, logsumexp = CROSS_ENTROPY_FORWARD(logits, targets, ignore_index)
        ctx.save_for_backward(logits, targets, logsumexp)
        ctx.ignore_index = ignore_index
        return losses

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, logsumexp = ctx.saved_tensors
        return CROSS_ENTROPY_BACKWARD(logits, targets, logsumexp, gradients, ctx.ignore_index), None, None


class _LossesAndTicket(torch.autograd.Function):
    """The same, and a ticket for the gradient that the logits may get from elsewhere."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        losses, logsumexp = CROSS_ENTROPY_FORWARD(logits, targets, ignore_index)
        ticket = GRADIENT_TICKET(logsumexp)
        ctx.save_for_backward(logits, targets, logsumexp, ticket)
        ctx.ignore_index = ignore_index
        return losses, ticket

    @staticmethod
    def backward(ctx: Any, gradients: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, logsumexp, ticket = ctx.saved_tensors
        operands = (logits, targets, logsumexp, gradients, ctx.ignore_index, ticket)
        return CROSS_ENTROPY_BACKWARD_DEFERRED(*operands), None, None


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int, reduction: str, out_dtype: torch.dtype) -> Tensor:
    """``F.cross_entropy`` of logits [N, V] and class indices int64 [N], in ``out_dtype``: [N] for "none", else []."""
    return _reduced(_Losses.apply(logits, targets, ignore_index), targets, ignore_index, reduction, out_dtype)


def cross_entropy_deferred(
    logits: Tensor, targets: Tensor, ignore_index: int, reduction: str, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """:func:`cross_entropy`, and the ticket for what gradient the logits get from elsewhere, fp64 [] on the host."""
    losses, ticket = _LossesAndTicket.apply(logits, targets, ignore_index)
    return _reduced(losses, targets, ignore_index, reduction, out_dtype), ticket


def _reduced(losses: Tensor, targets: Tensor, ignore_index: int, reduction: str, out_dtype: torch.dtype) -> Tensor:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction {reduction!r}: unknown; choose one of {', '.join(REDUCTIONS)}")
    if reduction != "none":
        losses = losses.sum()
    if reduction == "mean":  # no row counts: NaN, as in PyTorch
        losses = losses / (targets != ignore_index).sum()
    return losses.to(out_dtype)


CROSS_ENTROPY = define_composite(
    "cross_entropy(Tensor logits, Tensor targets, int ignore_index, str reduction, ScalarType out_dtype) -> Tensor",
    cross_entropy,
)
CROSS_ENTROPY_DEFERRED = define_composite(
    "cross_entropy_deferred(Tensor logits, Tensor targets, int ignore_index, str reduction, ScalarType out_dtype) "
    "-> (Tensor loss, Tensor ticket)",
    cross_entropy_deferred,
)
