// te_cuda_quantize: x to FP8, row-major and transposed, with amax, in one pass.
//
// Bytes: x once in, each copy once out; 8192 x 4096 bf16 to both copies moves 128 MiB, 31 us at 4.27 TB/s.
//
// A block of 256 threads takes a 64 x 64 tile. Each thread casts 2 x 8 neighbouring elements, stores their codes to q
// (64-byte runs) and to shared memory, and then, for qt, gathers 16 codes that stand below one another into one 16-byte
// store, four threads making a 64-byte run. The tile's rows in shared memory are 68 bytes apart: 17 words, odd, so that
// threads of a warp that read different rows mostly meet different banks.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "device.hpp"
#include "scale.hpp"

namespace te_compile {
namespace {

constexpr int kTile = 64;
constexpr int kThreads = 256;
constexpr int kVector = 8;  // elements a thread casts at a time
constexpr int kPitch = kTile + 4;

__device__ float to_float(float x) { return x; }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

/// Eight neighbouring elements, as 16-byte loads if `Aligned`, else one by one up to `available`; zeros beyond.
template <typename T, bool Aligned>
__device__ void load(const T* x, int64_t available, float (&values)[kVector]) {
  if (Aligned && available >= kVector) {
    constexpr int kLoads = kVector * sizeof(T) / 16;
    alignas(16) T elements[kVector];
    for (int i = 0; i < kLoads; ++i) reinterpret_cast<uint4*>(elements)[i] = reinterpret_cast<const uint4*>(x)[i];
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = to_float(elements[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = i < available ? to_float(x[i]) : 0.0f;
  }
}

__device__ float magnitude_of(float x) { return is_finite(x) ? fabsf(x) : __int_as_float(0x7F800000); }

/// The largest of all threads' values into *amax. Non-negative floats order as their bits do.
__device__ void reduce_amax(float value, float* amax) {
  __shared__ float of_warp[kThreads / 32];
  for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kThreads / 32; ++warp) value = fmaxf(value, of_warp[warp]);
    atomicMax(reinterpret_cast<int*>(amax), __float_as_int(value));
  }
}

template <typename T, bool Aligned>
__global__ void __launch_bounds__(kThreads)
    measure_kernel(const T* __restrict__ x, int64_t count, const float* scale, float* amax) {
  if (scale != nullptr && *scale > 0.0f) return;
  float largest = 0.0f;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads * kVector;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVector; i < count; i += stride) {
    float values[kVector];
    load<T, Aligned>(x + i, count - i, values);
#pragma unroll
    for (int j = 0; j < kVector; ++j) largest = fmaxf(largest, magnitude_of(values[j]));
  }
  reduce_amax(largest, amax);
}

/// A tile's codes to qt: a thread gathers 16 that stand below one another.
__device__ void store_transposed(uint8_t* qt, const uint8_t* codes, int64_t rows, int64_t columns, int64_t first_row,
                                 int64_t first_column) {
  const int64_t pitch = (rows + 15) / 16 * 16;
  const int column = threadIdx.x / 4;
  const int row = threadIdx.x % 4 * 16;
  if (first_column + column < columns && first_row + row < pitch) {
    uint32_t run[4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) run[i / 4] |= uint32_t{codes[(row + i) * kPitch + column]} << (i % 4 * 8);
    *reinterpret_cast<uint4*>(qt + (first_column + column) * pitch + first_row + row) =
        make_uint4(run[0], run[1], run[2], run[3]);
  }
}

template <typename T, bool Aligned>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const T* __restrict__ x, int64_t rows, int64_t columns, const float* scale, ScaleFormula formula,
                    __nv_fp8_interpretation_t format, uint8_t* q, uint8_t* qt, float* amax, float* scale_inv) {
  __shared__ alignas(16) uint8_t codes[kTile * kPitch];
  const int64_t tiles_across = (columns + kTile - 1) / kTile;
  const int64_t first_row = blockIdx.x / tiles_across * kTile;
  const int64_t first_column = blockIdx.x % tiles_across * kTile;

  // Where the scale is not known, measure_kernel has put the whole tensor's amax here; this kernel's own atomicMax
  // below cannot raise it further, so it does not matter which blocks have passed that point.
  const float given = scale == nullptr ? 0.0f : *scale;
  const float used = given > 0.0f ? given : scale_of(*static_cast<volatile float*>(amax), formula);
  if (scale_inv != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = 1.0f / used;

  float largest = 0.0f;
#pragma unroll
  for (int part = 0; part < kTile * kTile / (kThreads * kVector); ++part) {
    const int slot = part * kThreads + threadIdx.x;
    const int row = slot / (kTile / kVector);
    const int column = slot % (kTile / kVector) * kVector;
    const int64_t available = first_row + row < rows ? columns - first_column - column : 0;
    const int64_t at = (first_row + row) * columns + first_column + column;
    float values[kVector];
    load<T, Aligned>(available > 0 ? x + at : x, available, values);
    uint32_t packed[kVector / 4] = {};
#pragma unroll
    for (int j = 0; j < kVector; j += 2) {
      largest = fmaxf(largest, fmaxf(magnitude_of(values[j]), magnitude_of(values[j + 1])));
      const float2 pair = make_float2(scaled(values[j], used), scaled(values[j + 1], used));
      const uint32_t two = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, format);
      packed[j / 4] |= two << (j % 4 * 8);
    }
    if (q != nullptr && available > 0) {
      if (Aligned && available >= kVector) {
        *reinterpret_cast<uint2*>(q + at) = make_uint2(packed[0], packed[1]);
      } else {
        for (int j = 0; j < kVector && j < available; ++j) q[at + j] = packed[j / 4] >> (j % 4 * 8) & 0xFF;
      }
    }
    uint32_t* row_of_tile = reinterpret_cast<uint32_t*>(codes + row * kPitch + column);
    row_of_tile[0] = packed[0];
    row_of_tile[1] = packed[1];
  }

  if (qt != nullptr) {
    __syncthreads();
    store_transposed(qt, codes, rows, columns, first_row, first_column);
  }
  reduce_amax(largest, amax);
}

