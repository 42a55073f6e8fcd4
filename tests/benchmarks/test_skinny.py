"""The benchmark of a decoding step's products runs where there is no GPU, and judges what it measures."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks import skinny

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it measures, which takes minutes")


def test_every_variant_has_a_row_and_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert skinny.main(["--rows", "1,8"]) == 0
    _, *rows = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(row["rows"], row["name"]) for row in rows] == [(n, name) for n in (1, 8) for name in skinny.VARIANTS]
    assert all(row["us"] > 0 and row["error"] < skinny.CLOSE for row in rows)


def test_a_wrong_product_fails_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = skinny.gemms_reference

    def doubled(*operands: Any) -> list[torch.Tensor]:
        return [2 * y for y in right(*operands)]

    monkeypatch.setattr(skinny, "gemms_reference", doubled)
    assert skinny.main(["--only", "joined", "--rows", "8"]) == 1
    assert "from the reference" in capsys.readouterr().err
