// The kernel of te_cuda_norm_quantize for few rows, as a decoding step has them, without qt: a launch takes as long as its
// instructions take on the multiprocessors that it has, and what was one program's is a cluster's here.
//
// One cluster of up to 8 blocks has all rows, a block one or two of them, in registers. Blocks tell each other the largest
// magnitude of theirs, so a scale that is not known needs no other launch. It takes its places while the kernel before still
// runs, and the next one does while it runs.
#pragma once

#include "norm_elements.cuh"
#include "programmatic.cuh"

namespace te_compile {
namespace {

constexpr int kFewThreads = 512;
constexpr int kFewWarps = kFewThreads / 32;
static_assert(TE_NORM_FEW_ROWS <= 2 * kPortableCluster, "a block has two rows at most");

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/// Stores a number in the shared memory of another block of the cluster, at the place that `to` has in this one.
__device__ void tell(float value, float* to, int block) {
  asm volatile("{ .reg .b32 place; mapa.shared::cluster.u32 place, %0, %1; st.shared::cluster.f32 [place], %2; }" ::"r"(
                   shared_address(to)),
               "r"(block), "f"(value)
               : "memory");
}

/// Sums of all threads' values, the same in each of them. of_warp: this call's alone.
template <int Rows>
__device__ void add_up(float (&values)[Rows], float (*of_warp)[Rows]) {
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) values[r] += __shfl_xor_sync(0xFFFFFFFFu, values[r], step);
    if (threadIdx.x % 32 == 0) of_warp[warp][r] = values[r];
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    values[r] = 0.0f;
#pragma unroll
    for (int w = 0; w < kFewWarps; ++w) values[r] += of_warp[w][r];
  }
}

/// The largest of all threads' numbers, in every block of the cluster; called once, behind `has_begun`. of_warp, of_block:
/// this call's alone.
__device__ float largest_of_all(float largest, float* of_warp, float* of_block) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, step));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  await_all_begun();
  const int blocks = static_cast<int>(gridDim.x);
  const int other = static_cast<int>(threadIdx.x);
  if (other < blocks) {
#pragma unroll
    for (int w = 0; w < kFewWarps; ++w) largest = fmaxf(largest, of_warp[w]);
    if (blocks == 1) {
      of_block[0] = largest;
    } else {
      tell(largest, of_block + blockIdx.x, other);
    }
  }
  meet_cluster();
  for (int block = 0; block < blocks; ++block) largest = fmaxf(largest, of_block[block]);
  return largest;
}

/// Eight neighbouring elements.
template <typename T>
struct alignas(16) Eight {
  typename Pair<T>::Type pairs[4];
};

/// Weight (with its offset) and bias of eight columns: 1 and -0 for none, which change no bit.
struct EightParameters {
  float weight[kVector], bias[kVector];
};

__device__ EightParameters eight_parameters(const Task& task, int column) {
  EightParameters result;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    result.weight[i] = task.weight == nullptr
                           ? 1.0f
                           : parameter(task.weight, task.weight_dtype, column + i) + task.weight_offset;
    result.bias[i] = task.bias == nullptr ? -0.0f : parameter(task.bias, task.bias_dtype, column + i);
  }
  return result;
}

/// y, in x's dtype, of eight elements of a row.
template <typename T, bool Centre, bool RoundFirst>
__device__ Eight<T> normalised(const Eight<T>& x, float mean, float rstd, const EightParameters& by) {
  using P = Pair<T>;
  Eight<T> y;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 value = P::floats(x.pairs[i]);
    if (Centre) {
      value.x -= mean;
      value.y -= mean;
    }
    value.x *= rstd;
    value.y *= rstd;
    y.pairs[i] = finished<T, Centre, RoundFirst>(value, by.weight + 2 * i, by.bias + 2 * i);
  }
  return y;
}

/// The codes of eight elements; an infinity's is a NaN's (see `scaled`).
template <typename T>
__device__ uint2 codes_of_eight(const Eight<T>& y, float used) {
  using P = Pair<T>;
  const auto zero = P::rounded(make_float2(0.0f, 0.0f));
  uint32_t codes[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 first = P::floats(__hfma2(y.pairs[2 * i], zero, y.pairs[2 * i]));
    const float2 second = P::floats(__hfma2(y.pairs[2 * i + 1], zero, y.pairs[2 * i + 1]));
    codes[i] = codes_of({first.x * used, first.y * used, second.x * used, second.y * used});
  }
  return make_uint2(codes[0], codes[1]);
}

/// The columns of a thread's vectors, and the rows of a block.
__device__ int column_of(int vector) { return (vector * kFewThreads + static_cast<int>(threadIdx.x)) * kVector; }
__device__ int64_t row_of(int r) { return static_cast<int64_t>(blockIdx.x) + r * static_cast<int64_t>(gridDim.x); }

/// A thread's vectors of each row, zeros where there are none, and the parameters of their columns.
template <typename T, int Rows, int Vectors>
__device__ void load(const Task& task, int columns, Eight<T> (&x)[Rows][Vectors], EightParameters (&by)[Vectors]) {
#pragma unroll
  for (int v = 0; v < Vectors; ++v) {
    const bool inside = column_of(v) < columns;
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      uint4 loaded = make_uint4(0, 0, 0, 0);
      if (inside && row_of(r) < task.rows) {
        const T* from = static_cast<const T*>(task.x) + row_of(r) * task.stride + column_of(v);
        loaded = __ldg(reinterpret_cast<const uint4*>(from));
      }
      *reinterpret_cast<uint4*>(x[r][v].pairs) = loaded;
    }
    by[v] = inside ? eight_parameters(task, column_of(v)) : EightParameters{};
  }
}

