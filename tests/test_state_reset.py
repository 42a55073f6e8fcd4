"""``te_compile.reset_state``: the next step calibrates, and nobody reads what was before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import te_compile
from te_compile import state
from tests.compiling import compiled, relative_error, trained

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))


def batches(steps: int = 3) -> list[Tensor]:
    return [torch.randn(6, 32) for _ in range(steps)]


def test_a_training_goes_on_as_one_that_begins() -> None:
    model, data = perceptron(), batches()
    trained(model, batches())
    fresh = copy.deepcopy(model)  # weights without the state
    te_compile.reset_state(model)
    assert not te_compile.state_dict(model)
    assert all(map(torch.equal, trained(model, data), trained(fresh, data)))


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_of_another_training_are_not_cut_off_in_inference(frozen: bool) -> None:
    model, x = perceptron().requires_grad_(not frozen), torch.randn(6, 32, requires_grad=True)
    fast = compiled(model)
    for _ in range(2):
        fast(x).square().mean().backward()
    with torch.no_grad():
        fast(x)  # copies that last, by the scales of then
        for parameter in model.parameters():
            parameter.mul_(50)
        te_compile.reset_state(fast)
        assert relative_error(fast(x), model(x)) < 0.1


def test_a_backward_that_waits_has_the_scales_of_its_forward() -> None:
    model, x = perceptron(), torch.randn(6, 32)
    fast, dy = compiled(model), torch.randn(6, 32)
    fast(x).backward(dy)
    before = copy.deepcopy(te_compile.state_dict(model))
    model.zero_grad()
    fast(x).backward(dy)
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    te_compile.load_state_dict(model, before)
    model.zero_grad()
    y = fast(x)
    te_compile.reset_state(model)
    y.backward(dy)
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True) if p.grad is not None)
    assert not te_compile.state_dict(model)


def test_a_part_of_a_model_and_one_without_state_can_be_reset() -> None:
    model = perceptron()
    te_compile.reset_state(model)
    trained(model, batches(1))
    te_compile.reset_state(model[0])
    assert te_compile.state_dict(model).keys() == {"2.weight.forward", "2.weight.backward"}
    with pytest.raises(TypeError, match="expected a module"):
        te_compile.reset_state("model")  # type: ignore[arg-type]


def test_states_that_a_captured_graph_reads_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replays go on reading and writing there, whatever has become of the states."""
    monkeypatch.setattr(state, "_captured", [])
    model, x = perceptron(), torch.randn(6, 32)
    fast = compiled(model)
    fast(x).sum().backward()
    assert not state._captured
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with torch.no_grad():
        fast(x)
    (kept,) = state._captured
    read = [each.forward for weight in (model[0].weight, model[2].weight) for each in state.states_of(weight).values()]
    assert len(read) == 2 and all(one is other for one, other in zip(kept, read, strict=True))
