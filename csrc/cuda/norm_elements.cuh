// What both kernels of te_cuda_norm_quantize are told, and what they do with elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "cluster.hpp"
#include "scale.hpp"
#include "te_compile.h"

namespace te_compile {
namespace {

constexpr int kVector = 8;           // elements of a 16-byte load
constexpr int kPortableCluster = 8;  // blocks that every device with clusters can hold together

struct Task {
  const void* x;
  int64_t rows, stride;
  int columns, columns_of_block, blocks_of_cluster;
  const void* weight;  // null for none
  te_dtype weight_dtype;
  float weight_offset;
  const void* bias;
  te_dtype bias_dtype;
  float eps;
  const float* scale;
  bool measured;   // the amax holds the tensor's amax, for where there is no scale
  bool measuring;  // find the amax and nothing else
  ScaleFormula formula;
  void* y;
  uint8_t* q;
  uint8_t* qt;
  float* amax;
  float* scale_inv;
  float* mean;
  float* rstd;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

template <typename T>
struct Pair;  // two neighbouring elements

template <>
struct Pair<__nv_bfloat16> {
  using Type = __nv_bfloat162;
  static __device__ float2 floats(Type pair) {  // one instruction each
    const uint32_t bits = *reinterpret_cast<const uint32_t*>(&pair);
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u));
  }
  static __device__ Type rounded(float2 pair) { return __float22bfloat162_rn(pair); }
};

template <>
struct Pair<__half> {
  using Type = __half2;
  static __device__ float2 floats(Type pair) { return __half22float2(pair); }
  static __device__ Type rounded(float2 pair) { return __float22half2_rn(pair); }
};

__device__ float parameter(const void* values, te_dtype dtype, int64_t at) {
  switch (dtype) {
    case TE_BFLOAT16: return __bfloat162float(static_cast<const __nv_bfloat16*>(values)[at]);
    case TE_FLOAT16: return __half2float(static_cast<const __half*>(values)[at]);
    default: return static_cast<const float*>(values)[at];
  }
}

/// Four fp32 numbers as FP8 codes, the first one in the lowest byte.
__device__ uint32_t codes_of(const float (&z)[4]) {
  uint32_t codes;
  asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; "
      "mov.b32 %0, {low, high}; }"
      : "=r"(codes)
      : "f"(z[0]), "f"(z[1]), "f"(z[2]), "f"(z[3]));
  return codes;
}

/// What follows for two elements that were divided by their row's size: weight, bias (if Centre) and roundings.
template <typename T, bool Centre, bool RoundFirst>
__device__ typename Pair<T>::Type finished(float2 value, const float* weight, const float* bias) {
  using P = Pair<T>;
  if (RoundFirst) value = P::floats(P::rounded(value));
  value.x *= weight[0];
  value.y *= weight[1];
  if (Centre) {
    value.x += bias[0];
    value.y += bias[1];
  }
  return P::rounded(value);
}

#endif

}  // namespace
}  // namespace te_compile
