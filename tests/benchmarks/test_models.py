"""What the rows of whole models are held against."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch

from benchmarks import models
from benchmarks.measure import DEVICE, Rows, Runnable, Variant, gradients
from benchmarks.models import Task
from te_compile.passes import manager
from tests.fuzz.emulation import statuses_of

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="the models have their full sizes where there is a GPU"),
]

MIXTURE = Task("mixtral", "train", "sdpa", torch.bfloat16)
EXPERTS = [f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]


def in_fp8(*include: str) -> Runnable:
    options = {"compiler": "aot_eager", "include": [*include]}
    return models.compiled(MIXTURE, backend="te_fp8", options=options)


def test_the_textbook_rounds_what_te_fp8_rounds_and_nothing_else() -> None:
    """The last experts alone: no token changes its expert by their rounding."""
    pytest.importorskip("transformers")
    runnable, inputs = in_fp8("*.1.mlp.experts.*"), MIXTURE.inputs()
    models.call_once(Runnable(runnable.model, runnable.model), inputs, training=True)
    reference = gradients(runnable.model)
    with manager.recording() as records:
        models.call_once(runnable, inputs, training=True)
    found = models.cosines_to(reference, runnable.model)
    statuses = statuses_of([site for record in records for site in record.plan.sites], runnable.model)
    textbook = models.textbook_cosines(runnable.model, inputs, reference, statuses)
    assert sorted(name for name, each in statuses.items() if any(each)) == sorted(EXPERTS)
    assert all(abs(found[name] - textbook[name]) < 2e-3 for name in found)
    # One that left them alone would have 1 here, and one that rounded all linears something else everywhere.
    assert all(0.99 < textbook[name] < 0.998 for name in EXPERTS)


def test_a_row_asks_the_textbook_where_a_cosine_is_low(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(models, "COSINE", 1.1)
    row = models.check(in_fp8("*.1.mlp.experts.*"), MIXTURE.inputs(), training=True)
    assert row["cosine"] < 1 and row["textbook_cosine"] < 1 and "wrong" not in row


def test_logits_are_held_against_the_textbook_where_they_are_far_off(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(models, "LOGITS_DB", 100.0)
    task = Task("llama8b", "prefill", "sdpa", torch.bfloat16)
    inputs = task.inputs()
    row = models.check(models.compiled(task, backend="te_fp8", options={"compiler": "aot_eager"}), inputs, False)
    assert abs(row["logits_db"] - row["textbook_db"]) < 1 and "wrong" not in row
    model = task.build()
    expected = models.call_once(Runnable(model, model), inputs, False)
    noisy = expected + expected.std() * torch.randn_like(expected)
    statuses = {"model.layers.0.mlp.up_proj": [True]}
    assert "textbook FP8" in models.check_logits(model, inputs, expected, noisy, statuses)["wrong"]
    with pytest.raises(LookupError, match="1 products in FP8, and te_fp8 2"):
        models.check_logits(model, inputs, expected, noisy, {"model.layers.0.mlp.up_proj": [True], "no": [True]})


def test_all_are_built_before_one_is_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    task, built = Task("gpt2xl", "prefill", "sdpa", torch.bfloat16), []

    def eager(name: str) -> Variant:
        def build() -> Runnable:
            built.append(name)
            model = task.build()
            return Runnable(model, model)

        return Variant(name, build)

    def fails() -> NoReturn:
        raise RuntimeError("does not build")

    monkeypatch.setattr(models.measure, "in_turns", lambda calls, most: dict.fromkeys(calls, float(len(built))))
    rows = Rows()
    models.in_turns(task, [eager("one"), eager("other")], {"what": "model"}, rows, 2)
    assert built == ["one", "other"] and rows.exit_status() == 0
    shown = capsys.readouterr().out.splitlines()
    assert ['"name": "one", "ms": 2.0' in shown[0], '"name": "other", "ms": 2.0' in shown[1]] == [True, True]
    models.in_turns(task, [eager("one"), Variant("bad", fails)], {"what": "model"}, rows, 2)
    assert "does not build" in capsys.readouterr().out and rows.exit_status() == 1
