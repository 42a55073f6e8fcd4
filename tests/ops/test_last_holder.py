"""Who else holds the memory of a tensor, a backward pass finds out before it writes there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from te_compile.ops.last_holder import is_last_holder
from tests.in_backward import in_backward


def asked_in_backward(tensor: Tensor, hold: Callable[[Tensor], Any] = lambda tensor: None, **how: Any) -> bool:
    """What is answered in a backward pass about ``tensor``, while what ``hold`` makes of it is there."""
    answers: list[bool] = []
    held = hold(tensor)
    in_backward(lambda: answers.append(is_last_holder(tensor)), **how)
    del held
    return answers[0]


def test_a_tensor_alone_is_the_last() -> None:
    assert asked_in_backward(torch.randn(4))


@pytest.mark.parametrize(
    "hold",
    [
        lambda x: x.detach(),
        lambda x: x.view(2, 2),
        lambda x: x[1:],
        lambda x: x.untyped_storage(),
        lambda x: x.numpy(),
        lambda x: x.detach().requires_grad_().square(),
    ],
    ids=["detached", "view", "part", "storage", "numpy", "autograd"],
)
def test_whoever_else_holds_its_memory_counts(hold: Callable[[Tensor], Any]) -> None:
    assert not asked_in_backward(torch.randn(4), hold)


def test_a_graph_that_is_kept_may_run_once_more() -> None:
    assert not asked_in_backward(torch.randn(4), retain_graph=True)


def test_outside_of_a_backward_pass_nothing_is_known() -> None:
    assert not is_last_holder(torch.randn(4))


def test_a_parameter_is_nobodys_to_overwrite() -> None:
    assert not asked_in_backward(torch.nn.Parameter(torch.randn(4)))
