// te_cuda_skinny_gemm: products of few rows, several that read the same rows in one launch.
//
// Such a product takes what reading its weights takes, and cuBLASLt's tiles leave a third of that time unused: a decoding
// step's are short, so what a launch costs before its first bytes come and after its last ones shows.
//
// A block computes 16 columns of one product. Its warps divide the depth between them in steps of 128, add their sums up in
// shared memory, in an order that is always the same, and each thread then finishes at most one element. The weights come
// from memory straight into the registers of mma.m16n8k16, as its left operand, the rows of x being its right one. Of half a
// step lane l holds 16 bytes of row l / 4 of either, from 16 (l % 4): the tensor core takes them for other elements of the
// depth than they are, but for the same ones on both sides, and sums do not ask.
//
// Codes are multiplied as halves, which hold each of them. Hopper's mma of FP8 operands does that too, but widens the weights
// for every eight rows anew.
//
// All of a block's loads are its first instructions, so blocks are many and have few registers: what is on its way from
// memory is what hides its latency. And they take their places while the kernel before still runs, if it lets them.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "device.hpp"
#include "programmatic.cuh"

namespace te_compile {
namespace {

constexpr int kWarp = 32;
constexpr int kColumns = 16;  // of an mma
constexpr int kRows = 8;      // likewise
constexpr int kStep = 128;    // of the depth, that a warp takes at a time: a cache line of each column
constexpr int kHalf = 64;     // of the depth, that a warp's lanes hold in a vector each
constexpr int kVector = 16;   // bytes of a load
static_assert(TE_SKINNY_ROWS == 2 * kRows, "the kernels below are for 8 and for 16 rows");

struct Part {
  const uint8_t* b;
  const float* b_scale_inv;
  const void* bias;
  const void* addend;
  void* y;
  int columns, first_block;
  te_dtype bias_dtype;
};

struct Task {
  Part parts[TE_SKINNY_PARTS];
  const uint8_t* a;
  const float* a_scale_inv;
  int count, rows, depth;
};

/// How the kernel is cut: tiles of rows that a block computes, its warps, steps that a warp has under way, and how many blocks
/// a multiprocessor shall have registers for.
template <int Rows, int Warps, int Steps, int Blocks>
struct Cut {
  static constexpr int rows = Rows, warps = Warps, steps = Steps, blocks = Blocks;
  static constexpr int threads = Warps * kWarp;
  static constexpr int high = Rows * kRows;
  static_assert(high * kColumns <= threads, "a thread finishes one element at most");
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T rounded(float x);
template <>
__device__ __forceinline__ float rounded<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half rounded<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 rounded<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

__device__ __forceinline__ float value_at(const void* x, te_dtype dtype, int at) {
  if (dtype == TE_FLOAT32) return static_cast<const float*>(x)[at];
  if (dtype == TE_FLOAT16) return __half2float(static_cast<const __half*>(x)[at]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(x)[at]);
}

/// 16 bytes that nobody reads again soon: they would only push the rows of x out of the first cache.
__device__ __forceinline__ uint4 load_once(const uint8_t* x, bool inside) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (inside) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(x));
  }
  return v;
}

/// Four codes as two pairs of halves, which is exact.
__device__ __forceinline__ void widen(uint32_t codes, uint32_t (&pairs)[2]) {
#if __CUDA_ARCH__ >= 890
  asm("{\n"
      ".reg .b16 lower, upper;\n"
      "mov.b32 {lower, upper}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, lower;\n"
      "cvt.rn.f16x2.e4m3x2 %1, upper;\n"
      "}"
      : "=r"(pairs[0]), "=r"(pairs[1])
      : "r"(codes));
#endif
}

/// sums [16 columns, 8 rows] += left [16, 16] right [16, 8]: of columns `line` and `line + 8`, of row `line`.
__device__ __forceinline__ void multiply(float (&sums)[4], const uint32_t (&upper)[2], const uint32_t (&lower)[2],
                                         const uint32_t (&right)[2]) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(upper[0]), "r"(lower[0]), "r"(upper[1]), "r"(lower[1]), "r"(right[0]), "r"(right[1]));
#endif
}

/// The same of 16 codes of each column and row, for all tiles of rows.
template <int Rows>
__device__ __forceinline__ void multiply(float (&sums)[Rows][4], const uint4 (&left)[2], const uint4 (&right)[Rows]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    uint32_t upper[2], lower[2];
    widen((&left[0].x)[w], upper);
    widen((&left[1].x)[w], lower);
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      uint32_t rows[2];
      widen((&right[r].x)[w], rows);
      multiply(sums[r], upper, lower, rows);
    }
  }
}

__device__ __forceinline__ int part_of(const Task& task, int block) {
  int which = 0;
#pragma unroll
  for (int i = 1; i < TE_SKINNY_PARTS; ++i) {
    if (i < task.count && block >= task.parts[i].first_block) which = i;
  }
  return which;
}

