"""The benchmark of experts' products runs where there is no GPU, and judges what it measures."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import experts
from te_compile.ops import registry

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it measures, which takes minutes")


def test_every_part_has_a_row_and_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert experts.main(["--only", "reference"]) == 0
    _, *rows = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(row["part"], row["name"]) for row in rows] == [(part, "reference") for part in experts.PARTS]
    assert all(row["ms"] > 0 and row["error"] < 0.01 for row in rows)


def test_a_wrong_product_fails_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (entry,) = (each for each in registry.implementations("grouped_gemm") if each.name == registry.REFERENCE)

    def doubled(*operands: Any) -> torch.Tensor:
        return 2 * entry.function(*operands)

    monkeypatch.setitem(registry._TABLE, ("grouped_gemm", registry.REFERENCE), replace(entry, function=doubled))
    assert experts.main(["--parts", "forward", "--only", "reference"]) == 1
    assert "from the reference" in capsys.readouterr().err
