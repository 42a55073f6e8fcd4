// te_cuda_update_scales: one delayed-scaling step for many states in one launch.
//
// A block per row of a state. The pointers travel by value as a kernel parameter (4 KB hold 160 of them; longer lists take
// more launches), so a step costs no copy to the device and can be captured in a CUDA graph.
#include <cuda_runtime.h>

#include <algorithm>

#include "device.hpp"
#include "scale.hpp"

namespace te_compile {
namespace {

constexpr int kThreads = 256;
constexpr int kStatesPerLaunch = 160;

struct State {
  float* state;
  const float* amax;
  int64_t rows;
};

struct Batch {
  State states[kStatesPerLaunch];
};
static_assert(sizeof(Batch) <= 4000, "all parameters of a kernel must fit 4 KB");

/// The block's largest value; infinite if any is not finite. Every thread gets it.
__device__ float block_max(float value) {
  __shared__ float of_warp[kThreads / 32];
  for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  for (int warp = 0; warp < kThreads / 32; ++warp) value = fmaxf(value, of_warp[warp]);
  return value;
}

__global__ void __launch_bounds__(kThreads)
    update_kernel(const __grid_constant__ Batch batch, int64_t length, ScaleFormula formula, bool most_recent) {
  const State& mine = batch.states[blockIdx.y];
  for (int64_t row = blockIdx.x; row < mine.rows; row += gridDim.x) {
    float* scale = mine.state + row * (2 + length);
    float* history = scale + 2;
    const float amax = mine.amax[row];
    if (!is_finite(amax)) {
      if (threadIdx.x == 0) scale[1] += 1.0f;
      continue;
    }
    if (!(amax > 0.0f)) continue;
    // Everything moves one place to the right, from the last chunk to the first: a chunk reads one element of the next
    // chunk to the left, which is therefore not written before.
    float largest = 0.0f;
    for (int64_t chunk = (length - 1) / kThreads; chunk >= 0; --chunk) {
      const int64_t i = chunk * kThreads + threadIdx.x;
      const float value = i >= length ? 0.0f : i == 0 ? amax : history[i - 1];
      __syncthreads();
      if (i < length) history[i] = value;
      largest = fmaxf(largest, is_finite(value) ? value : __int_as_float(0x7F800000));
      __syncthreads();
    }
    largest = block_max(largest);
    const float chosen = most_recent ? amax : largest;
    if (threadIdx.x == 0 && is_finite(chosen)) *scale = scale_of(chosen, formula);
    __syncthreads();  // before the next row uses block_max's memory again
  }
}

}  // namespace
}  // namespace te_compile

using namespace te_compile;

extern "C" te_status te_cuda_update_scales(int device, float* const* states, const float* const* amaxes,
                                           const int64_t* rows, int64_t count, int64_t history_length,
                                           const te_scale_rule* rule, te_amax_algorithm algorithm, void* stream) {
  return guarded([&] {
    require(count >= 0 && history_length >= 1, "te_cuda_update_scales: count or history_length is too small");
    require(rule != nullptr, "te_cuda_update_scales: rule is null");
    require(count == 0 || (states && amaxes && rows), "te_cuda_update_scales: a list is null");
    const DeviceGuard guard(device);
    const ScaleFormula formula = formula_of(*rule);
    for (int64_t first = 0; first < count; first += kStatesPerLaunch) {
      const int here = static_cast<int>(std::min<int64_t>(kStatesPerLaunch, count - first));
      Batch batch{};
      int64_t most_rows = 0;
      for (int i = 0; i < here; ++i) {
        batch.states[i] = {states[first + i], amaxes[first + i], rows[first + i]};
        most_rows = std::max(most_rows, rows[first + i]);
        require(rows[first + i] == 0 || (states[first + i] && amaxes[first + i]),
                "te_cuda_update_scales: a state or amax is null");
      }
      if (most_rows == 0) continue;
      const dim3 grid(static_cast<unsigned>(std::min<int64_t>(most_rows, 1024)), static_cast<unsigned>(here));
      update_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(batch, history_length, formula,
                                                                              algorithm == TE_AMAX_MOST_RECENT);
      check_cuda(cudaGetLastError(), "te_cuda_update_scales: launch");
    }
  });
}
