"""Unmodified models trained and evaluated in FP8: how close, how much of it, and what is untouched.

Fifteen architectures always, and of the whole zoo (``make zoo``) a sample that changes daily.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

pytest.importorskip("transformers", reason="the zoo is made of Hugging Face models")

from tests.compiling import compiled, cosine
from tests.conftest import ORDER_VARIABLE
from tests.zoo.case import Setting
from tests.zoo.examine import CLOSE, LEAST_COSINE, LOSS_TOLERANCE, SETTINGS, compared, examine, step
from tests.zoo.models import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FIFTEEN = (
    "llama", "gpt2", "bert", "t5", "vit", "mistral", "qwen2", "phi3", "gemma2", "opt", "roberta", "whisper", "siglip",
    "nano_gpt", "hand_rms_swiglu",
)  # fmt: skip
FAST = ("llama", "gpt2", "bert")
"""Run always; the others with the slow tests."""
EAGER_ONLY = ("gemma2",)
NO_LABELS = ("hand_rms_swiglu",)
SAMPLE = 16


def cells(setting: Setting, recipes: dict[str, tuple[str, ...]]) -> list[object]:
    """(architecture, setting, recipe), marked slow but for the fast ones."""
    eager = Setting(setting.train, "eager")
    return [
        pytest.param(
            name,
            eager if name in EAGER_ONLY else setting,
            recipe,
            marks=[] if name in FAST and recipe == "delayed" else [pytest.mark.slow],
            id=f"{name}-{recipe}",
        )
        for recipe, names in recipes.items()
        for name in names
    ]


def assert_good(architecture: str, setting: Setting, recipe: str) -> None:
    """Stricter than the zoo: no emulation excuses the loss, and the least of them bounds the cosine."""
    finding = examine(ARCHITECTURES[architecture], setting, recipe)
    assert finding.outcome == "ok", finding
    if setting.train or architecture in NO_LABELS:
        assert finding.loss_error <= LOSS_TOLERANCE, finding
    else:
        assert finding.labelled_loss_error is not None and finding.labelled_loss_error <= LOSS_TOLERANCE, finding
    textbook = 1.0 if finding.textbook is None else finding.textbook
    assert finding.cosine >= min(LEAST_COSINE, textbook - CLOSE), finding


@pytest.mark.parametrize(
    ("architecture", "setting", "recipe"),
    cells(Setting(), {"delayed": FIFTEEN, "current": ("llama", "gpt2", "bert", "t5", "vit", "nano_gpt")}),
)
def test_training_is_close_to_high_precision(architecture: str, setting: Setting, recipe: str) -> None:
    """The calibrated first step and, with delayed scaling, the one after it."""
    assert_good(architecture, setting, recipe)


@pytest.mark.parametrize(
    ("architecture", "setting", "recipe"),
    cells(Setting(train=False), {"delayed": FIFTEEN, "current": ("llama", "gpt2", "whisper")}),
)
def test_inference_is_close_to_high_precision(architecture: str, setting: Setting, recipe: str) -> None:
    """Without labels for its results, and with them for the loss."""
    assert_good(architecture, setting, recipe)


def _sample() -> list[tuple[str, Setting]]:
    everything = [(name, setting) for name in ARCHITECTURES for setting in SETTINGS]
    return random.Random(os.environ.get(ORDER_VARIABLE)).sample(everything, SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "setting"), _sample(), ids=str)
def test_todays_sample_of_the_zoo_is_well(architecture: str, setting: Setting) -> None:
    """Nothing may be wrong; what does not run without te_fp8 need not run."""
    finding = examine(ARCHITECTURES[architecture], setting)
    assert finding.outcome != "wrong", finding


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_inductor_trains_them_as_well(architecture: str, seed: int) -> None:
    """Beside torch.compile's own Inductor, whose dropout draws other numbers than eager mode's."""
    case = ARCHITECTURES[architecture].case(Setting())
    expected = step(case, torch.compile(case.model), True, seed)
    torch._dynamo.reset()
    got = step(case, compiled(case.model, compiler="inductor"), True, seed)
    assert abs(float(got.loss - expected.loss)) <= LOSS_TOLERANCE * abs(float(expected.loss))
    for name in compared(expected.gradients):
        assert cosine(got.gradients[name], expected.gradients[name]) >= LEAST_COSINE, name


@pytest.mark.slow
def test_bfloat16_models_train_too(seed: int) -> None:
    case = ARCHITECTURES["llama"].case(Setting())
    case.model.bfloat16()
    expected, got = (step(case, run, True, seed) for run in (case.model, compiled(case.model)))
    assert abs(float(got.loss - expected.loss)) <= LOSS_TOLERANCE * abs(float(expected.loss))
    for name in compared(expected.gradients):
        assert got.gradients[name].dtype == torch.bfloat16
        assert cosine(got.gradients[name], expected.gradients[name]) >= LEAST_COSINE, name
