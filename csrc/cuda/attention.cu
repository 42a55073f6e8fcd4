// te_cuda_attention and its backward pass: checks a request, describes its tensors to TMA and launches the kernels.
#include <algorithm>
#include <string>

#include "attention_backward.cuh"
#include "attention_forward.cuh"
#include "device.hpp"
#include "tensor_map.hpp"

namespace te_compile {
namespace {

using namespace attention;

constexpr float kLog2E = 1.4426950408889634f;

constexpr const char* kName = "te_cuda_attention";

/// What copy_box needs to know of [batch, length, head, width], for boxes of so many rows and 64 columns.
CUtensorMap map_of(const te_attention& task, const te_heads& x, int64_t length, int64_t heads, int rows) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(task.width), static_cast<cuuint64_t>(length),
                              static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(task.batches)};
  const cuuint64_t bytes[] = {static_cast<cuuint64_t>(2 * x.row), static_cast<cuuint64_t>(2 * x.head),
                              static_cast<cuuint64_t>(2 * x.batch)};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(rows), 1, 1};
  const auto type = task.dtype == TE_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return tensor_map<4>(kName, type, x.x, sizes, bytes, box);
}

/// One that ends nowhere ends behind every position.
Window window_of(const te_attention& task) {
  const int64_t longest = std::max(task.queries, task.keys);
  const auto side = [&](int64_t sees) { return static_cast<int>(sees < 0 ? longest : std::min(sees, longest)); };
  return {side(task.left), side(task.right)};
}

Sight sight_of(const te_attention& task) {
  if (task.tiles != nullptr) return Sight::kTiles;
  if (task.left >= 0) return Sight::kWindow;
  return task.right > 0 ? Sight::kWindow : task.right == 0 ? Sight::kCausal : Sight::kAll;
}

Tiles tiles_of(const te_attention& task, int64_t rows, int64_t lists, int64_t tiles, int words_of_tile) {
  const bool has_own = task.mask_batches > 1;
  const int64_t words = words_of_tile * tiles, length = 1 + tiles;
  return {task.mask, task.tiles, has_own ? rows * words : 0, has_own ? lists * length : 0, static_cast<int>(words),
          static_cast<int>(length)};
}

int words_of(const te_attention& task) { return static_cast<int>((task.keys + 63) / 64 * 2); }

template <typename T, Sight Seen, bool Drops>
void forward(const te_attention& task) {
  Forward given{};
  given.bits = task.bits;
  given.logsumexp = task.logsumexp;
  given.heads = static_cast<int>(task.heads);
  given.shared = static_cast<int>(task.heads / task.key_heads);
  given.queries = static_cast<int>(task.queries);
  given.keys = static_cast<int>(task.keys);
  given.width = static_cast<int>(task.width);
  given.tiles = static_cast<int>((task.queries + kQueries - 1) / kQueries);
  given.words = words_of(task);
  given.scale = task.scale * kLog2E;
  given.growth = task.growth;
  given.window = window_of(task);
  given.mask = tiles_of(task, task.queries, given.tiles, (task.keys + kKeys - 1) / kKeys, 4);
  const auto kernel = forward_kernel<T, Seen, Drops>;
  allow_shared_memory(kernel, kForwardBytes, task.device, kName);
  const auto blocks = static_cast<unsigned>(given.tiles * task.batches * task.heads);
  kernel<<<blocks, 384, kForwardBytes, static_cast<cudaStream_t>(task.stream)>>>(
      map_of(task, task.q, task.queries, task.heads, kQueries), map_of(task, task.k, task.keys, task.key_heads, kKeys),
      map_of(task, task.v, task.keys, task.key_heads, kKeys), static_cast<T*>(task.out), given);
  check_cuda(cudaGetLastError(), "te_cuda_attention: launch");
}

