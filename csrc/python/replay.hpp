// Calls that are replayed, for te_compile/kernels/player.py.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "refs.hpp"
#include "te_compile.h"

namespace te_compile::python {

/// The requests that cublaslt_gemm and cuda_norm_quantize make of their arguments.
te_gemm gemm_of_arguments(const pybind11::sequence& arguments);
te_norm norm_of_arguments(const pybind11::sequence& arguments);

/// Sets the Python exception that the module's functions raise for this status of the calling thread's last call.
void set_error_of(te_status status);

/// with_gaps: null for None.
std::vector<Ref> refs_of(const pybind11::sequence& objects, bool with_gaps);

void add_replay(pybind11::module_& module);
void add_places(pybind11::module_& module);
void add_starts(pybind11::module_& module);
void add_unchanged(pybind11::module_& module);

}  // namespace te_compile::python
