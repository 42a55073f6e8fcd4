"""Keep attention off cuDNN, or in whole tiles on it, where its gradients would be no numbers.

On compute capability 9.0 cuDNN's backward kernel walks over keys 128 at a time, and hides what lies behind the last of
them only where that begins a block of 64. If 64 keys are left for the last tile, or 64 beside whole ones, it computes
e^(0 - logsumexp) for keys that are not there: infinite, and the query's gradient not a number, for each query whose
logsumexp is below -88 (pytorch#196678; cuDNN 9.19 shows it with a mask and without one). Such rows are ordinary: a row
of padding under a mask of the lowest float16 is one, and so is any whose scores are all low. From cuDNN 9.25 on a
single query does the same to the gradients of keys and values. Causal attention is right, for what is not there is in
nobody's past.

In eager mode a model that spells attention out never met that, and one that calls SDPA did. Both are spared it here.
Without a mask the C++ core's kernels compute such attention in about cuDNN's time, or PyTorch's flash does. With one
cuDNN has whole tiles of keys, filled up with some that the mask hides: the memory-efficient kernel takes up to twice as
long, and runs where a mask learns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_compile.ops.registry import Target
from te_compile.options import Options
from te_compile.passes import window_attentions
from te_compile.passes.attention_kernels import ordinary_attentions, put_flash
from te_compile.passes.captured_nodes import argument, value_of
from te_compile.passes.dropout_attentions import wants_eager_draws
from te_compile.passes.efficient_attention import Runs, bias_learns, call_efficiently, operands_of, runs_efficiently
from te_compile.passes.leave_cudnn import (
    as_products,
    has_plain_tensors,
    may_run_efficiently,
    reads_result_as_it_was,
    runs_on_cudnn,
    runs_on_flash,
)
from te_compile.passes.plan import Attention, Plan
from te_compile.passes.recognise_attention import RECOGNISED
from te_compile.passes.regions import Region
from te_compile.passes.varying_attentions import is_run_by_the_core
from te_compile.passes.whole_tiles import in_whole_tiles
from te_compile.passes.window_attentions import may_stand_for, put_window, window_without_mask

_FAULTY_ON = (9, 0)
_TILE, _UNHIDDEN = 128, 64


def runs_on_faulty(node: Node) -> bool:
    """Would SDPA run the call on cuDNN's kernel, on a device where that has the fault?"""
    return Target.of(value_of(node).device).capability == _FAULTY_ON and runs_on_cudnn(node)


@dataclass(frozen=True)
class Kernels:
    """Which calls of SDPA each kernel would run, on the device where they stand."""

    cudnn: Runs = runs_on_faulty
    core: window_attentions.Runs = is_run_by_the_core
    flash: Runs = runs_on_flash
    efficient: Runs = runs_efficiently


def finite_gradients(regions: list[Region], plan: Plan, options: Options, kernels: Kernels = Kernels()) -> int:
    """Go another way where cuDNN's kernel may return gradients that are no numbers; returns for how many attentions.

    All other passes must have chosen kernels.
    """
    if not torch.is_grad_enabled():
        return 0
    changed, changes = 0, dict[Node, bool]()
    for index in ordinary_attentions(regions, plan):
        attention = plan.attentions[index]
        node: Any = attention.node
        if not has_plain_tensors(node) or not _may_be_unhidden(node) or not _may_draw_anew(node, options):
            continue
        moved = _moved(attention, changes, kernels) if kernels.cudnn(node) else None
        if moved is not None:
            plan.attentions[index] = moved
            changed += 1
    return changed


def _may_be_unhidden(node: Node) -> bool:
    """May cuDNN's backward pass compute weights for keys, or with queries, that are not there?"""
    query, key, _, mask = map(value_of, operands_of(node))
    queries, keys = query.shape[2], key.shape[2]
    if _is_single(node):
        return True
    if isinstance(keys, int) and keys % _TILE != _UNHIDDEN:
        return False
    is_in_the_past = argument(node, 5, "is_causal", False) and statically_known_true(queries <= keys)
    return not (mask is None and is_in_the_past)


def _is_single(node: Node) -> bool:
    """Is there one query?"""
    return statically_known_true(value_of(operands_of(node)[0]).shape[2] == 1)


def _may_draw_anew(node: Node, options: Options) -> bool:
    """Is there no dropout, or one whose numbers nobody expects?"""
    return argument(node, 4, "dropout_p", 0.0) == 0 or RECOGNISED in node.meta or not wants_eager_draws(options)


def _moved(attention: Attention, changes: dict[Node, bool], kernels: Kernels) -> Attention | None:
    """The attention by the fastest other way that there is; None for none."""
    node = attention.node
    query, key, value, mask = operands_of(node)
    if mask is None and may_stand_for(node, [query, key, value], changes, kernels.core):
        call = put_window(node, [query, key, value], window_without_mask(node))
        return replace(attention, node=call, kernel="finite")
    if mask is None and kernels.flash(node) and not reads_result_as_it_was(node, changes):
        return replace(attention, node=put_flash(node), kernel="finite")
    efficient = may_run_efficiently(node, changes) and kernels.efficient(node)
    if mask is not None and not _is_single(node) and not (efficient and bias_learns(value_of(mask))):
        return in_whole_tiles(attention, _TILE, "finite")
    if efficient:
        return call_efficiently(attention, "finite")
    return as_products(attention, "finite") if RECOGNISED in node.meta else None
