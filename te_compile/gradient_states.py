"""What delayed scaling remembers of a gradient, for each FP8 format that it is quantised in.

The scale of a gradient aims at the largest number of its format, 57344 or 448. A step of one recipe may be under way
when a step of another one, of the other format, begins: two losses of one model whose backward passes come together. In
one tensor the second forward would set a scale that the first backward sets back, and the next gradients of the one
would be cut off, or nearly vanish, by the other's. So each format has a tensor.

A format that is asked for again learns what the last one knows. What it has met itself counts only if that was since
the other learnt from it, as where steps overlap: what is older has gone through the other's history, and has left it if
the history is shorter than that.
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
    """tensor: fp32 [1, 2+L]; number: its name, as state.py counts; trains: has a backward been announced? learnt: a
    copy of the tensor, as it was when another format learnt from it."""

    tensor: Tensor
    number: int
    trains: bool = False
    learnt: Tensor | None = None

    def mark_learnt(self) -> None:
        """Others know what it knows by now."""
        self.learnt = self.tensor.clone()


def known_of(states: Mapping[float, GradientState], last: float, aim: float) -> Tensor:
    """What ``states``, by the numbers that they aim at, know of one gradient, with a scale that aims at ``aim``: a
    fresh fp32 [1, 2+L].

    That is what the one that was asked for ``last`` knows. Others are joined to it if they have been updated since it
    learnt from them: step by step the larger amax, and the smaller scale, so that nothing is cut off that one of them
    would have let through. A scale of 0 is none.
    """
    result = _aimed(states[last].tensor, last, aim)
    for at, each in states.items():
        if at != last:
            joined = _joined(result, _aimed(each.tensor, at, aim))
            result = joined if each.learnt is None else torch.where((each.tensor != each.learnt).any(), joined, result)
    return result


def _aimed(tensor: Tensor, at: float, aim: float) -> Tensor:
    """A copy of ``tensor`` whose scale aims at ``aim`` where it aimed ``at`` something."""
    moved = tensor.clone()
    moved[:, SCALE] *= aim / at  # a power of two: nothing is rounded, and 0 stays 0
    moved[:, SCALE].clamp_(max=FP32_MAX)
    return moved


def _joined(one: Tensor, other: Tensor) -> Tensor:
    result = torch.maximum(one, other)
    scales = torch.stack([one[:, SCALE], other[:, SCALE]])
    smallest = torch.where(scales > 0, scales, torch.inf).amin(dim=0)
    result[:, SCALE] = torch.where(smallest < torch.inf, smallest, 0.0)
    return result
