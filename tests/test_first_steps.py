"""Several calls in a first step: each is cast by what it holds, and from the second step on by what all of them did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_compile import first_steps, load_state_dict, reset_state, state
from te_compile.ops import agreement, calibration
from te_compile.ops.scaling import SCALE
from te_compile.state_files import state_dict
from tests.backend.models import L, Linear, Mlp, all_fp8
from tests.compiling import BACKEND, compiled, gradients, relative_error
from tests.emulation import emulated

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

GROWING = (1.0, 30.0, 4.0)  # how large the inputs of the calls of a step are


def views(scale: float = 1.0) -> list[Tensor]:
    return [scale * size * torch.randn(16, 32) for size in GROWING]


def step(model: nn.Module, run: Callable[[Tensor], Tensor], inputs: list[Tensor]) -> dict[str, Tensor]:
    """The gradients of several calls and one backward pass, in which each call counts as much as the others."""
    model.zero_grad(set_to_none=True)
    results = [run(x) / size for x, size in zip(inputs, GROWING, strict=True)]
    torch.stack([result.square().mean() for result in results]).sum().backward()
    return gradients(model)


def assert_as_good_as_the_textbook(model: nn.Module, got: dict[str, Tensor], inputs: list[Tensor]) -> None:
    expected = step(model, model, inputs)
    yardstick = emulated(model, all_fp8)
    textbook = step(yardstick, yardstick, inputs)
    for name, each in expected.items():
        error = relative_error(got[name], each)
        assert error < 2 * relative_error(textbook[name], each) + 0.02, name


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_calls_of_a_first_step_are_cut_off_by_none_before_them(compiler: str) -> None:
    model = Mlp()
    fast = compiled(model, compiler=compiler)
    for _ in range(3):
        inputs = views()
        assert_as_good_as_the_textbook(model, step(model, fast, inputs), inputs)
        assert not first_steps.is_on([state.existing_state(model.up.weight, L).forward_number])


def test_calls_of_one_rank_among_several_are_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The amaxes of the first call are agreed on before the second one, which leaves a scale."""
    monkeypatch.setattr(agreement, "are_several", lambda: True)
    monkeypatch.setattr(agreement, "agree", lambda amaxes, group: None)
    model = Mlp()
    fast = compiled(model)
    for _ in range(2):
        inputs = views()
        assert_as_good_as_the_textbook(model, step(model, fast, inputs), inputs)
    assert int((state.existing_state(model.up.weight, L).history[0] > 0).sum()) == 2 * len(GROWING)


def test_the_history_knows_each_call_and_the_scale_all_of_them() -> None:
    model = Mlp()
    inputs = views()
    step(model, compiled(model), inputs)
    held = state.existing_state(model.up.weight, L)
    amaxes = torch.stack([x.abs().max() for x in inputs])
    assert torch.equal(held.history[0, :3], amaxes.flip(0)) and not held.history[0, 3:].any()
    torch.testing.assert_close(held.scale[0], 448 / amaxes.max(), rtol=1e-6, atol=0)


