"""Every change of a weight is seen: no call reads FP8 copies of what a weight was."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from te_compile import refresh_weights
from te_compile.ops import weight_refresh
from te_compile.ops.weight_refresh import line_places
from te_compile.state_files import load_state_dict, state_dict
from tests.backend.models import Chain
from tests.compiling import compiled, train_step
from tests.weight_changes import CHANGES, Launches, data
from tests.weight_changes import launches as launches

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

RECIPES = pytest.mark.parametrize("recipe", ["delayed", "current"])


@RECIPES
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen_by_the_next_call(change: str, recipe: str, launches: Launches) -> None:
    """To the bit what a graph computes that quantises its weights on each call. The FP8 state is the same one."""
    model, x = Chain(), data()
    fast, plain = compiled(model, recipe=recipe), compiled(model, recipe=recipe, cache_weights=False)
    train_step(model, plain, x)
    with torch.no_grad():
        assert torch.equal(fast(x), plain(x))
        launches.since()
        before = fast(x)
        assert torch.equal(fast(x), before) and launches.since() == 0
        CHANGES[change](model)
        got = fast(x)
        assert launches.since() == 1
        assert torch.equal(got, plain(x)) and not torch.equal(got, before)
        launches.since()
        assert torch.equal(fast(x), got) and launches.since() == 0


BEHIND_AUTOGRADS_BACK = ("an edit of .data", "every parameter by .data")


@pytest.mark.parametrize("change", CHANGES)
def test_two_checks_watch_and_each_sees_its_own(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the samples blind, what autograd and addresses show is still seen, and what they do not show is not."""
    monkeypatch.setattr(weight_refresh, "fingerprint_reference", lambda matrices: torch.zeros(1))
    model, x = Chain(), data()
    fast, plain = compiled(model), compiled(model, cache_weights=False)
    with torch.no_grad():
        fast(x)
        CHANGES[change](model)
        assert torch.equal(fast(x), plain(x)) is (change not in BEHIND_AUTOGRADS_BACK)


def test_a_few_elements_changed_behind_autograds_back_are_seen_after_a_word(launches: Launches) -> None:
    """The limit of looking at samples, and the way out."""
    model, x = Chain(64), torch.randn(5, 64)
    fast = compiled(model)
    with torch.no_grad():
        before = fast(x)
        looked_at = {int(place) + i for place in line_places((64 * 64,) * 3, 4)[0] for i in range(32)}
        hidden = random.choice([i for i in range(64 * 64) if i not in looked_at])
        model.a.weight.data.view(-1)[hidden] = 1e3
        assert torch.equal(fast(x), before)
        refresh_weights(model)
        launches.since()
        assert not torch.equal(fast(x), before) and launches.since() == 1


def test_loaded_fp8_state_is_used_from_the_next_call_on(launches: Launches) -> None:
    model, x = Chain(), data()
    fast = compiled(model)
    train_step(model, fast, x)
    saved = {name: entry.clone() for name, entry in state_dict(model).items()}
    with torch.no_grad():
        fast(x)
        for entry in saved.values():
            entry[:, 0] *= 0.37
        load_state_dict(model, saved)
        launches.since()
        got = fast(x)
        assert launches.since() == 1
        assert torch.equal(got, compiled(model, cache_weights=False)(x))


@pytest.mark.parametrize("fused", [False, True])
def test_a_compiled_step_of_an_optimizer_is_a_change(fused: bool) -> None:
    model, x = Chain(), data()
    fast, plain = compiled(model), compiled(model, cache_weights=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(fast(x), plain(x))
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        step()


def test_parameters_that_are_swapped_for_a_call_have_copies_of_their_own(launches: Launches) -> None:
    model, x = Chain(), data()
    others = {name: nn.Parameter(torch.randn_like(p)) for name, p in model.named_parameters()}
    fast, plain = compiled(model), compiled(model, cache_weights=False)
    with torch.no_grad():
        own = fast(x)
        for given in (others, {name: p.detach() for name, p in others.items()}):
            swapped = torch.func.functional_call(fast, given, (x,))
            assert not torch.equal(swapped, own)
            assert torch.equal(swapped, torch.func.functional_call(plain, given, (x,)))
            assert torch.equal(fast(x), own)
