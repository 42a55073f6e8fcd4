"""Turn the loss of a language model into one ``te::cross_entropy``, which touches the logits once each way.

``F.cross_entropy`` over [tokens, vocabulary] is the largest tensor of a step, read and written again and again: Hugging
Face casts the logits to float32 and reshapes them first,

    loss = F.cross_entropy(logits.float().view(-1, vocabulary), labels.view(-1), ignore_index=-100)

and the operator reads the logits as they were before the cast, in 16 bits. Its arithmetic is fp32 and its result has
the dtype that the model's had, so the loss is the same number; the gradient is rounded once, where the cast rounded it.

It has nothing to do with FP8, so it is done in graphs without FP8 too, and only where nothing is lost: where a kernel
runs both directions, and the logits are what a product or the caller wrote and nothing but losses reads in the graph.
Where they are scaled, capped, sliced or read by another loss, Inductor does that, and its backward, in the same pass
over them as the softmax; an opaque operator would ask for passes of its own. (A power of two is gone by then, and so is
a bias: scale_before_products.py, join_biases.py.) Losses with class weights, smoothed labels or probabilities as
targets, of more than two dimensions, or over few classes stay as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from te_compile.ops import registry
from te_compile.ops.cross_entropy import CROSS_ENTROPY, REDUCTIONS
from te_compile.passes.captured_nodes import argument, called, is_tensor, value_of, wrapped_kind
from te_compile.passes.drop_noop_casts import is_cast
from te_compile.passes.function_transforms import transforms_around
from te_compile.passes.side_effects import may_change, undisturbed
from te_compile.passes.sizes import same
from te_compile.passes.writing import Writer

FEWEST_CLASSES = 1024
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_VIEWS = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous"}
# Of F.cross_entropy's arguments, those that must be what they are by default: by name, position and default.
_PLAIN = (("weight", 2, None), ("size_average", 3, None), ("reduce", 5, None), ("label_smoothing", 7, 0.0))


# What products are called, as functions, methods and operators.
_PRODUCTS = {"linear", "addmm", "matmul", "mm", "bmm", "einsum"}
_SIZES = (int, torch.SymInt, torch.Size)


@dataclass(frozen=True)
class Loss:
    """A loss found: its ``call``, the ``logits`` [..., V] to read, and the views and casts ``between`` the two."""

    call: Node
    logits: Node
    targets: Node
    ignore_index: int
    reduction: str
    between: tuple[Node, ...]


def _has_plain_options(call: Node) -> bool:
    return all(argument(call, place, name, default) == default for name, place, default in _PLAIN)


def _are_classes(targets: Node, logits: Node) -> bool:
    """Is there a class index, int64, for each row of ``logits`` [N, V]?"""
    x, t = value_of(logits), value_of(targets)
    return bool(t.dtype == torch.int64 and t.dim() == 1 and same(t.shape[0], x.shape[0]) and t.device == x.device)


def _are_logits(node: Node) -> bool:
    x = value_of(node)
    is_matrix = x.dim() == 2 and x.dtype in _DTYPES and isinstance(x.shape[1], int)
    return is_matrix and x.shape[1] >= FEWEST_CLASSES


def with_these_rows(node: Node) -> Node | None:
    """The tensor that ``node`` casts to float32, or whose rows it shows in their order; None if it does neither."""
    source = argument(node, 0, "input")
    if node.op not in ("call_function", "call_method") or not is_tensor(source):
        return None
    before, after = value_of(source), value_of(node)
    if not isinstance(after, Tensor) or not before.dim() or not after.dim():
        return None
    if not same(before.shape[-1], after.shape[-1]):
        return None
    if is_cast(node):
        is_wider = after.dtype == torch.float32 and before.dtype in _DTYPES and before.device == after.device
        return source if is_wider else None
    return source if called(node) in _VIEWS and before.dtype == after.dtype else None


def _written_as(logits: Node) -> list[Node]:
    """``logits``, what it is a view or a cast of, and so on, to the node that computes it."""
    chain = [logits]
    while (source := with_these_rows(chain[-1])) is not None:
        chain.append(source)
    return chain


def _is_for_losses_alone(logits: Node) -> bool:
    """Is ``logits`` a product or an input of the graph, which nobody changes and only losses and the caller read?"""
    if may_change(logits) or (logits.op != "placeholder" and called(logits) not in _PRODUCTS):
        return False
    shown = [logits]
    for node in shown:
        for user in node.users:
            if with_these_rows(user) is node:
                shown.append(user)
            elif user.op != "output" and user.target is not F.cross_entropy and not isinstance(value_of(user), _SIZES):
                return False
    return True


def _is_run_by_kernels(loss: Loss) -> bool:
    """Does the registry have something better than the references, in both directions?"""
    arguments = {"logits": value_of(loss.logits), "targets": value_of(loss.targets), "addend": None}
    names = ("cross_entropy_forward", "cross_entropy_backward")
    return registry.are_run_by_kernels(names, value_of(loss.logits).device, arguments)


def _found(call: Node) -> Loss | None:
    """The loss that ``call`` is, if the operator stands for it."""
    logits, targets = argument(call, 0, "input"), argument(call, 1, "target")
    ignore_index, reduction = argument(call, 4, "ignore_index", -100), argument(call, 6, "reduction", "mean")
    if not is_tensor(logits) or not is_tensor(targets) or not is_tensor(call):
        return None
    if any(map(wrapped_kind, (logits, targets, call))) or not _has_plain_options(call):
        return None
    if not _are_logits(logits) or not _are_classes(targets, logits):
        return None
    if type(ignore_index) is not int or reduction not in REDUCTIONS:
        return None
    chain = _written_as(logits)
    narrow = next((node for node in chain if value_of(node).dtype != value_of(logits).dtype), logits)
    between = tuple(reversed(chain[: chain.index(narrow)]))
    loss = Loss(call, narrow, targets, ignore_index, reduction, between)
    is_undisturbed = not between or undisturbed(between[0], call, between, [narrow])
    return loss if is_undisturbed and _is_for_losses_alone(chain[-1]) and _is_run_by_kernels(loss) else None


def _lower(loss: Loss) -> None:
    """Put ``te::cross_entropy`` in the place of the loss, and take away what nobody else reads."""
    write, value = Writer(loss.call), value_of(loss.call)
    logits = loss.logits
    if value_of(logits).dim() != 2:
        logits = write.method("reshape", logits, -1, value_of(logits).shape[-1])
    arguments = (logits, loss.targets, loss.ignore_index, loss.reduction, value.dtype)
    with loss.call.graph.inserting_before(loss.call):
        new = loss.call.graph.create_node("call_function", CROSS_ENTROPY, arguments, name="cross_entropy")
    new.meta = dict(loss.call.meta)
    loss.call.replace_all_uses_with(new)
    for node in (loss.call, *reversed(loss.between)):
        if not node.users:
            node.graph.erase_node(node)


def lower_losses(graph: Graph) -> int:
    """Replace each ``F.cross_entropy`` over many classes that kernels run by the operator; returns how many."""
    calls = graph.find_nodes(op="call_function", target=F.cross_entropy)
    inside = transforms_around(graph) if calls else {}
    found = [_found(call) for call in calls if call not in inside]
    losses = [loss for loss in found if loss is not None]
    for loss in losses:
        _lower(loss)
    return len(losses)
