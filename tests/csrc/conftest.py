"""A program that multiplies on a pretended GPU.

It is te_cublaslt_gemm with a CUDA runtime whose device memory is host memory, and a cuBLASLt that computes in plain
loops.
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


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What drives products on a pretended GPU: see pretend/main.cpp."""
    headers = cuda_headers()
    if headers is None or not shutil.which("c++"):
        pytest.skip("needs a C++ compiler and the CUDA runtime's headers")
    folder = tmp_path_factory.mktemp("pretend")
    includes = [f"-I{path}" for path in (PRETEND, CSRC / "include", CSRC / "core", CSRC / "cuda", headers)]
    flags = ["c++", "-std=c++17", "-O1", "-Wall", "-Werror", *includes]
    library = [str(PRETEND / "cublaslt.cpp"), "-shared", "-fPIC", "-Wl,-soname,libcublasLt.so.13"]
    parts = ("core/failure", "core/shared_choices", "cuda/timing", "cuda/cublaslt_library")
    ours = [*(CSRC / f"{part}.cpp" for part in parts), *(CSRC / "cuda").glob("gemm*.cpp")]
    sources = [PRETEND / "main.cpp", *ours]
    for command in (
        [*flags, *library, "-o", "libcublasLt.so.13"],
        [*flags, *map(str, sources), "-rdynamic", "-ldl", "-pthread", "-o", "driver"],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return folder / "driver"
