"""State: one per parameter, alive as long as the parameter, waited for without stalling anyone."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from te_compile import state as module
from te_compile.ops.host_copies import HostCopy
from te_compile.state import ROLES, ParameterState, existing_state, overwrite, poll, skipped_counts, state_of
from te_compile.state_files import load_state_dict, state_dict
from tests.states import LENGTH, fill, poll_often, scales_are_missing, two_layers, used

pytestmark = pytest.mark.usefixtures("nothing_waits")

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# --- lookup --------------------------------------------------------------------------------------------------------


def test_a_new_state_has_seen_nothing() -> None:
    state = state_of(nn.Parameter(torch.rand(3, 4)), LENGTH)
    assert state.forward.shape == (2, 2 + LENGTH) and state.backward.shape == (1, 2 + LENGTH)
    assert state.forward.dtype == state.backward.dtype == torch.float32
    assert not state.forward.any() and not state.backward.any()


def test_a_parameter_has_one_state_for_each_history_length() -> None:
    parameter = nn.Parameter(torch.rand(3, 4))
    state = state_of(parameter, 5)
    assert existing_state(parameter, 7) is None
    other = state_of(parameter, 7)
    assert state_of(parameter, 5) is existing_state(parameter, 5) is state
    assert state_of(parameter, 7) is other is not state
    assert (state.history_length, other.history_length) == (5, 7)


def test_a_gradients_scale_follows_the_format_of_the_recipe() -> None:
    parameter = nn.Parameter(torch.rand(3, 4))
    state = state_of(parameter, LENGTH, training=True)
    fill(state)
    hybrid = state.backward
    before = hybrid.clone()
    assert state_of(parameter, LENGTH, gradient_max=448.0).backward is hybrid, "inference asks for no gradients"
    e4m3 = state_of(parameter, LENGTH, training=True, gradient_max=448.0).backward
    assert torch.equal(e4m3[:, 0], before[:, 0] / 128) and torch.equal(e4m3[:, 1:], before[:, 1:])
    assert torch.equal(state.backward_for(57344.0), before), "what is written to a file"
    assert state_of(parameter, LENGTH, training=True).backward is hybrid
    assert torch.equal(hybrid, before)


def test_a_format_that_no_backward_has_used_keeps_nothing() -> None:
    state = state_of(nn.Parameter(torch.rand(3, 4)), LENGTH)
    assert state.gradients.keys() == {57344.0}
    parameter = nn.Parameter(torch.rand(3, 4))
    state = state_of(parameter, LENGTH, training=True, gradient_max=448.0)
    assert state.gradients.keys() == {448.0}


def test_a_format_that_comes_back_in_a_capture_learns_nothing_for_each_replay_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it then has not learnt is not forgotten either: the next call outside knows it."""
    parameter = nn.Parameter(torch.rand(3, 4))
    for gradient_max in (57344.0, 448.0):
        state = state_of(parameter, LENGTH, training=True, gradient_max=gradient_max)
    state.gradients[448.0].tensor.fill_(2.0)
    monkeypatch.setattr(module, "_is_capturing", lambda: True)
    state_of(parameter, LENGTH, training=True, gradient_max=57344.0)
    assert not state.backward.any() and state.gradient_max == 57344.0
    assert state.backward_for(57344.0).tolist() == [[256.0] + [2.0] * (1 + LENGTH)]


