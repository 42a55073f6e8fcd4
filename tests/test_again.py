"""A call that finds its weights as the last one left them looks nothing up, and never reads anything old.

On the CPU nothing is remembered, so here a stand-in for the GPU: the reference check of copies is one that can be
repeated, and questions are answered for a device that there is. tests/gpu/test_again.py has the real one.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import triton
from torch import Tensor, nn

from te_compile import again, refresh_weights, reset_state, weight_cache
from te_compile.again import Again, Memory
from te_compile.kernels import native, player
from te_compile.ops import calibration
from te_compile.ops.weight_refresh import ReferenceRefresher
from te_compile.runtime import Runner
from te_compile.state_files import load_state_dict, state_dict
from tests.backend.models import Chain
from tests.compiling import compiled, gradients, train_step
from tests.kernels.test_replay import ON_NO_GPU
from tests.states import scales_are_missing
from tests.weight_changes import CHANGES, Launches, Packed, data
from tests.weight_changes import launches as launches

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(bool(native.missing()), reason="the C++ core is not built"),
]
RECIPES = pytest.mark.parametrize("recipe", ["delayed", "current"])
CALLS = 4  # of the same weights, after which one is remembered


class Met:
    """Counts the calls that were like the last one."""

    def __init__(self) -> None:
        self.count = 0

    def since(self) -> int:
        """How many there were since this was asked last."""
        count, self.count = self.count, 0
        return count


@pytest.fixture(autouse=True)
def met(monkeypatch: pytest.MonkeyPatch, nothing_waits: None) -> Met:
    questions = {**ON_NO_GPU, "current_device": lambda: -1, "stream_of": lambda device: 0}
    monkeypatch.setattr(
        player,
        "questions",
        lambda **_: {**questions, "flags": list(ON_NO_GPU["flags"]), "runtime": (vars(triton.knobs), "runtime")},
    )
    monkeypatch.setattr(player, "core", native.module)
    check = ReferenceRefresher.__call__

    def checked(self: Any, weights: Any, *arguments: Any, **named: Any) -> None:
        self.last = list(map(weakref.ref, weights))
        check(self, weights, *arguments, **named)

    def repeated(self: Any, amaxes: bool) -> Callable[[], Any]:
        return lambda: check(self, [weight() for weight in self.last], amaxes, calibration.pending())

    monkeypatch.setattr(ReferenceRefresher, "__call__", checked)
    monkeypatch.setattr(ReferenceRefresher, "repeated", repeated)
    met, of = Met(), Memory.of

    def counted(self: Memory, args: tuple[Any, ...]) -> Again | None:
        found = of(self, args)
        met.count += found is not None
        return found

    monkeypatch.setattr(Memory, "of", counted)
    return met


def settled(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Until every scale is known, in the backward too."""
    for _ in range(2):
        train_step(model, run, x)
    assert not scales_are_missing()


def remembered(model: nn.Module, met: Met) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """``model`` compiled and some data, with which it was called until such calls were met again, without gradients."""
    x, fast = data(), compiled(model)
    settled(model, fast, x)
    with torch.no_grad():
        for _ in range(CALLS):
            fast(x)
    assert met.since() > 0
    return fast, x


@RECIPES
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen_by_the_next_call(change: str, recipe: str, met: Met) -> None:
    model, x = Chain(), data()
    fast, plain = compiled(model, recipe=recipe), compiled(model, recipe=recipe, cache_weights=False)
    settled(model, plain, x)
    with torch.no_grad():
        before = plain(x)
        for _ in range(CALLS):
            assert torch.equal(fast(x), before)
        assert met.since() > 0
        CHANGES[change](model)
        got = fast(x)
        assert torch.equal(got, plain(x)) and not torch.equal(got, before)
        for _ in range(CALLS):
            assert torch.equal(fast(x), got)
        if recipe == "current":  # what the scale of the history cuts off may be cast anew, so it is not remembered
            assert met.since() > 0
        y = data()
        assert torch.equal(fast(y), plain(y))


def test_a_model_that_never_gets_its_scales_has_no_other_forgotten(met: Met) -> None:
    fast, x = remembered(Chain(), met)
    other = compiled(Chain())
    with torch.no_grad():
        for _ in range(CALLS):
            other(x)
        assert scales_are_missing()
        met.since()
        for _ in range(CALLS):
            fast(x)
    assert met.since() == CALLS - 1, "all but the first, after a state was new"


