"""Compiled code of producers that move columns: heads are read by vectors of 16 bytes, also where pieces are narrower
than a tile and where columns are left out.

It is compiled for an H100 without a GPU, in a process of its own: Triton's interpreter compiles nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]

COMPILE = """
import sys, torch, triton
from torch._subclasses.fake_tensor import FakeTensorMode
from te_compile.kernels.ahead import Notes
from te_compile.kernels.compile_worker import source_of, target_of
from te_compile.kernels.pointwise import fused_quantize
from te_compile.kernels.recording import rehearsing
from te_compile.recipe import ScaleRule
from tests.kernels.test_pointwise_pieces import rotation

width, rotated = map(int, sys.argv[1:])
notes = Notes(missing=False)
with FakeTensorMode(), rehearsing(notes):
    gradient = torch.empty(4, 32, 2048, width, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    tables = [torch.empty(1, 2048, 1, rotated, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    scale = torch.empty((), device="cuda")
    spec = rotation(width, rotated)
    fused_quantize([gradient, *tables], scale, spec, torch.float8_e5m2, True, True, ScaleRule(), False)
[launch] = [each for each in notes.launches if each.kernel.fn.__name__ == "produce"]
source, options = source_of(launch.kernel, launch.arguments, launch.constants, (9, 0))
print(triton.compile(source, target=target_of((9, 0)), options=options).asm["ptx"])
"""


@pytest.mark.parametrize(("width", "rotated"), [(128, 128), (64, 64), (128, 32)], ids=str)
def test_heads_are_read_by_vectors(width: int, rotated: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(width), str(rotated)]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-2000:]
    loads = re.findall(r"ld\.global\.(\S+)", ran.stdout)
    assert sorted(set(loads)) == ["b32", "v4.b32"] and loads.count("b32") == 1, "all but the scale"
    assert loads.count("v4.b32") == 4 * 4  # of a gradient twice, sin and cos, in each quarter of a tile
