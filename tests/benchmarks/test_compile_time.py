"""Compile time: what passes and kernels took is added up, and the ratio is judged where it means something."""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import compile_time, measure
from benchmarks.compile_time import KernelTimes, PassTimes
from tests.compiling import compiled

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def logged() -> Iterator[PassTimes]:
    times = PassTimes()
    logger = logging.getLogger("te_compile")
    level = logger.level
    logger.addHandler(times)
    logger.setLevel(logging.DEBUG)
    yield times
    logger.removeHandler(times)
    logger.setLevel(level)


def test_every_pass_of_both_graphs_is_counted(logged: PassTimes) -> None:
    """The handler reads the manager's lines: if their form changes, this fails."""
    model, x = torch.nn.Linear(32, 48), torch.randn(8, 32)
    compiled(torch.nn.Sequential(model, torch.nn.GELU()))(x).square().mean().backward()
    assert {"find_linears", "lower_linears", "fuse_producers", "choose_implementations"} <= logged.seconds.keys()
    assert all(seconds >= 0 for seconds in logged.seconds.values()) and sum(logged.seconds.values()) > 0


def test_kernels_found_in_the_cache_cost_nothing() -> None:
    times = KernelTimes()
    times(src=None, times=SimpleNamespace(total=2_000_000), cache_hit=False)
    times(src=None, times=SimpleNamespace(total=3_000_000), cache_hit=True)
    assert (times.seconds, times.kernels) == (2.0, 1)


def rows_for(monkeypatch: pytest.MonkeyPatch, path: Path, took: Any, *arguments: str) -> tuple[list[Any], int]:
    monkeypatch.setattr(compile_time, "in_a_fresh_process", took)
    status = compile_time.main(["--out", str(path), *arguments])
    return [json.loads(line) for line in path.read_text().splitlines()][1:], status


@pytest.mark.parametrize(("seconds", "status"), [(12.0, 0), (14.0, 1)])
def test_the_ratio_is_of_medians_and_judged_on_a_gpu(
    seconds: float, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(measure, "DEVICE", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(measure, "describe_device", lambda rows: rows.write(what="device"))
    draws = {"compile": iter([10.0, 9.0, 30.0]), "te_fp8": iter([seconds, 99.0, 1.0])}

    def took(name: str, variant: str, timeout: float) -> dict[str, Any]:
        return {"seconds": next(draws[variant]), "passes": {"fuse": 1.0, "lower": 0.5}}

    rows, found = rows_for(monkeypatch, tmp_path / "rows.jsonl", took, "--repeats", "3", "--passes")
    assert [row["seconds"] for row in rows] == [10.0, seconds]
    assert rows[1]["ratio"] == pytest.approx(seconds / 10) and rows[1]["passes"] == {"fuse": 1.0, "lower": 0.5}
    assert found == status


def test_a_process_that_dies_leaves_a_row_and_the_other_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def took(name: str, variant: str, timeout: float) -> dict[str, Any]:
        if variant == "compile":
            raise subprocess.TimeoutExpired("python", timeout)
        return {"seconds": 1.0, "passes": {}}

    rows, status = rows_for(monkeypatch, tmp_path / "rows.jsonl", took)
    assert "timed out" in rows[0]["error"] and rows[1]["seconds"] == 1.0 and "ratio" not in rows[1]
    assert status == 1


@pytest.mark.slow
def test_what_a_process_says_last_is_the_error() -> None:
    with pytest.raises(RuntimeError, match="KeyError"):
        compile_time.in_a_fresh_process("no such model", "te_fp8", 120)
