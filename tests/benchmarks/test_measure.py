"""What judges te_fp8's numbers in the benchmarks must itself be right."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks import measure
from benchmarks.measure import Rows, Runnable, Variant, attempt, chosen, chosen_of_each, cosine, sqnr, telling


def a_variant(name: str, ours: bool = False) -> Variant:
    model = torch.nn.Identity()
    return Variant(name, lambda: Runnable(model, model), ours)


def test_sqnr_is_twenty_decibels_for_an_error_of_a_tenth() -> None:
    x = torch.randn(100)
    assert sqnr(x, 1.1 * x) == pytest.approx(20, abs=1e-3)


def test_equal_tensors_have_infinite_sqnr() -> None:
    x = torch.randn(10)
    assert sqnr(x, x.clone()) == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_passes_no_threshold(bad: float) -> None:
    x = torch.randn(10)
    wrong = x.clone()
    wrong[3] = bad
    assert not sqnr(x, wrong) >= 20


def test_cosine_ignores_length_and_sees_direction() -> None:
    x = torch.randn(3, 4)
    assert cosine(x, 2 * x) == pytest.approx(1)
    assert cosine(x, -x) == pytest.approx(-1)


def test_gradients_that_are_only_rounding_noise_are_not_judged() -> None:
    gradients = {"w1": torch.randn(4, 4), "w2": torch.randn(4, 4), "noise": 1e-6 * torch.randn(4), "b": torch.randn(4)}
    assert telling(gradients) == ["w1", "w2", "b"]
    assert telling(gradients, matrices_only=True) == ["w1", "w2"]


def test_only_picks_variants_and_refuses_unknown_names() -> None:
    variants = [a_variant("a"), a_variant("b")]
    assert [each.name for each in chosen(variants, "")] == ["a", "b"]
    assert [each.name for each in chosen(variants, "b")] == ["b"]
    with pytest.raises(SystemExit, match=r"no variant c; there are a, b"):
        chosen(variants, "a,c")


def test_of_several_works_each_has_those_of_the_named_variants_that_it_knows() -> None:
    works = [[a_variant("a"), a_variant("b")], [a_variant("b"), a_variant("c")]]
    assert [[each.name for each in one] for one in chosen_of_each(works, "a,b")] == [["a", "b"], ["b"]]
    with pytest.raises(SystemExit, match=r"no variant d; there are a, b, c"):
        chosen_of_each(works, "a,d")


def test_rows_are_json_lines_on_screen_and_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    rows = Rows(path)
    rows.write(name="a", ms=1.23456)
    rows.write(name="b")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"name": "a", "ms": 1.235},
        {"name": "b"},
    ]
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize(("ours", "status"), [(True, 1), (False, 0)])
def test_a_crash_becomes_a_row_and_only_ours_fails_the_run(ours: bool, status: int) -> None:
    rows = Rows()

    def crash(variant: Variant) -> dict[str, float]:
        raise RuntimeError(variant.name)

    attempt(a_variant("a", ours), rows, {"what": "layer"}, crash)
    assert rows.exit_status() == status


def test_a_wrong_result_fails_the_run() -> None:
    rows = Rows()
    attempt(a_variant("a", ours=True), rows, {"what": "layer"}, lambda _: {"ms": 1.0, "wrong": "5 dB"})
    assert rows.exit_status() == 1


def test_turns_are_taken_and_the_best_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    times = {"a": iter([4.0, 2.0, 3.0, 5.0]), "b": iter([1.0, 7.0, 7.0, 7.0])}

    def median(call: Callable[[], str], iterations: int, warmup: int) -> float:
        name = call()
        order.append(f"{name}{iterations}")
        return next(times[name])

    monkeypatch.setattr(measure, "median_ms", median)
    monkeypatch.setattr(measure, "ROUND_MS", 8)
    monkeypatch.setattr(measure, "ROUNDS_SECONDS", 0.0)
    found = measure.in_turns({"a": lambda: "a", "b": lambda: "b"}, most=5)
    assert found == {"a": 2.0, "b": 1.0}
    assert order == ["a2", "b2", "a2", "b5", "a4", "b2", "a2", "b2"]


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, measure.ROUNDS), (3600.0, measure.MOST_ROUNDS)])
def test_what_is_soon_done_takes_more_turns(seconds: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(measure, "median_ms", lambda call, iterations, warmup: taken.append(call()) or 1.0)
    monkeypatch.setattr(measure, "ROUNDS_SECONDS", seconds)
    measure.in_turns({"a": lambda: "a", "b": lambda: "b"})
    assert taken == ["a", "b"] * rounds


@pytest.mark.parametrize(("version", "said"), [((), {}), ((9, 10, 2), {"cudnn": "9.10.2"})], ids=str)
def test_a_run_says_which_cudnn_and_which_attention_it_had(
    version: tuple[int, ...], said: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "cudnn_version", lambda: version)
    measure.describe_device(Rows())
    row = json.loads(capsys.readouterr().out)
    said |= {"attention": measure.default_attention()} if version else {}
    assert {name: row[name] for name in ("cudnn", "attention") if name in row} == said
    assert measure.default_attention() in {name.lower() for name in SDPBackend.__members__}


def makers_of_rows() -> list[str]:
    texts = {file.stem: file.read_text(encoding="utf-8") for file in Path(measure.__file__).parent.glob("*.py")}
    return sorted(name for name, text in texts.items() if "Rows(" in text and "def main(" in text)


@pytest.mark.parametrize("name", makers_of_rows())
def test_whatever_makes_rows_can_write_them_to_a_file(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0 and "--out" in capsys.readouterr().out
