"""On a GPU a compiled step's kernels come from Inductor's workers, and compute what they compute without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

ROOT = Path(__file__).parents[2]


def steps(seed: int, threads: int, caches: Path) -> dict[str, Any]:
    """Three steps in a fresh process with empty caches."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
        "TORCHINDUCTOR_CACHE_DIR": str(caches),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TE_COMPILE_GEMM_CANDIDATES": "1",  # every process takes the same algorithms
    }
    command = [sys.executable, "-m", "tests.programs.ahead_on_gpu", str(seed)]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_all_kernels_of_a_step_are_compiled_ahead_and_compute_the_same(seed: int, tmp_path: Path) -> None:
    alone, helped = steps(seed, 1, tmp_path / "alone"), steps(seed, 4, tmp_path / "helped")
    assert alone["ordered"] == alone["found"] == 0 and len(alone["by itself"]) > 10
    assert helped["by itself"] == [] and helped["missed"] == 0
    assert helped["found"] >= len(alone["by itself"])
    assert helped["losses"] == alone["losses"] and helped["sums"] == alone["sums"]