template <typename T, Sight Seen, bool Drops>
void backward(const te_attention& task) {
  const auto stream = static_cast<cudaStream_t>(task.stream);
  const int64_t steps = (task.queries + kStep - 1) / kStep, rows = task.batches * task.heads * steps * kStep;
  float *const dq = task.workspace, *const sums = dq + rows * kWidth, *const shifts = sums + rows;
  const int heads = static_cast<int>(task.heads), queries = static_cast<int>(task.queries);
  const int width = static_cast<int>(task.width);
  before_kernel<T><<<static_cast<unsigned>((rows + 15) / 16), 256, 0, stream>>>(
      static_cast<const T*>(task.grad.x), task.grad.batch, task.grad.row, task.grad.head, static_cast<const T*>(task.out),
      task.logsumexp, sums, shifts, dq, heads, queries, static_cast<int>(steps), width, rows);
  check_cuda(cudaGetLastError(), "te_cuda_attention_backward: launch");

  Backward given{};
  given.bits = task.bits;
  given.sums = sums;
  given.shifts = shifts;
  given.dq = dq;
  given.heads = heads;
  given.shared = static_cast<int>(task.heads / task.key_heads);
  given.queries = queries;
  given.keys = static_cast<int>(task.keys);
  given.width = width;
  given.tiles = static_cast<int>((task.keys + kKeys - 1) / kKeys);
  given.steps = static_cast<int>(steps);
  given.words = words_of(task);
  given.scale = task.scale * kLog2E;
  given.growth = task.growth;
  given.window = window_of(task);
  given.mask = tiles_of(task, task.keys, given.tiles, steps, 2);
  given.factor = task.scale;
  const auto kernel = backward_kernel<T, Seen, Drops>;
  allow_shared_memory(kernel, kBackwardBytes, task.device, kName);
  const auto blocks = static_cast<unsigned>(given.tiles * task.batches * task.key_heads);
  kernel<<<blocks, 384, kBackwardBytes, stream>>>(
      map_of(task, task.q, task.queries, task.heads, kStep), map_of(task, task.k, task.keys, task.key_heads, kKeys),
      map_of(task, task.v, task.keys, task.key_heads, kKeys),
      map_of(task, task.grad, task.queries, task.heads, kStep), static_cast<T*>(task.dk), static_cast<T*>(task.dv), given);
  check_cuda(cudaGetLastError(), "te_cuda_attention_backward: launch");

  const int64_t count = rows * kWidth / 16;
  after_kernel<T><<<static_cast<unsigned>((count + 255) / 256), 256, 0, stream>>>(
      dq, static_cast<T*>(task.dq), heads, queries, given.steps, width, task.scale, count);
  check_cuda(cudaGetLastError(), "te_cuda_attention_backward: launch");
}

void check(const te_heads& x, const char* name) {
  const bool aligned = reinterpret_cast<uintptr_t>(x.x) % 16 == 0;
  const bool strided = x.batch > 0 && x.row > 0 && x.head > 0 && x.batch % 8 == 0 && x.row % 8 == 0 && x.head % 8 == 0;
  const std::string what = "te_cuda_attention: " + std::string(name);
  require(x.x != nullptr && aligned && strided,
          (what + " must be aligned to 16 bytes, its strides positive multiples of 8").c_str());
}

void check(const te_attention& task) {
  require(task.batches > 0 && task.heads > 0 && task.queries > 0 && task.keys > 0,
          "te_cuda_attention: there must be a query and a key");
  require(task.width > 0 && task.width % 8 == 0 && task.width <= kWidth,
          "te_cuda_attention: heads must have a multiple of 8 features, up to 128");
  require(sight_of(task) == Sight::kAll || sight_of(task) == Sight::kTiles || task.queries == task.keys,
          "te_cuda_attention: causal, or in a window, with other keys than queries");
  require(task.dtype == TE_FLOAT16 || task.dtype == TE_BFLOAT16,
          "te_cuda_attention: q, k and v must be TE_FLOAT16 or TE_BFLOAT16");
  require(task.key_heads > 0 && task.heads % task.key_heads == 0,
          "te_cuda_attention: heads must be a multiple of key_heads");
  require(task.bits == nullptr || task.heads == task.key_heads,
          "te_cuda_attention: where weights are dropped each head must have keys of its own");
  require(task.bits != nullptr || task.growth == 1, "te_cuda_attention: where none is dropped growth must be 1");
  require(task.bits == nullptr || sight_of(task) != Sight::kWindow,
          "te_cuda_attention: weights are dropped from all keys, from causal ones, or under a mask");
  require((task.mask == nullptr) == (task.tiles == nullptr) && reinterpret_cast<uintptr_t>(task.mask) % 16 == 0,
          "te_cuda_attention: a mask has tiles, and is aligned to 16 bytes");
  require(task.tiles == nullptr || (task.left < 0 && task.right < 0),
          "te_cuda_attention: under a mask there is no window");
  require(task.tiles == nullptr || task.mask_batches == 1 || task.mask_batches == task.batches,
          "te_cuda_attention: there must be a mask for each batch, or one for all");
  require(task.out != nullptr && task.logsumexp != nullptr, "te_cuda_attention: out or logsumexp is null");
  check(task.q, "q");
  check(task.k, "k");
  check(task.v, "v");
  const int64_t longest = std::max(task.queries, task.keys);
  if (longest > INT32_MAX / 2 || (longest + 127) / 128 * task.batches * task.heads > INT32_MAX) {
    throw Failure(TE_UNSUPPORTED, "te_cuda_attention: more tiles than a launch has blocks");
  }
  require_hopper(task.device, kName);
}