struct Request {
  const void* x;
  int64_t rows, columns;
  const float* scale;
  bool measure;
  ScaleFormula formula;
  __nv_fp8_interpretation_t format;
  uint8_t* q;
  uint8_t* qt;
  float* amax;
  float* scale_inv;
  cudaStream_t stream;
};

template <typename T, bool Aligned>
void launch(const Request& request) {
  const T* x = static_cast<const T*>(request.x);
  const int64_t count = request.rows * request.columns;
  if (request.measure && count > 0) {
    const int64_t blocks = std::min<int64_t>((count + kThreads * kVector - 1) / (kThreads * kVector), 132 * 8);
    measure_kernel<T, Aligned>
        <<<static_cast<unsigned>(blocks), kThreads, 0, request.stream>>>(x, count, request.scale, request.amax);
    check_cuda(cudaGetLastError(), "te_cuda_quantize: launch of the measuring kernel");
  }
  const int64_t across = (request.columns + kTile - 1) / kTile;
  const int64_t down = (request.rows + kTile - 1) / kTile;
  const int64_t blocks = std::max<int64_t>(across * down, 1);  // one even for an empty x, for scale_inv
  require(blocks <= 0x7FFFFFFF, "te_cuda_quantize: x is too large");
  quantize_kernel<T, Aligned><<<static_cast<unsigned>(blocks), kThreads, 0, request.stream>>>(
      x, count > 0 ? request.rows : 0, std::max<int64_t>(request.columns, 1), request.scale, request.formula, request.format,
      count > 0 ? request.q : nullptr, count > 0 ? request.qt : nullptr, request.amax, request.scale_inv);
  check_cuda(cudaGetLastError(), "te_cuda_quantize: launch");
}

template <typename T>
void dispatch(const Request& request) {
  // Vectors need every row to start on 16 bytes of x and on 8 bytes of q.
  const bool aligned = request.columns % 16 == 0 && reinterpret_cast<uintptr_t>(request.x) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(request.q) % 8 == 0;
  if (aligned) {
    launch<T, true>(request);
  } else {
    launch<T, false>(request);
  }
}

}  // namespace
}  // namespace te_compile

using namespace te_compile;

extern "C" te_status te_cuda_quantize(int device, const void* x, te_dtype x_dtype, int64_t rows, int64_t columns,
                                      const float* scale, int measure, const te_scale_rule* rule, te_dtype dtype,
                                      uint8_t* q, uint8_t* qt, float* amax, float* scale_inv, void* stream) {
  return guarded([&] {
    require(rows >= 0 && columns >= 0, "te_cuda_quantize: a size is negative");
    require(x != nullptr || rows * columns == 0, "te_cuda_quantize: x is null");
    require(rule != nullptr && amax != nullptr, "te_cuda_quantize: rule or amax is null");
    require(scale != nullptr || measure, "te_cuda_quantize: without a scale, measure must be set");
    require(dtype == TE_FLOAT8_E4M3 || dtype == TE_FLOAT8_E5M2,
            "te_cuda_quantize: dtype must be TE_FLOAT8_E4M3 or TE_FLOAT8_E5M2");
    require(reinterpret_cast<uintptr_t>(qt) % 16 == 0, "te_cuda_quantize: qt must be aligned to 16 bytes");
    const DeviceGuard guard(device);
    const Request request{x,
                          rows,
                          columns,
                          scale,
                          measure != 0,
                          formula_of(*rule),
                          dtype == TE_FLOAT8_E4M3 ? __NV_E4M3 : __NV_E5M2,
                          q,
                          qt,
                          amax,
                          scale_inv,
                          static_cast<cudaStream_t>(stream)};
    check_cuda(cudaMemsetAsync(amax, 0, sizeof(float), request.stream), "te_cuda_quantize: clearing amax");
    switch (x_dtype) {
      case TE_FLOAT32: return dispatch<float>(request);
      case TE_FLOAT16: return dispatch<__half>(request);
      case TE_BFLOAT16: return dispatch<__nv_bfloat16>(request);
      default: throw Failure(TE_INVALID_ARGUMENT, "te_cuda_quantize: x must be TE_FLOAT32, TE_FLOAT16 or TE_BFLOAT16");
    }
  });
}
