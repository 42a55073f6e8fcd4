"""The benchmark of gradients of tables of few rows runs where there is no GPU, and judges what it measures."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from benchmarks import few_rows

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it measures, which takes minutes"),
    pytest.mark.usefixtures("fresh_dynamo"),
]


@pytest.mark.parametrize("across", [[], ["--across"]])
def test_both_ways_have_rows_and_are_right(across: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert few_rows.main(["--iters", "1", *across]) == 0
    _, *rows = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(row["name"], row["across"]) for row in rows] == [(name, bool(across)) for name in few_rows.WAYS]
    assert all(row["us"] > 0 and row["off"] < few_rows.MOST_OFF for row in rows)


def test_a_wrong_sum_fails_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def shifted(dy: Tensor, ids: Tensor, rows: int) -> Tensor:
        return few_rows.product(dy, (ids + 1) % rows, rows)

    monkeypatch.setattr(few_rows, "WAYS", {"product": shifted})
    assert few_rows.main(["--iters", "1"]) == 1
    assert "of the largest sum" in capsys.readouterr().err