/// A row of x or a column of the weight. Those beyond the last are the last one, and what comes of them is nobody's element.
__device__ __forceinline__ const uint8_t* line_at(const uint8_t* from, int line, int count, int depth) {
  return from + static_cast<int64_t>(min(line, count - 1)) * depth;
}

/// What is added to an element.
template <typename T>
__device__ __forceinline__ float added_to(const Part& part, int64_t at, int column) {
  float added = 0.0f;
  if (part.addend != nullptr) added = to_float(static_cast<const T*>(part.addend)[at]);
  if (part.bias != nullptr) added += value_at(part.bias, part.bias_dtype, column);
  return added;
}

/// A lane's vectors of its two columns of b: of each step that its warp has under way, and of each half of it.
template <typename C>
__device__ __forceinline__ void load_columns(uint4 (&left)[C::steps][2][2], const uint8_t* const (&b)[2], int first,
                                             int depth) {
#pragma unroll
  for (int s = 0; s < C::steps; ++s) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int k = first + s * C::warps * kStep + h * kHalf;
      left[s][h][0] = load_once(b[0] + k, k < depth);
      left[s][h][1] = load_once(b[1] + k, k < depth);
    }
  }
}

/// A lane's sums to its warp's tiles of rows.
template <typename C>
__device__ __forceinline__ void share(float (&tiles)[C::high][kColumns + 1], const float (&sums)[C::rows][4], int line,
                                      int lane) {
#pragma unroll
  for (int r = 0; r < C::rows; ++r) {
#pragma unroll
    for (int i = 0; i < 4; ++i) tiles[r * kRows + lane % 4 * 2 + i % 2][i / 2 * 8 + line] = sums[r][i];
  }
}

template <typename C, typename T>
__global__ void __launch_bounds__(C::threads, C::blocks) skinny_gemm_kernel(const __grid_constant__ Task task) {
  await_before();
  let_next_begin();
  const Part part = task.parts[part_of(task, static_cast<int>(blockIdx.x))];
  const int first = (static_cast<int>(blockIdx.x) - part.first_block) * kColumns;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int line = lane / 4, vector = lane % 4 * kVector;

  // The element that this thread finishes, and what it needs for that besides the sum, on its way meanwhile.
  const int row = threadIdx.x / kColumns, column = first + static_cast<int>(threadIdx.x) % kColumns;
  const bool finishes = row < min(task.rows, C::high) && column < part.columns;
  const int64_t at = static_cast<int64_t>(row) * part.columns + column;
  float scale = 0.0f, added = 0.0f;
  if (finishes) {
    scale = *task.a_scale_inv * *part.b_scale_inv;
    added = added_to<T>(part, at, column);
  }

  const uint8_t *b[2], *a[C::rows];
#pragma unroll
  for (int h = 0; h < 2; ++h) b[h] = line_at(part.b, first + h * 8 + line, part.columns, task.depth);
#pragma unroll
  for (int r = 0; r < C::rows; ++r) a[r] = line_at(task.a, r * kRows + line, task.rows, task.depth);

  float sums[C::rows][4] = {};
  for (int start = warp * kStep; start < task.depth; start += C::warps * C::steps * kStep) {
    uint4 left[C::steps][2][2];
    load_columns<C>(left, b, start + vector, task.depth);
#pragma unroll
    for (int s = 0; s < C::steps; ++s) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int k = start + s * C::warps * kStep + h * kHalf + vector;
        uint4 right[C::rows];
#pragma unroll
        for (int r = 0; r < C::rows; ++r) {
          right[r] = make_uint4(0, 0, 0, 0);
          if (k < task.depth) right[r] = *reinterpret_cast<const uint4*>(a[r] + k);
        }
        multiply<C::rows>(sums, left[s][h], right);
      }
    }
  }

  __shared__ float of_warp[C::warps][C::high][kColumns + 1];
  share<C>(of_warp[warp], sums, line, lane);
  __syncthreads();
  if (!finishes) return;
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < C::warps; ++w) sum += of_warp[w][row][threadIdx.x % kColumns];
  static_cast<T*>(part.y)[at] = rounded<T>(sum * scale + added);
}

/// How many blocks `columns` take.
int64_t tiles(int64_t columns) { return (columns + kColumns - 1) / kColumns; }