def test_a_format_that_is_new_in_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.rand(3, 4))
    state = state_of(parameter, LENGTH, training=True)
    monkeypatch.setattr(module, "_is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"another fp8_format .* run one such step before"):
        state_of(parameter, LENGTH, training=True, gradient_max=448.0)
    assert state.gradient_max == 57344.0 and state.gradients.keys() == {57344.0}


def test_what_is_loaded_reaches_the_gradients_of_every_format() -> None:
    parameter = nn.Parameter(torch.rand(3, 4))
    for gradient_max in (57344.0, 448.0):
        state = state_of(parameter, LENGTH, training=True, gradient_max=gradient_max)
    tensors = {aim: each.tensor for aim, each in state.gradients.items()}
    forward, backward = torch.rand(2, 2 + LENGTH), torch.rand(1, 2 + LENGTH)
    overwrite(parameter, forward, backward)
    assert torch.equal(state.forward, forward) and torch.equal(tensors[57344.0], backward)
    assert torch.equal(tensors[448.0][:, 0], backward[:, 0] / 128)
    assert torch.equal(tensors[448.0][:, 1:], backward[:, 1:])


def test_equal_parameters_have_states_of_their_own() -> None:
    values = torch.rand(3, 4)
    one, other = nn.Parameter(values), nn.Parameter(values)
    assert state_of(one, LENGTH) is not state_of(other, LENGTH)


def test_the_roles_are_x_w_gradient_in_this_order() -> None:
    state = state_of(nn.Parameter(torch.rand(3, 4)), LENGTH)
    fill(state)
    rows = torch.cat([state.forward, state.backward])
    assert ROLES == ("x", "w", "gradient")
    assert torch.equal(state.scale, rows[:, 0])
    assert torch.equal(state.skipped, rows[:, 1])
    assert torch.equal(state.history, rows[:, 2:])


@needs_cuda
def test_a_state_follows_its_parameter_to_another_device() -> None:
    model = nn.Linear(3, 4)
    state = state_of(model.weight, LENGTH)
    fill(state)
    before = torch.cat([state.forward, state.backward])
    model.cuda()
    assert state_of(model.weight, LENGTH) is state
    assert state.forward.is_cuda and state.backward.is_cuda
    assert torch.equal(torch.cat([state.forward, state.backward]).cpu(), before)


def test_a_state_made_on_the_meta_device_starts_afresh_when_the_parameter_materialises() -> None:
    model = nn.Linear(3, 4, device="meta")
    parameter = model.weight
    state = state_of(parameter, LENGTH)
    module._move(state, torch.empty(4, 3))
    assert state.forward.device.type == state.backward.device.type == "cpu"
    assert not state.forward.any()


def test_a_fake_parameter_gets_a_fake_state_that_nobody_keeps() -> None:
    before = len(module._states)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.rand(3, 4))
        state = state_of(fake, LENGTH, training=True)
    assert state.forward.shape == (2, 2 + LENGTH) and state.forward.dtype == torch.float32
    assert len(module._states) == before and not scales_are_missing()


def test_a_state_made_in_inference_mode_can_be_trained() -> None:
    parameter = nn.Parameter(torch.rand(3, 4))
    with torch.inference_mode():
        state = state_of(parameter, LENGTH)
    state.forward.add_(1)
    assert not state.forward.is_inference() and not state.backward.is_inference()


def test_deleting_the_model_frees_its_state_and_stops_the_waiting() -> None:
    model = two_layers()
    states = [weakref.ref(state_of(layer.weight, LENGTH, training=True)) for layer in model]
    tensors = [weakref.ref(reference().forward) for reference in states]
    assert scales_are_missing()
    del model
    gc.collect()
    assert [each() for each in states + tensors] == [None] * 4
    assert not scales_are_missing() and not module._waiting


def test_a_parameter_at_the_address_of_a_dead_one_starts_afresh() -> None:
    addresses = set()
    for _ in range(100):
        parameter = nn.Parameter(torch.rand(1))
        addresses.add(id(parameter))
        state = state_of(parameter, LENGTH)
        assert not state.forward.any()
        fill(state)
    assert len(addresses) < 100, "no address was used twice, so nothing was tested"


# --- calibration ---------------------------------------------------------------------------------------------------


def test_inference_waits_for_the_forward_scales_only() -> None:
    state = state_of(nn.Parameter(torch.rand(3, 4)), LENGTH)
    assert scales_are_missing()
    poll_often()
    assert scales_are_missing(), "no scale has arrived"
    state.forward[0, 0] = 1
    poll_often()
    assert scales_are_missing(), "the weight still lacks a scale"
    state.forward[1, 0] = 1
    poll_often()
    assert not scales_are_missing()


def test_training_waits_for_the_gradients_scale_too() -> None:
    parameter = nn.Parameter(torch.rand(3, 4))
    state = state_of(parameter, LENGTH)
    state.forward[:, 0] = 1
    poll()
    assert not scales_are_missing()
    state_of(parameter, LENGTH, training=True)
    assert scales_are_missing()
    poll_often()
    assert scales_are_missing()
    state.backward[:, 0] = 1
    poll_often()
    assert not scales_are_missing()
    state_of(parameter, LENGTH, training=True)
    assert not scales_are_missing(), "a scale that is known stays known"


def test_a_model_is_calibrated_by_the_second_call_after_its_first_step() -> None:
    model = two_layers()
    poll()
    states = [state_of(layer.weight, LENGTH, training=True) for layer in model]
    for state in states:
        fill(state)
    poll()
    assert not scales_are_missing()


