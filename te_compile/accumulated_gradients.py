"""The gradient that a parameter has already, for a backward that may add to it in place of returning another.

Several backward passes before an optimizer's step leave autograd to add each weight gradient to ``.grad``: it reads the
new one, reads the sum and writes it, all of which a product could have done while it wrote its result. So the backward
of a compiled graph asks here, while autograd runs it, and where it is given the parameter's gradient it adds to that
and returns none for the parameter (ops/gemm_into_grad.py).

Autograd knows the way: the node that runs has an edge for each tensor that the graph got, and the edge of a parameter
leads to what adds to its ``.grad``. Whoever could see the difference gets a gradient of his own, as ever: hooks on the
parameter or on autograd's nodes, ``torch.autograd.grad``, a graph of the backward, subclasses, other processes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

ALIGNMENT = 16  # bytes: products write matrices that begin on such an address
_NODE, _LEAF = "CompiledFunctionBackward", "AccumulateGrad"  # AOTAutograd's backward, and what adds to a ``.grad``
_DOUBLE = "_double_backward"  # AOTAutograd's backward, where that is differentiated in turn
_BACKWARD = "backward"  # and where it is not
_PLAIN = (nn.Parameter, Tensor)
_HOLDERS = 2  # of a gradient: its parameter, and Python. Another one is autograd, which saved it for a backward to come


def gradient_to_add_to(
    place: int, inputs: int, size: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """The ``.grad`` of an input of the graph whose backward autograd is running, if this may be changed in its place.

    place: which of the ``inputs`` tensors that the graph got. Returns a contiguous tensor of ``size``, ``dtype`` and on
    ``device``, or None: then the backward returns a gradient. Whoever changes it must say so by :func:`added_to`.
    """
    node = torch._C._current_autograd_node()
    if node is None:
        return None
    asked = _asked_by(node)
    if len(asked.leaves) != inputs or type(leaf := asked.leaves[place][0]).__name__ != _LEAF:
        return None
    parameter = leaf.variable
    # Autograd leaves alone what was frozen after the forward pass, too.
    gradient = parameter.grad if type(parameter) in _PLAIN and parameter.requires_grad else None
    if gradient is None or not _fits(gradient, size, dtype, device):  # as a rule there is none: first what is cheap
        return None
    may_add = _is_on_usual_stream(device) and asked.may_add()
    return gradient if may_add and _is_reached(leaf) and not _is_watched(leaf, parameter) else None


def added_to(gradient: Tensor) -> None:
    """Let autograd know that ``gradient`` is another, as it would if it had added to it."""
    torch._C._increment_version((gradient,))


# --- this backward pass -----------------------------------------------------------------------------------------------


class _Pass:
    """What is known of one backward pass on this thread: of its last node where that one's edges lead, and whether it
    may add in place at all. Asked for each parameter, that would take longer than all else here."""

    def __init__(self, task: int) -> None:
        self.task = task
        self.forget()

    def forget(self) -> None:
        """Keep nothing alive."""
        self.node: Any = None
        self.leaves: Sequence[tuple[Any, int]] = ()
        self.allowed: bool | None = None

    def turn_to(self, node: Any) -> None:
        """``node`` is the one that asks from now on."""
        self.node, self.allowed = node, None
        self.leaves = node.next_functions if type(node).__name__ == _NODE else ()

    def may_add(self) -> bool:
        """Would nobody see it if this node's backward added in place?"""
        if self.allowed is None:
            self.allowed = _adds_in_place() and not _has_hooks(self.node.register_hook)
        return self.allowed


class BackwardHasRun:
    """A hook of te_compile's own on autograd's node of a graph, told that its backward has run: it sees no gradient."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self.tell = torch._dynamo.disable(tell)

    def __call__(self, *_: Any) -> None:
        """Autograd gives gradients, and takes None for as they are."""
        self.tell()


class _Here(threading.local):
    current: ref[_Pass] | None = None


_here = _Here()


def _asked_by(node: Any) -> _Pass:
    """What is known of the backward pass that runs ``node``; its leaves are in the order of the graph's inputs."""
    task = torch._C._current_graph_task_id()
    current = None if _here.current is None else _here.current()
    if current is None or current.task != task:
        current = _Pass(task)
        _here.current = ref(current)
        # Who calls back at its end holds it, and is gone with a pass that fails. A thread of autograd's own may be the
        # one that calls back, so it is told which pass is over.
        torch.autograd.Variable._execution_engine.queue_callback(current.forget)
    if current.node is not node:
        current.turn_to(node)
    return current


def _adds_in_place() -> bool:
    """Would autograd itself add in place in this backward pass, with nobody looking on?"""
    return not (
        torch.is_grad_enabled()
        or torch._C._autograd._get_current_graph_task_keep_graph()
        or torch.is_anomaly_enabled()
        or (dist.is_available() and dist.is_initialized())  # reducers have hooks that Python cannot see
        or _is_differentiated()
    )


def _is_differentiated() -> bool:
    """Does the backward that asks make a graph of itself? It turns gradients off for that, so nothing else tells."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != _BACKWARD:
        if frame.f_code.co_name == _DOUBLE:
            return True
        frame = frame.f_back
    return False


def _is_on_usual_stream(device: torch.device) -> bool:
    """Is this where gradients are added and read? With streams of the user's own autograd has them wait for each other,
    and for a gradient that it does not get it has nobody wait."""
    return device.type != "cuda" or torch._C._cuda_getCurrentRawStream(device.index or 0) == 0


# --- this parameter ---------------------------------------------------------------------------------------------------


def _is_reached(leaf: Any) -> bool:
    """Will this backward pass add to the parameter's gradient? It may be for other tensors, or return gradients."""
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # torch.autograd.grad, for this very parameter
        return False


def _is_watched(leaf: Any, parameter: Tensor) -> bool:
    """Does anything run when a gradient gets to ``parameter``?"""
    hooks: Any = parameter
    return bool(
        hooks._backward_hooks
        or hooks._post_accumulate_grad_hooks
        or _has_hooks(leaf.register_hook)
        or _has_hooks(leaf.register_prehook)
    )


def _has_hooks(register: Any) -> bool:
    """Are there hooks beside which ``register`` puts another? A node does not tell but to whoever adds one."""
    handle = register(_nothing)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return not all(isinstance(hook, BackwardHasRun) for hook in hooks.values())


def _nothing(*_: Any) -> None:
    """A hook that is never called."""


def _fits(gradient: Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Can a product add to ``gradient``, and would nobody take it for something else?"""
    return (
        type(gradient) is Tensor
        and gradient.dtype == dtype
        and gradient.device == device
        and gradient.layout is torch.strided
        and gradient.shape == torch.Size(size)
        and gradient.is_contiguous()
        and not gradient.requires_grad
        and not gradient.is_inference()
        and gradient.data_ptr() % ALIGNMENT == 0
        and gradient.data_ptr() != 0
        and getattr(gradient, "_use_count", lambda: _HOLDERS)() <= _HOLDERS
    )
