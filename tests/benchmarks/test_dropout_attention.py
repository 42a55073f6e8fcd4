"""The benchmark of attention with dropout runs where there is no GPU, and judges what it measures."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from benchmarks import dropout_attention

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it measures, which takes minutes"),
]


def test_every_variant_has_a_row_and_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert dropout_attention.main(["--iters", "1", "--shape", "1,4,64,32"]) == 0
    _, *rows = map(json.loads, capsys.readouterr().out.splitlines())
    assert [row["name"] for row in rows] == 4 * ["flash", "cudnn", "te_compile"]
    assert all(row["ms"] > 0 and 0.7 < row["noise_ratio"] < 1.4 for row in rows)


def test_another_probability_than_the_one_asked_for_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attend = dropout_attention.attend

    def drops_more(*inputs: Tensor, probability: float, causal: bool) -> Tensor:
        return attend(*inputs, probability=0.9, causal=causal)

    monkeypatch.setattr(dropout_attention, "attend", drops_more)
    assert dropout_attention.main(["--iters", "1", "--shape", "1,4,64,32", "--only", "te_compile"]) == 1
    assert "times the noise" in capsys.readouterr().err
