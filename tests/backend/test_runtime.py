"""What a compiled graph is handed in front of its arguments: the states of this call's parameters, cheaply."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from te_compile import first_steps, runtime, state, weight_cache
from te_compile.ops import calibration
from te_compile.passes import manager
from te_compile.recipe import DelayedScaling, Format
from te_compile.runtime import Runner
from tests.backend.models import Mlp
from tests.compiling import compiled
from tests.states import poll_often

LENGTH = 4
E4M3_ALONE = DelayedScaling(amax_history_len=LENGTH, fp8_format=Format.E4M3)


def runner(count: int = 2, training: bool = True, recipe: Any = None) -> Runner:
    """Of a graph with so many weights, which are its arguments; calling it returns what it was handed."""
    graph = torch.fx.Graph()
    weights = [graph.placeholder(f"weight_{at}") for at in range(count)]
    gm = SimpleNamespace(graph=graph)
    signature = SimpleNamespace(added=0, weights=weights, states=True, training=training, slots=3, groups=[])
    recipe = recipe or DelayedScaling(amax_history_len=LENGTH)
    return Runner(lambda *given: list(given), signature, gm, recipe)  # type: ignore[arg-type]


def parameters(count: int = 2) -> list[nn.Parameter]:
    return [nn.Parameter(torch.rand(3, 4)) for _ in range(count)]


def lookups(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Grows by each parameter whose state is looked up."""
    seen: list[Tensor] = []
    look_up = state.state_of

    def noted(parameter: Tensor, *rest: Any, **named: Any) -> state.ParameterState:
        seen.append(parameter)
        return look_up(parameter, *rest, **named)

    monkeypatch.setattr(state, "state_of", noted)
    return seen


def states(weights: list[nn.Parameter]) -> list[Tensor]:
    found = [state.states_of(weight)[LENGTH] for weight in weights]
    return [each.forward for each in found] + [each.backward for each in found]


