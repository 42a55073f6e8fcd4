"""The benchmark of attention in a window runs where there is no GPU, and judges what it measures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import window_attention
from te_compile.ops import registry
from te_compile.ops.window_attention import window_attention_reference

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it measures, which takes minutes")


def test_both_passes_have_a_row_and_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert window_attention.main([]) == 0
    _, *rows = map(json.loads, capsys.readouterr().out.splitlines())
    assert [row["what"] for row in rows] == ["window attention forward", "window attention backward"]
    assert all(row["ms"] > 0 and row["sqnr_db"] > 45 and row["window"] == "7,0" for row in rows)


def test_another_window_than_the_one_asked_for_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sees_more(q, k, v, left, right, scale):  # type: ignore[no-untyped-def]
        return window_attention_reference(q, k, v, left + 1, right, scale)

    key = ("window_attention_forward", registry.REFERENCE)
    monkeypatch.setitem(registry._TABLE, key, replace(registry._TABLE[key], function=sees_more))
    assert window_attention.main([]) == 1
    assert "dB, 45 needed" in capsys.readouterr().err