/// The mean of each row. of_warp: as `add_up` has it.
template <typename T, int Rows, int Vectors>
__device__ void find_means(int columns, const Eight<T> (&x)[Rows][Vectors], float (&mean)[Rows], float (*of_warp)[Rows]) {
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
#pragma unroll
    for (int i = 0; i < 4 * Vectors; ++i) {
      const float2 value = Pair<T>::floats(x[r][i / 4].pairs[i % 4]);
      mean[r] += value.x + value.y;
    }
  }
  add_up(mean, of_warp);
#pragma unroll
  for (int r = 0; r < Rows; ++r) mean[r] /= columns;
}

/// The rstd of each row about its mean, if Centre, or about 0; writes both.
template <typename T, bool Centre, int Rows, int Vectors>
__device__ void find_rstds(const Task& task, int columns, const Eight<T> (&x)[Rows][Vectors], const float (&mean)[Rows],
                           float (&rstd)[Rows], float (*of_warp)[Rows]) {
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
#pragma unroll
    for (int i = 0; i < 4 * Vectors; ++i) {
      float2 value = Pair<T>::floats(x[r][i / 4].pairs[i % 4]);
      if (Centre) {
        const bool inside = column_of(i / 4) < columns;
        value.x = inside ? value.x - mean[r] : 0.0f;
        value.y = inside ? value.y - mean[r] : 0.0f;
      }
      rstd[r] = fmaf(value.x, value.x, fmaf(value.y, value.y, rstd[r]));
    }
  }
  add_up(rstd, of_warp);
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    rstd[r] = __frcp_rn(__fsqrt_rn(rstd[r] / columns + task.eps));
    if (threadIdx.x == 0 && row_of(r) < task.rows) {
      if (Centre) task.mean[row_of(r)] = mean[r];
      task.rstd[row_of(r)] = rstd[r];
    }
  }
}

/// Makes y of x, in its place. Returns the largest magnitude of a thread's elements, infinity if one is not finite.
template <typename T, bool Centre, bool RoundFirst, int Rows, int Vectors>
__device__ float normalise(const Task& task, int columns, Eight<T> (&x)[Rows][Vectors], const float (&mean)[Rows],
                           const float (&rstd)[Rows], const EightParameters (&by)[Vectors]) {
  using P = Pair<T>;
  auto largest = P::rounded(make_float2(0.0f, 0.0f));
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
#pragma unroll
    for (int v = 0; v < Vectors; ++v) {
      if (column_of(v) >= columns || row_of(r) >= task.rows) continue;
      x[r][v] = normalised<T, Centre, RoundFirst>(x[r][v], mean[r], rstd[r], by[v]);
#pragma unroll
      for (int i = 0; i < 4; ++i) largest = __hmax2_nan(largest, __habs2(x[r][v].pairs[i]));
    }
  }
  const float2 two = P::floats(largest);
  const bool finite = is_finite(two.x) && is_finite(two.y);
  return finite ? fmaxf(two.x, two.y) : __int_as_float(0x7F800000);
}

/// The codes of a thread's elements, and the elements themselves if they are wanted.
template <typename T, int Rows, int Vectors>
__device__ void store(const Task& task, int columns, const Eight<T> (&y)[Rows][Vectors], float used) {
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
#pragma unroll
    for (int v = 0; v < Vectors; ++v) {
      if (column_of(v) >= columns || row_of(r) >= task.rows) continue;
      const int64_t at = row_of(r) * columns + column_of(v);
      if (task.q != nullptr) {
        const uint2 codes = codes_of_eight(y[r][v], used);
        *reinterpret_cast<uint32_t*>(task.q + at) = codes.x;
        *reinterpret_cast<uint32_t*>(task.q + at + 4) = codes.y;
      }
      if (task.y != nullptr) {
        const uint4 eight = *reinterpret_cast<const uint4*>(y[r][v].pairs);
        uint2* const to = reinterpret_cast<uint2*>(static_cast<T*>(task.y) + at);
        to[0] = make_uint2(eight.x, eight.y);
        to[1] = make_uint2(eight.z, eight.w);
      }
    }
  }
}

#endif

/// Rows: of a block, at most; Vectors: of eight columns that a thread has of each row.
template <typename T, bool Centre, bool RoundFirst, int Rows, int Vectors>
__global__ void __launch_bounds__(kFewThreads) norm_few_rows_kernel(const __grid_constant__ Task task) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ float sums[2][kFewWarps][Rows];
  __shared__ float largest_of_warp[kFewWarps], largest_of_block[kPortableCluster];
  has_begun();
  await_before();
  let_next_begin();
  const int columns = task.columns;  // read once: behind a barrier it would be read anew

  Eight<T> x[Rows][Vectors];
  EightParameters by[Vectors];
  load(task, columns, x, by);

  float mean[Rows] = {}, rstd[Rows] = {};
  if (Centre) find_means(columns, x, mean, sums[0]);
  find_rstds<T, Centre>(task, columns, x, mean, rstd, sums[1]);

  const float largest = normalise<T, Centre, RoundFirst>(task, columns, x, mean, rstd, by);
  const float amax = largest_of_all(largest, largest_of_warp, largest_of_block);
  float used = task.scale == nullptr ? 0.0f : *task.scale;
  if (!(used > 0.0f)) used = scale_of(amax, task.formula);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *task.amax = amax;
    *task.scale_inv = 1.0f / used;
  }
  store(task, columns, x, used);
#endif
}

}  // namespace
}  // namespace te_compile