def same(got: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(got) == len(wanted) and all(one is other for one, other in zip(got, wanted, strict=True))


def test_states_are_looked_up_until_nothing_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, run, weights = lookups(monkeypatch), runner(), parameters()
    handed = [run(*weights) for _ in range(5)]
    for each in handed:
        assert same(each[:4], states(weights)) and same(each[5:], weights)
        assert each[4].requires_grad and each[4].is_leaf and each[4].data_ptr() == run.token.data_ptr()
    assert len(seen) == 4, "made by the first call, found by the second, known to all others"
    handed[-1].clear()
    assert same(run(*weights)[:4], states(weights)), "what a call was handed is its own"


@pytest.mark.usefixtures("nothing_waits")
def test_once_all_scales_are_known_all_calls_share_one_token() -> None:
    run, weights = runner(), parameters()
    one, other = run(*weights)[4], run(*weights)[4]
    assert one is not other
    a_backward_runs(other)
    for each in states(weights):
        each.fill_(1.0)
    poll_often()
    assert run(*weights)[4] is run(*weights)[4] is run.token


def a_backward_runs(token: Tensor) -> None:
    """That of the call which was handed this token."""
    token.sum().backward()


class Graph:
    """What a runner calls; notes whether kernels would be ready for missing scales."""

    def __init__(self) -> None:
        self.was_ready: list[bool] = []

    def __call__(self, *given: Any) -> list[Any]:
        self.was_ready.append(calibration.pending())
        return list(given)


@pytest.mark.usefixtures("nothing_waits")
def test_a_state_that_never_gets_a_scale_has_no_other_graph_measure() -> None:
    """One that infers alone beside one that trains, as an evaluation whose small linears training leaves alone."""
    infers, trains = runner(training=False), runner()
    infers.compiled, trains.compiled = Graph(), Graph()
    for run in (infers, trains):
        run.head_start.compiled = run.compiled
    few, many = parameters(), parameters()
    for step in range(4):
        a_backward_runs(trains(*many)[4])
        infers(*few)
        assert not calibration.pending(), "the token of a call is gone with it"
        if step == 1:
            for each in states(many):
                each.fill_(1.0)
            poll_often()
    assert trains.compiled.was_ready == [True, True, False, False]
    assert infers.compiled.was_ready == [True] * 4, "it has no scale to trust"


@pytest.mark.usefixtures("nothing_waits")
def test_a_backward_that_never_comes_has_no_forward_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an evaluation that forgets no_grad: its first calls might be one step, and no more than these measure."""
    monkeypatch.setattr(first_steps, "MOST_CALLS", 3)
    run, weights = runner(), parameters()
    run.compiled = run.head_start.compiled = Graph()
    held = run(*weights)
    assert calibration.pending(), "its backward may come"
    for weight in weights:
        state.states_of(weight)[LENGTH].forward.fill_(1.0)
    poll_often()
    for _ in range(3):
        held.clear()
        held = run(*weights)
        assert calibration.pending(), "no gradient has a scale yet"
    held.clear()
    run(*weights)
    assert run.compiled.was_ready == [True] * 3 + [False] * 2 and not calibration.pending()


@pytest.mark.usefixtures("nothing_waits")
@pytest.mark.parametrize("training", [False, True])
def test_a_call_that_fails_leaves_nothing_expected(training: bool) -> None:
    def fails(*_: Any) -> NoReturn:
        raise RuntimeError("no memory")

    run = runner(training=training)
    run.head_start.compiled = fails
    with pytest.raises(RuntimeError, match="no memory"):
        run(*parameters())
    gc.collect()
    assert not calibration.pending()


def test_blocks_that_share_a_graph_keep_their_own_states(monkeypatch: pytest.MonkeyPatch) -> None:
    run, blocks = runner(), [parameters() for _ in range(3)]
    blocks.append([blocks[0][0], blocks[1][1]])  # the same first weight
    for _ in range(3):
        for weights in blocks:
            assert same(run(*weights)[:4], states(weights))
    seen = lookups(monkeypatch)
    run(*blocks[1])
    assert not seen


def forget(weights: list[nn.Parameter]) -> None:
    for weight in weights:
        for found in state.states_of(weight).values():
            found.only_loaded = True
        state.drop_unused(weight)


CHANGES: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "dropped": forget,
    "aimed elsewhere": lambda weights: runner(recipe=E4M3_ALONE)(*weights),
    "loaded": lambda weights: [state.overwrite(weight, torch.ones(2, 6), torch.ones(1, 6)) for weight in weights],
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_a_state_has_it_looked_up_again(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, weights = runner(), parameters()
    for _ in range(3):
        run(*weights)
    CHANGES[change](weights)
    seen = lookups(monkeypatch)
    handed = run(*weights)
    assert len(seen) == 2 and same(handed[:4], states(weights))
    for weight in weights:
        found = state.states_of(weight)[LENGTH]
        assert found.gradient_max == Format.HYBRID.backward_max and not found.only_loaded


def test_a_parameter_elsewhere_has_its_state_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run, weights = runner(), parameters()
    for _ in range(3):
        run(*weights)
    seen = lookups(monkeypatch)
    monkeypatch.setattr(runtime, "_device_of", lambda weight: torch.device("meta"))
    run(*weights)
    assert len(seen) == 2


def test_a_parameter_at_two_places_has_a_state_for_each() -> None:
    run, (weight,) = runner(), parameters(1)
    first, second, *backward = run(weight, weight)[:4]
    assert same([first, backward[0]], states([weight]))
    assert first is not second and backward[0] is not backward[1]
    assert same(run(weight, weight)[:4], [first, second, *backward])
    other = runner()
    assert same(other(weight, weight)[:4], [first, second, *backward])
    first.fill_(1)
    state.overwrite(weight, torch.ones(2, 6), torch.ones(1, 6))
    assert not run(weight, weight)[1].any(), "what the second place knew was of another training"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_states_follow_their_parameters() -> None:
    run, model = runner(1), nn.Linear(4, 3)
    for _ in range(3):
        run(model.weight)
    for device in ("cuda", "cpu", "cuda"):
        model.to(device)
        for _ in range(2):
            assert run(model.weight)[0].device.type == device


def test_a_parameter_at_the_identity_of_a_dead_one_gets_a_state_of_its_own() -> None:
    run, seen, again = runner(1), set[int](), False
    for _ in range(2000):  # the allocator is free to hand out other addresses for a while
        (weight,) = parameters(1)
        again = id(weight) in seen
        seen.add(id(weight))
        for _ in range(3):
            handed = run(weight)
            assert handed[0] is state.states_of(weight)[LENGTH].forward and not handed[0].any()
        handed[0].fill_(1)
        del weight, handed
        if again:
            break
    assert again, "no identity came again: nothing was tested"


def test_states_of_fake_parameters_are_not_kept() -> None:
    run = runner(1)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.rand(3, 4))
        assert run(fake)[0] is not run(fake)[0]
    assert not run.found


@pytest.mark.usefixtures("fresh_dynamo")
def test_copies_of_fake_weights_are_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler's dry run of what is compiled already: nothing is quantised, looked up or kept."""

    def quantizes(*_: Any) -> NoReturn:
        raise AssertionError("a fake weight is quantised")

    model, before = Mlp(), set(weight_cache._caches)
    compiled(model, recipe="current", compiler="aot_eager")(torch.randn(4, 32)).sum().backward()
    (copies,) = set(weight_cache._caches) - before
    (record,) = copies.records.values()
    args: list[Any] = [None] * (max(copies.positions) + 1)
    for position, weight in zip(copies.positions, record.references, strict=True):
        args[position] = weight()
    real = copies.inputs(args, [])
    monkeypatch.setattr(weight_cache, "copies_of", quantizes)
    with FakeTensorMode() as mode:
        fake = copies.inputs([each if each is None else mode.from_tensor(each) for each in args], [])
    assert list(copies.records.values()) == [record]
    assert all(isinstance(each, FakeTensor) for each in fake)
    assert [(each.shape, each.dtype) for each in fake] == [(each.shape, each.dtype) for each in real]


def test_what_is_known_of_a_compilation_keeps_no_parameter_alive() -> None:
    torch._dynamo.reset()
    model = Mlp()
    with manager.recording() as records:  # compiled code has the same record, and stays with the class of the model
        compiled(model)(torch.randn(16, 32)).sum().backward()
    held = [weakref.ref(each) for each in model.parameters()]
    assert len(records) == 1 and len(records[0].plan.parameters) == len(held)
    del model
    gc.collect()
    assert not any(each() is not None for each in held)
    assert not records[0].plan.parameters
