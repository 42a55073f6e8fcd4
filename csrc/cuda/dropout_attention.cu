// te_cuda_dropout_attention and its backward pass: checks a request, describes its tensors to TMA and launches the kernels.
#include <algorithm>
#include <string>
#include <type_traits>

#include "device.hpp"
#include "dropout_attention_backward.cuh"
#include "dropout_attention_forward.cuh"
#include "tensor_map.hpp"

namespace te_compile {
namespace {

using namespace attention;

constexpr float kLog2E = 1.4426950408889634f;

constexpr const char* kName = "te_cuda_dropout_attention";

/// What copy_box needs to know of [batch, length, head, width], for boxes of so many rows and 64 columns.
CUtensorMap map_of(const te_dropout_attention& task, const te_heads& x, int64_t length, int rows) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(task.width), static_cast<cuuint64_t>(length),
                              static_cast<cuuint64_t>(task.heads), static_cast<cuuint64_t>(task.batches)};
  const cuuint64_t bytes[] = {static_cast<cuuint64_t>(2 * x.row), static_cast<cuuint64_t>(2 * x.head),
                              static_cast<cuuint64_t>(2 * x.batch)};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(rows), 1, 1};
  const auto type = task.dtype == TE_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return tensor_map<4>(kName, type, x.x, sizes, bytes, box);
}

int words_of(const te_dropout_attention& task) { return static_cast<int>((task.keys + 63) / 64 * 2); }

template <typename T, bool Causal>
void forward(const te_dropout_attention& task) {
  Forward given{};
  given.bits = task.bits;
  given.logsumexp = task.logsumexp;
  given.heads = static_cast<int>(task.heads);
  given.queries = static_cast<int>(task.queries);
  given.keys = static_cast<int>(task.keys);
  given.width = static_cast<int>(task.width);
  given.tiles = static_cast<int>((task.queries + kQueries - 1) / kQueries);
  given.words = words_of(task);
  given.scale = task.scale * kLog2E;
  given.growth = task.growth;
  const auto kernel = forward_kernel<T, Causal>;
  allow_shared_memory(kernel, kForwardBytes, task.device, kName);
  const auto blocks = static_cast<unsigned>(given.tiles * task.batches * task.heads);
  kernel<<<blocks, 384, kForwardBytes, static_cast<cudaStream_t>(task.stream)>>>(
      map_of(task, task.q, task.queries, kQueries), map_of(task, task.k, task.keys, kKeys),
      map_of(task, task.v, task.keys, kKeys), static_cast<T*>(task.out), given);
  check_cuda(cudaGetLastError(), "te_cuda_dropout_attention: launch");
}

template <typename T, bool Causal>
void backward(const te_dropout_attention& task) {
  const auto stream = static_cast<cudaStream_t>(task.stream);
  const int64_t rows = task.batches * task.heads * task.queries;
  float *const dq = task.workspace, *const sums = dq + rows * kWidth, *const shifts = sums + rows;
  const int heads = static_cast<int>(task.heads), queries = static_cast<int>(task.queries);
  const int width = static_cast<int>(task.width);
  before_kernel<T><<<static_cast<unsigned>((rows + 15) / 16), 256, 0, stream>>>(
      static_cast<const T*>(task.grad.x), task.grad.batch, task.grad.row, task.grad.head, static_cast<const T*>(task.out),
      task.logsumexp, sums, shifts, dq, heads, queries, width, rows);
  check_cuda(cudaGetLastError(), "te_cuda_dropout_attention_backward: launch");

  Backward given{};
  given.bits = task.bits;
  given.sums = sums;
  given.shifts = shifts;
  given.dq = dq;
  given.heads = heads;
  given.queries = queries;
  given.keys = static_cast<int>(task.keys);
  given.width = width;
  given.tiles = static_cast<int>(task.keys / kKeys);
  given.words = words_of(task);
  given.scale = task.scale * kLog2E;
  given.growth = task.growth;
  given.factor = task.scale;
  const auto kernel = backward_kernel<T, Causal>;
  allow_shared_memory(kernel, kBackwardBytes, task.device, kName);
  const auto blocks = static_cast<unsigned>(given.tiles * task.batches * task.heads);
  kernel<<<blocks, 384, kBackwardBytes, stream>>>(
      map_of(task, task.q, task.queries, kStep), map_of(task, task.k, task.keys, kKeys),
      map_of(task, task.v, task.keys, kKeys), map_of(task, task.grad, task.queries, kStep), static_cast<T*>(task.dk),
      static_cast<T*>(task.dv), given);
  check_cuda(cudaGetLastError(), "te_cuda_dropout_attention_backward: launch");

  const int64_t count = rows * kWidth / 16;
  after_kernel<T><<<static_cast<unsigned>((count + 255) / 256), 256, 0, stream>>>(
      dq, static_cast<T*>(task.dq), heads, queries, width, task.scale, count);
  check_cuda(cudaGetLastError(), "te_cuda_dropout_attention_backward: launch");
}

