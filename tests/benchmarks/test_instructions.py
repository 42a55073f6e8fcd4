"""Counting instructions: what is counted is a kernel's own machine code, and activations stay as cheap as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks.instructions import DISASSEMBLER, Code

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not DISASSEMBLER.exists(), reason="this Triton brings no cuobjdump")


def counted(*arguments: str) -> dict[str, dict[str, Any]]:
    """Rows by kernel, from a process of its own: Triton's interpreter compiles nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.instructions", *arguments]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-2000:]
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    return {row["kernel"]: row for row in rows}


@pytest.mark.slow
def test_gelus_take_no_more_instructions_than_they_did() -> None:
    rows = counted("--only", "gelu")
    most = {"gelu": 25, "gelu_backward": 36, "exact_gelu": 36, "exact_gelu_backward": 45}
    assert set(rows) == set(most)
    for name, row in rows.items():
        assert 15 < row["an_element"] <= most[name] and row["spills"] < 16, row
        assert 2 < row["most"]["MUFU"] < 2.5, "an exponential and a reciprocal, and no second one"


@pytest.mark.slow
def test_registers_are_held_to_what_was_said() -> None:
    row = counted("--only", "exact_gelu_backward", "--registers", "48")["exact_gelu_backward"]
    assert row["registers"] <= 48 and row["spills"] > 0 and row["warps"] == 40


def test_warps_come_in_whole_programs() -> None:
    code = Code(Counter(FADD=2, STL=3, LDL=4), registers=72)
    assert code.spills == 7
    assert (code.warps(2), code.warps(8)) == (28, 24)
    assert Code(Counter(), registers=16).warps(4) == 64
