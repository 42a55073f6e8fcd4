"""The benchmark of convolutions with long kernels runs where there is no GPU, and judges what it measures."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from benchmarks import long_convolutions

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it measures, which takes minutes"),
    pytest.mark.usefixtures("fresh_dynamo"),
]


def test_both_ways_have_rows_for_each_direction(capsys: pytest.CaptureFixture[str]) -> None:
    assert long_convolutions.main(["--iters", "1"]) == 0
    _, *rows = map(json.loads, capsys.readouterr().out.splitlines())
    wanted = [(name, direction) for name in long_convolutions.WAYS for direction in ("forward", "dgrad", "wgrad")]
    assert [(row["name"], row["direction"]) for row in rows] == wanted
    assert all(row["us"] > 0 for row in rows)


def test_a_wrong_product_fails_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def shifted(dy: Tensor, x: Tensor, weight: Tensor, groups: int) -> dict[str, long_convolutions.Way]:
        return long_convolutions.directions_by_products(dy, x.roll(1, 2), weight, groups)

    monkeypatch.setattr(long_convolutions, "WAYS", {"products": shifted})
    assert long_convolutions.main(["--iters", "1"]) == 1
    assert "forward: off by" in capsys.readouterr().err
