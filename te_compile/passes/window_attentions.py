"""Attention in a window, without the mask that says so.

A sliding window, or the local attention of an encoder, reaches SDPA as a boolean for each pair of query and key. Any
mask keeps flash attention out; the kernels that take one compute every pair, and without a fast cuDNN PyTorch falls
back to slower ones still. Where a mask is proved to be a window (fold_masks.py), ``te::window_attention`` takes its
place, whose kernels are told how far a query sees and skip what lies beyond. On an H100 attention with its gradients
takes, in milliseconds, bf16, heads of 128 features (64 in the last row):

    rows × heads × positions     a query sees     cuDNN with the mask     mem-efficient     with the window
    4 × 32 × 2048                512 before       3.4                     8.4               1.4
    4 × 32 × 2048                2001 before      3.3                     8.4               2.2
    1 × 32 × 8192                1024 before      12.3                    31.3              2.2
    8 × 12 × 2048                64 either way    1.6                     4.2               0.6

That is by PyTorch's flash kernels. The C++ core's, for heads of more than 32 features on Hopper, take less: see
``python -m benchmarks.window_attention``.

Attention with sinks (``te::sink_attention``) goes the same way where its mask folded away, for SDPA knows none: its
window is all keys, or all that are not later.

Keys and values that the model repeats for several heads of queries are read as they were before: with a window nothing
is left that needs the copies. As with causal attention, an order of kernels that the user has set stands, and so does
attention with a dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from te_compile.ops import registry
from te_compile.ops.window_attention import EVERYTHING, WINDOW_ATTENTION
from te_compile.passes.attention_calls import has_sinks
from te_compile.passes.attention_kernels import chooses_itself, is_plain, takes_its_own_order
from te_compile.passes.attention_scores import same_sizes
from te_compile.passes.captured_nodes import argument, value_of, wrapped_kind
from te_compile.passes.fold_masks import WINDOW, without_guard
from te_compile.passes.function_transforms import transforms_around
from te_compile.passes.plan import Attention, Plan
from te_compile.passes.prove_masks import Window
from te_compile.passes.regions import Region
from te_compile.passes.side_effects import may_change
from te_compile.passes.undo_repeated_heads import heads_before_copies
from te_compile.passes.writing import Writer

_OPERATORS = ("window_attention_forward", "window_attention_backward")


Runs = Callable[[Any, Any, Any], bool]
"""Is there a kernel for q, k and v, [B, S, H, D]?"""


def is_run_by_kernels(q: Any, k: Any, v: Any) -> bool:
    """Has the registry something better than the references? q, k, v: [B, S, H, D]."""
    return registry.are_run_by_kernels(_OPERATORS, q.device, {"q": q, "k": k, "v": v})


def window_attentions(regions: list[Region], plan: Plan, runs: Runs = is_run_by_kernels) -> int:
    """Give each attention that is proved to be one in a window to the operator for it; returns how many.

    ``plan`` must know them (find_attentions). runs: is there a kernel?
    """
    if any(chooses_itself(region.graph) for region in regions) or not takes_its_own_order():
        return 0
    graphs = {id(region.graph): transforms_around(region.graph) for region in regions}
    changed, changes = 0, dict[Node, bool]()
    for index, attention in enumerate(plan.attentions):
        node = attention.node
        if _window_of(node) and id(node.graph) in graphs and node not in graphs[id(node.graph)]:
            operands = _operands(node, changes)
            if may_stand_for(node, operands, changes, runs):
                plan.attentions[index] = _replaced(attention, operands)
                changed += 1
    return changed


def _window_of(node: Node) -> Window | None:
    """What the mask of an attention was proved to show; of one without a mask only where sinks keep it from SDPA."""
    if WINDOW in node.meta:
        shown: Window = node.meta[WINDOW]
        return shown
    is_call = node.op == "call_function" and has_sinks(node) and argument(node, 3, "attn_mask") is None
    if not is_call:
        return None
    return window_without_mask(node)


def window_without_mask(node: Node) -> Window:
    """What a query sees in attention without a mask: everything, or nothing later than itself."""
    return (EVERYTHING, 0) if argument(node, 5, "is_causal", False) else (EVERYTHING, EVERYTHING)


def _operands(node: Node, changes: dict[Node, bool]) -> list[Node]:
    """Queries, keys and values, these as they were before copies were made of them."""
    query, key, value = (argument(node, place, name) for place, name in enumerate(("query", "key", "value")))
    _, query = without_guard(argument(node, 3, "attn_mask"), query)
    return [query, *(heads_before_copies(node, key, value, changes) or (key, value))]


def may_be_an_operator(node: Node, operands: list[Node], changes: dict[Node, bool]) -> bool:
    """Can an operator of ours for these operands stand for this call, if it sees the same keys? changes: see
    ``may_change``."""
    scale = argument(node, 6, "scale")
    if not is_plain(node, masked=argument(node, 3, "attn_mask") is not None) or (scale is not None and scale <= 0):
        return False  # kernels hide before they scale
    if any(map(wrapped_kind, (*operands, node))) or (torch.is_grad_enabled() and may_change(node, changes)):
        return False  # gradients read the result as it was
    query, key, value = map(value_of, operands)
    if len({each.device for each in (query, key, value, value_of(node))}) != 1:
        return False
    # Else SDPA would broadcast them.
    return _fit(query, key, value) and same_sizes(value_of(node).shape, (*query.shape[:3], value.shape[3]))


def may_stand_for(node: Node, operands: list[Node], changes: dict[Node, bool], runs: Runs) -> bool:
    """Does the operator mean the same as this call, and is there a kernel for it? changes: see ``may_change``."""
    if not may_be_an_operator(node, operands, changes) or argument(node, 4, "dropout_p", 0.0) != 0:
        return False
    query, key = (value_of(each).shape[2:3] for each in operands[:2])
    if not same_sizes(query, key):
        return False  # kernels count causal positions from the last one, is_causal from the first
    return runs(*read_as_rows(node, operands))


def read_as_rows(node: Node, operands: list[Node]) -> list[Tensor]:
    """Example values of q, k and v as operators read them for this call: [B, S, H, D]."""
    dtype = value_of(node).dtype
    return [value_of(each).transpose(1, 2).to(dtype) for each in operands]


def _fit(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Are there as many rows of all of them, and heads of keys and values that queries can share?"""
    rows = [each.shape[:1] for each in (query, key, value)]
    if not all(same_sizes(rows[0], each) for each in rows) or not same_sizes(key.shape[:2], value.shape[:2]):
        return False
    heads, shared = query.shape[1], key.shape[1]
    return isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared == 0


