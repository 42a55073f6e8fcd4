"""``python -m te_compile``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from te_compile.__main__ import main
from te_compile.inspect.from_config import Request, example_call, explain_config
from te_compile.inspect.report import Report

TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64,
}  # fmt: skip
LLAMA = {**TINY, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2}
VIT = {**TINY, "model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 8, "patch_size": 4}


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    """Each test has Dynamo to itself."""


def written(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command line that is refused says."""
    with pytest.raises(SystemExit) as stopped:
        main([str(each) for each in arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_a_configuration_becomes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    directory = written(tmp_path, {**LLAMA, "hidden_size": 8192, "intermediate_size": 32768, "vocab_size": 128000})
    assert main(["explain", str(directory), "--batch", "3", "--seq", "16", "--out", str(out)]) == 0
    report = Report.from_json(out.read_text())
    rows = {row.name: row for row in report.rows}
    assert report.model == "LlamaForCausalLM" and report.training
    assert rows["model.layers.0.mlp.up_proj"].shape == (48, 8192, 32768)
    assert rows["model.layers.0.mlp.up_proj"].status == "fp8" and rows["lm_head"].status == "kept"
    assert "7 of 8 linears in FP8" in capsys.readouterr().out


def test_options_recipe_and_inference_are_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, LLAMA) / "config.json"
    given = (
        "--inference",
        "--recipe",
        "current",
        "--option",
        "lm_head=true",
        "--option",
        "exclude=*.mlp",
        "--seq",
        "16",
    )
    assert main(["explain", str(file), *given]) == 0
    text = capsys.readouterr().out
    assert "inference, 1 graph; recipe current" in text
    assert "5 of 8 linears in FP8" in text and "exclude pattern '*.mlp'" in text


def test_a_model_of_images_gets_images() -> None:
    config = transformers.ViTConfig(**{k: v for k, v in VIT.items() if k not in ("model_type", "architectures")})
    model = transformers.ViTForImageClassification(config)
    call = example_call(model, config, Request(Path(), batch=3))
    assert {name: tuple(value.shape) for name, value in call.items() if isinstance(value, torch.Tensor)} == {
        "pixel_values": (3, 3, 8, 8), "labels": (3,),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("BertForTokenClassification", {"input_ids": (2, 8), "labels": (2, 8)}),
        ("BertForSequenceClassification", {"input_ids": (2, 8), "labels": (2,)}),
        ("BertForQuestionAnswering", {"input_ids": (2, 8), "start_positions": (2,), "end_positions": (2,)}),
        ("BertForMaskedLM", {"input_ids": (2, 8), "labels": (2, 8)}),
        ("BertModel", {"input_ids": (2, 8)}),
    ],
)
def test_each_head_gets_its_labels(kind: str, expected: dict[str, tuple[int, ...]]) -> None:
    config = transformers.BertConfig(**TINY)
    call = example_call(getattr(transformers, kind)(config), config, Request(Path(), seq=8))
    assert {name: tuple(value.shape) for name, value in call.items() if isinstance(value, torch.Tensor)} == expected


def test_a_task_chooses_the_head(tmp_path: Path) -> None:
    request = Request(written(tmp_path, VIT), task="base", batch=1, train=False)
    report = explain_config(request, {})
    assert report.model == "ViTModel" and not report.training and report.totals["fp8"] >= 6


def test_errors_name_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = written(tmp_path, {**LLAMA, "architectures": ["NoSuchModel"]})
    assert "found none" in refused(capsys, "explain", tmp_path / "nowhere")
    assert "NoSuchModel" in refused(capsys, "explain", directory)
    assert "image-classification" in refused(capsys, "explain", directory, "--task", "image-classification")
    assert "'delaied'" in refused(capsys, "explain", directory, "--recipe", "delaied")
    assert "strickt" in refused(capsys, "explain", directory, "--option", "strickt=true")
    assert "NAME=VALUE" in refused(capsys, "explain", directory, "--option", "strict")
    assert ".html, .json, .txt" in refused(capsys, "explain", directory, "--out", "report.pdf")
    assert "no directory" in refused(capsys, "explain", directory, "--out", tmp_path / "nowhere" / "report.html")
    assert "whole number above 0" in refused(capsys, "explain", directory, "--batch", "0")
    uneven = {**TINY, "model_type": "bert", "architectures": ["BertModel"], "hidden_size": 33}
    assert "cannot build this model: ValueError: " in refused(capsys, "explain", written(tmp_path, uneven))
    (tmp_path / "config.json").write_text("{")
    assert "cannot read this configuration" in refused(capsys, "explain", directory)


@pytest.mark.parametrize("device", ["tpu", "xpu", "cuda:first", "meta"])
def test_a_device_that_te_fp8_does_not_run_on_is_an_error(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "choose cuda, one of several" in refused(capsys, "explain", written(tmp_path, LLAMA), "--device", device)


def test_a_device_beyond_the_last_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "last is cuda:1" in refused(capsys, "explain", written(tmp_path, LLAMA), "--device", "cuda:2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no CUDA device" in refused(capsys, "explain", written(tmp_path, LLAMA), "--device", "cuda")


def test_the_environment_says_versions_and_what_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__.split("+")[0] in text and transformers.__version__ in text
    for expected in ("python ", "C++ core", "2 of 2 linears in FP8", "te::gemm"):
        assert expected in text
