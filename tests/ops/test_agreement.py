"""Ranks agree on the amaxes of a step at the end of its backward pass, with the same result as at once."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from te_compile.ops import agreement, same_layers, scaling
from te_compile.ops.scaling import UPDATE_SCALES
from te_compile.recipe import DelayedScaling, remember
from te_compile.state_files import state_dict
from tests.compiling import compiled
from tests.in_backward import in_backward

pytestmark = pytest.mark.usefixtures("one_rank", "fresh_dynamo")
MORE = same_layers.NUMBERS  # in an exchange at the end of a pass
KEY = remember(DelayedScaling(amax_history_len=4))


@pytest.fixture(autouse=True)
def reductions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """As if there were several ranks; notes of each all-reduce how many amaxes it was for."""
    noted: list[int] = []
    all_reduce = torch.distributed.all_reduce

    def noting(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        noted.append(tensor.numel())
        return all_reduce(tensor, *arguments, **named)

    monkeypatch.setattr(torch.distributed, "all_reduce", noting)
    monkeypatch.setattr(agreement, "are_several", lambda: True)
    yield noted
    agreement._from_forwards.clear()
    agreement._awaited.clear()


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many states each update has taken."""
    noted: list[int] = []
    alone = scaling.update_alone

    def noting(states: list[Tensor], *rest: Any) -> Any:
        noted.append(len(states))
        return alone(states, *rest)

    monkeypatch.setattr(scaling, "update_alone", noting)
    return noted


def fresh(count: int) -> list[Tensor]:
    """States, which last."""
    states = [torch.zeros(1, 6) for _ in range(count)]
    agreement.remember(states)
    return states


def test_a_backward_pass_updates_all_at_its_end(reductions: list[int], updates: list[int]) -> None:
    states, amaxes, seen = fresh(3), torch.rand(3) + 0.5, []

    def first() -> None:
        UPDATE_SCALES(states[:2], [amaxes[:2]], "backward", KEY)
        seen.append(states[0].abs().max().item())

    in_backward(first, lambda: UPDATE_SCALES(states[2:], [amaxes[2]], "backward", KEY))
    assert seen == [0.0] and reductions == [3 + MORE] and updates == [3]
    for state, amax in zip(states, amaxes, strict=True):
        assert state[0].tolist() == [pytest.approx(57344.0 / amax.item()), 0.0, amax.item(), 0.0, 0.0, 0.0]


def test_forward_passes_wait_for_the_next_backward_pass(reductions: list[int], updates: list[int]) -> None:
    """Blocks that are compiled one by one: one exchange for all of them, and one launch for each direction."""
    states, amaxes = fresh(4), torch.rand(4) + 0.5
    for state, amax in zip(states[:2], amaxes, strict=False):
        UPDATE_SCALES([state], [amax], "forward", KEY)
    assert not any(state.any() for state in states) and not reductions
    in_backward(*(partial(UPDATE_SCALES, [states[at]], [amaxes[at]], "backward", KEY) for at in (3, 2)))
    assert reductions == [4 + MORE] and updates == [2, 2]
    for state, amax, most in zip(states, amaxes, (448.0, 448.0, 57344.0, 57344.0), strict=True):
        assert state[0].tolist() == [pytest.approx(most / amax.item()), 0.0, amax.item(), 0.0, 0.0, 0.0]


def test_a_backward_pass_that_updates_nothing_leaves_them_waiting(reductions: list[int]) -> None:
    """It may be another model's, of one rank alone."""
    (state,) = fresh(1)
    UPDATE_SCALES([state], [torch.ones(1)], "forward", KEY)
    in_backward(lambda: None)
    assert not reductions and not state.any()


def test_a_forward_pass_that_reads_finds_states_updated(reductions: list[int]) -> None:
    """A block that is used twice; others go on without waiting for it."""
    first, second = fresh(2)
    UPDATE_SCALES([first], [torch.ones(1)], "forward", KEY)
    agreement.settle_before_reading([second])
    assert not reductions and not first.any()
    agreement.settle_before_reading([second, first])
    assert reductions == [1 + MORE] and first[0, 2] == 1
    agreement.settle_before_reading([first])
    assert reductions == [1 + MORE]


