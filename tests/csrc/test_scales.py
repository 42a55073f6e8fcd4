"""The C++ core's scale formula and state update against the recipes, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from te_compile.kernels import native
from te_compile.recipe import DelayedScaling, ScaleRule

if native.missing():
    pytest.skip(native.missing(), allow_module_level=True)

MAXIMA = [448.0, 57344.0]
AMAXES = [0.0, 1e-45, 1e-38, 1e-3, 1.0, 447.9, 3.3e38, math.inf, math.nan]


@pytest.mark.parametrize("fp8_max", MAXIMA)
@pytest.mark.parametrize(
    "rule",
    [ScaleRule(), ScaleRule(margin=3), ScaleRule(epsilon=1e-4), ScaleRule(power_2=True), ScaleRule(-30, 0.0, True)],
)
def test_scale_formula_is_the_recipes(rule: ScaleRule, fp8_max: float) -> None:
    amaxes = torch.cat([torch.tensor(AMAXES), torch.exp(torch.randn(2000) * 20)])
    want = rule.scale(amaxes, fp8_max)
    scale = native.module().host_scale
    got = torch.tensor([scale(a, fp8_max, rule.margin, rule.epsilon, rule.power_2) for a in amaxes.tolist()])
    wrong = got != want
    assert not wrong.any(), (
        f"amax {amaxes[wrong][:5].tolist()}: {got[wrong][:5].tolist()} for {want[wrong][:5].tolist()}"
    )


def random_states(rows: list[int], length: int) -> list[Tensor]:
    """States as they are in training: some rows fresh, some with a short history, some with a full one."""
    states = []
    for count in rows:
        state = torch.rand(count, 2 + length) * 10
        state[:, 1] = torch.randint(0, 5, (count,)).float()
        state[::3, 2:] = 0
        state[::3, 0] = 0
        state[1::3, 2 + length // 2 :] = 0
        states.append(state)
    return states


def random_amaxes(rows: list[int]) -> list[Tensor]:
    special = torch.tensor([0.0, math.inf, math.nan, 1e-40])
    amaxes = []
    for count in rows:
        amax = torch.exp(torch.randn(count) * 3)
        odd = torch.rand(count) < 0.4
        amaxes.append(torch.where(odd, special[torch.randint(0, len(special), (count,))], amax))
    return amaxes


def update_by_recipe(state: Tensor, amax: Tensor, recipe: DelayedScaling, fp8_max: float) -> Tensor:
    history, scale, skipped = recipe.updated(state[:, 2:], state[:, 0], amax, fp8_max)
    return torch.cat([scale[:, None], state[:, 1:2] + skipped[:, None].float(), history], dim=1)


def update_by_core(states: list[Tensor], amaxes: list[Tensor], recipe: DelayedScaling, fp8_max: float) -> None:
    native.module().host_update_scales(
        [state.data_ptr() for state in states],
        [amax.data_ptr() for amax in amaxes],
        [state.shape[0] for state in states],
        recipe.amax_history_len,
        fp8_max,
        recipe.margin,
        0.0,
        False,
        recipe.amax_compute_algo == "most_recent",
    )


@pytest.mark.parametrize("fp8_max", MAXIMA)
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "margin"), [(1, 0), (2, 0), (16, 2), (31, 0), (1024, 0)])
def test_many_steps_leave_the_state_that_the_recipe_leaves(
    length: int, margin: int, algorithm: str, fp8_max: float
) -> None:
    recipe = DelayedScaling(margin=margin, amax_history_len=length, amax_compute_algo=algorithm)
    rows = [1, 4, 0, 7]
    states = random_states(rows, length)
    want = [state.clone() for state in states]
    for _ in range(5):
        amaxes = random_amaxes(rows)
        want = [update_by_recipe(state, amax, recipe, fp8_max) for state, amax in zip(want, amaxes, strict=True)]
        update_by_core(states, amaxes, recipe, fp8_max)
    for got, expected in zip(states, want, strict=True):
        assert torch.equal(got, expected)


def test_a_window_forgets_an_old_maximum() -> None:
    recipe = DelayedScaling(amax_history_len=3)
    state = torch.zeros(1, 5)
    scales = []
    for amax in (100.0, 1.0, 2.0, 1.0):
        update_by_core([state], [torch.tensor([amax])], recipe, 448.0)
        scales.append(state[0, 0].item())
    assert scales == pytest.approx([4.48, 4.48, 4.48, 224.0])
    assert state[0, 2:].tolist() == [1.0, 2.0, 1.0]


def test_an_overflow_is_counted_and_changes_nothing_else() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    state = torch.rand(1, 6) + 1
    before = state.clone()
    for amax in (math.inf, math.nan):
        update_by_core([state], [torch.tensor([amax])], recipe, 448.0)
    before[0, 1] += 2
    assert torch.equal(state, before)


def test_lists_of_unequal_length_are_refused() -> None:
    state, amax = torch.zeros(1, 3), torch.zeros(1)
    with pytest.raises(ValueError, match="one entry per state"):
        native.module().host_update_scales(
            [state.data_ptr()], [amax.data_ptr()], [1, 1], 1, 448.0, 0, 0.0, False, False
        )
