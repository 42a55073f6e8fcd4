"""Unmodified models on a GPU, compiled by Inductor, beside high precision: a few, and a sample that changes daily.

``make zoo ARGS="--device cuda --out runs/zoo-gpu.md"`` examines all of them.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

pytest.importorskip("transformers", reason="the zoo is made of Hugging Face models")

from tests.conftest import ORDER_VARIABLE
from tests.needs import FP8_GPU
from tests.zoo.case import Place, Setting
from tests.zoo.examine import SETTINGS, examine
from tests.zoo.models import ARCHITECTURES

pytestmark = [
    *FP8_GPU,
    pytest.mark.usefixtures("fresh_dynamo"),
]
SAMPLE = 6


def _sample() -> list[tuple[str, Setting]]:
    everything = [(name, setting) for name in ARCHITECTURES for setting in SETTINGS]
    return random.Random(os.environ.get(ORDER_VARIABLE)).sample(everything, SAMPLE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("train", [True, False], ids=["train", "inference"])
@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_known_models_are_well(architecture: str, train: bool, dtype: torch.dtype) -> None:
    finding = examine(ARCHITECTURES[architecture], Setting(train), place=Place("cuda", dtype))
    assert finding.outcome == "ok", finding


@pytest.mark.parametrize(("architecture", "setting"), _sample(), ids=str)
def test_todays_sample_of_the_zoo_is_well(architecture: str, setting: Setting) -> None:
    finding = examine(ARCHITECTURES[architecture], setting, place=Place("cuda", torch.bfloat16))
    assert finding.outcome != "wrong", finding
