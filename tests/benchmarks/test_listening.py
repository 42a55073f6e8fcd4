"""The benchmark of the convolutions of models of speech runs where there is no GPU, and judges what it measures."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks import listening

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it measures, which takes minutes"),
    pytest.mark.usefixtures("fresh_dynamo"),
]


def test_each_way_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert listening.main([]) == 0
    _, *rows = map(json.loads, capsys.readouterr().out.splitlines())
    names = ("torch.compile", "by hand", "te_fp8")
    assert [(row["norm"], row["name"]) for row in rows] == [(norm, name) for norm in listening.NORMS for name in names]
    assert all(row["step_ms"] > 0 and row["forward_ms"] > 0 for row in rows)


def test_a_wrong_result_fails_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = listening.ways

    def shifted(norm: str, width: int) -> dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]]:
        made = right(norm, width)
        model, fast = made["te_fp8"]
        return {**made, "te_fp8": (model, lambda x: fast(x) * 1.1)}

    monkeypatch.setattr(listening, "ways", shifted)
    assert listening.main(["--only", "layer"]) == 1
    assert "layer: off by" in capsys.readouterr().err
