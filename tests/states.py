"""Models with FP8 state as if they had trained, for the tests of state and of its files."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from te_compile import state as module
from te_compile.state import LONGEST_PAUSE, ParameterState, poll, state_of

LENGTH = 5


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))


def used(model: nn.Module, length: int = LENGTH) -> nn.Module:
    """``model`` with random state for each of its matrices, as if it had trained."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            fill(state_of(parameter, length, training=True))
    return model


def fill(state: ParameterState) -> None:
    """Random scales, counts and amaxes."""
    for tensor in (state.forward, state.backward):
        tensor.copy_(torch.rand_like(tensor) + 0.1)
        tensor[:, 1] = torch.randint(0, 9, (tensor.shape[0],))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Equal names, and equal bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def poll_often() -> None:
    for _ in range(2 * LONGEST_PAUSE):
        poll()


def scales_are_missing() -> bool:
    """Is there a state, of whatever model, that has not been seen to have its scales?"""
    return module.lack_scales(list(module._waiting))
