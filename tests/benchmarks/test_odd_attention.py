"""The benchmark runs here too, on a tiny shape, and fails where results are wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import Tensor

from benchmarks import odd_attention

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize(("form", "bias", "dropout"), [
    ("widened", "lookup", 0), ("flat", "none", 0), ("spelled", "fixed", 0.1), ("flat", "none", 0.1),
])  # fmt: skip
def test_it_runs(form: str, bias: str, dropout: float, capfd: pytest.CaptureFixture[str]) -> None:
    work = ["--form", form, "--bias", bias, "--shape", f"2,{1 if form == 'flat' else 2},24,12"]
    assert odd_attention.main([*work, "--dropout", str(dropout)]) == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith('{"what": "odd')]
    assert [row["name"] for row in rows] == ["compile", "te_fp8"] and all(row["train_us"] > 0 for row in rows)
    assert all((row["sqnr_db"] is None) == (dropout > 0) for row in rows)
    assert rows[1]["way"] == ("sdpa" if form == "flat" else "recognised")


def test_wrong_results_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(work: odd_attention.Work, right: list[Tensor], options: Any, calls: int) -> dict[str, Any]:
        return {"train_us": 1.0, "sqnr_db": 50.0 if options is None else 38.0, "way": "sdpa"}

    monkeypatch.setattr(odd_attention, "measured", measured)
    assert odd_attention.main([]) == 1
    monkeypatch.setattr(odd_attention, "_LEAST_DB", 37.0)
    assert odd_attention.main([]) == 0
