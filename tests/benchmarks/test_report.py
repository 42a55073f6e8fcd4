"""The tables say what the rows say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report import main, markdown, tables, text_of

LAYER = {"what": "layer", "attn": "sdpa", "dtype": "bf16", "dropout": 0.0}


def test_speed_is_relative_to_torch_compile() -> None:
    rows = [{**LAYER, "name": "compile", "step_ms": 12.0}, {**LAYER, "name": "te_fp8", "step_ms": 8.0}]
    (group,) = tables(rows).values()
    assert [row["step_ms_speed"] for row in group] == [1.0, 1.5]


def test_without_torch_compile_no_speed_is_claimed() -> None:
    text = text_of([{**LAYER, "name": "te_fp8", "step_ms": 8.0}])
    assert "8.00" in text
    assert "speed" not in text


def test_rows_of_different_works_stand_in_different_tables() -> None:
    rows = [{"what": "model", "model": "m", "work": work, "name": "compile", "ms": 1.0} for work in ("train", "decode")]
    assert list(tables(rows)) == ["model, m, train", "model, m, decode"]


def test_a_missing_figure_is_a_dash_and_an_absent_column_is_left_out() -> None:
    text = markdown("t", [{"name": "a", "ms": 1.0, "cosine": 0.99}, {"name": "b", "ms": 2.0}])
    assert text.splitlines()[-1] == "| b | 2.00 | – |"
    assert "GiB" not in text


def test_failures_are_listed() -> None:
    rows = [
        {**LAYER, "name": "te_fp8", "error": "boom"},
        {**LAYER, "name": "te_fp8_current", "step_ms": 1.0, "wrong": "5 dB"},
    ]
    text = text_of(rows)
    assert "te_fp8: boom" in text
    assert "te_fp8_current: 5 dB" in text


def test_report_is_written_beside_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"what": "device", "name": "some GPU", "torch": "2"}, {**LAYER, "name": "compile", "step_ms": 12.0}]
    (tmp_path / "layer.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main([str(tmp_path)]) == 0
    assert (tmp_path / "report.md").read_text().strip() == capsys.readouterr().out.strip()
    assert "some GPU" in (tmp_path / "report.md").read_text()


def test_report_says_which_attention_the_baseline_had() -> None:
    row = {"what": "device", "name": "some GPU", "torch": "2", "cudnn": "9.20.1", "attention": "flash_attention"}
    assert "some GPU, torch 2, cuDNN 9.20.1, flash attention by default" in text_of([row])


def test_an_empty_folder_is_an_error_that_says_what_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "make bench" in capsys.readouterr().err


def test_kernels_and_growth_have_tables_of_their_own(tmp_path: Path) -> None:
    kernel = {"kernel": "quantize", "by": "te_compile", "shape": "8x8", "tile": "chosen", "bytes": 1024, "ms": 0.01}
    size = {"what": "growth", "hidden": 1024, "tokens": 2048}
    rows = [
        {"kernel": "copy", "by": "torch", "shape": "1 GiB", "tb_s": 4.2, "share": 1.0},
        {**kernel, "share": 0.9, "right": True},
        {**kernel, "kernel": "norm", "error": "boom"},
        *({**size, "name": name, "step_ms": 1.0} for name in ("compile", "te_fp8")),
    ]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main([str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "| quantize | 8x8 |" in text and "4.20 TB/s" in text and "norm, te_compile: boom" in text
    assert "| 2048 | 1.00 ms → 1.00× |" in text
    assert tables(rows) == {}


def test_compile_times_are_a_table_with_the_ratio() -> None:
    rows = [
        {"what": "compile_time", "model": "m", "name": "compile", "seconds": 10.0, "ratio": 1.0},
        {"what": "compile_time", "model": "m", "name": "te_fp8", "seconds": 12.0, "ratio": 1.2, "passes_share": 0.04},
    ]
    text = text_of(rows)
    assert "**compile_time, m**" in text and "| te_fp8 | 12.0 | 1.20 | 0.04 |" in text
