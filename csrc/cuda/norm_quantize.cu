// te_cuda_norm_quantize: checks a request, divides its rows over clusters and launches the kernel for as many.
#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "device.hpp"
#include "norm_few_rows.cuh"
#include "norm_quantize_kernel.cuh"

namespace te_compile {
namespace {

/// The task's columns over as few blocks as can hold them, evenly.
void divide(Task& task) {
  task.blocks_of_cluster = (task.columns + kColumns - 1) / kColumns;
  const int even = (task.columns + task.blocks_of_cluster - 1) / task.blocks_of_cluster;
  task.columns_of_block = (even + kStep - 1) / kStep * kStep;
  task.blocks_of_cluster = (task.columns + task.columns_of_block - 1) / task.columns_of_block;
}

cudaLaunchAttribute cluster_of(unsigned blocks) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = blocks;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}

/// How many clusters of this launch the current device runs at once. Asked once for each kernel and shape of cluster.
template <typename Kernel>
int64_t clusters_at_once(Kernel kernel, const cudaLaunchConfig_t& config, int device) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, unsigned, size_t>, int> known;
  const auto key = std::make_tuple(reinterpret_cast<const void*>(kernel), device, config.attrs->val.clusterDim.x,
                                   config.dynamicSmemBytes);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  const RelaxedCapture relaxed;
  int clusters = 0;
  check_cuda(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "te_cuda_norm_quantize: occupancy");
  if (clusters < 1) throw Failure(TE_UNSUPPORTED, "te_cuda_norm_quantize: no room for a cluster on this device");
  return known[key] = clusters;
}

/// Lets the kernel have so much shared memory, and such clusters, on the current device. Asked for once: what was
/// granted stays, until a smaller grant takes it back.
template <typename Kernel>
void allow(Kernel kernel, size_t bytes, int blocks_of_cluster, int device) {
  struct Granted {
    size_t bytes = 0;
    bool large_clusters = false;
  };
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, Granted> known;
  const std::lock_guard<std::mutex> lock(mutex);
  Granted& granted = known[{reinterpret_cast<const void*>(kernel), device}];
  if (bytes > granted.bytes) {
    const auto error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error == cudaErrorInvalidValue) {
      cudaGetLastError();
      throw Failure(TE_UNSUPPORTED, "te_cuda_norm_quantize: blocks of this device have too little shared memory");
    }
    check_cuda(error, "te_cuda_norm_quantize: shared memory");
    granted.bytes = bytes;
  }
  if (blocks_of_cluster > kPortableCluster && !granted.large_clusters) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
               "te_cuda_norm_quantize: cluster size");
    granted.large_clusters = true;
  }
}

template <typename T, bool Centre, bool RoundFirst>
void launch(const Task& task, int device, cudaStream_t stream) {
  const auto kernel = norm_quantize_kernel<T, Centre, RoundFirst>;
  const size_t bytes = static_cast<size_t>(kStages) * kRows * task.columns_of_block * sizeof(T);
  allow(kernel, bytes, task.blocks_of_cluster, device);
  cudaLaunchAttribute cluster = cluster_of(static_cast<unsigned>(task.blocks_of_cluster));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(cluster.val.clusterDim.x);  // one cluster, to ask about
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  const int64_t groups = (task.rows + kRows - 1) / kRows;
  const int64_t clusters = std::min(groups, clusters_at_once(kernel, config, device));
  config.gridDim = dim3(static_cast<unsigned>(clusters * task.blocks_of_cluster));
  check_cuda(cudaLaunchKernelEx(&config, kernel, task), "te_cuda_norm_quantize: launch");
}

bool has_few_rows(const te_norm& norm) { return norm.rows <= TE_NORM_FEW_ROWS && norm.qt == nullptr; }

template <typename T, bool Centre, bool RoundFirst, int Rows, int Vectors>
void launch_few_rows(const Task& task, const te_norm& norm, unsigned blocks) {
  const auto kernel = norm_few_rows_kernel<T, Centre, RoundFirst, Rows, Vectors>;
  cudaLaunchAttribute attributes[2] = {cluster_of(blocks), begins_early()};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kFewThreads);
  config.stream = static_cast<cudaStream_t>(norm.stream);
  config.attrs = attributes;
  config.numAttrs = awaits_before(kernel, norm.device) ? 2 : 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, task), "te_cuda_norm_quantize: launch");
}

