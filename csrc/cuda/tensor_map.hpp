// What kernels for Hopper alone need of the host: tensors described to TMA, more shared memory, the GPU that they run on.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "device.hpp"
#include "driver.hpp"

namespace te_compile {

/// Describes a tensor whose innermost dimension lies side by side, for boxes of 128 bytes of that. Sizes and boxes begin
/// with the innermost dimension, `bytes` are from one to the next of each of the others. Past its ends it is zero.
template <int Dimensions>
CUtensorMap tensor_map(const char* who, CUtensorMapDataType type, const void* x, const cuuint64_t (&sizes)[Dimensions],
                       const cuuint64_t (&bytes)[Dimensions - 1], const cuuint32_t (&box)[Dimensions]) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                              const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const auto encode = reinterpret_cast<Encode>(driver::entry_point("cuTensorMapEncodeTiled"));
  cuuint32_t every[Dimensions];
  for (cuuint32_t& step : every) step = 1;
  CUtensorMap map;
  const CUresult result = encode(&map, type, Dimensions, const_cast<void*>(x), sizes, bytes, box, every,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Failure(TE_CUDA_ERROR, std::string(who) + ": cuTensorMapEncodeTiled returned " + std::to_string(result));
  }
  return map;
}

/// Lets the kernel have so much shared memory on the current device; once for each.
template <typename Kernel>
void allow_shared_memory(Kernel kernel, int bytes, int device, const char* who) {
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> allowed;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::pair<const void*, int> key{reinterpret_cast<const void*>(kernel), device};
  if (allowed.count(key) != 0) return;
  const std::string what = std::string(who) + ": shared memory";
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), what.c_str());
  allowed.insert(key);  // only now: loading the kernel may fail for lack of memory, and work another time
}

inline void require_hopper(int device, const char* who) {
  if (compute_capability(device) != 90) {
    throw Failure(TE_UNSUPPORTED, std::string(who) + ": needs a GPU of compute capability 9.0");
  }
}

}  // namespace te_compile
