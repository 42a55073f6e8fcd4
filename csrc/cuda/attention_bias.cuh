// What a bias adds to scores: tiles of 16-bit numbers in shared memory, in rows of 128 bytes swizzled as TMA writes them, that
// come to threads as products' results lie.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace te_compile::attention {

/// Below this a score says that nothing is seen: rows all of whose scores lie there have no gradient, for a logsumexp of such
/// numbers has lost how many there are.
constexpr float kLowest = -1e30f;

/// Four matrices of eight rows of 16 bytes, by a warp, whose lanes 8 i to 8 i + 7 name the rows of matrix i. A thread gets of
/// each those of row lane / 4 at 2 (lane % 4) and after that.
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}

/// The same of their transposes.
__device__ __forceinline__ void load_transposes(uint32_t (&x)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}

/// Two numbers of 16 bits, the lower half first.
__device__ __forceinline__ float2 both(uint32_t x, const __nv_bfloat16*) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000u));
}
__device__ __forceinline__ float2 both(uint32_t x, const __half*) {
  __half2 two;
  memcpy(&two, &x, 4);
  return __half22float2(two);
}

}  // namespace te_compile::attention