def test_what_waits_when_the_other_ranks_have_gone_is_entered_alone(
    reductions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (state,) = fresh(1)
    UPDATE_SCALES([state], [torch.ones(1)], "forward", KEY)
    monkeypatch.setattr(agreement, "are_several", lambda: False)
    agreement.settle_before_reading([state])
    assert not reductions and state[0, 2] == 1


def test_states_that_were_written_keep_what_was_written(reductions: list[int]) -> None:
    """Other ranks may not have written theirs, and expect an exchange of so many amaxes."""
    written, other = fresh(2)
    UPDATE_SCALES([written, other], [torch.ones(2)], "forward", KEY)
    agreement.let_go([written])
    written.fill_(7.0)
    agreement.settle_before_reading([written])
    assert not reductions
    agreement.settle_before_reading([other])
    assert reductions == [2 + MORE] and other[0, 2] == 1 and bool((written == 7.0).all())


def test_what_a_checkpoint_runs_anew_is_not_entered_again(reductions: list[int], updates: list[int]) -> None:
    (state,) = fresh(1)

    def recompute() -> None:
        with agreement.unheard():
            UPDATE_SCALES([state], [torch.ones(1)], "forward", KEY)

    in_backward(recompute)
    assert not reductions and not updates and not state.any()


def test_a_call_that_is_captured_leaves_what_waits(reductions: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The replays of a CUDA graph would enter it again and again."""
    (state,) = fresh(1)
    UPDATE_SCALES([state], [torch.ones(1)], "forward", KEY)
    monkeypatch.setattr(agreement, "_is_captured", lambda state: True)
    agreement.settle_before_reading([state])
    assert not reductions and not state.any()


def test_a_dry_run_settles_nothing(reductions: list[int]) -> None:
    """DistributedDataParallel's optimizer calls what it has compiled with fake tensors, between two passes as well."""
    (state,) = fresh(1)
    UPDATE_SCALES([state], [torch.ones(1)], "forward", KEY)
    with FakeTensorMode() as mode:
        agreement.settle_before_reading([mode.from_tensor(state)])
    assert not reductions and not state.any()


def test_updates_of_one_state_follow_each_other(updates: list[int]) -> None:
    (state,), expected = fresh(1), [torch.zeros(1, 6)]  # which is updated at once, as nobody's state
    amaxes = [torch.tensor(3.0), torch.tensor(2.0)]
    in_backward(*(lambda amax=amax: UPDATE_SCALES([state], [amax], "backward", KEY) for amax in amaxes))
    for amax in amaxes:
        UPDATE_SCALES(expected, [amax], "backward", KEY)
    assert updates[:2] == [1, 1] and torch.equal(state, expected[0]) and state[0, 2:4].tolist() == [2.0, 3.0]


def test_updates_of_other_recipes_are_done_apart(updates: list[int]) -> None:
    other = remember(DelayedScaling(amax_history_len=4, margin=1))
    states = fresh(2)
    in_backward(
        lambda: UPDATE_SCALES(states[:1], [torch.ones(1)], "backward", KEY),
        lambda: UPDATE_SCALES(states[1:], [torch.ones(1)], "backward", other),
    )
    assert updates == [1, 1] and [state[0, 0].item() for state in states] == [57344.0, 28672.0]


def test_updates_on_other_devices_are_done_apart(reductions: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch writes what lies on one device, and one exchange reads it."""
    noted: list[list[str]] = []

    def update(states: list[Tensor], *_: Any) -> None:
        noted.append([state.device.type for state in states])

    monkeypatch.setattr(agreement, "agree", lambda amaxes, group: reductions.append(amaxes.numel()))
    devices = ["cpu", "meta", "meta", "cpu"]
    waiting = agreement._Waiting(
        agreement._Measured(torch.ones(1, device=each), [torch.zeros(1, 6, device=each)], update, (), [0])
        for each in devices
    )
    agreement._settle(waiting)
    assert sorted(itertools.chain(*noted)) == sorted(devices) and all(len(set(each)) == 1 for each in noted)
    assert reductions == [2 + MORE, 2 + MORE]


def test_whoever_comes_second_finds_nothing_left_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads of one pass may be about to read."""
    waiting = agreement._Waiting()
    noted: list[int] = []

    def update(states: list[Tensor], *_: Any) -> None:
        noted.append(len(states))

    monkeypatch.setattr(agreement, "agree", lambda amaxes, group: agreement._settle(waiting))
    waiting += [agreement._Measured(torch.ones(1), [torch.zeros(1, 6)], update, (), [0]) for _ in range(3)]
    agreement._settle(waiting)
    assert noted == [3] and not waiting


def test_a_forward_pass_within_a_backward_pass_finds_states_updated(reductions: list[int], updates: list[int]) -> None:
    states, seen = fresh(2), []

    def read() -> None:
        agreement.settle_before_reading(states)
        seen.append([state[0, 2].item() for state in states])

    in_backward(
        lambda: UPDATE_SCALES(states, [torch.ones(2)], "backward", KEY),
        read,
        lambda: UPDATE_SCALES(states, [torch.full((2,), 3.0)], "backward", KEY),
    )
    assert seen == [[1.0, 1.0]] and [state[0, 2].item() for state in states] == [3.0, 3.0]
    assert reductions == [2 + MORE, 2 + MORE] and updates == [2, 2]


def test_compiled_autograd_does_not_wait(reductions: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo.compiled_autograd, "compiled_autograd_enabled", True)
    states = fresh(1)
    in_backward(lambda: UPDATE_SCALES(states, [torch.ones(1)], "backward", KEY))
    assert reductions == [1] and states[0][0, 2] == 1


def test_a_capture_into_a_cuda_graph_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[bool] = []
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    for captures in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures)
        answers.append(agreement.may_wait([], on_gpu))
    assert answers == [True, False]


def test_copies_of_states_are_updated_at_once(reductions: list[int]) -> None:
    """What runs operators one by one hands them copies, and writes these back."""
    (state,) = fresh(1)
    copy = state.clone()
    in_backward(lambda: UPDATE_SCALES([copy], [torch.ones(1)], "backward", KEY))
    assert reductions == [1] and copy[0, 2] == 1 and not state.any()


def test_states_that_are_gone_are_forgotten() -> None:
    states = fresh(2)
    addresses = {state.data_ptr() for state in states}
    assert addresses <= agreement._lasting.keys() and agreement.are_lasting(states)
    del states
    gc.collect()
    assert not addresses & agreement._lasting.keys()


def test_a_backward_pass_that_fails_leaves_nothing_behind() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    states = fresh(1)
    with pytest.raises(ZeroDivisionError):
        in_backward(lambda: UPDATE_SCALES(states, [torch.ones(1)], "backward", KEY), fail)
    gc.collect()
    assert not agreement._waiting and not states[0].any()


def test_states_have_places_from_their_first_exchange_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank trains alone has none."""

    def places(states: list[Tensor]) -> list[int | None]:
        return [agreement._lasting[state.data_ptr()].place for state in states]

    def exchange(states: list[Tensor]) -> None:
        in_backward(lambda: UPDATE_SCALES(states, [torch.ones(len(states))], "backward", KEY))

    alone, states, later = fresh(1), fresh(2), fresh(1)
    exchange(states[::-1])
    begin = places(states)[1]
    assert begin is not None and places(states) == [begin + 1, begin] and places([*alone, *later]) == [None, None]
    agreement.remember(states)
    exchange([*states, *later])
    assert places([*states, *later]) == [begin + 1, begin, begin + 2]
    others = nn.Module()
    monkeypatch.setattr(agreement, "_world", lambda: others)
    agreement._places_of([later[0].data_ptr()])
    assert places([*states, *later]) == [None, None, 0]


class Wrapper:
    """What a forward pass may find itself in, as DistributedDataParallel is."""

    def __init__(self) -> None:
        self.process_group, self.require_backward_grad_sync = torch.distributed.new_group([0]), True


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> Wrapper:
    made = Wrapper()
    monkeypatch.setattr(agreement.data_parallel, "active", lambda: made)
    return made


@pytest.mark.parametrize("count", [1, 2, 4])
def test_micro_batches_whose_gradients_are_not_exchanged_have_one_exchange(
    count: int, wrapper: Wrapper, reductions: list[int]
) -> None:
    """Whatever their number, and with the largest amax of all."""
    forwards, backwards = fresh(2), fresh(1)
    amaxes = torch.rand(count, 3) + 0.5
    for place, amax in enumerate(amaxes):
        wrapper.require_backward_grad_sync = place == count - 1
        agreement.settle_before_reading(forwards)
        UPDATE_SCALES(forwards, [amax[:2]], "forward", KEY)
        in_backward(partial(UPDATE_SCALES, backwards, [amax[2:]], "backward", KEY))
        assert all(state.any() == wrapper.require_backward_grad_sync for state in (*forwards, *backwards))
    assert reductions == [3 + MORE]
    for state, amax in zip((*forwards, *backwards), amaxes.amax(0), strict=True):
        assert state[0, 2:].tolist() == [amax.item(), 0.0, 0.0, 0.0]


def test_states_that_are_written_in_between_keep_what_was_written(wrapper: Wrapper, reductions: list[int]) -> None:
    first, second = fresh(2)
    wrapper.require_backward_grad_sync = False
    UPDATE_SCALES([first, second], [torch.ones(2)], "forward", KEY)
    in_backward(lambda: None)
    in_backward(lambda: UPDATE_SCALES([second], [torch.ones(1)], "backward", KEY))
    agreement.let_go([first])
    wrapper.require_backward_grad_sync = True
    UPDATE_SCALES([second], [torch.ones(1)], "forward", KEY)
    in_backward(lambda: UPDATE_SCALES([second], [torch.ones(1)], "backward", KEY))
    assert not first.any() and second[0, 2] == 1


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_model_that_is_wrapped_later_or_no_more_agrees_with_those_of_now(
    is_wrapped: bool, wrapper: Wrapper, monkeypatch: pytest.MonkeyPatch, reductions: list[int]
) -> None:
    """In both directions: its states were handed to the graph before."""
    monkeypatch.setattr(agreement.data_parallel, "active", lambda: None if is_wrapped else wrapper)
    forwards, backwards = (states := fresh(2))[:1], states[1:]
    wrapper.require_backward_grad_sync = False
    monkeypatch.setattr(agreement.data_parallel, "active", lambda: wrapper if is_wrapped else None)
    UPDATE_SCALES(forwards, [torch.ones(1)], "forward", KEY)
    in_backward(lambda: UPDATE_SCALES(backwards, [torch.ones(1)], "backward", KEY))
    assert reductions == ([] if is_wrapped else [2 + MORE])
    assert [bool(state.any()) for state in states] == [not is_wrapped] * 2


def test_what_is_held_for_a_wrapper_that_is_gone_is_let_go(
    wrapper: Wrapper, monkeypatch: pytest.MonkeyPatch, reductions: list[int]
) -> None:
    states, others = fresh(1), fresh(1)
    wrapper.require_backward_grad_sync = False
    UPDATE_SCALES(states, [torch.ones(1)], "forward", KEY)
    in_backward(lambda: UPDATE_SCALES(states, [torch.ones(1)], "backward", KEY))
    assert len(agreement._held) == 1
    made = agreement._lasting[states[0].data_ptr()].trainer.wrapper
    monkeypatch.setattr(made, "module", lambda: None)
    monkeypatch.setattr(agreement.data_parallel, "active", lambda: None)
    agreement.remember(others)
    in_backward(lambda: UPDATE_SCALES(others, [torch.ones(1)], "backward", KEY))
    assert len(agreement._held) == 0 and reductions == [1 + MORE]


def test_the_ranks_of_a_process_group_agree_among_themselves(wrapper: Wrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    all_reduce = torch.distributed.all_reduce
    monkeypatch.setattr(
        torch.distributed,
        "all_reduce",
        lambda *given, group, **named: (asked.append(group), all_reduce(*given, **named)),
    )
    states, others, stray = fresh(2), fresh(1), torch.zeros(1, 6)
    UPDATE_SCALES(states[:1], [torch.ones(1)], "forward", KEY)
    monkeypatch.setattr(agreement.data_parallel, "active", lambda: None)
    agreement.remember(others)
    UPDATE_SCALES(others, [torch.ones(1)], "forward", KEY)  # another model's, of all ranks
    in_backward(lambda: UPDATE_SCALES(states[1:], [torch.ones(1)], "backward", KEY))
    assert asked == [wrapper.process_group, None] and [state[0, 2] for state in (*states, *others)] == [1, 1, 1]
    places = [agreement._lasting[state.data_ptr()].place for state in (*states, *others)]
    assert len(set(places[:2])) == 2
    UPDATE_SCALES([stray], [torch.ones(1)], "forward", KEY)  # which no graph was handed, and is updated at once
    assert asked[2:] == [None]


@pytest.mark.parametrize("of_the_other_rank", [(0, 1), (1, 0), (0,), (0, 2)])
def test_ranks_that_run_other_layers_are_told(
    of_the_other_rank: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(same_layers, "_told", False)
    states = fresh(2)
    in_backward(lambda: UPDATE_SCALES(states, [torch.ones(2)], "backward", KEY))
    begin = agreement._lasting[states[0].data_ptr()].place
    assert begin is not None
    other = torch.cat(same_layers.fingerprint([begin + each for each in of_the_other_rank], torch.device("cpu")))

    def agree(amaxes: Tensor, group: Any) -> None:
        amaxes[-MORE:] = torch.maximum(amaxes[-MORE:], other)

    monkeypatch.setattr(agreement, "agree", agree)
    for step in range(2):
        in_backward(lambda: UPDATE_SCALES(states, [torch.ones(2)], "backward", KEY))
        assert [state[0, 3 + step].item() for state in states] == [1.0, 1.0]
    assert caplog.messages == ([] if of_the_other_rank == (0, 1) else [same_layers.WARNING])


Blocks = Sequence[Callable[..., Tensor]]


def in_a_row(blocks: Blocks, x: Tensor) -> Tensor:
    return blocks[0](blocks[1](blocks[0](x)).tanh())


def around_a_reentrant_checkpoint(blocks: Blocks, x: Tensor) -> Tensor:
    """Which runs its forward pass once more within the backward pass, when the states have been used."""
    return blocks[0](checkpoint(blocks[0], blocks[1](x), use_reentrant=True))


@pytest.mark.parametrize("run", [in_a_row, around_a_reentrant_checkpoint])
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_training_has_the_states_that_it_has_without_waiting(
    compiler: str, run: Callable[[Blocks, Tensor], Tensor], reductions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two blocks that are compiled one by one, one of them run several times in each step."""

    def states(waits: bool) -> dict[str, Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
        if not waits:
            monkeypatch.setattr(agreement, "may_wait", lambda states, amaxes: False)
        fast = [compiled(block, compiler=compiler) for block in model]
        x = torch.randn(8, 32)
        for step in range(3):
            run(fast, (step + 1) * x).square().sum().backward()
        return state_dict(model)

    later = states(waits=True)
    several = len(reductions)
    at_once = states(waits=False)
    assert later.keys() == at_once.keys() and all(torch.equal(later[name], at_once[name]) for name in later)
    assert (several < len(reductions) - several) == (compiler == "inductor"), "copies of states are updated at once"
