"""The batched scale update: the recipe's own arithmetic, row by row and bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_compile.kernels.scale_update import FEW, needs_table, snapshot_scales, update_scales
from te_compile.ops.scaling import snapshot_reference, update_scales_reference
from te_compile.recipe import DelayedScaling

ROWS = (2, 1, 3)


def states(length: int, device: str) -> list[Tensor]:
    """Fresh states: no scale, nothing skipped, an empty history."""
    return [torch.zeros(rows, 2 + length, device=device) for rows in ROWS]


def amaxes(device: str) -> Tensor:
    """Over many binades, now and then 0 or not finite."""
    drawn = torch.exp(6 * torch.randn(sum(ROWS), device=device))
    special = torch.tensor([0.0, torch.inf, torch.nan], device=device)[torch.randint(3, drawn.shape, device=device)]
    return torch.where(torch.rand(drawn.shape, device=device) < 0.3, special, drawn)


@pytest.mark.parametrize("length", [1, 2, 16, 31, 1024])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
def test_many_steps_leave_the_states_of_the_reference(length: int, algorithm: str, margin: int, device: str) -> None:
    recipe = DelayedScaling(margin=margin, amax_history_len=length, amax_compute_algo=algorithm)
    ours, wanted = states(length, device), states(length, device)
    for _ in range(40 if length <= 31 else 5):
        seen = amaxes(device)
        update_scales(ours, [seen], 448.0, recipe.rule(), algorithm)
        update_scales_reference(wanted, [seen], 448.0, recipe)
        for state, expected in zip(ours, wanted, strict=True):
            assert torch.equal(state, expected)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 50])
def test_amaxes_lie_anywhere_and_one_may_count_for_many_rows(rows: int, device: str) -> None:
    recipe = DelayedScaling(amax_history_len=4)
    ours = [torch.zeros(each, 6, device=device) for each in [1] * (rows - 1) + [2]]
    wanted = [state.clone() for state in ours]
    many = torch.rand(3 * rows + 3, device=device)
    for _ in range(3):
        seen = [many[place] for place in torch.randint(len(many), (rows - 1,)).tolist()]  # of all alignments, twice too
        seen.append(many[1:3] + 1)
        update_scales(ours, seen, 448.0, recipe.rule(), "max")
        update_scales_reference(wanted, seen, 448.0, recipe)
        assert all(map(torch.equal, ours, wanted))


def test_the_window_forgets_an_old_peak_after_its_length(device: str) -> None:
    recipe = DelayedScaling(amax_history_len=3)
    state = [torch.zeros(1, 5, device=device)]
    scales = []
    for amax in (64.0, 1.0, 2.0, 4.0, 1.0):
        update_scales(state, [torch.tensor([amax], device=device)], 448.0, recipe.rule(), "max")
        scales.append(float(state[0][0, 0]))
    assert scales == [448 / 64, 448 / 64, 448 / 64, 448 / 4, 448 / 4]
    assert state[0][0, 2:].tolist() == [1.0, 4.0, 2.0]


def test_an_amax_that_is_not_finite_is_counted_and_nothing_else(device: str) -> None:
    recipe = DelayedScaling(amax_history_len=4)
    state = [torch.tensor([[7.0, 2.0, 64.0, 1.0, 0.0, 0.0]], device=device)]
    for step, bad in enumerate((torch.inf, torch.nan), start=1):
        update_scales(state, [torch.tensor([bad], device=device)], 448.0, recipe.rule(), "max")
        assert state[0].tolist() == [[7.0, 2.0 + step, 64.0, 1.0, 0.0, 0.0]]


def test_an_amax_of_zero_changes_nothing(device: str) -> None:
    before = torch.rand(1, 10, device=device)
    state = [before.clone()]
    update_scales(state, [torch.zeros(1, device=device)], 448.0, DelayedScaling(amax_history_len=8).rule(), "max")
    assert torch.equal(state[0], before)


@pytest.mark.parametrize("amax", [1e-45, 1e-38, 3e38], ids=str)
def test_scales_stay_normal_numbers(amax: float, device: str) -> None:
    recipe = DelayedScaling(amax_history_len=2)
    ours, wanted = [torch.zeros(1, 4, device=device)], [torch.zeros(1, 4, device=device)]
    seen = torch.tensor([amax], device=device)
    update_scales(ours, [seen], 57344.0, recipe.rule(), "max")
    update_scales_reference(wanted, [seen], 57344.0, recipe)
    assert torch.equal(ours[0], wanted[0]) and float(ours[0][0, 0]) >= torch.finfo(torch.float32).tiny


def test_rows_of_a_larger_tensor_are_updated_in_place(device: str) -> None:
    recipe = DelayedScaling(amax_history_len=4)
    whole = torch.zeros(4, 20, device=device)
    update_scales([whole[1::2, :6]], [torch.tensor([1.0, 2.0], device=device)], 448.0, recipe.rule(), "max")
    assert whole[1::2, 0].tolist() == [448.0, 224.0]
    assert not whole[::2].any() and not whole[:, 6:].any()


@pytest.mark.parametrize("more", [0, 1, FEW - sum(ROWS), FEW - sum(ROWS) + 1, 300])
def test_a_snapshot_is_every_scale_in_order_and_does_not_follow_updates(more: int, device: str) -> None:
    several = [torch.rand(rows, 18, device=device) for rows in (*ROWS, more)]
    assert needs_table(several) == (sum(ROWS) + more > FEW)
    scales = snapshot_scales(several)
    wanted = snapshot_reference(several)
    assert torch.equal(scales, wanted)
    for state in several:
        state.zero_()
    assert torch.equal(scales, wanted)


def test_a_snapshot_of_no_rows_is_empty(device: str) -> None:
    assert snapshot_scales([torch.rand(0, 18, device=device)]).shape == (0,)


def test_a_few_rows_are_read_wherever_they_lie(device: str) -> None:
    """Without a table, which would have to be found for other states each time."""
    whole = torch.rand(9, 20, device=device)
    several = [whole[1::2, :6], whole[:1, 3:9], whole[8:]]  # of all alignments
    assert torch.equal(snapshot_scales(several), snapshot_reference(several))
