"""The benchmark of attention under masks runs where there is no GPU, and judges what it measures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import masked_attention
from te_compile.ops import registry

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it measures, which takes minutes")


@pytest.mark.parametrize("mask", masked_attention.MASKS)
def test_both_kinds_of_call_have_rows_and_are_right(mask: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert masked_attention.main(["--mask", mask, "--iters", "1"]) == 0
    _, tiles, *rows = map(json.loads, capsys.readouterr().out.splitlines())
    assert tiles["what"] == "mask tiles" and tiles["ms"] > 0
    what = [(row["what"], row["name"]) for row in rows]
    assert what == [(f"masked attention {w}", n) for w in ("forward", "step") for n in ("pytorch", "te_compile")]
    assert all(row["ms"] > 0 and row["sqnr_db"] > 40 and row["mask"] == mask for row in rows)


def test_another_mask_than_the_one_asked_for_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = ("mask_tiles", registry.REFERENCE)
    right = registry._TABLE[key]
    monkeypatch.setitem(
        registry._TABLE, key, replace(right, function=lambda mask, both: right.function(mask.roll(1, 2), both))
    )
    assert masked_attention.main(["--iters", "1"]) == 1
    assert "dB, 45 needed" in capsys.readouterr().err
