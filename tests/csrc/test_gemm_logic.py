"""The cuBLASLt product's own logic on a pretended GPU: operand order, epilogue pointers, plans, timing, capture.

``pretend/`` holds a CUDA runtime whose device memory is host memory and a cuBLASLt that computes in plain loops, so
what surrounds the library is tested on any machine with the CUDA headers. tests/gpu tests the real thing.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

CHECKS = [
    "numbers",
    "bias",
    "gelu",
    "bias_gradient",
    "accumulation",
    "addend",
    "timing",
    "cold",
    "capture",
    "lengths",
    "refusals",
    "prepared",
    "prepared_alignment",
    "prepared_otherwise",
    "prepared_threads",
]


@pytest.mark.parametrize("check", CHECKS)
def test_product_on_a_pretended_gpu_gets_right(program: Path, check: str) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(program.parent)}
    done = subprocess.run([program, check], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == "passed"
