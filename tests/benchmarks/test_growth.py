"""Growth: every size leaves its rows, a run goes on where it stopped, and the crossover is where the line crosses."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import growth, layer, measure
from benchmarks.growth import Size
from benchmarks.growth_tables import crossover, document, plot, slower, speeds, table
from te_compile import backend
from te_compile.passes.plan import Cause

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def rows_of(times: dict[tuple[int, int], tuple[float, float, float]], **more: Any) -> list[dict[str, Any]]:
    """Rows of (hidden, tokens): the milliseconds of torch.compile, te_fp8 and te_fp8 without its cost model."""
    names = ("compile", "te_fp8", "te_fp8_forced")
    return [
        {"what": "growth", "hidden": hidden, "tokens": tokens, "name": name, "step_ms": milliseconds, **more}
        for (hidden, tokens), values in times.items()
        for name, milliseconds in zip(names, values, strict=True)
    ]


def test_a_size_is_a_layer_with_heads_of_128_and_sequences_of_up_to_2048() -> None:
    work = Size(4096, 32768).work()
    assert (work.hidden, work.intermediate, work.heads) == (4096, 16384, 32)
    assert (work.sequence, work.batch) == (2048, 16)
    assert (Size(1024, 1024).work().sequence, Size(1024, 1024).work().batch) == (1024, 1)


def test_shares_are_everything_once() -> None:
    sizes = [Size(hidden, tokens) for hidden in growth.HIDDEN for tokens in growth.TOKENS]
    shares = [growth.share_of(sizes, growth.VARIANTS, number, 7) for number in range(7)]
    everything = [each for share in shares for each in share]
    assert len(everything) == len(set(everything)) == 24 * 3
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.slow
def test_rows_are_written_and_a_second_run_measures_only_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "growth.jsonl"
    command = ["--compiler", "aot_eager", "--hidden", "64", "--out", str(out)]
    assert growth.main([*command, "--tokens", "16"]) == 0
    first = out.read_text()
    assert growth.main([*command, "--tokens", "16,32"]) == 0
    assert out.read_text().startswith(first)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    measured = [(row["tokens"], row["name"]) for row in rows if row["what"] == "growth"]
    assert measured == [(tokens, name) for tokens in (16, 32) for name in growth.VARIANTS]
    assert all(row["step_ms"] > row["fwd_nograd_ms"] > 0 for row in rows if row["what"] == "growth")
    by_name = {row["name"]: row for row in rows if row["what"] == "growth"}
    assert by_name["compile"]["fp8_linears"] == [0, 0] and by_name["te_fp8_forced"]["fp8_linears"] == [4, 4]
    assert by_name["te_fp8"]["same_as"] == "te_fp8_forced"
    assert out.with_suffix(".md").read_text() in capsys.readouterr().out


def test_linears_that_the_cost_model_keeps_are_timed_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no cost model on a CPU; a pretended one keeps a linear in training."""
    counts = {growth.DEFAULT: [3, 4], growth.FORCED: [4, 4], growth.BASELINE: [0, 0]}
    monkeypatch.setattr(growth, "in_fp8", lambda model, x: counts)
    rows = list(growth.measure_size(Size(64, 16), growth.VARIANTS, "aot_eager"))
    assert [row["name"] for row in rows] == list(growth.VARIANTS)
    assert not any("same_as" in row for row in rows)


def test_counting_linears_asks_the_cost_model_and_leaves_nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_too_many(plan: Any, options: Any) -> int:
        if options.cost_model and torch.is_grad_enabled():
            plan.sites[0].keep(Cause.RULE, "pretended")
        return len(plan.selected)

    monkeypatch.setattr(backend, "select_linears", one_too_many)
    work = Size(64, 16).work()
    x, _ = layer.data(work)
    found = growth.in_fp8(layer.plain(work), x)
    assert found == {growth.BASELINE: [0, 0], growth.DEFAULT: [3, 4], growth.FORCED: [4, 4]}


def test_the_forward_can_be_left_out() -> None:
    rows = list(growth.measure_size(Size(64, 16), growth.VARIANTS, "aot_eager", ["step_ms"]))
    assert all("step_ms" in row and "fwd_nograd_ms" not in row for row in rows)


