"""What the examination of a model sees, and the table that is made of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("transformers", reason="the zoo is made of Hugging Face models")

from te_compile.ops import linear
from te_compile.passes import manager
from tests.backend.models import Mlp
from tests.compiling import BACKEND, compiled
from tests.fuzz.emulation import statuses_of
from tests.zoo.case import Architecture, Case, NotSupportedError, Place, Setting
from tests.zoo.examine import Finding, Step, _Examination, examine
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
        (lambda dx, dw, others: (dx, dw * torch.nan, *others), "not finite"),
    ],
)
def test_a_wrong_gradient_is_seen(change: Any, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear._Linear, "backward", _changed(change))
    finding = examine(GOOD, Setting())
    assert finding.outcome == "wrong" and any(each.startswith(complaint) for each in finding.complaints), finding


def test_a_wrong_gradient_is_seen_where_the_textbooks_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is nothing is not compared as a rule, but where ours is odd it has to be."""
    emulated = _Examination._emulated

    def without_gradients(self: _Examination, *given: Any) -> Step:
        textbook = emulated(self, *given)
        return replace(textbook, gradients={name: 0 * each for name, each in textbook.gradients.items()})

    monkeypatch.setattr(linear._Linear, "backward", _changed(lambda dx, dw, others: (dx, dw.flip(0), *others)))
    monkeypatch.setattr(_Examination, "_emulated", without_gradients)
    finding = examine(GOOD, Setting())
    assert finding.outcome == "wrong" and any(each.startswith("cosine of") for each in finding.complaints), finding


class _Refusing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("not today")


def test_other_gradients_are_seen_where_only_te_fp8_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are held against torch.compile's, which may fail where te_fp8 does not."""
    monkeypatch.setattr(linear._Linear, "backward", _changed(lambda dx, dw, others: (dx, None, *others)))
    original = torch.compile

    def without_us_it_fails(model: nn.Module, backend: Any, **options: Any) -> Any:
        return original(model if backend == BACKEND else _Refusing(), backend=backend, **options)

    monkeypatch.setattr(torch, "compile", without_us_it_fails)
    finding = examine(GOOD, Setting())
    assert finding.outcome == "wrong" and any("other parameters" in each for each in finding.complaints), finding


def test_a_parameter_that_is_written_to_is_seen() -> None:
    def write(bias: Tensor) -> None:
        bias.data.mul_(1.0001)

    def build(_: Setting) -> Case:
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        model[1].bias.register_post_accumulate_grad_hook(write)
        return Case(model, {"input": torch.randn(8, 32)})

    finding = examine(Architecture("written", "torch", build), Setting())
    assert finding.complaints == ["parameters have other values, and nobody took a step: ['1.bias']"], finding


class _Classifier(nn.Module):
    """Its loss is ``change`` times what it should be where it is compiled."""

    def __init__(self, change: float) -> None:
        super().__init__()
        self.up, self.head, self.change = nn.Linear(32, 64), nn.Linear(64, 32), change

    def forward(self, x: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        y = self.head(F.gelu(self.up(x)))
        if labels is None:
            return y, None
        return y, F.cross_entropy(y, labels) * (self.change if torch.compiler.is_compiling() else 1.0)


@pytest.mark.parametrize(("change", "outcome"), [(1.0, "ok"), (1.1, "wrong")])
def test_in_inference_the_loss_with_labels_is_compared_too(change: float, outcome: str) -> None:
    def build(setting: Setting) -> Case:
        labels = {"labels": torch.randint(0, 32, (8,))} if setting.train else {}
        return Case(_Classifier(change), {"x": torch.randn(8, 32), **labels})

    finding = examine(Architecture("classifier", "torch", build), Setting(train=False))
    assert finding.outcome == outcome and finding.linears == 2, finding
    assert finding.labelled_loss_error == pytest.approx(change - 1, abs=0.02)
    assert outcome == "ok" or finding.complaints[0].startswith("loss with labels off by"), finding


class _Certain(_Classifier):
    """It knows every label, and rounds that elsewhere where it is compiled."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        y, loss = super().forward(x, labels)
        return y, None if loss is None else 0 * loss + (4e-7 if torch.compiler.is_compiling() else 0.0)


def test_a_loss_of_next_to_nothing_is_all_rounding() -> None:
    def build(setting: Setting) -> Case:
        labels = {"labels": torch.randint(0, 32, (8,))} if setting.train else {}
        return Case(_Certain(1.0), {"x": torch.randn(8, 32), **labels})

    assert examine(Architecture("certain", "torch", build), Setting(train=False)).outcome == "ok"


def test_a_model_without_labels_has_no_loss_of_its_own() -> None:
    assert examine(GOOD, Setting(train=False)).labelled_loss_error is None


class _Broken(nn.Module):
    """Layers with graph breaks between, of which later ones run the code of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x)
        return x


def test_the_textbook_rounds_layers_that_share_code_too() -> None:
    model = _Broken()
    with manager.recording() as records:
        compiled(model)(torch.randn(8, 32)).sum().backward()
    sites = [site for record in records for site in record.plan.sites]
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert len(sites) < len(linears)
    assert statuses_of(sites, model) == {name: [True] for name in linears}


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
            finding(
                "first",
                Setting(False),
                outcome="wrong",
                complaints=["loss off by 9%"],
                share=0.5,
                loss_error=0.5,
                labelled_loss_error=0.09,
            ),
            finding("second", Setting(), outcome="not run", detail="eager mode fails"),
        ]
    )
    assert "1 ok, 1 wrong, 1 not run" in text
    row = next(line for line in text.splitlines() if line.startswith("| first"))
    assert "| 3 of 4 | 50.0% | 0.981 | 9.00% |" in row and row.count("| ok |") == 1 and "| wrong |" in row
    assert "- first, inference, sdpa: loss off by 9%" in text
    assert "- a head: first" in text
    assert "- second (train, sdpa): eager mode fails" in text


def test_a_model_can_be_examined_in_another_precision() -> None:
    finding = examine(GOOD, Setting(), place=Place("cpu", torch.bfloat16))
    assert (finding.outcome, finding.in_fp8) == ("ok", 8), finding


def test_on_a_gpu_nothing_is_dropped() -> None:
    """Neither by modules nor by attention, which reads its probability from a configuration."""
    bert = ARCHITECTURES["bert"].case(Setting())
    assert bert.model.config.attention_probs_dropout_prob > 0
    there = bert.at(Place("meta", torch.bfloat16))
    assert there.model.config.attention_probs_dropout_prob == there.model.config.hidden_dropout_prob == 0
    assert all(each.p == 0 for each in there.model.modules() if isinstance(each, nn.Dropout))
    assert there.inputs["input_ids"].dtype == torch.int64 and there.model.dtype == torch.bfloat16
    assert all(each.device.type == "meta" for each in there.inputs.values())


def test_the_table_says_where_it_was_made() -> None:
    findings = [Finding("first", "decoder", str(Setting()))]
    assert "on\na CPU, where" in page(findings) and "Dropout is on" in page(findings)
    on_gpu = page(findings, Place("cuda", torch.bfloat16))
    assert "on\na GPU, in bfloat16, where" in on_gpu and "Dropout is off" in on_gpu
