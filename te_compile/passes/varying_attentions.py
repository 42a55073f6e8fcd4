"""Attention of varying size on kernels that need no plan for each.

cuDNN builds a plan for each length, and each batch, that it has not met: tens of milliseconds of the host, forward and
backward (``python -m benchmarks.new_lengths``). Where these are symbols when the graph is compiled, for batches are as
long as what is in them, prompts as they come, or requests as many as there are, that is another plan for each, and
attention waits for all of them. Where PyTorch takes flash, there is no plan, and the kernel takes 1.6 times as long as
the core's (``python -m benchmarks.window_attention``, its last row).

The C++ core's kernels (kernels/native_attention.py) take any size as it comes, in about cuDNN's time. They run
``te::window_attention`` in a window that ends nowhere, or with the query itself. Where sizes are numbers they run
only what PyTorch would leave to flash, as under a cuDNN that PyTorch holds too old.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from te_compile.ops import registry
from te_compile.ops.native_implementations import CUDA
from te_compile.ops.registry import Target
from te_compile.options import Options
from te_compile.passes.attention_kernels import is_plain, ordinary_attentions, takes_flash_first
from te_compile.passes.captured_nodes import argument, value_of
from te_compile.passes.plan import Plan
from te_compile.passes.regions import Region
from te_compile.passes.step_cost import waits_for_host
from te_compile.passes.window_attentions import Runs, may_stand_for, put_window, window_without_mask

_OPERATORS = ("window_attention_forward", "window_attention_backward")


def is_run_by_the_core(q: Any, k: Any, v: Any) -> bool:
    """Are the kernels the C++ core's? q, k, v: [B, S, H, D]."""
    target, arguments = Target.of(q.device), {"q": q, "k": k, "v": v}
    return all(registry.choose(operator, target, arguments)[0] == CUDA for operator in _OPERATORS)


def varying_attentions(regions: list[Region], plan: Plan, options: Options, runs: Runs = is_run_by_the_core) -> int:
    """Give attention whose kernel PyTorch would choose to the core's, where its size varies or that is flash; returns
    how many. The plan's linears must have been selected."""
    found = [index for index in ordinary_attentions(regions, plan) if _is_left_to_pytorch(plan.attentions[index].node)]
    if not found or waits_for_host(plan, options, torch.is_grad_enabled()):
        return 0
    changed, changes = 0, dict[Node, bool]()
    for index in found:
        node = plan.attentions[index].node
        operands: list[Node] = [argument(node, place, name) for place, name in enumerate(("query", "key", "value"))]
        if may_stand_for(node, operands, changes, runs):
            call = put_window(node, operands, window_without_mask(node))
            plan.attentions[index] = replace(plan.attentions[index], node=call, kernel="core")
            changed += 1
    return changed


def _is_left_to_pytorch(node: Node) -> bool:
    """Is it a call of SDPA without a mask that these kernels would run faster?"""
    if not is_plain(node):
        return False
    batch, _, length, _ = value_of(node).shape
    return not (isinstance(batch, int) and isinstance(length, int)) or takes_flash_first()
