"""Cast a mask of float32 beside heads of 16 bits, which cuDNN's attention would misread.

SDPA takes masks of float32 whatever its operands are: ``nn.Transformer.generate_square_subsequent_mask`` makes one.
PyTorch tells cuDNN that a mask has the operands' dtype: the kernel reads halves of its numbers, and results are noise
or no numbers at all (pytorch#191612). Newer versions tell it the truth, which it may not take (pytorch#191964). The
other kernels refuse such a mask, or round it as they add it to scores of 16 bits. So it is rounded here, whatever the
version. An autocast that is at work does the same before SDPA sees the mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from te_compile.passes.attention_kernels import ordinary_attentions
from te_compile.passes.captured_nodes import argument, value_of
from te_compile.passes.efficient_attention import HALVES, Runs, operands_of
from te_compile.passes.leave_cudnn import has_plain_tensors, runs_on_cudnn
from te_compile.passes.plan import Plan
from te_compile.passes.regions import Region
from te_compile.passes.writing import Writer


def narrow_masks(regions: list[Region], plan: Plan, misread: Runs = runs_on_cudnn) -> int:
    """Cast masks that would be misread to the dtype of what they are added to; returns for how many attentions.

    Our own kernels, which look into how a mask is written, must have been chosen. misread: would SDPA hand the mask of
    a call to cuDNN?
    """
    changed = 0
    for index in ordinary_attentions(regions, plan):
        node: Any = plan.attentions[index].node
        if has_plain_tensors(node) and _is_wider(node) and misread(node):
            mask = argument(node, 3, "attn_mask")
            node.replace_input_with(mask, Writer(node).method("to", mask, value_of(node).dtype))
            changed += 1
    return changed


def _is_wider(node: Node) -> bool:
    """Is there a mask of float32 beside operands of 16 bits, with no autocast at work that casts it?"""
    query, _, _, mask = map(value_of, operands_of(node))
    is_seen_as_it_is = query.dtype == value_of(node).dtype in HALVES
    return mask is not None and mask.dtype == torch.float32 and is_seen_as_it_is