void check_backward(const te_attention& task) {
  require(task.bits == nullptr || (task.queries % kStep == 0 && task.keys % kKeys == 0),
          "te_cuda_attention_backward: where weights are dropped queries must be a multiple of 64, keys of 128");
  check(task.grad, "grad");
  require(reinterpret_cast<uintptr_t>(task.out) % 16 == 0,
          "te_cuda_attention_backward: out must be aligned to 16 bytes");
  require(task.workspace != nullptr && reinterpret_cast<uintptr_t>(task.workspace) % 16 == 0,
          "te_cuda_attention_backward: the workspace must be aligned to 16 bytes");
  require(reinterpret_cast<uintptr_t>(task.bits) % 16 == 0,
          "te_cuda_attention_backward: bits must be aligned to 16 bytes");
  require(task.dq != nullptr && task.dk != nullptr && task.dv != nullptr,
          "te_cuda_attention_backward: dq, dk or dv is null");
}

template <Sight Seen, bool Drops>
struct Kind {};

/// Calls `run` with a pointer to the type of the operands and the kind of their attention.
template <typename Run>
void by_kind(const te_attention& task, Run run) {
  const auto by_type = [&](auto kind) {
    if (task.dtype == TE_BFLOAT16) return run(static_cast<__nv_bfloat16*>(nullptr), kind);
    run(static_cast<__half*>(nullptr), kind);
  };
  const bool drops = task.bits != nullptr;
  switch (sight_of(task)) {
    case Sight::kAll: return drops ? by_type(Kind<Sight::kAll, true>()) : by_type(Kind<Sight::kAll, false>());
    case Sight::kCausal: return drops ? by_type(Kind<Sight::kCausal, true>()) : by_type(Kind<Sight::kCausal, false>());
    case Sight::kWindow: return by_type(Kind<Sight::kWindow, false>());
    case Sight::kTiles: return drops ? by_type(Kind<Sight::kTiles, true>()) : by_type(Kind<Sight::kTiles, false>());
  }
}

template <typename T, Sight Seen, bool Drops>
void forward_of(const te_attention& task, T*, Kind<Seen, Drops>) {
  forward<T, Seen, Drops>(task);
}

template <typename T, Sight Seen, bool Drops>
void backward_of(const te_attention& task, T*, Kind<Seen, Drops>) {
  backward<T, Seen, Drops>(task);
}

}  // namespace
}  // namespace te_compile

using namespace te_compile;

extern "C" te_status te_cuda_attention(const te_attention* task) {
  return guarded([&] {
    require(task != nullptr, "te_cuda_attention: task is null");
    check(*task);
    const DeviceGuard guard(task->device);
    by_kind(*task, [&](auto* type, auto kind) { forward_of(*task, type, kind); });
  });
}

extern "C" te_status te_cuda_attention_backward(const te_attention* task) {
  return guarded([&] {
    require(task != nullptr, "te_cuda_attention_backward: task is null");
    check(*task);
    check_backward(*task);
    const DeviceGuard guard(task->device);
    by_kind(*task, [&](auto* type, auto kind) { backward_of(*task, type, kind); });
  });
}