def _replaced(attention: Attention, operands: list[Node]) -> Attention:
    """The attention with the operator in the place of its call."""
    node = attention.node
    had_mask, undone = WINDOW in node.meta, operands[1] is not argument(node, 1, "key")
    call = put_window(node, operands, _window_of(node) or (EVERYTHING, EVERYTHING))
    heads = {"heads": "undone", "heads_reason": ""} if undone else {}
    if not had_mask:
        return replace(attention, node=call, kernel="sinks", **heads)
    return replace(attention, node=call, kernel="window", mask="folded_window", mask_reason="", **heads)


def put_window(node: Node, operands: list[Node], window: Window) -> Node:
    """Put the operator in the place of a call of SDPA, or of one with sinks; returns it. operands: q, k and v."""
    sinks = [node.kwargs["sinks"]] if has_sinks(node) else []
    return put_operator(WINDOW_ATTENTION, node, operands, window, sinks)


def put_operator(
    target: Callable[..., Any], node: Node, operands: list[Node], given: Sequence[Any], more: Sequence[Any] = ()
) -> Node:
    """Put ``target``, of operands, what is given, a scale and more, in the place of a call of SDPA; returns it."""
    write, scale = Writer(node), argument(node, 6, "scale")
    factor = 1 / math.sqrt(value_of(operands[0]).shape[3]) if scale is None else float(scale)
    dtype = value_of(node).dtype  # an autocast is at work if theirs are others
    cast = [each if value_of(each).dtype == dtype else write.method("to", each, dtype) for each in operands]
    call = write.call(target, *cast, *given, factor, *more)
    write.put_in_place(call)
    return call
