"""Ordinary dropout becomes ``te::dropout``, whose mask a kernel draws 32 elements at a time.

Inductor draws a number by ten rounds of Philox for each element, and on a GPU its kernel then takes as long as that and
not as its bytes: 138 µs for [8192, 4096] in fp16 on an H200, where x, a residual, the result and the mask allow 55. The
operator's kernel takes four calls for 32 elements (ops/dropout_masks.py), and what stands around it fuses as before,
the quantizes of the backward pass included. The seed is drawn by PyTorch's generator, as Inductor's own is, so what
is computed again under a checkpoint has the same mask: Inductor keeps all seeds, or from PyTorch 2.15 on the state that
the generator drew them from, and eager mode sets the generator back.

Other numbers are drawn than by Inductor, which draws others than eager mode: who asks it for eager mode's own
(``fallback_random``) keeps them, and so does whoever runs operators one by one (``aot_eager``). Graphs with nothing in
FP8 are left to Inductor whole.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.fx import Node

from te_compile.ops import registry
from te_compile.ops.dropout_masks import DROPOUT
from te_compile.options import Options
from te_compile.passes.captured_nodes import argument, is_tensor, size_hint, value_of, wrapped_kind
from te_compile.passes.dropout_attentions import wants_eager_draws
from te_compile.passes.function_transforms import transforms_around
from te_compile.passes.plan import Plan
from te_compile.passes.regions import Region
from te_compile.passes.step_cost import waits_for_host

FEWEST_ELEMENTS = 1 << 22
"""By the times above Inductor's draw of so many costs some 10 µs. The seed and the mask are two launches, and the mask
is read once more than Inductor's is: below that little or nothing would be gained."""
_DROPOUTS = (F.dropout, torch.dropout, torch.ops.aten.dropout.default)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _probability(node: Node) -> float:
    """Of dropping an element, where ``node`` is a dropout of a new tensor in training; 0 for all else."""
    if node.op != "call_function" or node.target not in _DROPOUTS or argument(node, 3, "inplace", False):
        return 0.0
    p, training = argument(node, 1, "p", 0.5), argument(node, 2, "training", node.kwargs.get("train", True))
    is_known = isinstance(p, (int, float)) and training is True
    return float(p) if is_known and 0 < p < 1 else 0.0


def _is_plain(node: Node) -> bool:
    """Is it of numbers that lie in order, as the mask will, and in a tensor that holds no others?"""
    x = argument(node, 0, "input")
    if not is_tensor(x) or not is_tensor(node) or wrapped_kind(x) or wrapped_kind(node):
        return False
    before, after = value_of(x), value_of(node)
    return before.dtype in _DTYPES and bool(before.is_contiguous() and after.is_contiguous())


def _is_run_by_kernels(node: Node, probability: float) -> bool:
    """Does the registry have something better than the reference?"""
    x = value_of(node)
    arguments = {"size": x.shape, "probability": probability}
    return registry.are_run_by_kernels(["dropout_mask"], x.device, arguments)


def _is_large(node: Node) -> bool:
    return math.prod(map(size_hint, value_of(node).shape)) >= FEWEST_ELEMENTS


def draw_dropouts(regions: list[Region], plan: Plan, options: Options) -> int:
    """Replace each dropout in training that a kernel draws faster by the operator; returns how many.

    The plan's linears must have been selected.
    """
    if not plan.selected or options.compiler != "inductor" or wants_eager_draws(options):
        return 0
    if waits_for_host(plan, options, torch.is_grad_enabled()):
        return 0
    drawn = 0
    for region in regions:
        inside = transforms_around(region.graph)
        for node in region.graph.nodes:
            probability = _probability(node)
            if not probability or node in inside or not _is_plain(node) or not _is_run_by_kernels(node, probability):
                continue
            if options.cost_model and not _is_large(node):
                continue
            # The node stays the same one, for the plan knows it as what a linear reads.
            node.target, node.args, node.kwargs = DROPOUT, (argument(node, 0, "input"), probability), {}
            drawn += 1
    return drawn