template <typename C, typename T>
void launch(const te_skinny_gemm& given) {
  Task task{};
  task.a = static_cast<const uint8_t*>(given.a);
  task.a_scale_inv = given.a_scale_inv;
  task.count = static_cast<int>(given.count);
  task.rows = static_cast<int>(given.rows);
  task.depth = static_cast<int>(given.depth);
  int64_t blocks = 0;
  for (int i = 0; i < task.count; ++i) {
    const te_skinny_part& part = given.parts[i];
    task.parts[i] = {static_cast<const uint8_t*>(part.b),
                     part.b_scale_inv,
                     part.bias,
                     part.addend,
                     part.y,
                     static_cast<int>(part.columns),
                     static_cast<int>(blocks),
                     part.bias_dtype};
    blocks += tiles(part.columns);
  }
  const auto kernel = skinny_gemm_kernel<C, T>;
  cudaLaunchAttribute early = begins_early();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(C::threads);
  config.stream = static_cast<cudaStream_t>(given.stream);
  config.attrs = &early;
  config.numAttrs = awaits_before(kernel, given.device) ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, task), "te_cuda_skinny_gemm: launch");
}

/// How much of what `at_once` blocks can do at a time `blocks` of them use, on average over their waves.
double filled(int64_t blocks, int64_t at_once) {
  const int64_t waves = (blocks + at_once - 1) / at_once;
  return static_cast<double>(blocks) / static_cast<double>(waves * at_once);
}

/// The faster cut of two on an H200, for the weights of decoders of hidden size 1600 to 8192: three blocks of 8 warps on each
/// multiprocessor, but two of 16 warps where these leave much less of the last wave empty.
template <int Rows, typename T>
void dispatch(const te_skinny_gemm& given) {
  using Small = Cut<Rows, 8, 2, 3>;
  using Large = Cut<Rows, 16, 1, 2>;
  int64_t blocks = 0;
  for (int i = 0; i < given.count; ++i) blocks += tiles(given.parts[i].columns);
  const int64_t processors = multiprocessors(given.device);
  if (filled(blocks, Large::blocks * processors) > 1.2 * filled(blocks, Small::blocks * processors)) {
    return launch<Large, T>(given);
  }
  launch<Small, T>(given);
}

template <typename T>
void dispatch(const te_skinny_gemm& given) {
  if (given.rows <= kRows) return dispatch<1, T>(given);
  dispatch<2, T>(given);
}

bool is_aligned(const void* x, uintptr_t bytes) { return x != nullptr && reinterpret_cast<uintptr_t>(x) % bytes == 0; }

void check(const te_skinny_gemm& given) {
  require(given.rows > 0 && given.depth > 0, "te_cuda_skinny_gemm: there must be a row and something to sum over");
  require(given.depth % kVector == 0, "te_cuda_skinny_gemm: depth must be a multiple of 16");
  require(given.count > 0 && given.count <= TE_SKINNY_PARTS, "te_cuda_skinny_gemm: there must be from 1 to 4 parts");
  require(is_aligned(given.a, kVector), "te_cuda_skinny_gemm: a must be aligned to 16 bytes");
  require(given.a_scale_inv != nullptr, "te_cuda_skinny_gemm: a_scale_inv is null");
  require(given.y_dtype == TE_FLOAT32 || given.y_dtype == TE_FLOAT16 || given.y_dtype == TE_BFLOAT16,
          "te_cuda_skinny_gemm: y must be TE_FLOAT32, TE_FLOAT16 or TE_BFLOAT16");
  int64_t columns = 0;
  for (int i = 0; i < given.count; ++i) {
    const te_skinny_part& part = given.parts[i];
    require(part.columns > 0, "te_cuda_skinny_gemm: a part has no column");
    require(is_aligned(part.b, kVector), "te_cuda_skinny_gemm: b must be aligned to 16 bytes");
    require(part.b_scale_inv != nullptr && part.y != nullptr, "te_cuda_skinny_gemm: b_scale_inv or y is null");
    require(part.bias == nullptr || part.bias_dtype == TE_FLOAT32 || part.bias_dtype == TE_FLOAT16 ||
                part.bias_dtype == TE_BFLOAT16,
            "te_cuda_skinny_gemm: a bias must be TE_FLOAT32, TE_FLOAT16 or TE_BFLOAT16");
    columns += part.columns;
  }
  supported_if(given.rows <= TE_SKINNY_ROWS, "te_cuda_skinny_gemm: more than 16 rows");
  supported_if(columns <= INT32_MAX / 2 && given.depth <= INT32_MAX / 2, "te_cuda_skinny_gemm: more than is counted");
  supported_if(compute_capability(given.device) >= 89, "te_cuda_skinny_gemm: FP8 tensor cores need compute capability 8.9");
}

}  // namespace
}  // namespace te_compile

using namespace te_compile;

extern "C" te_status te_cuda_skinny_gemm(const te_skinny_gemm* task) {
  return guarded([&] {
    require(task != nullptr, "te_cuda_skinny_gemm: task is null");
    check(*task);
    const DeviceGuard guard(task->device);
    if (task->y_dtype == TE_FLOAT32) return dispatch<float>(*task);
    if (task->y_dtype == TE_FLOAT16) return dispatch<__half>(*task);
    dispatch<__nv_bfloat16>(*task);
  });
}
