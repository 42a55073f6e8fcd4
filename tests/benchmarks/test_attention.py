"""The benchmark of attention runs where there is no GPU, and judges what it measures."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import attention

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it measures, which takes minutes"),
]


def test_every_variant_has_a_row_and_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.main(["--iters", "1", "--shape", "1,4,32,64", "--shared", "2"]) == 0
    _, *rows = map(json.loads, capsys.readouterr().out.splitlines())
    forward, step = ["flash", "cudnn", "te_fp8", "te_fp8 kernel"], ["flash", "cudnn", "te_fp8"]
    assert [row["name"] for row in rows] == 2 * [*forward, *step]
    assert all(row["ms"] > 0 and row["sqnr_db"] >= attention.LEAST_DB[row["what"].split()[1]] for row in rows)
    assert {row["sqnr_db"] < 40 for row in rows if row["name"].startswith("te_fp8")} == {True}


def test_a_result_that_is_wrong_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(attention.LEAST_DB, "forward", 60.0)
    assert attention.main(["--iters", "1", "--only", "te_fp8"]) == 1
    assert "60 needed" in capsys.readouterr().err
