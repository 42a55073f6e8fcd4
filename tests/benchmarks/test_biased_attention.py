"""The benchmark of attention with a bias runs where there is no GPU, and judges what it measures."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import biased_attention
from te_compile.ops import registry

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it measures, which takes minutes")


@pytest.mark.parametrize("own", ["0", "1"])
def test_both_kinds_of_call_have_rows_and_are_right(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert biased_attention.main(["--own", own, "--iters", "1"]) == 0
    _, *rows = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(row["what"], row["name"]) for row in rows] == [
        ("biased attention forward", "te_compile"), ("biased attention step", "te_compile"),
    ]  # fmt: skip
    assert all(row["ms"] > 0 and row["sqnr_db"] > 40 and row["own"] == bool(int(own)) for row in rows)


def test_another_bias_than_the_one_given_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = ("biased_attention_forward", registry.REFERENCE)
    right = registry._TABLE[key]

    def other(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *rest: Any) -> Any:
        return right.function(q, k, v, bias.roll(1, 2), *rest)

    monkeypatch.setitem(registry._TABLE, key, replace(right, function=other))
    assert biased_attention.main(["--iters", "1"]) == 1
    assert "dB, 45 needed" in capsys.readouterr().err
