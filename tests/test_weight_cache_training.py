"""A training that reads kept FP8 copies of weights is the same to the bit as one that quantises them on each call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_compile import backend
from te_compile.state_files import state_dict
from tests.backend.models import Chain, Mlp
from tests.compiling import compiled, gradients, train_step
from tests.weight_changes import CHANGES, Launches, addresses_of_copies, backward, data, edit_in_place, step_of
from tests.weight_changes import launches as launches

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

RECIPES = pytest.mark.parametrize("recipe", ["delayed", "current"])


def trained(model: nn.Module, batches: list[Tensor], **options: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Five steps of Adam with an evaluation in between: all results, and the FP8 state."""
    torch._dynamo.reset()
    fast = compiled(model, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    results = []
    for batch in batches:
        y = fast(batch)
        backward(y)
        results += [y.detach(), *gradients(model).values()]
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            results += [fast(batch), fast(2 * batch)]
        model.train()
    return results, state_dict(model)


@RECIPES
def test_a_training_is_the_same_to_the_bit_with_and_without_cache(recipe: str) -> None:
    model = Mlp()
    other, batches = copy.deepcopy(model), [2.0**i * data() for i in range(5)]
    got, got_state = trained(model, batches, recipe=recipe)
    expected, expected_state = trained(other, batches, recipe=recipe, cache_weights=False)
    assert all(map(torch.equal, got, expected))
    assert got_state.keys() == expected_state.keys()
    assert all(torch.equal(got_state[name], entry) for name, entry in expected_state.items())


def test_two_forwards_before_two_backwards(launches: Launches) -> None:
    model, x, z = Chain(), data(), data()
    other = copy.deepcopy(model)
    for each, options in ((model, {}), (other, {"cache_weights": False})):
        torch._dynamo.reset()
        fast = compiled(each, recipe="current", **options)
        for _ in range(2):
            first, second = fast(x), fast(z)
            backward(first)
            backward(second)
    assert all(torch.equal(gradients(model)[name], gradient) for name, gradient in gradients(other).items())


def test_a_backward_reads_the_copies_of_its_own_forward() -> None:
    """Also where the weights have changed since, which eager mode refuses. Twice, so that copies are being kept."""
    model, x, z = Chain(), data(), data()
    fast = compiled(model, recipe="current")
    for change in (edit_in_place, edit_in_place, CHANGES["Adam, fused"]):
        model.zero_grad()
        backward(fast(x))
        expected = gradients(model)
        late = fast(x)
        change(model)
        model.zero_grad()
        fast(z)
        backward(late)
        assert all(torch.equal(gradients(model)[name], gradient) for name, gradient in expected.items())


def test_a_checkpointed_training_reads_the_copies_that_the_root_was_given() -> None:
    class Recomputed(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    model, batches = Recomputed(), [2.0**i * data() for i in range(4)]
    other = copy.deepcopy(model)
    got, _ = trained(model, batches)
    expected, _ = trained(other, batches, cache_weights=False)
    assert all(map(torch.equal, got, expected))


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Inductor captured CUDA graphs."""
    monkeypatch.setattr(backend, "captures_cuda_graphs", lambda options: True)


def edit_up(model: nn.Module) -> None:
    with torch.no_grad():
        model.up.weight.mul_(-1.5)


def edit_up_data(model: nn.Module) -> None:
    model.up.weight.data.add_(torch.randn_like(model.up.weight))


def new_up(model: nn.Module) -> None:
    model.up.weight.data = torch.randn_like(model.up.weight)


def test_for_cuda_graphs_copies_stay_where_they_are(
    in_place: None, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = addresses_of_copies(monkeypatch)
    model, x = Mlp(), data()
    other = copy.deepcopy(model)
    got, got_state = [], []
    for each, options in ((model, {}), (other, {"cache_weights": False})):
        torch._dynamo.reset()
        fast = compiled(each, **options)
        results = []
        for change in (edit_up, edit_up_data, lambda m: step_of(m, "SGD"), new_up):
            y, grads = train_step(each, fast, x)
            results += [y, *grads.values()]
            torch.manual_seed(7)
            change(each)
        got.append(results)
        got_state.append(state_dict(each))
    assert all(map(torch.equal, *got))
    assert all(torch.equal(got_state[0][name], entry) for name, entry in got_state[1].items())
    assert len(addresses) == 4 and all(each == addresses[0] for each in addresses)


def test_for_cuda_graphs_a_backward_that_comes_too_late_is_refused(in_place: None) -> None:
    model, x = Chain(), data()
    fast = compiled(model)
    late = fast(x)
    step_of(model, "SGD")
    fast(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(late)