@pytest.mark.parametrize(
    ("error", "field", "status"),
    [
        (torch.OutOfMemoryError("no"), "skipped", 0),
        (RuntimeError("CUDA out of memory"), "skipped", 0),
        (ValueError("x"), "error", 1),
    ],
)
def test_a_size_that_does_not_run_leaves_a_row_and_the_next_goes_on(
    error: Exception, field: str, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(growth, "measure_size", fail)
    rows = measure.Rows(tmp_path / "rows.jsonl")
    growth.attempt(Size(64, 16), growth.VARIANTS, "aot_eager", rows)
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert field in row and rows.exit_status() == status
    # What failed is tried again by the next run, what does not fit is not.
    assert growth.done(tmp_path / "rows.jsonl") == (set() if status else {Size(64, 16)})


@pytest.mark.slow
def test_what_other_processes_compiled_is_found(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    chosen = ["--hidden", "64", "--tokens", "16", "--variants", "compile", "--step-only"]
    arguments = growth.parsed(["--warm", "2", *chosen])
    growth.warm(arguments, cache)
    assert list(cache.rglob("*.py")) and not list(cache.rglob("*.best_config"))


# --- the tables ----------------------------------------------------------------------------------------------------


def test_speed_is_torch_compiles_time_over_ours() -> None:
    rows = rows_of({(1024, 2048): (3.0, 2.0, 1.5), (1024, 1024): (1.0, 1.0, 2.0)})
    assert speeds(rows, "te_fp8", "step_ms") == {1024: [(1024, 1.0), (2048, 1.5)]}
    assert speeds(rows, "te_fp8_forced", "step_ms") == {1024: [(1024, 0.5), (2048, 2.0)]}


def test_the_crossover_lies_where_a_line_through_both_points_passes_one() -> None:
    low = 2 ** random.randint(8, 12)
    at = random.uniform(0.2, 0.8)
    points = [(low, 1 - at), (2 * low, 2 - at)]  # rises by 1 over a doubling
    assert float(crossover(points)) == pytest.approx(low * 2**at, abs=1)


def test_a_line_that_never_crosses_says_on_which_side_it_is() -> None:
    assert crossover([(1024, 1.1), (2048, 1.5)]) == "below 1024"
    assert crossover([(1024, 0.5), (2048, 0.9)]) == "above 2048"
    assert crossover([]) == "–"


def test_a_line_that_crosses_twice_counts_from_where_it_stays_above() -> None:
    assert 2048 < float(crossover([(1024, 1.2), (2048, 0.9), (4096, 1.1)])) < 4096


def test_a_cell_has_the_time_and_both_speeds() -> None:
    text = table(rows_of({(1024, 1024): (2.0, 2.0, 4.0)}), "step_ms")
    assert "2.00 ms → 1.00× (0.50×)" in text
    same = rows_of({(1024, 1024): (2.0, 1.0, 1.0)})
    next(row for row in same if row["name"] == "te_fp8")["same_as"] = "te_fp8_forced"
    assert "2.00 ms → 2.00× |" in table(same, "step_ms")


def test_what_does_not_fit_and_what_failed_stand_in_the_table() -> None:
    rows = rows_of({(1024, 1024): (2.0, 1.0, 1.0)})
    rows += [{"what": "growth", "hidden": 8192, "tokens": 1024, "name": "all", "skipped": "does not fit"}]
    rows += [{"what": "growth", "hidden": 8192, "tokens": 2048, "name": "all", "error": "boom"}]
    text = document(rows)
    assert "does not fit |" in text and "failed |" in text and "2048 tokens: boom" in text


def test_breaking_the_promise_of_two_per_cent_is_said_loudly() -> None:
    kept, broken = rows_of({(1024, 1024): (0.985, 1.0, 1.0)}), rows_of({(1024, 1024): (0.975, 1.0, 1.0)})
    assert slower(kept) == [] and "No size is more than 2% slower" in document(kept)
    assert len(slower(broken)) == 1 and "0.975×" in document(broken)


def test_the_plot_is_drawn_where_there_is_something_to_draw(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = rows_of({(1024, tokens): (2.0, 1.0, math.sqrt(tokens)) for tokens in (1024, 2048)})
    assert plot(rows, tmp_path / "a.png") and (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert not plot([], tmp_path / "b.png")
