"""LoRA adapters of the PEFT library around a frozen model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("peft", reason="adapters of the PEFT library")

import peft

from te_compile.passes import manager
from te_compile.passes.plan import Site
from tests.compiling import compiled, cosine
from tests.emulation import emulated
from tests.fuzz.emulation import Fp8Products, Scales, statuses_of
from tests.zoo.case import Case, Setting
from tests.zoo.examine import EMULATIONS, Step, step
from tests.zoo.models import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def adapted(rank: int, checkpointed: bool, **options: Any) -> Case:
    case = ARCHITECTURES["llama"].case(Setting())
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.1, target_modules="all-linear", init_lora_weights=False, **options
    )
    model = peft.get_peft_model(case.model, config)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return Case(model, case.inputs)


def textbook_step(case: Case, is_fp8: Callable[[str], bool], seed: int) -> Step:
    """The same step with textbook FP8 in the linears of these names."""
    yardstick = emulated(case.model, lambda name, module: is_fp8(name))
    return step(Case(yardstick, case.inputs), yardstick, True, seed)


def textbook_steps(case: Case, sites: list[Site], seed: int) -> list[Step]:
    """The same step with textbook FP8 where ``sites`` say so, each time on grids of its own."""
    found, statuses = [], statuses_of(sites, case.model)
    for number in range(EMULATIONS):
        mode = Fp8Products(case.model, statuses, Scales(random.Random(number) if number else None, delayed=False))

        def run(mode: Fp8Products = mode, **inputs: Any) -> Any:
            with mode:
                return case.model(**inputs)

        found.append(step(case, run, True, seed))
        assert mode.products, "nothing ran in FP8"
    return found


def assert_as_good(got: Step, textbook: list[Step], expected: Step) -> None:
    """What rounding costs differs from draw to draw, and hardly from textbook FP8 on the same grid. But a last bit may
    move numbers to the next code: by up to 0.025 for a matrix in one draw of 60, and by less for all together."""
    for name, each in expected.gradients.items():
        least = min(cosine(one.gradients[name], each) for one in textbook)
        assert cosine(got.gradients[name], each) > least - 0.05, name
    together = [torch.cat([g.flatten() for g in one.gradients.values()]) for one in (expected, got, *textbook)]
    ours, *theirs = (cosine(one, together[0]) for one in together[1:])
    assert ours > min(theirs) - 0.01


@pytest.mark.parametrize("checkpointed", [False, True])
def test_adapters_of_low_rank_stay_and_the_frozen_linears_run_in_fp8(checkpointed: bool, seed: int) -> None:
    case = adapted(8, checkpointed)
    expected = step(case, case.model, True, seed)
    with manager.recording() as records:
        fast = compiled(case.model)
        steps = [step(case, fast, True, seed) for _ in range(2)]
    sites = [site for record in records for site in record.plan.sites]
    assert {site.name.rpartition(".")[2] for site in sites if site.status == "fp8"} == {"base_layer"}
    assert all("too narrow" in site.reason for site in sites if ".lora_" in site.name)
    textbook = textbook_step(case, lambda name: "lm_head" not in name and "lora_" not in name, seed)
    for got in steps:
        assert abs(float(got.loss / expected.loss) - 1) < 0.02
        assert got.gradients.keys() == expected.gradients.keys()
        assert all("lora_" in name for name in got.gradients), "a frozen weight has a gradient"
        assert_as_good(got, [textbook], expected)


def test_adapters_that_are_wide_enough_run_in_fp8_too(seed: int) -> None:
    case = adapted(16, False)
    expected = step(case, case.model, True, seed)
    with manager.recording() as records:
        got = step(case, compiled(case.model), True, seed)
    (record,) = records
    kept = [site.name for site in record.plan.sites if site.status == "kept"]
    assert [name.rpartition(".")[2] for name in kept] == ["lm_head"]
    assert abs(float(got.loss / expected.loss) - 1) < 0.02
    # Two products in FP8 where there was one weight, and a rank of 16 averages little of the rounding away: the least
    # cosine of 40 draws was 0.885.
    assert_as_good(got, textbook_steps(case, record.plan.sites, seed), expected)


def test_adapters_that_are_called_for_a_norm_first_get_the_gradients_of_high_precision(seed: int) -> None:
    """DoRA's, which sees an identity matrix in that call, behind a graph break. The least cosine of 12 draws was
    0.935."""
    case = adapted(16, False, use_dora=True)
    expected, fast = step(case, case.model, True, seed), compiled(case.model)
    for _ in range(2):
        got = step(case, fast, True, seed)
        for part in ("lora_A", "lora_B", "magnitude"):
            names = [name for name in expected.gradients if part in name]
            mine, theirs = (torch.cat([each.gradients[name].flatten() for name in names]) for each in (got, expected))
            assert cosine(mine, theirs) > 0.88 and abs(float(mine.norm() / theirs.norm()) - 1) < 0.2, part


def test_what_was_frozen_is_as_it_was(seed: int) -> None:
    case = adapted(8, False)
    frozen = {name: p.detach().clone() for name, p in case.model.named_parameters() if not p.requires_grad}
    step(case, compiled(case.model), True, seed)
    after = dict(case.model.named_parameters())
    assert all(after[name].equal(value) and isinstance(after[name], nn.Parameter) for name, value in frozen.items())
