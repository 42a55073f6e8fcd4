// The few entry points of the CUDA driver that launch a compiled kernel, opened at run time: neither its headers nor
// its library are needed to build, with nvcc or without. Where cuda.h is found, cuda/abi_check.cpp proves them equal.
#pragma once

namespace te_compile::driver {

using Result = int;
constexpr Result kSuccess = 0;

using LaunchKernel = Result (*)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream,
                                void** parameters, void** extra);
using GetCurrentContext = Result (*)(void** context);
using GetErrorString = Result (*)(Result, const char** text);

struct Driver {
  LaunchKernel launch;
  GetCurrentContext current_context;
  GetErrorString error_string;
};

/// libcuda's. Throws Failure(TE_UNSUPPORTED) if there is none.
const Driver& entry_points();

/// One more of libcuda's, by its name. Throws Failure(TE_UNSUPPORTED) if there is none.
void* entry_point(const char* name);

/// For tests: from now on these, or with null libcuda's again.
void pretend(const Driver* instead);

}  // namespace te_compile::driver
