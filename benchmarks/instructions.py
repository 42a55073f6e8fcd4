"""How many instructions an element the generated producers take, counted in machine code. It needs no GPU.

    python -m benchmarks.instructions                      every producer of benchmarks.kernels, for an H100 or H200
    python -m benchmarks.instructions --only gelu          those whose name contains "gelu"
    python -m benchmarks.instructions --registers 64       held to so many registers a thread

One JSON line a kernel. At 4.27 TB/s an H200 has 28 instructions for an element of two bytes that is read once and
written twice in FP8, 42 where two are read; a kernel that takes more waits for its arithmetic and not for memory.
``spills`` are loads and stores of registers that did not fit, ``warps`` how many a multiprocessor holds of its 64.

Kernels are compiled as their launches would have them compiled, by Triton and the ptxas that it brings; the tool that
takes machine code apart comes with it too.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.kernels import SPECS, SWIGLU_BACKWARD
from benchmarks.measure import Rows, add_out
from te_compile.kernels.ahead import Launch, Notes
from te_compile.kernels.compile_worker import source_of, target_of
from te_compile.kernels.pointwise import fused_quantize, fused_quantize_pair
from te_compile.kernels.recording import rehearsing
from te_compile.ops.pointwise import Spec
from te_compile.recipe import ScaleRule

CAPABILITY = (9, 0)
SHAPE = (8192, 16384)
REGISTERS, WARPS, GRANULE = 65536, 64, 256  # of a multiprocessor; a warp's registers come in such portions
DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")


@dataclass(frozen=True)
class Code:
    """What a kernel became: its instructions by their names, and the registers of a thread."""

    instructions: Counter[str]
    registers: int

    @property
    def spills(self) -> int:
        """Loads and stores of registers that did not fit."""
        return self.instructions["LDL"] + self.instructions["STL"]

    def warps(self, of_program: int) -> int:
        """How many a multiprocessor holds at once, as far as registers say."""
        of_warp = -(-32 * self.registers // GRANULE) * GRANULE
        return min(WARPS, REGISTERS // (of_warp * of_program) * of_program)


def producer(text: str) -> Launch:
    """The launch that writes the FP8 copies of what a spec computes, on :data:`SHAPE`."""
    spec, rule, notes = Spec.parse(text), ScaleRule(), Notes(missing=False)
    with FakeTensorMode(), rehearsing(notes):
        inputs = [torch.empty(SHAPE, dtype=torch.bfloat16, device="cuda") for _ in spec.inputs]
        scale = torch.empty((), device="cuda")
        if spec.second:
            fused_quantize_pair(inputs, [scale] * 2, spec, torch.float8_e5m2, [(True, True)] * 2, rule, False)
        else:
            fused_quantize(inputs, scale, spec, torch.float8_e4m3fn, True, True, rule, False)
    (found,) = (each for each in notes.launches if each.kernel.fn.__name__ == "produce")
    return found


def code_of(launch: Launch, registers: int | None = None) -> Code:
    """Compile the kernel of a launch and take it apart. registers: the most that a thread may have."""
    source, options = source_of(launch.kernel, launch.arguments, launch.constants, CAPABILITY)
    held = {} if registers is None else {"maxnreg": registers}
    compiled = triton.compile(source, target=target_of(CAPABILITY), options=options | held)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        code, usage = (_told(flag, file.name) for flag in ("-sass", "-res-usage"))
    used = re.search(r"REG:(\d+)", usage)
    assert used is not None, f"cuobjdump says nothing of registers: {usage[:300]}"
    return Code(Counter(_INSTRUCTION.findall(code)), int(used[1]))


def _told(flag: str, file: str) -> str:
    return subprocess.run([DISASSEMBLER, flag, file], capture_output=True, text=True, check=True).stdout


def row_of(name: str, text: str, registers: int | None) -> dict[str, Any]:
    """The columns of one producer."""
    launch = producer(text)
    code = code_of(launch, registers)
    tile = launch.constants
    elements = tile["ROWS"] * tile["COLUMNS"] / (32 * tile["num_warps"])  # a thread's
    each = {name: count / elements for name, count in code.instructions.most_common(8)}
    return {
        "what": "instructions",
        "kernel": name,
        "tile": f"{tile['ROWS']}x{tile['COLUMNS']}/{tile['num_warps']}",
        "an_element": code.instructions.total() / elements,
        "registers": code.registers,
        "spills": code.spills,
        "warps": code.warps(tile["num_warps"]),
        "most": {instruction: round(count, 2) for instruction, count in each.items()},
    }


def main(given: Sequence[str] | None = None) -> int:
    """Count and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="producers whose name contains this")
    parser.add_argument("--registers", type=int, help="the most that a thread may have")
    add_out(parser)
    arguments = parser.parse_args(given)
    rows = Rows(arguments.out)
    for name, text in {**SPECS, "swiglu backward, both": SWIGLU_BACKWARD}.items():
        if arguments.only in name:
            rows.write(**row_of(name, text, arguments.registers))
    return rows.exit_status()


if __name__ == "__main__":
    sys.exit(main())
