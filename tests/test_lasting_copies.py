"""Copies of weights that no optimizer changes: larger weights in their place are not cut off for good."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from te_compile import backend
from tests.compiling import compiled

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Trained:
    """A frozen linear that took part in two steps of a training."""

    def __init__(self) -> None:
        self.model = nn.Linear(32, 48).requires_grad_(False)
        self.x = torch.randn(16, 32, requires_grad=True)
        self.fast: Callable[[Tensor], Tensor] = compiled(self.model)
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


def test_weights_that_a_step_made_a_little_larger_are_no_other_weights() -> None:
    """An evaluation between two steps casts them by the scale of the last one, as any recipe with a history does."""
    trained = Trained()
    trained.load(1.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trained.evaluate()
