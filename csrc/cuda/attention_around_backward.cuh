// The launches before and after that of attention_backward.cuh: what it needs to know of each query, and its dq in order.
#pragma once

#include "attention_backward_task.cuh"

namespace te_compile::attention {

/// sums and shifts of every query, and zeros for what is to be added up of dq, or for a dq of which some may stay unwritten;
/// either may be null. Lanes of eight columns each a query of [batch, 64 steps, head].
template <typename T, int Width>
__global__ void __launch_bounds__(256)
    before_kernel(const T* grad, int64_t batch_stride, int64_t row_stride, int64_t head_stride, const T* out,
                  const float* logsumexp, float* sums, float* shifts, float* dq, T* whole_dq, int heads, int queries, int steps,
                  int width, int64_t rows) {
  constexpr int kLanes = Width / 8;
  const int64_t at = int64_t{blockIdx.x} * (256 / kLanes) + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t length = int64_t{steps} * kStep;
  const int64_t head = at % heads, query = at / heads % length, batch = at / heads / length;
  const bool is_there = query < queries;
  float shift = 0;
  if (at < rows) {
    if (is_there && 8 * lane < width) {
      const T* from = grad + batch * batch_stride + query * row_stride + head * head_stride + 8 * lane;
      const uint4 x = *reinterpret_cast<const uint4*>(from);
      const int64_t place = ((batch * queries + query) * heads + head) * width + 8 * lane;
      const uint4 y = *reinterpret_cast<const uint4*>(out + place);
      if (whole_dq != nullptr) *reinterpret_cast<uint4*>(whole_dq + place) = make_uint4(0, 0, 0, 0);
      const T *u = reinterpret_cast<const T*>(&x), *w = reinterpret_cast<const T*>(&y);
#pragma unroll
      for (int i = 0; i < 8; ++i) shift = fmaf(static_cast<float>(u[i]), static_cast<float>(w[i]), shift);
    }
    if (dq != nullptr) {
      float4* zeros = reinterpret_cast<float4*>(dq + at * Width);
      zeros[lane] = zeros[lane + kLanes] = make_float4(0, 0, 0, 0);
    }
  }
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) shift += __shfl_xor_sync(~0u, shift, i);
  if (at < rows && lane == 0) {
    const int64_t index = batch * heads + head, to = index * length + query;
    shifts[to] = shift;
    const float sum = is_there ? logsumexp[index * queries + query] * 1.4426950408889634f : INFINITY;
    sums[to] = sum == -INFINITY ? INFINITY : sum;
  }
}

/// dq of [heads, steps, half of the columns, eight columns, warp, row, four lanes, 4], fp32, to [batch, query, head, width].
template <typename T, int Width>
__global__ void __launch_bounds__(256)
    after_kernel(const float* from, T* dq, int heads, int queries, int steps, int width, float factor, int64_t count) {
  const int64_t at = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (at >= count) return;
  constexpr int kEights = Width / 8;
  const int eight = at % kEights, row = at / kEights % 8, warp = at / kEights / 8 % 4;  // both halves are side by side
  const int64_t step = at / kEights / 32;
  if (8 * eight >= width) return;
  const float4* x = reinterpret_cast<const float4*>(from) + (step * kEights + eight) * 128 + warp * 32 + row * 4;
  uint32_t upper[4], lower[4];
#pragma unroll
  for (int l = 0; l < 4; ++l) {
    const float4 four = x[l];
    upper[l] = pair(four.x * factor, four.y * factor, static_cast<const T*>(nullptr));
    lower[l] = pair(four.z * factor, four.w * factor, static_cast<const T*>(nullptr));
  }
  const int64_t index = step / steps, query = step % steps * kStep + warp * 16 + row;
  T* to = dq + ((index / heads * queries + query) * heads + index % heads) * width + 8 * eight;
  if (query < queries) *reinterpret_cast<uint4*>(to) = make_uint4(upper[0], upper[1], upper[2], upper[3]);
  if (query + 8 < queries) {
    *reinterpret_cast<uint4*>(to + int64_t{8} * heads * width) = make_uint4(lower[0], lower[1], lower[2], lower[3]);
  }
}

}  // namespace te_compile::attention