def test_two_threads_that_ask_for_a_fresh_state_at_once_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    both_looked = threading.Barrier(2)
    fresh = module._require_no_other_loaded

    def meet(*given: Any) -> None:
        both_looked.wait(timeout=60)  # behind the look at what there is, before anything is made
        fresh(*given)

    monkeypatch.setattr(module, "_require_no_other_loaded", meet)
    weight, found = nn.Parameter(torch.randn(16, 16)), list[ParameterState]()
    threads = [threading.Thread(target=lambda: found.append(state_of(weight, LENGTH))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1] is existing_state(weight, LENGTH)


def test_two_threads_that_meet_at_a_look_both_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(nn.Parameter(torch.rand(3, 4)), LENGTH)
    state.forward[:, 0] = 1
    number, scales, device = state.forward_number, torch.ones(2), torch.device("cuda", 7)

    class SeenByAnother(HostCopy):
        def arrived(self) -> bool:
            module._looks.pop(device, None)
            return True

    monkeypatch.setattr(module, "_calls_left", 9)
    monkeypatch.setitem(module._looks, device, module._Look([(number, 2)], SeenByAnother(scales, None)))
    poll()
    poll_often()
    assert not scales_are_missing()


def test_a_scale_that_never_comes_is_looked_for_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    state_of(nn.Parameter(torch.rand(3, 4)), LENGTH)
    parameter = nn.Parameter(torch.rand(3, 4))
    state = state_of(parameter, LENGTH)
    looks = []
    original = module._look_at
    monkeypatch.setattr(module, "_look_at", lambda *arguments: looks.append(arguments) or original(*arguments))
    for _ in range(1000):
        poll()
    assert 8 <= len(looks) <= 14
    assert state.forward.device.type == "cpu" and scales_are_missing()


def test_polling_touches_no_tensor_when_nothing_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.rand(3, 4))
    fill(state_of(parameter, LENGTH))
    poll()
    monkeypatch.setattr(module, "_look_at", lambda *_: pytest.fail("looked"))
    poll_often()


def test_polling_is_no_business_of_a_mode_around_the_call() -> None:
    """Of fake tensors in a dry run, or of one that counts operators."""
    state = state_of(nn.Parameter(torch.rand(3, 4)), LENGTH)
    with FakeTensorMode():
        poll()
    assert scales_are_missing()
    fill(state)
    with FakeTensorMode():
        poll_often()
    assert not scales_are_missing()


@needs_cuda
def test_the_scales_of_a_busy_device_are_awaited_without_stalling_it() -> None:
    state = state_of(nn.Parameter(torch.rand(3, 4, device="cuda")), LENGTH, training=True)
    poll()
    torch.cuda._sleep(2_000_000_000)  # about a second of device time
    fill_on_device(state)
    started = torch.cuda.Event()
    started.record()
    for _ in range(10):
        poll()
    assert not started.query(), "polling waited for the device"
    assert scales_are_missing()
    torch.cuda.synchronize()
    poll_often()
    assert not scales_are_missing()


def fill_on_device(state: ParameterState) -> None:
    """Scales written by kernels, without a copy that would wait."""
    state.forward.fill_(1)
    state.backward.fill_(1)


@needs_cuda
def test_polling_does_nothing_while_a_graph_is_captured() -> None:
    state = state_of(nn.Parameter(torch.rand(3, 4, device="cuda")), LENGTH)
    fill_on_device(state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state.forward.add_(0)
        poll_often()
    assert scales_are_missing()
    poll_often()
    torch.cuda.synchronize()
    poll_often()
    assert not scales_are_missing()


@needs_cuda
def test_a_loaded_state_wins_over_scales_that_were_on_their_way() -> None:
    model = nn.Linear(4, 4, device="cuda")
    state = state_of(model.weight, LENGTH)
    entries = state_dict(model)
    torch.cuda._sleep(500_000_000)
    fill_on_device(state)
    poll()
    load_state_dict(model, entries)
    torch.cuda.synchronize()
    poll_often()
    assert scales_are_missing(), "the loaded scales are zero"


# --- counts ---


def test_skipped_amaxes_are_counted_by_parameter_and_role() -> None:
    model = used(two_layers())
    counts = torch.randint(0, 99, (3,)).tolist()
    state = state_of(model[0].weight, LENGTH)
    state.forward[:, 1], state.backward[:, 1] = torch.tensor(counts[:2]), counts[2]
    state_of(model[1].weight, LENGTH).forward[:, 1] = 0
    state_of(model[1].weight, LENGTH).backward[:, 1] = 0
    assert skipped_counts(model) == {
        "0.weight": dict(zip(ROLES, counts, strict=True)),
        "1.weight": {"x": 0, "w": 0, "gradient": 0},
    }
