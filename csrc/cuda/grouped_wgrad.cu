// te_cuda_grouped_wgrad: checks a request, describes its operands to TMA and launches the kernels.
#include "grouped_wgrad_kernel.cuh"

#include <algorithm>
#include <string>

#include "device.hpp"
#include "grouped_requests.hpp"
#include "tensor_map.hpp"

namespace te_compile {
namespace {

using namespace grouped;

constexpr const char* kName = "te_cuda_grouped_wgrad";

/// Codes [rows, tokens] in boxes of 128 by 128.
CUtensorMap map_of(const void* codes, int64_t rows, int64_t tokens) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(tokens), static_cast<cuuint64_t>(rows)};
  const cuuint64_t bytes[] = {static_cast<cuuint64_t>(tokens)};
  const cuuint32_t box[] = {kDepth, 128};
  return tensor_map<2>(kName, CU_TENSOR_MAP_DATA_TYPE_UINT8, codes, sizes, bytes, box);
}

template <typename T, typename A, typename B>
void launch(const te_grouped_wgrad& task) {
  const auto stream = static_cast<cudaStream_t>(task.stream);
  auto* const maps = static_cast<CUtensorMap*>(task.workspace);
  const int tokens = static_cast<int>(task.tokens);
  maps_kernel<<<static_cast<unsigned>(2 * task.experts), 32, 0, stream>>>(
      map_of(task.a, task.rows, task.tokens), map_of(task.b, task.columns, task.tokens), task.ends, tokens, maps);
  check_cuda(cudaGetLastError(), "te_cuda_grouped_wgrad: launch");

  Wgrad given{};
  given.maps = maps;
  given.ends = task.ends;
  given.a_scale_inv = task.a_scale_inv;
  given.b_scale_inv = task.b_scale_inv;
  given.rows = static_cast<int>(task.rows);
  given.columns = static_cast<int>(task.columns);
  given.tokens = tokens;
  given.down = static_cast<int>((task.rows + kRows - 1) / kRows);
  given.across = static_cast<int>((task.columns + kCluster * kColumns - 1) / (kCluster * kColumns));
  given.tiles = static_cast<int>(task.experts) * given.down * given.across;
  const int processors = multiprocessors(task.device);
  const int clusters = std::min(processors / kCluster, given.tiles);
  const auto kernel = wgrad_kernel<T, A, B>;
  allow_shared_memory(kernel, kRing, task.device, kName);
  kernel<<<static_cast<unsigned>(kCluster * clusters), kThreads, kRing, stream>>>(given, static_cast<T*>(task.y));
  check_cuda(cudaGetLastError(), "te_cuda_grouped_wgrad: launch");
}

template <typename T>
void by_codes(const te_grouped_wgrad& task) {
  if (task.a_dtype == TE_FLOAT8_E5M2) return launch<T, __nv_fp8_e5m2, __nv_fp8_e4m3>(task);
  if (task.b_dtype == TE_FLOAT8_E5M2) return launch<T, __nv_fp8_e4m3, __nv_fp8_e5m2>(task);
  launch<T, __nv_fp8_e4m3, __nv_fp8_e4m3>(task);
}

void check(const te_grouped_wgrad& task) {
  require(task.experts > 0 && task.rows > 0 && task.columns > 0 && task.tokens > 0,
          "te_cuda_grouped_wgrad: there must be an expert, a row, a column and a token");
  require(task.tokens % 16 == 0 && task.columns % 4 == 0,
          "te_cuda_grouped_wgrad: tokens must be a multiple of 16, columns of 4");
  require(is_aligned(task.workspace, 128), "te_cuda_grouped_wgrad: the workspace must be aligned to 128 bytes");
  check_operands(task, kName);
  supported_if(std::max({task.rows, task.columns, task.tokens}) <= INT32_MAX / 4 &&
                   task.experts * ((task.rows + kRows - 1) / kRows) * ((task.columns + kColumns - 1) / kColumns) <= INT32_MAX / 4,
               "te_cuda_grouped_wgrad: more tiles than are counted");
  require_hopper(task.device, kName);
}

}  // namespace
}  // namespace te_compile

using namespace te_compile;

extern "C" te_status te_cuda_grouped_wgrad(const te_grouped_wgrad* task) {
  return guarded([&] {
    require(task != nullptr, "te_cuda_grouped_wgrad: task is null");
    check(*task);
    const DeviceGuard guard(task->device);
    if (task->y_dtype == TE_FLOAT32) return by_codes<float>(*task);
    if (task->y_dtype == TE_FLOAT16) return by_codes<__half>(*task);
    by_codes<__nv_bfloat16>(*task);
  });
}