void check(const te_heads& x, const char* name) {
  const bool aligned = reinterpret_cast<uintptr_t>(x.x) % 16 == 0;
  const bool strided = x.batch > 0 && x.row > 0 && x.head > 0 && x.batch % 8 == 0 && x.row % 8 == 0 && x.head % 8 == 0;
  const std::string what = "te_cuda_dropout_attention: " + std::string(name);
  require(x.x != nullptr && aligned && strided,
          (what + " must be aligned to 16 bytes, its strides positive multiples of 8").c_str());
}

void check(const te_dropout_attention& task) {
  require(task.batches > 0 && task.heads > 0 && task.queries > 0 && task.keys > 0,
          "te_cuda_dropout_attention: there must be a query and a key");
  require(task.width > 0 && task.width % 8 == 0 && task.width <= kWidth,
          "te_cuda_dropout_attention: heads must have a multiple of 8 features, up to 128");
  require(!task.causal || task.queries == task.keys, "te_cuda_dropout_attention: causal with other keys than queries");
  require(task.dtype == TE_FLOAT16 || task.dtype == TE_BFLOAT16,
          "te_cuda_dropout_attention: q, k and v must be TE_FLOAT16 or TE_BFLOAT16");
  require(task.bits != nullptr && task.out != nullptr && task.logsumexp != nullptr,
          "te_cuda_dropout_attention: bits, out or logsumexp is null");
  check(task.q, "q");
  check(task.k, "k");
  check(task.v, "v");
  const int64_t longest = std::max(task.queries, task.keys);
  if (longest > INT32_MAX / 2 || (longest + 127) / 128 * task.batches * task.heads > INT32_MAX) {
    throw Failure(TE_UNSUPPORTED, "te_cuda_dropout_attention: more tiles than a launch has blocks");
  }
  require_hopper(task.device, kName);
}

void check_backward(const te_dropout_attention& task) {
  require(task.queries % kStep == 0 && task.keys % kKeys == 0,
          "te_cuda_dropout_attention_backward: queries must be a multiple of 64, keys of 128");
  check(task.grad, "grad");
  require(task.workspace != nullptr && reinterpret_cast<uintptr_t>(task.workspace) % 16 == 0,
          "te_cuda_dropout_attention_backward: the workspace must be aligned to 16 bytes");
  require(reinterpret_cast<uintptr_t>(task.bits) % 16 == 0,
          "te_cuda_dropout_attention_backward: bits must be aligned to 16 bytes");
  require(task.dq != nullptr && task.dk != nullptr && task.dv != nullptr,
          "te_cuda_dropout_attention_backward: dq, dk or dv is null");
}

template <typename Run>
void by_kind(const te_dropout_attention& task, Run run) {
  const bool bf16 = task.dtype == TE_BFLOAT16;
  if (bf16 && task.causal) return run(static_cast<__nv_bfloat16*>(nullptr), std::true_type());
  if (bf16) return run(static_cast<__nv_bfloat16*>(nullptr), std::false_type());
  if (task.causal) return run(static_cast<__half*>(nullptr), std::true_type());
  run(static_cast<__half*>(nullptr), std::false_type());
}

}  // namespace
}  // namespace te_compile

using namespace te_compile;

extern "C" te_status te_cuda_dropout_attention(const te_dropout_attention* task) {
  return guarded([&] {
    require(task != nullptr, "te_cuda_dropout_attention: task is null");
    check(*task);
    const DeviceGuard guard(task->device);
    by_kind(*task, [&](auto* type, auto causal) {
      forward<std::remove_pointer_t<decltype(type)>, decltype(causal)::value>(*task);
    });
  });
}

extern "C" te_status te_cuda_dropout_attention_backward(const te_dropout_attention* task) {
  return guarded([&] {
    require(task != nullptr, "te_cuda_dropout_attention_backward: task is null");
    check(*task);
    check_backward(*task);
    const DeviceGuard guard(task->device);
    by_kind(*task, [&](auto* type, auto causal) {
      backward<std::remove_pointer_t<decltype(type)>, decltype(causal)::value>(*task);
    });
  });
}
