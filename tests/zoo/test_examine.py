"""What the examination of a model sees, and the table that is made of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="the zoo is made of Hugging Face models")

from te_compile.ops import linear
from tests.zoo.case import Architecture, Case, NotSupportedError, Setting
from tests.zoo.examine import Finding, examine
from tests.zoo.models import ARCHITECTURES
from tests.zoo.table import page

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
GOOD = ARCHITECTURES["hand_rms_swiglu"]


def test_a_good_model_is_well_and_described() -> None:
    finding = examine(GOOD, Setting())
    assert (finding.outcome, finding.linears, finding.in_fp8, finding.share) == ("ok", 8, 8, 1.0)
    assert 0.97 < finding.cosine < 1 and 0 < finding.loss_error < 0.02 and finding.graphs == 1
    assert finding.rewrites["fuse_norm_quantize"] == 4


def _changed(change: Any) -> Any:
    original = linear._Linear.backward

    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        dx, dw, *others = original(ctx, *gradients)
        return change(dx, dw, others)

    return staticmethod(backward)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda dx, dw, others: (dx, 2 * dw, *others), "size of"),
        (lambda dx, dw, others: (dx, dw.flip(0), *others), "cosine of"),
        (lambda dx, dw, others: (dx, None, *others), "other parameters have gradients"),
    ],
)
def test_a_wrong_gradient_is_seen(change: Any, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear._Linear, "backward", _changed(change))
    finding = examine(GOOD, Setting())
    assert finding.outcome == "wrong" and any(each.startswith(complaint) for each in finding.complaints), finding


class _Refusing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("not today")


def test_what_fails_without_us_is_not_held_against_us() -> None:
    def refuse(_: Setting) -> Case:
        raise NotSupportedError("it has no such setting")

    refused = examine(Architecture("refusing", "torch", refuse), Setting())
    failing = Architecture("failing", "torch", lambda _: Case(_Refusing(), {"x": torch.zeros(2)}))
    assert (refused.outcome, refused.detail) == ("not run", "it has no such setting")
    assert (examine(failing, Setting()).detail) == "eager mode fails: RuntimeError: not today"


def test_the_table_shows_each_outcome_with_its_reason() -> None:
    def finding(name: str, setting: Setting, **more: Any) -> Finding:
        return Finding(name, "decoder", str(setting), **more)

    text = page(
        [
            finding("first", Setting(), linears=4, in_fp8=3, cosine=0.981, kept={"a head": 1}),
            finding("first", Setting(train=False), outcome="wrong", complaints=["loss off by 9%"], share=0.5),
            finding("second", Setting(), outcome="not run", detail="eager mode fails"),
        ]
    )
    assert "1 ok, 1 wrong, 1 not run" in text
    row = next(line for line in text.splitlines() if line.startswith("| first"))
    assert "| 3 of 4 | 50.0% | 0.981 | 0.00% |" in row and row.count("| ok |") == 1 and "| wrong |" in row
    assert "- first, inference, sdpa: loss off by 9%" in text
    assert "- a head: first" in text
    assert "- second (train, sdpa): eager mode fails" in text
