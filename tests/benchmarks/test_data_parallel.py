"""Training on several ranks: every way and variant gets a row, and what is not known ends the program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import data_parallel

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_ranks_leave_a_row_for_each_way_and_variant(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "rows.jsonl"
    chosen = ["--ranks", "2", "--ways", "ddp,fsdp", "--only", "compile,te_fp8", "--iters", "1", "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.data_parallel", *chosen]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stderr[-2000:]
    _, *rows = map(json.loads, out.read_text().splitlines())
    assert [(row["way"], row["name"]) for row in rows] == [
        (way, name) for way in ("ddp", "fsdp") for name in ("compile", "te_fp8")
    ]
    assert all(row["ranks"] == 2 and row["ms"] > 0 and row["start_s"] > 0 for row in rows)


@pytest.mark.slow
def test_variants_may_take_turns(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "rows.jsonl"
    chosen = ["--ways", "fsdp", "--only", "te_fp8,te_fp8_current", "--in-turns", "--iters", "4", "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.data_parallel", *chosen]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stderr[-2000:]
    _, *rows = map(json.loads, out.read_text().splitlines())
    assert [row["name"] for row in rows] == ["te_fp8", "te_fp8_current"] and all(row["ms"] > 0 for row in rows)


@pytest.mark.parametrize("option, names", [("--ways", "alone, ddp"), ("--only", "compile, te_fp8")])
def test_a_name_that_does_not_exist_ends_the_program(option: str, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["data_parallel", option, "nothing"])
    with pytest.raises(SystemExit, match=f"{option}: no 'nothing'; there are {names}"):
        data_parallel.main()
