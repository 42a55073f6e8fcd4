"""The demo's data and verdict: what makes its loss curves comparable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.demo import (
    BASELINE,
    GOAL,
    SMALL,
    Curve,
    batches,
    learning_rate,
    main,
    parsed,
    show_losses,
    standard_library_text,
)


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return standard_library_text(limit=1 << 16)


def test_text_is_python_source_and_the_same_each_time(text: torch.Tensor) -> None:
    assert text.dtype == torch.uint8
    assert len(text) == 1 << 16
    assert b"import" in bytes(text.tolist())
    assert torch.equal(text, standard_library_text(limit=1 << 16))


def test_limit_cuts_the_text_but_does_not_change_it(text: torch.Tensor) -> None:
    assert torch.equal(standard_library_text(limit=100), text[:100])


def test_every_variant_reads_the_same_batches(text: torch.Tensor) -> None:
    size = replace(SMALL, steps=5)
    first, second = list(batches(text, size)), list(batches(text, size))
    assert len(first) == 5
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_another_seed_reads_other_batches(text: torch.Tensor) -> None:
    size = replace(SMALL, steps=1)
    assert not torch.equal(next(batches(text, size, seed=0)), next(batches(text, size, seed=1)))


def test_batches_are_runs_of_the_text(text: torch.Tensor) -> None:
    size = replace(SMALL, steps=1, batch=3, sequence=16)
    batch = next(batches(text, size))
    assert batch.shape == (3, 16)
    assert batch.dtype == torch.int64
    windows = text.unfold(0, 16, 1).long()
    assert all((windows == row).all(dim=1).any() for row in batch)


def test_a_text_of_one_window_is_enough() -> None:
    size = replace(SMALL, steps=1, batch=2, sequence=8)
    text = torch.arange(8, dtype=torch.uint8)
    assert torch.equal(next(batches(text, size)), text.long().expand(2, 8))


def test_learning_rate_rises_to_its_peak_then_falls() -> None:
    size = replace(SMALL, steps=100)
    rates = [learning_rate(step, size) for step in range(100)]
    assert max(rates) == rates[9] == rates[10] == size.learning_rate
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] >= 0.1 * size.learning_rate


def test_final_loss_is_the_mean_of_the_last_tenth() -> None:
    losses = torch.rand(40).tolist()
    assert Curve(losses).final == pytest.approx(sum(losses[-4:]) / 4)


@pytest.mark.slow
def test_a_short_demo_ends_within_its_goal_and_leaves_curves_and_graphs(
    fresh_dynamo: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both models and both recipes, as `make demo` runs them, for a fifth of the steps."""
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    assert main(["--steps", "40", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert "every FP8 loss is within 1.5% of high precision" in capsys.readouterr().out
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    for name in ("GPT-2", "Llama"):
        graph = (tmp_path / f"{name}-graph.txt").read_text()
        assert graph.startswith("==== captured ====") and "te.fused_quantize" in graph


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["--models", "GPT-2,BERT"], "unknown 'BERT'; choose from GPT-2, Llama"),
        (["--steps", "0"], "--steps 0: must be 1 or more"),
        (["--device", "tpu"], "--device tpu: choose cuda, where there is one, or cpu"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_trains(
    given: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(given)
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("sign", [-1, 1])
def test_verdict_turns_at_the_goal(sign: int) -> None:
    baseline = Curve([2.0] * 20)
    inside, outside = (Curve([2.0 * (1 + sign * GOAL * factor)] * 20) for factor in (0.9, 1.1))
    assert show_losses("model", {BASELINE: baseline, "te_fp8": inside}, on_gpu=False)
    assert not show_losses("model", {BASELINE: baseline, "te_fp8": outside}, on_gpu=False)


def test_speed_is_shown_only_where_it_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    curves = {BASELINE: Curve([2.0] * 10, [0.2] * 10), "te_fp8": Curve([2.0] * 10, [0.1] * 10)}
    show_losses("model", curves, on_gpu=False)
    assert "speed" not in capsys.readouterr().out
    show_losses("model", curves, on_gpu=True)
    assert "2.00x" in capsys.readouterr().out
