"""The C interface stands alone: a plain C program uses it, without Python, CUDA or any framework."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from te_compile.kernels import native, native_norm, skinny_gemm
from te_compile.ops.gemms import AT_ONCE

CSRC = Path(__file__).parents[2] / "csrc"
PROGRAM = """
#include <stdio.h>
#include "te_compile.h"

int main(void) {
  const float x[4] = {1.0f, -1000.0f, 0.3f, 0.0f};
  uint8_t q[4];
  float y[4], amax, scale;
  const te_scale_rule rule = {448.0f, 0, 0.0f, 0};
  if (te_host_quantize(x, 4, 1.0f, TE_FLOAT8_E4M3, q, &amax) != TE_OK) return 1;
  if (te_host_dequantize(q, 4, 1.0f, TE_FLOAT8_E4M3, y) != TE_OK) return 2;
  if (te_host_scale(2.0f, &rule, &scale) != TE_OK) return 3;
  printf("%g %g %g %g amax %g scale %g\\n", y[0], y[1], y[2], y[3], amax, scale);
  if (te_host_quantize(x, 4, 1.0f, TE_FLOAT16, q, NULL) != TE_INVALID_ARGUMENT) return 4;
  printf("%s\\n", te_last_error());
  if (te_cuda_built() || te_cublaslt_gemm(NULL) != TE_NOT_BUILT) return 5;
  printf("%s\\n", te_last_error());
  return 0;
}
"""


@pytest.mark.skipif(not (shutil.which("cc") and shutil.which("c++")), reason="needs a C and a C++ compiler")
def test_a_plain_c_program_casts_and_reads_errors(tmp_path: Path) -> None:
    (tmp_path / "program.c").write_text(PROGRAM)
    warnings = ["-Wall", "-Wextra", "-Werror", f"-I{CSRC / 'include'}"]
    compile_c = ["cc", "-std=c99", "-pedantic", *warnings, "-c", "program.c", "-o", "program.o"]
    sources = [str(CSRC / path) for path in ("core/failure.cpp", "core/host.cpp", "cuda/absent.cpp")]
    link = ["c++", "-std=c++17", *warnings, f"-I{CSRC / 'core'}", *sources, "program.o", "-o", "program"]
    for command in (compile_c, link, ["./program"]):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command[0]} ended with {done.returncode}: {done.stderr}"
    values, bad_dtype, no_cuda = done.stdout.splitlines()
    assert values == "1 -448 0.3125 0 amax 1000 scale 224"
    assert "dtype must be TE_FLOAT8_E4M3 or TE_FLOAT8_E5M2" in bad_dtype
    assert "built without CUDA" in no_cuda


def test_the_interface_needs_no_framework_headers() -> None:
    sources = [path for path in CSRC.rglob("*") if path.suffix in {".h", ".hpp", ".cpp", ".cu"}]
    assert sources
    for path in sources:
        includes = [line for line in path.read_text().splitlines() if line.startswith("#include")]
        assert not [line for line in includes if "torch" in line or "ATen" in line or "c10" in line], path
    header = (CSRC / "include" / "te_compile.h").read_text()
    assert "pybind11" not in header
    assert "cuda_runtime" not in header


@pytest.mark.skipif(bool(native.missing()), reason=native.missing())
def test_python_knows_how_many_products_and_rows_one_launch_takes() -> None:
    core = native.module()
    assert (core.SKINNY_PARTS, core.SKINNY_ROWS) == (AT_ONCE, skinny_gemm.MOST_ROWS)
    assert core.NORM_FEW_ROWS == native_norm.FEW_ROWS
