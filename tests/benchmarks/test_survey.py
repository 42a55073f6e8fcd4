"""The survey: each work has its row, and what is slower, wrong or does not run is said."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks import measure, survey
from benchmarks.measure import DEVICE
from benchmarks.survey_works import WORKS

WORDS = {"compile": {"loss": 2.0}, "te_fp8": {"loss": 2.01, "fp8": "3 of 4"}}


class FakeWorker:
    """A process that takes so many milliseconds for a step and for a forward."""

    def __init__(self, step: float, forward: float) -> None:
        self.milliseconds = {"step": [step, 3 * step], "forward": [forward, 2 * forward]}

    def ask(self, question: Any, call: str) -> Any:
        if question is survey.kernels:
            return [measure.Kernel("a", 800.0, 2.0), measure.Kernel("b", 200.0, 1.0)]
        assert question is survey.peak_of
        return 1.5

    def median(self, call: str, count: int) -> float:
        turns = self.milliseconds[call]
        return turns.pop() if len(turns) > 1 else turns[0]


def row(
    capsys: pytest.CaptureFixture[str], times: dict[str, tuple[float, float]], words: dict[str, Any] = WORDS
) -> tuple[dict[str, Any], list[str]]:
    """The row that is written for such times, and what failed."""
    rows = measure.Rows()
    workers: Any = {variant: FakeWorker(*its) for variant, its in times.items()}
    survey.write_row("a work", workers, words, rows)
    return json.loads(capsys.readouterr().out), rows.failures


def test_a_row_has_the_best_of_each_and_their_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    found, failures = row(capsys, {"compile": (9.0, 4.0), "te_fp8": (6.0, 2.0)})
    assert found["step_compile_ms"] == 9 and found["step_te_fp8_ms"] == 6 and found["step_ratio"] == 1.5
    assert found["forward_ratio"] == 2 and found["te_fp8_gib"] == 1.5 and found["fp8"] == "3 of 4" and not failures
    assert found["step_compile_busy_ms"] == 1


def test_it_shows_the_kernels_that_take_longest(capsys: pytest.CaptureFixture[str]) -> None:
    workers: Any = {variant: FakeWorker(1.0, 1.0) for variant in survey.VARIANTS}
    survey.write_row("a work", workers, WORDS, measure.Rows(), longest=1)
    _, *shown = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(each["name"], each["kernel"], each["us"]) for each in shown] == [
        ("compile", "a", 800),
        ("te_fp8", "a", 800),
    ]


def test_what_is_slower_on_a_gpu_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"compile": (9.0, 4.0), "te_fp8": (9.1, 4.5)}
    monkeypatch.setattr(survey, "DEVICE", torch.device("cuda"))
    assert [each.split(" at ")[0] for each in row(capsys, slow)[1]] == ["a work: forward"]
    monkeypatch.setattr(survey, "DEVICE", torch.device("cpu"))
    assert row(capsys, slow)[1] == []


@pytest.mark.parametrize("loss", [2.1, float("nan")])
def test_a_loss_that_is_off_fails(capsys: pytest.CaptureFixture[str], loss: float) -> None:
    words = {**WORDS, "te_fp8": {"loss": loss, "fp8": "3 of 4"}}
    assert "loss" in row(capsys, {"compile": (9.0, 4.0), "te_fp8": (6.0, 2.0)}, words)[1][0]


def test_what_does_not_run_is_a_row_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = {**WORDS, "te_fp8": {"error": "no memory"}}
    found, failures = row(capsys, {"compile": (9.0, 4.0), "te_fp8": (6.0, 2.0)}, words)
    assert found["error"] == "te_fp8: no memory" and failures == ["a work: te_fp8: no memory"]


def test_batches_have_a_process_for_each_variant() -> None:
    names = list(WORKS)
    batches = list(survey.in_batches(names, 8))
    assert [name for batch in batches for name in batch] == names and max(map(len, batches)) == 4
    assert next(survey.in_batches(names, 1)) == names[:1]


def test_a_work_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        survey.parsed(["--only", "gpt5"])
    assert "no 'gpt5'; there are" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type != "cpu", reason="the models have their full sizes where there is a GPU")
def test_processes_of_a_work_compile_and_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert survey.main(["--only", "llama, autocast", "--compiler", "aot_eager", "--jobs", "2"]) == 0
    _, found = map(json.loads, capsys.readouterr().out.splitlines())
    assert found["step_ratio"] > 0 and found["forward_te_fp8_ms"] > 0 and found["fp8"] != "0 of 0"


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type != "cpu", reason="the models have their full sizes where there is a GPU")
def test_a_process_that_is_late_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert survey.main(["--only", "vit", "--compiler", "aot_eager", "--seconds", "0.1"]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "compile: not compiled in 0 s" in found["error"]


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type != "cpu", reason="the models have their full sizes where there is a GPU")
@pytest.mark.parametrize("name", WORKS)
def test_every_work_is_there(name: str) -> None:
    pytest.importorskip("transformers")
    work = WORKS[name]
    model, inputs = work.build(), work.inputs()
    with work.context()():
        assert model(**inputs).loss.isfinite()
