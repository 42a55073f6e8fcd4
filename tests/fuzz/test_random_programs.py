"""Random programs compute under te_fp8 what they compute without it, as far as FP8 can. Others each day.

A failure shows the seed of each program and the smallest program that still fails, as a test that can be kept in
test_found.py. ``python -m tests.fuzz --seed S --cases 1`` runs one program again.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.conftest import ORDER_VARIABLE
from tests.fuzz.campaign import Campaign

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BATCHES, PROGRAMS = 8, 25
ALWAYS = 3  # batches that run also where time is short


@pytest.mark.parametrize(
    "batch", [pytest.param(i, marks=[] if i < ALWAYS else [pytest.mark.slow]) for i in range(BATCHES)]
)
def test_random_programs_mean_the_same_in_fp8(batch: int) -> None:
    campaign = Campaign()
    dice = random.Random(f"{os.environ[ORDER_VARIABLE]} {batch}")
    campaign.run(dice.sample(range(2**31), PROGRAMS))
    assert not campaign.found, campaign.failures_text(shrunk=2)
    # Some programs are nonsense to eager PyTorch; if most were, nothing would be tested.
    assert campaign.counts["right"] > PROGRAMS / 2, campaign.summary()
    assert campaign.linears["fp8"] > PROGRAMS / 2, campaign.summary()
