"""Attention rewritten or not, masks folded or not: without FP8 in the way every model computes what it did.

With no linear in FP8 what remains are the rewrites of attention and masks, so that the comparison is tight. The calls
are those that must keep a mask: padding, and several sequences in one row, told apart by their positions alone.
A sample that changes daily; every text model with TEST_WHOLE_ZOO=1.
"""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the zoo is made of Hugging Face models")

from tests.compiling import compiled, error_but_for_ties
from tests.conftest import ORDER_VARIABLE
from tests.zoo.case import LENGTH, Case, NotSupportedError, Setting
from tests.zoo.examine import first_tensor
from tests.zoo.models import ARCHITECTURES

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.slow]

TEXT = [name for name, each in ARCHITECTURES.items() if each.kind in ("decoder", "experts", "encoder")]
SAMPLE = 8
PADDING, PACKED = 7, 12  # tokens at the end of row 0 that are none; the first of two sequences in a row


def padded(case: Case) -> Tensor:
    """Hide the last tokens of row 0; returns which positions count."""
    mask = torch.ones_like(case.inputs["input_ids"])
    mask[0, -PADDING:] = 0
    case.inputs["attention_mask"] = mask
    return mask.bool()


def packed(case: Case) -> Tensor:
    """Two sequences a row, told by positions that begin anew."""
    if "position_ids" not in inspect.signature(case.model.forward).parameters:
        pytest.skip("its call takes no positions")
    positions = torch.cat([torch.arange(PACKED), torch.arange(LENGTH - PACKED)])
    case.inputs["position_ids"] = positions.expand_as(case.inputs["input_ids"]).contiguous()
    return torch.ones_like(case.inputs["input_ids"], dtype=torch.bool)


def _sample() -> list[tuple[str, str, Callable[[Case], Tensor]]]:
    everything = [
        (name, attention, call) for name in TEXT for attention in ("sdpa", "eager") for call in (padded, packed)
    ]
    chosen = random.Random(os.environ.get(ORDER_VARIABLE))
    return everything if os.environ.get("TEST_WHOLE_ZOO") else chosen.sample(everything, SAMPLE)


@pytest.mark.parametrize(("architecture", "attention", "masked"), _sample())
def test_a_call_with_a_mask_that_matters_computes_what_it_did(
    architecture: str, attention: str, masked: Callable[[Case], Tensor], seed: int
) -> None:
    try:
        case = ARCHITECTURES[architecture].case(Setting(attention=attention))
    except NotSupportedError as why:
        pytest.skip(str(why))
    case.inputs.pop("labels", None)
    counts = masked(case)

    def step(run: Any) -> tuple[Tensor, dict[str, Tensor]]:
        case.model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        shown = first_tensor(run(**case.inputs))
        shown = shown[counts] if shown.shape[:2] == counts.shape else shown
        torch.manual_seed(seed + 1)
        (shown * torch.randn_like(shown)).sum().backward()
        return shown.detach(), {n: p.grad.clone() for n, p in case.model.named_parameters() if p.grad is not None}

    try:
        expected, gradients = step(case.model)
    except (TypeError, ValueError, RuntimeError) as error:
        pytest.skip(f"eager mode fails: {error}")
    got, got_gradients = step(compiled(case.model, exclude=["*"]))
    assert error_but_for_ties(got, expected) < 1e-4
    size = max(float(each.norm()) for each in gradients.values())
    for name, each in gradients.items():
        assert float((got_gradients[name] - each).norm()) < 1e-4 * float(each.norm()) + 1e-6 * size, name
