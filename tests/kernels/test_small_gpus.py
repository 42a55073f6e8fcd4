"""Every kernel compiles for GPUs of 99 KiB of shared memory a block, Ada and desktop Blackwell, and fits into it.

No GPU is needed, and Triton's interpreter compiles nothing, so a process of its own does it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from te_compile.ops import registry
from te_compile.ops.registry import Target
from tests.ops.test_triton_implementations import ARGUMENTS

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "te_compile" / "kernels"
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
SHARED_MEMORY = 99 << 10
SMALL = [(8, 9), (12, 0)]
WRITTEN = {"measure", "produce", "alone"}  # by kernels/pointwise_source.py
ON_HOPPER_ALONE = ("dropout_attention.py", "dropout_attention_backward.py", "dropout_bits.py", "mask_tiles.py")

compiles = pytest.mark.skipif(not PTXAS.exists(), reason="this Triton brings no ptxas")


def taken_on(capability: tuple[int, int], *families: str) -> list[tuple[str, dict[str, str], int]]:
    """Of each kernel its name, its constants and its bytes of shared memory."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.programs.small_gpu", *map(str, capability), *families]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [(name, constants, shared) for name, constants, shared in json.loads(ran.stdout.splitlines()[-1])]


def kernels() -> set[str]:
    """The names of all that are launched."""
    texts = [file.read_text(encoding="utf-8") for file in KERNELS.glob("*.py") if file.name not in ON_HOPPER_ALONE]
    return {name for text in texts for name in re.findall(r"^def (_\w+_kernel)\(", text, re.MULTILINE)} | WRITTEN


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("capability", SMALL, ids=["ada", "desktop blackwell"])
def test_every_kernel_fits_a_small_gpu(capability: tuple[int, int]) -> None:
    taken = taken_on(capability)
    assert {name for name, _, _ in taken} >= kernels() - {"_snapshot_kernel"}  # which asks for addresses
    assert [each for each in taken if each[2] > SHARED_MEMORY] == []


@compiles
def test_attention_in_fp8_compiles_for_every_width_of_heads() -> None:
    assert {int(constants["WIDTH"]) for _, constants, _ in taken_on((8, 9), "attentions")} == {16, 64, 128}


@pytest.mark.parametrize("capability", [*SMALL, (10, 0), (12, 1)])
@pytest.mark.parametrize("operator", ARGUMENTS)
def test_later_and_smaller_gpus_get_the_kernels(operator: str, capability: tuple[int, int]) -> None:
    arguments: dict[str, Any] = ARGUMENTS[operator]
    name, _ = registry.choose(operator, Target("cuda", capability), arguments)
    assert name == "triton" or (name == "cuda" and capability[0] == 10)


@pytest.mark.parametrize("capability", [*SMALL, (10, 0)])
def test_attention_with_dropout_is_for_hopper_alone_and_says_so(capability: tuple[int, int]) -> None:
    arguments = {"seed": None, "heads": 1, "queries": 64, "keys": 64, "probability": 0.1, "causal": False}
    name, declined = registry.choose("dropout_bits", Target("cuda", capability), arguments)
    assert name == "reference" and any("compute capability 9.0" in line for line in declined)
