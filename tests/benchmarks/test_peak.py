"""The estimate of peaks without a GPU: what it tells apart, and that nothing runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import peak
from benchmarks.layer import Work

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
ROOT = Path(__file__).parents[2]
WORK = Work(hidden=256, intermediate=1024, heads=4, sequence=512, batch=4)


def rows(*variants: str) -> list[dict[str, float]]:
    return [peak.estimated(variant, *peak.layer(WORK)) for variant in variants]


def test_each_option_lowers_the_estimate() -> None:
    cached, uncached, lean = rows("te_fp8", "te_fp8_uncached", "te_fp8_save_memory")
    assert lean["peak_gib"] < uncached["peak_gib"] < cached["peak_gib"]
    assert lean["saved_gib"] < uncached["saved_gib"]


def test_the_copies_of_weights_and_what_waits_are_counted() -> None:
    """Scales and row statistics are small beside it."""
    cached, uncached, lean = rows("te_fp8", "te_fp8_uncached", "te_fp8_save_memory")
    weights = 12 * WORK.hidden**2
    assert (cached["forward_gib"] - uncached["forward_gib"]) * peak.GIB == pytest.approx(2 * weights, rel=0.6)
    tokens, codes = WORK.batch * WORK.sequence, 3 * WORK.hidden + WORK.intermediate
    assert (uncached["saved_gib"] - lean["saved_gib"]) * peak.GIB == pytest.approx(tokens * codes, rel=0.01)


@pytest.mark.slow
def test_checkpointing_keeps_the_inputs_of_layers_and_little_else() -> None:
    """And as little as with torch.compile."""
    pytest.importorskip("transformers")
    every, inputs = (
        peak.estimated("te_fp8_uncached", *peak.whole("llama8b", 4, checkpointed)) for checkpointed in (False, True)
    )
    plain = peak.estimated("compile", *peak.whole("llama8b", 4, checkpointed=True))
    assert inputs["saved_gib"] < 0.3 * every["saved_gib"]
    assert inputs["peak_gib"] < plain["peak_gib"] < every["peak_gib"]


def test_torch_compile_is_estimated_as_well_and_nothing_is_left_behind() -> None:
    (row,) = rows("compile")
    assert 0 < row["saved_gib"] < row["peak_gib"]
    layer = torch.nn.Sequential(torch.nn.Linear(16, 16))
    assert torch.compile(layer, backend="eager")(torch.ones(2, 16)).shape == (2, 16)


def test_the_command_runs_without_a_gpu_where_kernels_are_not_interpreted() -> None:
    """Kernels that plan for the device's limits ask for a GPU's there."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.peak", "--hidden", "256", "--sequence", "128", "--only", "te_fp8"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-2000:]
    (row,) = map(json.loads, run.stdout.splitlines())
    assert row["name"] == "te_fp8" and 0 < row["saved_gib"] < row["peak_gib"]


def test_a_variant_that_does_not_exist_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["peak", "--only", "te_fp9"])
    with pytest.raises(SystemExit, match="no 'te_fp9'; there are compile, te_fp8"):
        peak.main()