def test_a_model_that_never_trained_is_met_again_measures_each_time_and_learns_that_it_has_scales(met: Met) -> None:
    model = Chain()
    fast, plain = compiled(model), compiled(model, cache_weights=False)
    with torch.no_grad():
        for at in range(2 * CALLS):
            x = 2.0**at * data()
            assert torch.equal(fast(x), plain(x))
        assert scales_are_missing() and met.since() > 0
        for change in ("an edit of .data", "an edit in place"):
            CHANGES[change](model)
            for _ in range(CALLS):
                x = data()
                assert torch.equal(fast(x), plain(x))
            assert met.since() > 0
    settled(model, plain, data())
    with torch.no_grad():
        large = 16 * data()  # which the scales that there are now cut off
        met.since()
        assert all(torch.equal(fast(large), plain(large)) for _ in range(CALLS)) and met.since() > 0


def test_a_call_of_a_backward_that_lacks_its_scales_is_not_remembered(met: Met) -> None:
    model = Chain()
    fast, x = compiled(model), data()
    for _ in range(CALLS):
        fast(x)
    assert scales_are_missing() and met.since() == 0


def test_micro_batches_give_the_same_bits_and_are_met_again(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    batches, first = [data() for _ in range(15)], Chain()
    for tries in (again.MOST_TRIES, 0):
        monkeypatch.setattr(again, "MOST_TRIES", tries)
        torch._dynamo.reset()
        model = copy.deepcopy(first)
        fast, optimizer = compiled(model), torch.optim.SGD(model.parameters(), lr=0.01)
        seen = []
        for at, batch in enumerate(batches):
            y = fast(batch)
            y.square().mean().backward()
            seen.append(y.detach())
            if at % 5 == 4:
                seen += gradients(model).values()
                optimizer.step()
                optimizer.zero_grad()
        results.append([*seen, *(p.detach() for p in model.parameters()), *state_dict(model).values()])
        assert (met.since() > 0) == (tries > 0)
    got, expected = results
    assert len(got) == len(expected) and all(map(torch.equal, got, expected))


def test_a_plain_training_remembers_nothing(met: Met) -> None:
    model, x = Chain(), data()
    fast = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(8):
        train_step(model, fast, x)
        optimizer.step()
    assert met.since() == 0


def test_other_fp8_states_are_seen(met: Met) -> None:
    model = Chain()
    fast, x = remembered(model, met)
    saved = {name: entry.clone() for name, entry in state_dict(model).items()}
    with torch.no_grad():
        before = fast(x)
        assert met.since() == 1
        reset_state(model)
        fast(1000 * x)
        assert met.since() == 0
        load_state_dict(model, saved)
        assert torch.equal(fast(x), before)


def test_a_word_about_a_change_is_enough(met: Met, launches: Launches) -> None:
    model = Chain()
    fast, x = remembered(model, met)
    with torch.no_grad():
        launches.since()
        refresh_weights(model)
        fast(x)
        assert met.since() == 0 and launches.since() == 1


def test_what_is_remembered_goes_with_the_copies(launches: Launches, met: Met) -> None:
    """With a step of training, and with the model."""
    model = Chain()
    fast, x = remembered(model, met)
    assert launches.alive() > 0
    made = [each() for each in launches.made if each() is not None]
    CHANGES["SGD"](model)
    train_step(model, fast, x)
    watched = list(map(weakref.ref, made))
    del made
    gc.collect()
    assert not any(each() is not None for each in watched), "old copies outlive their weights' change"
    with torch.no_grad():
        for _ in range(CALLS):
            fast(x)
    assert met.since() > 0 and launches.alive() > 0
    del model, fast
    torch._dynamo.reset()
    assert launches.alive() == 0


def test_blocks_that_share_code_are_told_apart(met: Met) -> None:
    blocks = nn.ModuleList(Chain() for _ in range(3))
    x = data()
    fast = [compiled(block) for block in blocks]
    plain = [compiled(block, cache_weights=False) for block in blocks]
    for block, run in zip(blocks, plain, strict=True):
        settled(block, run, x)
    with torch.no_grad():
        for _ in range(CALLS):
            for run, other in zip(fast, plain, strict=True):
                assert torch.equal(run(x), other(x))
        assert met.since() > 0
        CHANGES["an edit in place"](blocks[1])
        for run, other in zip(fast, plain, strict=True):
            assert torch.equal(run(x), other(x))
        assert met.since() == 2


def test_parts_of_parameters_are_told_by_these(met: Met) -> None:
    model, x = Packed(), data()
    fast, plain = compiled(model), compiled(model, cache_weights=False)
    settled(model, plain, x)
    with torch.no_grad():
        for _ in range(CALLS):
            assert torch.equal(fast(x), plain(x))
        assert met.since() > 0
        for parameter in model.parameters():
            parameter.mul_(1.5)
        assert torch.equal(fast(x), plain(x)) and met.since() == 0


def test_what_is_never_met_again_is_no_longer_remembered(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under deterministic algorithms nothing is played, so what is remembered is of no use."""
    remembered = 0

    def counted(*arguments: Any) -> Again:
        nonlocal remembered
        remembered += 1
        return Again(*arguments)

    monkeypatch.setattr(again, "Again", counted)
    model, x = Chain(), data()
    fast = compiled(model)
    torch.use_deterministic_algorithms(True)
    try:
        settled(model, fast, x)
        with torch.no_grad():
            for _ in range(again.MOST_TRIES + CALLS):
                fast(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert met.since() == 0 and remembered == again.MOST_TRIES


def test_what_is_of_one_call_alone_is_not_remembered(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token of a call whose scales may be missing: who keeps it has all later calls look for missing scales."""
    model, x = Chain(), data()
    fast = compiled(model)
    settled(model, fast, x)
    found = Runner._states

    def of_one_call(self: Runner, args: tuple[Any, ...]) -> Any:
        states = found(self, args)
        *shared, token = states.tensors
        return dataclasses.replace(states, tensors=[*shared, token.detach().requires_grad_()])

    with monkeypatch.context() as patched:
        patched.setattr(Runner, "_states", of_one_call)
        for _ in range(CALLS):
            train_step(model, fast, x)
    assert met.since() == 0
    for _ in range(CALLS):
        train_step(model, fast, x)
    assert met.since() > 0


def test_a_call_that_is_captured_is_not_remembered_for_its_stream(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes copies of its own. Those that are kept are of another stream, after which nothing here is ordered."""
    now = {"capturing": False, "stream": 0}
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: now["capturing"], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: now["stream"], raising=False)
    questions = player.questions()
    questions |= {"is_capturing": lambda: now["capturing"], "stream_of": lambda device: now["stream"]}
    monkeypatch.setattr(player, "questions", lambda **_: {**questions, "flags": list(questions["flags"])})
    model, x = Chain(), data()
    fast = compiled(model)
    settled(model, fast, x)
    with torch.no_grad():
        fast(x)
        for group in weight_cache._caches:
            monkeypatch.setattr(group, "is_cuda", True)
        for _ in range(CALLS):
            fast(x)
        assert met.since() > 0
        now.update(capturing=True, stream=7)
        fast(x)
        now.update(capturing=False)
        fast(x)
        assert met.since() == 0


def test_without_the_core_nothing_is_remembered(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(player, "core", lambda: None)
    model, x = Chain(), data()
    fast = compiled(model)
    settled(model, fast, x)
    with torch.no_grad():
        for _ in range(CALLS):
            fast(x)
    assert met.since() == 0


def test_weights_without_a_version_are_not_remembered(core_arguments: tuple[Tensor, ...]) -> None:
    memory, home = Memory([0]), dict[int, Again]()
    memory.remember(core_arguments, [], list, home, {"steps": 0}, lambda: True)
    assert not home and not memory.known


@pytest.fixture(params=["made in inference mode", "of another class"])
def core_arguments(request: pytest.FixtureRequest) -> tuple[Tensor, ...]:
    if request.param == "of another class":
        return (torch.randn(3).as_subclass(type("Other", (Tensor,), {})),)
    with torch.inference_mode():
        return (torch.randn(3),)


def test_a_memory_holds_nothing_that_its_home_has_given_up() -> None:
    memory, home, counter = Memory([0]), dict[int, Again](), {"steps": 0}
    weight, held = nn.Parameter(torch.randn(3)), torch.randn(3)
    memory.remember((weight,), [held], partial(list, [held]), home, counter, lambda: True)
    found = memory.of((weight,))
    assert found is not None and found.states == (held,) and found.copies() == [held]
    reference = weakref.ref(held)
    del found, held
    home.clear()
    assert reference() is None and memory.of((weight,)) is None and not memory.known