class Looped(nn.Module):
    """One block that runs several times, on a stream that grows."""

    def __init__(self, around: Callable[..., Tensor]) -> None:
        super().__init__()
        self.block, self.around = Mlp(), around

    def forward(self, x: Tensor) -> Tensor:
        for size in GROWING:
            x = size * torch.tanh(self.around(self.block, x))
        return x


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def recomputed(block: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(block, x, use_reentrant=False)
    return result


@pytest.mark.parametrize("around", [plain, recomputed])
def test_a_block_that_is_compiled_by_itself_and_runs_several_times(around: Callable[..., Tensor]) -> None:
    model, x = Looped(around), torch.randn(16, 32)

    def one_step(model: nn.Module) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        return gradients(model)

    expected, textbook = one_step(model), one_step(emulated(model, all_fp8))
    model.block.compile(backend=BACKEND, options={"compiler": "aot_eager"})
    got = one_step(model)
    for name, each in expected.items():
        assert relative_error(got[name], each) < 2 * relative_error(textbook[name], each) + 0.02, name


def test_behind_the_first_backward_pass_calls_are_cast_by_the_history() -> None:
    """Of micro-batches the first alone is measured, as it is in a step of one."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    fast = compiled(model)
    small, large = torch.randn(16, 32), 100 * torch.randn(16, 32)
    fast(small).sum().backward()
    cut_off = fast(large)
    cut_off.sum().backward()
    assert float(cut_off.detach().abs().max()) < 0.2 * float(model(large).detach().abs().max())
    assert relative_error(fast(large).detach(), model(large).detach()) < 0.1


def test_a_call_that_tells_nothing_leaves_the_scale_that_there_is() -> None:
    """And so does one that fails."""
    model = Mlp()
    fast = compiled(model)
    x = torch.randn(16, 32)
    first = fast(x)
    held = state.existing_state(model.up.weight, L)
    scale = held.scale[0].clone()
    fast(torch.zeros(16, 32))
    assert scale > 0 and held.scale[0] == scale
    fast(torch.full((16, 32), torch.inf))
    assert held.scale[0] == scale and held.skipped[0] == 1
    with (
        pytest.raises(RuntimeError, match="no memory"),
        first_steps.counted_call([held.forward_number], [held.forward], []),
    ):
        assert held.scale[0] == 0
        raise RuntimeError("no memory")
    assert held.scale[0] == scale
    first.sum().backward()
    assert relative_error(fast(x).detach(), model(x).detach()) < 0.1


@pytest.mark.parametrize("nothing", [torch.zeros(16, 32), torch.full((16, 32), torch.inf), torch.zeros(0, 32)])
def test_a_step_that_tells_nothing_was_not_the_first(nothing: Tensor) -> None:
    """As of an expert without tokens, or of an overflow under a loss scaler."""
    model = Linear()
    fast = compiled(model)
    (0.0 * fast(nothing)).sum().backward()
    inputs = views()
    assert_as_good_as_the_textbook(model, step(model, fast, inputs), inputs)


def by_autograd_grad(loss: Tensor, parameters: list[Tensor]) -> None:
    torch.autograd.grad(loss, parameters)


def for_some_inputs(loss: Tensor, parameters: list[Tensor]) -> None:
    loss.backward(inputs=parameters)


@pytest.mark.usefixtures("nothing_waits")
@pytest.mark.parametrize("differentiate", [by_autograd_grad, for_some_inputs])
def test_a_backward_pass_for_some_tensors_ends_a_step_as_well(
    differentiate: Callable[[Tensor, list[Tensor]], None],
) -> None:
    model = Mlp()
    loss = compiled(model)(torch.randn(16, 32)).square().mean()
    number = state.existing_state(model.up.weight, L).forward_number
    assert first_steps.is_on([number]) and calibration.pending()
    differentiate(loss, list(model.parameters()))
    assert not first_steps.is_on([number]) and not calibration.pending()


def test_scales_that_were_loaded_are_used_from_the_first_call_on() -> None:
    model, twin = Mlp(), Mlp()
    inputs = views()
    step(model, compiled(model), inputs)
    twin.load_state_dict(model.state_dict())
    load_state_dict(twin, state_dict(model))
    held = state.existing_state(twin.up.weight, L)
    scale = held.scale[0].clone()
    fast = compiled(twin)
    small = [fast(x / 100) for x in inputs]
    assert held.scale[0] == scale and not first_steps.is_on([held.forward_number])
    assert small[0].requires_grad


def test_a_reset_begins_another_first_step() -> None:
    model = Mlp()
    fast = compiled(model)
    step(model, fast, views())
    reset_state(model)
    inputs = views(0.01)
    assert_as_good_as_the_textbook(model, step(model, fast, inputs), inputs)


def test_calls_without_gradients_neither_begin_nor_join_a_first_step() -> None:
    model = Mlp()
    fast = compiled(model)
    with torch.no_grad():
        fast(torch.randn(16, 32))
    held = state.existing_state(model.up.weight, L)
    assert not first_steps.is_on([held.forward_number])
    kept = fast(torch.randn(16, 32))
    before = held.forward.clone()
    with torch.no_grad():
        fast(100 * torch.randn(16, 32))
    assert torch.equal(held.forward, before) and first_steps.is_on([held.forward_number]) and kept.requires_grad


def test_forwards_without_a_backward_end_a_first_step_at_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_steps, "MOST_CALLS", 3)
    model = Mlp()
    fast = compiled(model)
    went_on = []
    for _ in range(5):
        fast(torch.randn(16, 32))
        went_on.append(first_steps.is_on([state.existing_state(model.up.weight, L).forward_number]))
    assert went_on == [True, True, False, False, False]
    fast(torch.randn(16, 32)).sum().backward()
    assert not first_steps._without_backward
    held = state.existing_state(model.up.weight, L)
    held.forward[0, SCALE] = 0
    with pytest.raises(RuntimeError, match="no memory"):
        for at in range(9):
            with first_steps.counted_call([held.forward_number], [held.forward], [held.forward_number]):
                if at == 2:
                    raise RuntimeError("no memory")
    assert not first_steps.is_on([held.forward_number]), "that was the last one of those that count"


def test_what_is_known_of_a_step_goes_with_its_state() -> None:
    model = Mlp()
    kept = compiled(model)(torch.randn(16, 32))
    number = state.existing_state(model.up.weight, L).forward_number
    assert kept.requires_grad and first_steps.is_on([number])
    reset_state(model)
    del kept
    assert not first_steps.is_on([number])


def test_a_history_that_is_shorter_than_what_is_counted_is_told(recwarn: pytest.WarningsRecorder) -> None:
    model = Mlp()
    fast = compiled(model, recipe="delayed amax_history_len=16")
    torch.stack([fast(torch.randn(16, 32)).mean() for _ in range(first_steps.MOST_CALLS + 5)]).sum().backward()
    (message,) = [str(each.message) for each in recwarn if "amax_history_len" in str(each.message)]
    assert f"called {first_steps.MOST_CALLS} times" in message


@pytest.mark.parametrize(
    "recipe", ["delayed amax_history_len=2", {"name": "delayed", "amax_compute_algo": "most_recent"}, "delayed"]
)
def test_a_history_that_is_shorter_than_a_step_is_told(recipe: Any, recwarn: pytest.WarningsRecorder) -> None:
    model = Mlp()
    step(model, compiled(model, recipe=recipe), views())
    told = [str(each.message) for each in recwarn if "amax_history_len" in str(each.message)]
    if recipe == "delayed":
        assert not told
    else:
        (message,) = told
        assert "called 3 times" in message and f"the last {2 if isinstance(recipe, str) else 1}." in message
