// Programmatic dependent launch: a kernel's blocks take their places while those of the kernel before it still run.
//
// A launch that is short takes as long to begin as to work. With the attribute below a kernel is launched once every
// block of the one before it in the stream has said `let_next_begin`, or has ended; it must call `await_before` before it
// touches memory that any kernel before it may read or write. What it may do earlier is to come.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <utility>

#include "device.hpp"

namespace te_compile {

/// Returns once the kernels before this one have ended and what they wrote can be read.
__device__ __forceinline__ void await_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// The next kernel may take places. Called behind `await_before`, it finds no kernel before this one still running.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Does `kernel` wait on the current device, as it must before it may begin early? Code for older GPUs that runs on a
/// newer one does not: what counts is what it was compiled for.
template <typename Kernel>
bool awaits_before(Kernel kernel, int device) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, bool> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::pair<const void*, int> key{reinterpret_cast<const void*>(kernel), device};
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  const RelaxedCapture relaxed;
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  return known[key] = attributes.ptxVersion >= 90;
}

inline cudaLaunchAttribute begins_early() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

}  // namespace te_compile
