"""The cuBLASLt product's own logic on a pretended GPU: operand order, epilogue pointers, plans, timing, capture.

``pretend/`` holds a CUDA runtime whose device memory is host memory and a cuBLASLt that computes in plain loops, so
what surrounds the library is tested on any machine with the CUDA headers. tests/gpu tests the real thing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
PRETEND = Path(__file__).parent / "pretend"


def cuda_headers() -> Path | None:
    """The folder of the CUDA runtime's headers, if this machine has them."""
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", nvcc and Path(nvcc).resolve().parents[1]]
    folders = [Path(root) / "include" for root in roots if root]
    return next((folder for folder in folders if (folder / "cuda_runtime_api.h").exists()), None)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver, built against the pretended GPU."""
    headers = cuda_headers()
    if headers is None or not shutil.which("c++"):
        pytest.skip("needs a C++ compiler and the CUDA runtime's headers")
    folder = tmp_path_factory.mktemp("pretend")
    includes = [f"-I{path}" for path in (PRETEND, CSRC / "include", CSRC / "core", CSRC / "cuda", headers)]
    flags = ["c++", "-std=c++17", "-O1", "-Wall", "-Werror", *includes]
    library = [str(PRETEND / "cublaslt.cpp"), "-shared", "-fPIC", "-Wl,-soname,libcublasLt.so.13"]
    ours = ("core/failure.cpp", "cuda/gemm.cpp", "cuda/timing.cpp", "cuda/cublaslt_library.cpp")
    sources = [PRETEND / "main.cpp", *(CSRC / name for name in ours)]
    for command in (
        [*flags, *library, "-o", "libcublasLt.so.13"],
        [*flags, *map(str, sources), "-rdynamic", "-ldl", "-pthread", "-o", "driver"],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return folder / "driver"


CHECKS = [
    "numbers",
    "bias",
    "gelu",
    "bias_gradient",
    "accumulation",
    "addend",
    "timing",
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
