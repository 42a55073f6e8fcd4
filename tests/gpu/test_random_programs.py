"""Random programs compute on a GPU, by kernels and Inductor, what they compute without te_fp8. Others each day.

``make fuzz ARGS="--device cuda --inductor 0.5"`` runs as many as there is time for.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.conftest import ORDER_VARIABLE
from tests.fuzz.campaign import Campaign
from tests.needs import FP8_GPU

pytestmark = [
    *FP8_GPU,
    pytest.mark.usefixtures("fresh_dynamo"),
]
BATCHES, PROGRAMS = 4, 8


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_programs_mean_the_same_in_fp8(batch: int) -> None:
    campaign = Campaign(inductor=0.5, device="cuda")
    dice = random.Random(f"{os.environ[ORDER_VARIABLE]} {batch}")
    campaign.run(dice.sample(range(2**31), PROGRAMS))
    assert not campaign.found, campaign.failures_text(shrunk=1)
    assert campaign.counts["right"] > PROGRAMS / 3, campaign.summary()
    assert campaign.linears["fp8"] > PROGRAMS / 3, campaign.summary()
