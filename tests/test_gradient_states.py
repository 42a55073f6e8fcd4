"""Two formats of gradients on one model: none of them takes or gives a scale that was made for the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from te_compile import load_state_dict
from te_compile.gradient_states import GradientState, known_of
from te_compile.ops.scaling import HISTORY, SCALE
from te_compile.recipe import FP32_MAX
from te_compile.state import existing_state
from te_compile.state_files import state_dict
from tests.backend.models import Mlp, all_fp8
from tests.compiling import compiled, gradients, relative_error
from tests.emulation import emulated

HYBRID, E4M3 = 57344.0, 448.0
HISTORY_LENGTH = 1024
RECIPES = ("delayed", "delayed fp8_format=E4M3")


def row(scale: float, skipped: float, *history: float) -> Tensor:
    return torch.tensor([[scale, skipped, *history]])


def states_of(hybrid: Tensor, e4m3: Tensor | None = None) -> dict[float, GradientState]:
    """As they are where each has been updated since the other learnt from it."""
    found = {HYBRID: GradientState(hybrid, 0), E4M3: GradientState(hybrid if e4m3 is None else e4m3, 1)}
    return found if e4m3 is not None else {HYBRID: found[HYBRID]}


def test_what_is_known_for_one_format_is_aimed_at_another() -> None:
    tensor = row(3.0, 2, 5, 4)
    before, states = tensor.clone(), states_of(tensor)
    result = known_of(states, HYBRID, E4M3)
    assert torch.equal(result, row(3.0 / 128, 2, 5, 4)) and torch.equal(tensor, before)
    assert torch.equal(known_of({E4M3: GradientState(result, 0)}, E4M3, HYBRID), tensor)
    same = known_of(states, HYBRID, HYBRID)
    assert torch.equal(same, tensor) and same.data_ptr() != tensor.data_ptr()


def test_no_scale_stays_none_and_the_largest_stays_finite() -> None:
    nothing, largest = row(0.0, 1, 0, 0), row(FP32_MAX, 0, 1e-38, 0)
    for tensor in (nothing, largest):
        assert torch.equal(known_of({E4M3: GradientState(tensor, 0)}, E4M3, HYBRID), tensor)


@pytest.mark.parametrize(
    ("hybrid", "e4m3", "expected"),
    [
        (row(128.0, 1, 5, 1), row(2.0, 3, 2, 4), row(128.0, 3, 5, 4)),
        (row(512.0, 0, 5, 1), row(2.0, 0, 2, 4), row(256.0, 0, 5, 4)),
        (row(0.0, 0, 0, 0), row(2.0, 0, 2, 4), row(256.0, 0, 2, 4)),
        (row(128.0, 0, 5, 1), row(0.0, 0, 0, 0), row(128.0, 0, 5, 1)),
    ],
)
def test_the_larger_amax_and_the_smaller_scale_are_kept(hybrid: Tensor, e4m3: Tensor, expected: Tensor) -> None:
    for last in (HYBRID, E4M3):
        assert torch.equal(known_of(states_of(hybrid, e4m3), last, HYBRID), expected)


def test_what_has_not_been_updated_since_the_other_learnt_of_it_is_old() -> None:
    states = states_of(row(1.0, 0, 900, 0), row(448.0, 0, 1, 1))
    states[HYBRID].mark_learnt()
    assert torch.equal(known_of(states, E4M3, HYBRID), row(57344.0, 0, 1, 1))
    states[HYBRID].tensor.copy_(row(2.0, 0, 800, 900))
    assert torch.equal(known_of(states, E4M3, HYBRID), row(2.0, 0, 800, 900))


def gradients_of(model: nn.Module, runs: list[Any], x: Tensor, backwards: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """The gradients of one loss for each of ``runs``, after all their forward passes, in the order of ``backwards``."""
    losses = [run(x).square().mean() for run in runs]
    found: list[dict[str, Tensor]] = [{} for _ in runs]
    for each in backwards:
        model.zero_grad(set_to_none=True)
        losses[each].backward()
        found[each] = gradients(model)
    return found


def assert_each_is_as_good_as_the_textbook(model: nn.Module, found: list[dict[str, Tensor]], x: Tensor) -> None:
    (expected,) = gradients_of(model, [model], x, (0,))
    for recipe, got in zip(RECIPES, found, strict=True):
        yardstick = emulated(model, all_fp8)
        (quantised,) = gradients_of(yardstick, [yardstick], x, (0,))
        for name, gradient in expected.items():
            bound = max(2 * relative_error(quantised[name], gradient), 0.02)
            assert relative_error(got[name], gradient) < bound, f"{recipe}: {name}"


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backwards", [(0, 1), (1, 0)])
def test_backward_passes_of_both_may_wait_at_a_time(backwards: tuple[int, int]) -> None:
    model = Mlp()
    runs = [compiled(model, recipe=recipe) for recipe in RECIPES]
    for size in (2.0, 1.0, 1.0, 1.0):  # of what is larger than all before it delayed scaling would cut something off
        x = size * torch.randn(16, 32)
        found = gradients_of(model, runs, x, backwards)
        assert_each_is_as_good_as_the_textbook(model, found, x)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("recipe", "aim"), [(RECIPES[0], HYBRID), (RECIPES[1], E4M3)])
def test_a_state_that_is_loaded_while_a_backward_pass_waits_is_for_its_format(recipe: str, aim: float) -> None:
    model = Mlp()
    run = compiled(model, recipe=recipe)
    for _ in range(2):
        run(torch.randn(16, 32)).square().mean().backward()
    saved = state_dict(model)
    loss = run(torch.randn(16, 32)).square().mean()
    load_state_dict(model, saved)
    loss.backward()
    states = [state for parameter in model.parameters() if (state := existing_state(parameter, HISTORY_LENGTH))]
    assert len(states) == 2
    for state in states:
        known = state.backward_for(aim)
        torch.testing.assert_close(known[:, SCALE] * known[:, HISTORY:].amax(dim=1), torch.tensor([aim]))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_recipe_that_comes_back_knows_what_the_other_has_met() -> None:
    model = Mlp()
    runs = [compiled(model, recipe=recipe) for recipe in RECIPES]
    x = torch.randn(16, 32)
    # Of two layers the first meets what the second one lets through: the whole of it a step later.
    for run, size in ((runs[0], 1.0), (runs[1], 100.0), (runs[1], 100.0), (runs[0], 100.0)):
        model.zero_grad(set_to_none=True)
        (size * run(x).square().mean()).backward()
    got = gradients(model)
    model.zero_grad(set_to_none=True)
    (100.0 * model(x).square().mean()).backward()
    for name, gradient in gradients(model).items():
        assert relative_error(got[name], gradient) < 0.3, name


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_one_format_has_met_leaves_the_history_of_the_other() -> None:
    """As it would if the other had met it: neither a recipe that comes back nor a state that is saved knows it."""
    model = Mlp()
    runs = [compiled(model, recipe=f"{recipe} amax_history_len=4") for recipe in RECIPES]
    for run, size, steps in ((runs[0], 1e4, 2), (runs[1], 1.0, 6)):
        for _ in range(steps):
            (size * run(torch.randn(16, 32)).square().mean()).backward()
    live = [state for parameter in model.parameters() if (state := existing_state(parameter, 4))]
    before = [state.backward.clone() for state in live]
    load_state_dict(model, state_dict(model))
    assert live and all(torch.equal(state.backward, one) for state, one in zip(live, before, strict=True))
    runs[0](torch.randn(16, 32)).square().mean().backward()
    for state, one in zip(live, before, strict=True):
        assert float(state.gradients[HYBRID].tensor[:, HISTORY:].max()) < 10 * float(one[:, HISTORY:].max())


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_dry_run_with_fake_parameters_has_states_of_its_format(recipe: str) -> None:
    with FakeTensorMode():
        model = Mlp()
        compiled(model, recipe=recipe)(torch.randn(16, 32)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
