// te_cuda_grouped_gemm: checks a request, describes its operands to TMA and launches the kernel.
#include "grouped_gemm_kernel.cuh"

#include <algorithm>
#include <string>

#include "device.hpp"
#include "grouped_requests.hpp"
#include "tensor_map.hpp"

namespace te_compile {
namespace {

using namespace grouped;

constexpr const char* kName = "te_cuda_grouped_gemm";

/// How many blocks share tokens: two, unless every other one would have few features left or none.
int cluster_of(const te_grouped_gemm& task) {
  const int64_t wide = (task.features + 2 * kFeatures - 1) / (2 * kFeatures) * 2 * kFeatures;
  return 8 * (wide - task.features) > task.features ? 1 : 2;
}

CUtensorMap map_of_tokens(const te_grouped_gemm& task, int cluster) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(task.depth), static_cast<cuuint64_t>(task.tokens)};
  const cuuint64_t bytes[] = {static_cast<cuuint64_t>(task.depth)};
  const cuuint32_t box[] = {kDepth, static_cast<cuuint32_t>(kTokens / cluster)};
  return tensor_map<2>(kName, CU_TENSOR_MAP_DATA_TYPE_UINT8, task.a, sizes, bytes, box);
}

CUtensorMap map_of_weights(const te_grouped_gemm& task) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(task.depth), static_cast<cuuint64_t>(task.features),
                              static_cast<cuuint64_t>(task.experts)};
  const cuuint64_t bytes[] = {static_cast<cuuint64_t>(task.feature_stride), static_cast<cuuint64_t>(task.expert_stride)};
  const cuuint32_t box[] = {kDepth, kFeatures, 1};
  return tensor_map<3>(kName, CU_TENSOR_MAP_DATA_TYPE_UINT8, task.b, sizes, bytes, box);
}

template <bool Split, typename T, typename A, typename B>
void launch(const te_grouped_gemm& task) {
  Gemm given{};
  given.ends = task.ends;
  given.a_scale_inv = task.a_scale_inv;
  given.b_scale_inv = task.b_scale_inv;
  given.experts = static_cast<int>(task.experts);
  given.tokens = static_cast<int>(task.tokens);
  given.features = static_cast<int>(task.features);
  given.depth = static_cast<int>(task.depth);
  given.cluster = cluster_of(task);
  given.across = static_cast<int>((task.features + given.cluster * kFeatures - 1) / (given.cluster * kFeatures));

  const int processors = multiprocessors(task.device);
  const int64_t most = (task.tokens / kTokens + task.experts + 1) * given.across;
  const auto clusters = static_cast<unsigned>(std::min<int64_t>(processors / given.cluster, most));
  const auto kernel = gemm_kernel<Split, T, A, B>;
  allow_shared_memory(kernel, kGemmBytes, task.device, kName);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(given.cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(clusters * given.cluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kGemmBytes;
  config.stream = static_cast<cudaStream_t>(task.stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, map_of_tokens(task, given.cluster), map_of_weights(task), given,
                                static_cast<T*>(task.y)),
             "te_cuda_grouped_gemm: launch");
}

template <bool Split, typename T>
void by_codes(const te_grouped_gemm& task) {
  if (task.a_dtype == TE_FLOAT8_E5M2) return launch<Split, T, __nv_fp8_e5m2, __nv_fp8_e4m3>(task);
  if (task.b_dtype == TE_FLOAT8_E5M2) return launch<Split, T, __nv_fp8_e4m3, __nv_fp8_e5m2>(task);
  launch<Split, T, __nv_fp8_e4m3, __nv_fp8_e4m3>(task);
}

template <typename T>
void by_accumulation(const te_grouped_gemm& task) {
  if (task.fast_accumulation) return by_codes<false, T>(task);
  by_codes<true, T>(task);
}

void check(const te_grouped_gemm& task) {
  require(task.experts > 0 && task.tokens > 0 && task.features > 0 && task.depth > 0,
          "te_cuda_grouped_gemm: there must be an expert, a token, a feature and something to sum over");
  require(task.depth % 16 == 0 && task.feature_stride % 16 == 0 && task.expert_stride % 16 == 0 && task.features % 4 == 0,
          "te_cuda_grouped_gemm: depth and strides must be multiples of 16, features of 4");
  require(task.feature_stride > 0 && task.expert_stride > 0, "te_cuda_grouped_gemm: strides must be positive");
  check_operands(task, kName);
  supported_if(task.experts <= kMostExperts, "te_cuda_grouped_gemm: more than 1024 experts");
  const int64_t tiles = (task.tokens / kTokens + task.experts + 1) * ((task.features + 127) / 128);
  supported_if(std::max({task.tokens, task.features, task.depth, tiles}) <= INT32_MAX / 4,
               "te_cuda_grouped_gemm: more tiles than are counted");
  require_hopper(task.device, kName);
}

}  // namespace
}  // namespace te_compile

using namespace te_compile;

extern "C" te_status te_cuda_grouped_gemm(const te_grouped_gemm* task) {
  return guarded([&] {
    require(task != nullptr, "te_cuda_grouped_gemm: task is null");
    check(*task);
    const DeviceGuard guard(task->device);
    if (task->y_dtype == TE_FLOAT32) return by_accumulation<float>(*task);
    if (task->y_dtype == TE_FLOAT16) return by_accumulation<__half>(*task);
    by_accumulation<__nv_bfloat16>(*task);
  });
}
