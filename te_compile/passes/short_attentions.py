"""Attention of few queries and keys, as within windows of an image, on the kernel that is the fastest there.

Tiles of cuDNN's and of flash's kernels are 64 to 128 queries long. Of heads with fewer positions than that most of a
tile is empty, and a bias whose rows are not aligned costs cuDNN more still. PyTorch's memory-efficient kernel loses
less: ``python -m benchmarks.odd_attention`` has the times. Only what was measured is changed: up to 64 queries
and keys of up to 64 features, in 16 bits, on compute capability 9.0. A bias that learns has its place elsewhere
(``lay_out_biases``), and an order of kernels that the user has set stands.

With a dropout only attention that the model spells out is changed, and only where rows of a mask are not aligned:
SDPA's own draw stands, and other shapes were not slower than what torch.compile makes of them (``--dropout 0.1``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from te_compile.ops.registry import Target
from te_compile.options import Options
from te_compile.passes.attention_kernels import is_plain, ordinary_attentions
from te_compile.passes.captured_nodes import argument, value_of, wrapped_kind
from te_compile.passes.dropout_attentions import wants_eager_draws
from te_compile.passes.efficient_attention import (
    ALIGNED_KEYS,
    HALVES,
    Runs,
    bias_learns,
    call_efficiently,
    may_be_called,
    operands_of,
    runs_efficiently,
)
from te_compile.passes.plan import Plan
from te_compile.passes.recognise_attention import RECOGNISED
from te_compile.passes.regions import Region
from te_compile.passes.side_effects import may_change

_MEASURED_ON = (9, 0)
_POSITIONS = range(16, 65)
_WIDEST = 64


def runs_fastest(node: Node) -> bool:
    """Is attention on a device where the memory-efficient kernel was measured, and takes heads like these?"""
    return Target.of(value_of(node).device).capability == _MEASURED_ON and runs_efficiently(node)


def short_attentions(regions: list[Region], plan: Plan, options: Options, runs: Runs = runs_fastest) -> int:
    """Call the memory-efficient kernel for attention of few positions; returns for how many.

    ``plan`` must know them (find_attentions). runs: is the kernel there, and is it the fastest?
    """
    changed, changes = 0, dict[Node, bool]()
    for index in ordinary_attentions(regions, plan):
        node: Any = plan.attentions[index].node
        if not _is_short(node) or not _may_draw(node, options) or not may_be_called(node) or not runs(node):
            continue
        if torch.is_grad_enabled() and may_change(node, changes):
            continue  # a fused kernel's gradients read the result as it was
        plan.attentions[index] = call_efficiently(plan.attentions[index], "short")
        changed += 1
    return changed


def _is_short(node: Node) -> bool:
    """Is it a call of SDPA for few positions, in 16 bits, without a bias that learns?"""
    operands = operands_of(node)
    if any(map(wrapped_kind, operands)) or not is_plain(node, masked=operands[3] is not None):
        return False
    mask, causal = value_of(operands[3]), argument(node, 5, "is_causal", False)
    if (mask is not None and causal) or bias_learns(mask):
        return False
    return value_of(node).dtype in HALVES and all(_fits(value_of(each).shape) for each in operands[:3])


def _may_draw(node: Node, options: Options) -> bool:
    """Is there no dropout, or one whose numbers nobody expects and with which the kernel is faster?"""
    if argument(node, 4, "dropout_p", 0.0) == 0:
        return True
    if RECOGNISED not in node.meta or wants_eager_draws(options):
        return False
    _, key, _, mask = operands_of(node)
    return mask is not None and bool(value_of(key).shape[-2] % ALIGNED_KEYS)


def _fits(shape: Sequence[Any]) -> bool:
    *_, positions, width = shape
    are_numbers = isinstance(positions, int) and isinstance(width, int)
    return are_numbers and positions in _POSITIONS and width <= _WIDEST
