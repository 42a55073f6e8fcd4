"""te::gradient_slots: one update per backward pass, with every amax that arrived."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_compile.ops.gradient_slots import GRADIENT_SLOTS
from te_compile.recipe import DelayedScaling, remember

LENGTH = 4
RECIPE = remember(DelayedScaling(amax_history_len=LENGTH))


def states(number: int) -> list[Tensor]:
    """Backward states that have seen nothing: scale | skipped | history."""
    return [torch.zeros(1, 2 + LENGTH) for _ in range(number)]


def backward(held: list[Tensor], owners: list[int], amaxes: list[float | None]) -> None:
    """One backward pass in which each slot receives its amax, or nothing."""
    token = torch.zeros(len(owners), requires_grad=True)
    slots = GRADIENT_SLOTS(token, held, owners, RECIPE)
    used = [slots[i] * amax for i, amax in enumerate(amaxes) if amax is not None]
    torch.stack(used).sum().backward()
    assert token.grad is None, "the token is there to be asked, not to be given"


def test_every_state_is_updated_with_the_amax_of_its_slot() -> None:
    held = states(2)
    backward(held, [0, 1], [3.0, 7.0])
    assert [state[0, 2].item() for state in held] == [3.0, 7.0]
    assert [state[0, 0].item() for state in held] == pytest.approx([57344 / 3, 57344 / 7])


def test_slots_of_one_state_count_once_with_the_largest() -> None:
    held = states(1)
    backward(held, [0, 0, 0], [3.0, 9.0, 5.0])
    assert held[0][0, 2:].tolist() == [9.0, 0.0, 0.0, 0.0]


def test_a_slot_that_nothing_came_back_to_changes_nothing() -> None:
    held = states(2)
    backward(held, [0, 1], [3.0, None])
    assert held[0][0, 2] == 3.0 and not held[1].any()


def test_a_non_finite_amax_is_counted_and_kept_out() -> None:
    held = states(1)
    backward(held, [0], [3.0])
    before = held[0].clone()
    backward(held, [0], [float("inf")])
    assert held[0][0, 1] == 1
    before[0, 1] = 1
    assert torch.equal(held[0], before)


def test_passes_follow_one_another_in_the_history() -> None:
    held = states(1)
    for amax in (1.0, 2.0, 3.0):
        backward(held, [0], [amax])
    assert held[0][0, 2:].tolist() == [3.0, 2.0, 1.0, 0.0]


def test_without_gradients_nothing_is_updated() -> None:
    held = states(1)
    with torch.no_grad():
        slots = GRADIENT_SLOTS(torch.zeros(1), held, [0], RECIPE)
    assert slots.shape == (1,) and not held[0].any()