template <typename T, bool Centre, bool RoundFirst, int Rows>
void dispatch_vectors(const Task& task, const te_norm& norm, unsigned blocks) {
  constexpr int kOneVector = kFewThreads * kVector;
  static_assert(4 * kOneVector >= kColumns * kLargestCluster, "a thread has four vectors of the longest row");
  if (task.columns <= kOneVector) return launch_few_rows<T, Centre, RoundFirst, Rows, 1>(task, norm, blocks);
  if (task.columns <= 2 * kOneVector) return launch_few_rows<T, Centre, RoundFirst, Rows, 2>(task, norm, blocks);
  return launch_few_rows<T, Centre, RoundFirst, Rows, 4>(task, norm, blocks);
}

template <typename T, bool Centre, bool RoundFirst>
void dispatch_rows(const Task& task, const te_norm& norm) {
  if (!has_few_rows(norm)) {
    return launch<T, Centre, RoundFirst>(task, norm.device, static_cast<cudaStream_t>(norm.stream));
  }
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(task.rows, kPortableCluster));
  if (task.rows <= blocks) return dispatch_vectors<T, Centre, RoundFirst, 1>(task, norm, blocks);
  return dispatch_vectors<T, Centre, RoundFirst, 2>(task, norm, blocks);
}

template <typename T>
void dispatch(const Task& task, const te_norm& norm) {
  if (norm.centre) return dispatch_rows<T, true, false>(task, norm);
  if (norm.round_first) return dispatch_rows<T, false, true>(task, norm);
  return dispatch_rows<T, false, false>(task, norm);
}

void check(const te_norm& norm) {
  require(norm.rows > 0 && norm.columns > 0, "te_cuda_norm_quantize: x is empty");
  require(norm.x != nullptr && norm.amax != nullptr && norm.scale_inv != nullptr && norm.rstd != nullptr,
          "te_cuda_norm_quantize: x, amax, scale_inv or rstd is null");
  require(!norm.centre || norm.mean != nullptr, "te_cuda_norm_quantize: mean is null");
  require(!(norm.centre && norm.round_first), "te_cuda_norm_quantize: centre and round_first exclude each other");
  require(norm.scale != nullptr || norm.measure, "te_cuda_norm_quantize: without a scale, measure must be set");
  for (const auto address : {reinterpret_cast<uintptr_t>(norm.x), reinterpret_cast<uintptr_t>(norm.qt)}) {
    require(address % 16 == 0, "te_cuda_norm_quantize: x and qt must be aligned to 16 bytes");
  }
  require(reinterpret_cast<uintptr_t>(norm.q) % 4 == 0 && reinterpret_cast<uintptr_t>(norm.y) % 8 == 0,
          "te_cuda_norm_quantize: q must be aligned to 4 bytes and y to 8");
  require(norm.columns % kVector == 0 && norm.stride % kVector == 0,
          "te_cuda_norm_quantize: columns and stride must be multiples of 8");
  if (norm.columns > int64_t{kColumns} * kLargestCluster) {
    throw Failure(TE_UNSUPPORTED, "te_cuda_norm_quantize: more than 16384 columns");
  }
  supported_if(compute_capability(norm.device) >= 90,
               "te_cuda_norm_quantize: clusters need compute capability 9.0");
}

}  // namespace
}  // namespace te_compile

using namespace te_compile;

extern "C" te_status te_cuda_norm_quantize(const te_norm* norm) {
  return guarded([&] {
    require(norm != nullptr, "te_cuda_norm_quantize: norm is null");
    check(*norm);
    const DeviceGuard guard(norm->device);
    Task task{};
    task.x = norm->x;
    task.rows = norm->rows;
    task.stride = norm->stride;
    task.columns = static_cast<int>(norm->columns);
    task.weight = norm->weight;
    task.weight_dtype = norm->weight_dtype;
    task.weight_offset = norm->weight_offset;
    task.bias = norm->bias;
    task.bias_dtype = norm->bias_dtype;
    task.eps = norm->eps;
    task.scale = norm->scale;
    task.measured = norm->measure != 0;
    task.formula = formula_of(norm->rule);
    task.y = norm->y;
    task.q = norm->q;
    task.qt = norm->qt;
    task.amax = norm->amax;
    task.scale_inv = norm->scale_inv;
    task.mean = norm->mean;
    task.rstd = norm->rstd;
    divide(task);
    const auto run = [&](const Task& given) {
      switch (norm->x_dtype) {
        case TE_FLOAT16: return dispatch<__half>(given, *norm);
        case TE_BFLOAT16: return dispatch<__nv_bfloat16>(given, *norm);
        default: throw Failure(TE_UNSUPPORTED, "te_cuda_norm_quantize: x must be TE_FLOAT16 or TE_BFLOAT16");
      }
    };
    if (task.measured && !has_few_rows(*norm)) {
      Task measuring = task;
      measuring.measuring = true;
      measuring.measured = false;
      run(measuring);
    }
    run(task);
  });
}
