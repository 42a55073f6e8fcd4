"""A gradient that comes only if somebody asks for it: that of logits which a model returns beside its loss.

AOTAutograd takes a gradient for every differentiable output of a graph. Logits that nobody trains on get one all the
same, a tensor of zeros of [tokens, vocabulary], which each backward pass makes, reads and adds: for 32768 tokens and
30528 classes in bf16 2 GB of memory, written once and read once.

So the graph returns such logits detached, and beside them a *ticket*: a number on the host, which is a differentiable
output in their place. The runtime gives the logits a gradient function of their own (te_compile/deferred_gradients.py).
If a gradient ever reaches it, it waits under the ticket's number; autograd runs the graph's backward after that, where
the backward of the loss takes what waits, and adds it. If none comes, nothing was ever made.
"""

from __future__ import annotations

import itertools
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from te_compile.kernels.recording import here
from te_compile.ops.library import define

TICKET_DTYPE = torch.float64  # differentiable, and exact for more numbers than a process can count


class Waiting:
    """Holds a gradient until the backward that has the ticket takes it, or until whoever made this is gone.

    A fake ticket has no number, and nobody runs a backward of it: where DistributedDataParallel has a graph cut, Dynamo
    calls what was compiled of a piece with fake tensors, to know what the next piece is given.
    """

    def __init__(self, ticket: Tensor) -> None:
        self.gradient: Tensor | None = None
        if not isinstance(ticket, FakeTensor):
            _waiting[_number_of(ticket)] = self

    def add(self, gradient: Tensor) -> None:
        """Leave a gradient, beside what waits already."""
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def take(self) -> Tensor | None:
        """What waits, once."""
        found, self.gradient = self.gradient, None
        return found


_numbers = itertools.count(1)
_waiting: WeakValueDictionary[int, Waiting] = WeakValueDictionary()


def _number_of(ticket: Tensor) -> int:
    """It lies on the host, so nobody waits for a device."""
    return int(ticket.detach().item())


def take(ticket: Tensor) -> Tensor | None:
    """The gradient that waits for this ticket, once; None if there is none."""
    if here.rehearsal is not None:
        return None
    waiting = _waiting.get(_number_of(ticket))
    return None if waiting is None else waiting.take()


def _ticket(of: Tensor) -> Tensor:
    return torch.tensor(float(next(_numbers)), dtype=TICKET_DTYPE, device="cpu")


def _ticket_fake(of: Tensor) -> Tensor:
    return torch.empty((), dtype=TICKET_DTYPE, device="cpu")


# Two calls never give the same, so they may not count as equal: ``of`` is a result of the call that the ticket is for.
GRADIENT_TICKET = define("gradient_ticket(Tensor of) -> Tensor", _ticket, _ticket_fake, asks=True)
