#!/usr/bin/env bash
# Build te_compile/_native*.so into the checkout, without pip and without a network.
#
#   csrc/build.sh [cmake options]          e.g. csrc/build.sh -DTE_COMPILE_CUDA_ARCHS=90a
#
# PYTHON names the interpreter that the module is for (default: python3 on the PATH). Needs cmake, a C++17 compiler and
# pybind11 in that interpreter; nvcc for the CUDA part. Beside the module comes the metadata by which torch.compile finds
# the backend of a checkout that is on PYTHONPATH.
set -euo pipefail
source_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="$("${PYTHON:-python3}" -c 'import sys; print(sys.executable)')"
tag="$("$python" -c 'import sys; print(sys.implementation.cache_tag)')"
build_dir="$source_dir/../build/native-$tag"
generator=()
if command -v ninja > /dev/null; then generator=(-G Ninja); fi
cmake -S "$source_dir" -B "$build_dir" "${generator[@]}" -DPython_EXECUTABLE="$python" -DTE_COMPILE_INPLACE=ON "$@"
cmake --build "$build_dir" --parallel
cd "$source_dir/.."
"$python" -c 'import sys; sys.path.insert(0, "te_compile"); import _native; print("built", _native.__file__, "with" if _native.cuda_built else "without", "CUDA")'
"$python" csrc/describe.py
