"""What delayed scaling remembers of a gradient, for each FP8 format that it is quantised in.

The scale of a gradient aims at the largest number of its format, 57344 or 448. A step of one recipe may be under way
when a step of another one, of the other format, begins: two losses of one model whose backward passes come together. In
one tensor the second forward would set a scale that the first backward sets back, and the next gradients of the one
would be cut off, or nearly vanish, by the other's. So each format has a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from te_compile.ops.scaling import SCALE
from te_compile.recipe import FP32_MAX


@dataclass(eq=False)
class GradientState:
    """tensor: fp32 [1, 2+L]; number: its name, as state.py counts; trains: has a backward been announced?"""

    tensor: Tensor
    number: int
    trains: bool = False


def joined(known: Mapping[float, Tensor], aim: float) -> Tensor:
    """What all of ``known`` know of one gradient, fp32 [1, 2+L] by the number that its scale aims at, with a scale that
    aims at ``aim``: a fresh tensor of that shape.

    Histories are joined step by step by the larger amax, and the smallest scale is taken, so nothing is cut off that
    one of them would have let through. A scale of 0 is none.
    """
    whole = torch.stack([_aimed(tensor, at, aim) for at, tensor in known.items()])
    scales = whole[..., SCALE]
    smallest = torch.where(scales > 0, scales, torch.inf).amin(dim=0)
    result = whole.amax(dim=0)
    result[:, SCALE] = torch.where(smallest < torch.inf, smallest, 0.0)
    return result


def _aimed(tensor: Tensor, at: float, aim: float) -> Tensor:
    """A copy of ``tensor`` whose scale aims at ``aim`` where it aimed ``at`` something."""
    moved = tensor.clone()
    moved[:, SCALE] *= aim / at  # a power of two: nothing is rounded, and 0 stays 0
    moved[:, SCALE].clamp_(max=FP32_MAX)
    return moved
