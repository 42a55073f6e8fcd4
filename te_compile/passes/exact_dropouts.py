"""Keep a dropout that a model spells out off cuDNN, which would round its probability, where attention has a mask.

cuDNN's attention knows probabilities in sixteenths: a dropout of 0.1 would be one of 0.125 or of 0.0625
(pytorch#174245). From PyTorch 2.12 on SDPA asks it for no others; 2.11 with a newer cuDNN does. Without a mask
``choose_attention_kernels`` takes another kernel, and kernels of ours run masks of booleans. What is left here has a
bias: it goes to the memory-efficient kernel by name and, where that cannot be called, to products of matrices.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from te_compile.passes.attention_kernels import is_rounded, ordinary_attentions
from te_compile.passes.captured_nodes import argument
from te_compile.passes.efficient_attention import Runs, call_efficiently, runs_efficiently
from te_compile.passes.leave_cudnn import as_products, has_plain_tensors, may_run_efficiently, runs_on_cudnn
from te_compile.passes.plan import Plan
from te_compile.passes.recognise_attention import RECOGNISED
from te_compile.passes.regions import Region


def exact_dropouts(
    regions: list[Region],
    plan: Plan,
    rounds: Runs = runs_on_cudnn,
    efficient: Runs = runs_efficiently,
) -> int:
    """Call a kernel that draws as the model asks, where cuDNN's would round; returns for how many attentions.

    All other passes must have chosen kernels. rounds: does cuDNN's run this call? efficient: can the other?
    """
    changed, changes = 0, dict[Node, bool]()
    for index in ordinary_attentions(regions, plan):
        attention = plan.attentions[index]
        node: Any = attention.node
        if RECOGNISED not in node.meta or argument(node, 3, "attn_mask") is None or not has_plain_tensors(node):
            continue
        if not is_rounded(node) or not rounds(node):
            continue
        if may_run_efficiently(node, changes) and efficient(node):
            plan.attentions[index] = call_efficiently(attention, "exact")
        else:
            plan.attentions[index] = as_products(attention, "exact")
        changed += 1
    return changed
