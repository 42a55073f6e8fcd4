"""Copies of weights that no optimizer changes: larger weights in their place are not cut off for good."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_compile import backend
from te_compile.ops.weight_refresh import ReferenceRefresher
from tests.compiling import compiled

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Trained:
    """A frozen linear that took part in two steps of a training."""

    def __init__(self, device: str = "cpu") -> None:
        self.model = nn.Linear(32, 48).requires_grad_(False).to(device)
        self.x = torch.randn(16, 32, device=device, requires_grad=True)
        self.fast: Callable[[Tensor], Tensor] = compiled(self.model, cost_model=False)
        self.train(2)

    def train(self, steps: int) -> list[float]:
        """The output's relative error in each of some steps."""
        errors = []
        for _ in range(steps):
            y = self.fast(self.x)
            errors.append(self._error_of(y))
            y.square().mean().backward()
        return errors

    def evaluate(self) -> float:
        """The output's relative error without gradients."""
        with torch.no_grad():
            return self._error_of(self.fast(self.x))

    def load(self, factor: float) -> None:
        """Weights ``factor`` times as large."""
        self.model.load_state_dict({name: factor * entry for name, entry in self.model.state_dict().items()})

    def _error_of(self, y: Tensor) -> float:
        expected = self.model(self.x)
        return float((y - expected).norm() / expected.norm())


@pytest.fixture(params=[False, True], ids=["plain", "for CUDA graphs"])
def trained(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Trained:
    monkeypatch.setattr(backend, "captures_cuda_graphs", lambda options: request.param)
    return Trained()


def test_larger_frozen_weights_loaded_into_a_training_are_not_cut_off(trained: Trained) -> None:
    """By the scale of the weights before. Those that an optimizer steps get another one with the next step."""
    for factor in (20.0, 0.05, 30.0):
        trained.load(factor)
        assert max(trained.train(3)) < 0.1


def test_what_an_evaluation_cut_off_is_right_as_soon_as_a_step_of_training_knows_its_amax(trained: Trained) -> None:
    """Frozen weights that are loaded, evaluated, trained around, and evaluated again."""
    assert trained.evaluate() < 0.1
    trained.load(20.0)
    with pytest.warns(UserWarning, match="reaches 20 times as far as its FP8 scale"):
        assert trained.evaluate() > 0.5  # delayed scaling has not met them
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing is cut off any more
        trained.train(2)
        assert trained.evaluate() < 0.1


def test_larger_weights_written_behind_autograds_back_are_cut_off_nowhere(trained: Trained) -> None:
    """Only the device sees them change, and has the weights at hand."""
    assert trained.evaluate() < 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for factor in (30.0, 0.1, 40.0):
            trained.model.weight.data.mul_(factor)
            trained.model.bias.data.mul_(factor)
            assert trained.evaluate() < 0.1
            assert max(trained.train(2)) < 0.1


def test_a_refresh_that_was_interrupted_is_done_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have noted the change, and made nothing of it."""
    trained = Trained()
    trained.evaluate()
    forced: list[bool] = []
    refresh = ReferenceRefresher.__call__

    def interrupted(self: Any, weights: Any, amaxes: bool, missing: bool, force: bool = False) -> None:
        forced.append(force)
        if len(forced) == 1:
            raise KeyboardInterrupt
        refresh(self, weights, amaxes, missing, force)

    monkeypatch.setattr(ReferenceRefresher, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained.evaluate()
    for _ in range(2):
        trained.evaluate()
    assert forced == [False, True, False]


def test_weights_that_a_step_made_a_little_larger_are_no_other_weights() -> None:
    """An evaluation between two steps casts them by the scale of the last one, as any recipe with a history does."""
    trained = Trained()
    trained.load(1.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trained.evaluate()
