"""The benchmark runs here too, on a tiny shape, and fails where results are wrong."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from benchmarks import odd_attention

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize(("form", "bias"), [("spelled", "fixed"), ("widened", "lookup"), ("flat", "none")])
def test_it_runs(form: str, bias: str, capfd: pytest.CaptureFixture[str]) -> None:
    heads = 1 if form == "flat" else 2
    assert odd_attention.main(["--form", form, "--bias", bias, "--shape", f"2,{heads},24,12"]) == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith('{"what": "odd')]
    assert [row["name"] for row in rows] == ["compile", "te_fp8"] and all(row["train_us"] > 0 for row in rows)
    assert rows[1]["way"] == ("sdpa" if form == "flat" else "recognised")


def test_wrong_results_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(work: odd_attention.Work) -> list[Tensor]:
        return [torch.zeros_like(x[: odd_attention._CHECKED].float()) + 1 for x in (work.grad, work.qkv)]

    monkeypatch.setattr(odd_attention.Work, "right_results", wrong)
    monkeypatch.setattr(odd_attention, "_MARGIN_DB", -1000.0)
    assert odd_attention.main([]) == 1
