// Attention for heads of one width: describes a task's tensors to TMA and launches its kernels.
#pragma once

#include <algorithm>

#include "attention_backward.cuh"
#include "attention_forward.cuh"
#include "attention_tasks.hpp"
#include "device.hpp"
#include "tensor_map.hpp"

namespace te_compile::attention {

inline CUtensorMapDataType sixteen_bits(const te_attention& task) {
  return task.dtype == TE_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

/// What copy_box needs to know of [batch, length, head, width], for boxes of so many rows and 64 columns.
inline CUtensorMap map_of(const te_attention& task, const te_heads& x, int64_t length, int64_t heads, int rows) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(task.width), static_cast<cuuint64_t>(length),
                              static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(task.batches)};
  const cuuint64_t bytes[] = {static_cast<cuuint64_t>(2 * x.row), static_cast<cuuint64_t>(2 * x.head),
                              static_cast<cuuint64_t>(2 * x.batch)};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(rows), 1, 1};
  return tensor_map<4>(kName, sixteen_bits(task), x.x, sizes, bytes, box);
}

/// What copy_box needs to know of a bias, for boxes of so many rows and 64 columns.
inline CUtensorMap map_of_bias(const te_attention& task, int rows) {
  const int64_t row = 2 * task.bias_row, head = task.queries * row;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(task.keys), static_cast<cuuint64_t>(task.queries),
                              static_cast<cuuint64_t>(task.bias_heads), static_cast<cuuint64_t>(task.bias_batches)};
  const cuuint64_t bytes[] = {static_cast<cuuint64_t>(row), static_cast<cuuint64_t>(head),
                              static_cast<cuuint64_t>(task.bias_heads * head)};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(rows), 1, 1};
  return tensor_map<4>(kName, sixteen_bits(task), task.bias, sizes, bytes, box);
}

/// And write_box of its gradient, for boxes of 64 keys and 64 queries.
inline CUtensorMap map_of_ds(const te_attention& task) {
  const int64_t row = 2 * task.ds_row, head = task.keys * row;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(task.queries), static_cast<cuuint64_t>(task.keys),
                              static_cast<cuuint64_t>(task.heads), static_cast<cuuint64_t>(task.batches)};
  const cuuint64_t bytes[] = {static_cast<cuuint64_t>(row), static_cast<cuuint64_t>(head),
                              static_cast<cuuint64_t>(task.heads * head)};
  const cuuint32_t box[] = {kStep, 64, 1, 1};
  return tensor_map<4>(kName, sixteen_bits(task), task.ds, sizes, bytes, box);
}

inline OwnBias own_bias_of(const te_attention& task) { return {task.bias_batches > 1, task.bias_heads > 1}; }

/// Should each multiprocessor have one block, which walks over all queries of some heads, one after the other, and loads
/// the next while it computes? With few queries a head blocks begin and end so often that it pays. As many heads' keys and
/// values as there are blocks are read at a time, more than once, and should not be much more than the cache holds; causal
/// attention reads half of them. 2048 keys of 64 features take 0.88 of the time of a block for each item, 512 take 0.77, and
/// 1024 of 128 features, all of which are seen, 1.14, on an H200.
inline bool walking_pays(const te_attention& task, int width, int units) {
  const int64_t heads = std::min(task.batches * task.key_heads, units / (task.heads / task.key_heads) + 1);
  const int64_t most = sight_of(task) == Sight::kAll || sight_of(task) == Sight::kBiased ? 40 : 72;
  return heads * task.keys * width * 4 <= (most << 20);
}

/// Do blocks of 192 queries take less time than blocks of 128? They do where few of their queries are not there: with
/// 2048 queries, and not with 512 or 1024.
inline bool three_groups_pay(const te_attention& task) {
  const auto rows = [&](int64_t queries) { return (task.queries + queries - 1) / queries * queries; };
  return 10 * rows(192) <= 11 * rows(128);
}

/// One that ends nowhere ends behind every position.
inline Window window_of(const te_attention& task) {
  const int64_t longest = std::max(task.queries, task.keys);
  const auto side = [&](int64_t sees) { return static_cast<int>(sees < 0 ? longest : std::min(sees, longest)); };
  return {side(task.left), side(task.right)};
}

inline Tiles tiles_of(const te_attention& task, int64_t rows, int64_t lists, int64_t tiles, int words_of_tile) {
  const bool has_own = task.mask_batches > 1;
  const int64_t words = words_of_tile * tiles, length = 1 + tiles;
  return {task.mask, task.tiles, has_own ? rows * words : 0, has_own ? lists * length : 0, static_cast<int>(words),
          static_cast<int>(length)};
}

template <typename T, int Width, int Groups, Sight Seen, bool Drops>
void forward_by(const te_attention& task) {
  using Sizes = ForwardSizes<Width, Groups>;
  constexpr int kQueries = Sizes::kQueries;
  Forward given{};
  given.bits = task.bits;
  given.logsumexp = task.logsumexp;
  given.heads = static_cast<int>(task.heads);
  given.shared = static_cast<int>(task.heads / task.key_heads);
  given.queries = static_cast<int>(task.queries);
  given.keys = static_cast<int>(task.keys);
  given.width = static_cast<int>(task.width);
  given.tiles = static_cast<int>((task.queries + kQueries - 1) / kQueries);
  given.words = static_cast<int>(task.bit_words);
  given.bit_queries = static_cast<int>(task.bit_queries);
  given.all_heads = static_cast<int>(task.batches * task.heads);
  const int units = multiprocessors(task.device);
  const bool walks = walking_pays(task, Width, units);
  given.chunk = walks ? units : 1;
  constexpr bool kBiased = Seen == Sight::kBiased;
  given.scale = kBiased ? task.scale : task.scale * kLog2E;
  given.growth = task.growth;
  given.window = window_of(task);
  given.bias = own_bias_of(task);
  given.mask = tiles_of(task, task.queries, given.tiles, (task.keys + kKeys - 1) / kKeys, 4);
  const auto kernel = forward_kernel<T, Width, Groups, Seen, Drops>;
  constexpr int kBytes = Sizes::kBytes + (kBiased ? ForwardBias<Width, Groups>::kBytes : 0);
  allow_shared_memory(kernel, kBytes, task.device, kName);
  const int items = given.tiles * given.all_heads;
  const auto blocks = static_cast<unsigned>(walks ? std::min(items, units) : items);
  kernel<<<blocks, Sizes::kThreads, kBytes, static_cast<cudaStream_t>(task.stream)>>>(
      map_of(task, task.q, task.queries, task.heads, kQueries), map_of(task, task.k, task.keys, task.key_heads, kKeys),
      map_of(task, task.v, task.keys, task.key_heads, kKeys), kBiased ? map_of_bias(task, kQueries) : CUtensorMap{},
      static_cast<T*>(task.out), given);
  check_cuda(cudaGetLastError(), "te_cuda_attention: launch");
}

template <typename T, int Width, Sight Seen, bool Drops>
void forward(const te_attention& task) {
  if constexpr (Width == 64 && Seen != Sight::kTiles && Seen != Sight::kBiased) {
    if (three_groups_pay(task)) return forward_by<T, Width, 3, Seen, Drops>(task);
  }
  forward_by<T, Width, 2, Seen, Drops>(task);
}

template <typename T, int Width, Sight Seen, bool Drops>
void backward(const te_attention& task) {
  using Sizes = BackwardSizes<Width>;
  const auto stream = static_cast<cudaStream_t>(task.stream);
  const int64_t steps = (task.queries + kStep - 1) / kStep, rows = task.batches * task.heads * steps * kStep;
  float *const dq = task.workspace, *const sums = dq + rows * Width, *const shifts = sums + rows;
  const int heads = static_cast<int>(task.heads), queries = static_cast<int>(task.queries);
  const int width = static_cast<int>(task.width);
  constexpr int kRows = 256 / (Width / 8);  // of a block
  const bool is_whole = task.keys <= kKeys;
  T* const zeros = is_whole && Seen == Sight::kTiles ? static_cast<T*>(task.dq) : nullptr;  // lists leave out queries
  before_kernel<T, Width><<<static_cast<unsigned>((rows + kRows - 1) / kRows), 256, 0, stream>>>(
      static_cast<const T*>(task.grad.x), task.grad.batch, task.grad.row, task.grad.head, static_cast<const T*>(task.out),
      task.logsumexp, sums, shifts, is_whole ? nullptr : dq, zeros, heads, queries, static_cast<int>(steps), width, rows);
  check_cuda(cudaGetLastError(), "te_cuda_attention_backward: launch");

  Backward given{};
  given.bits = task.bits;
  given.sums = sums;
  given.shifts = shifts;
  given.dq = is_whole ? task.dq : dq;
  given.is_whole = is_whole;
  given.heads = heads;
  given.shared = static_cast<int>(task.heads / task.key_heads);
  given.queries = queries;
  given.keys = static_cast<int>(task.keys);
  given.width = width;
  given.tiles = static_cast<int>((task.keys + kKeys - 1) / kKeys);
  given.steps = static_cast<int>(steps);
  given.words = static_cast<int>(task.bit_words);
  given.bit_queries = static_cast<int>(task.bit_queries);
  given.scale = task.scale * kLog2E;
  given.growth = task.growth;
  given.window = window_of(task);
  constexpr bool kBiased = Seen == Sight::kBiased;
  given.bias = own_bias_of(task);
  given.wants_ds = kBiased && task.ds != nullptr;
  given.mask = tiles_of(task, task.keys, given.tiles, steps, 2);
  given.factor = task.scale;
  const auto kernel = backward_kernel<T, Width, Seen, Drops>;
  constexpr int kBytes = Sizes::kBytes + (kBiased ? Sizes::kBiasBytes : 0);
  allow_shared_memory(kernel, kBytes, task.device, kName);
  const auto blocks = static_cast<unsigned>(given.tiles * task.batches * task.key_heads);
  kernel<<<blocks, 384, kBytes, stream>>>(
      map_of(task, task.q, task.queries, task.heads, kStep), map_of(task, task.k, task.keys, task.key_heads, kKeys),
      map_of(task, task.v, task.keys, task.key_heads, kKeys),
      map_of(task, task.grad, task.queries, task.heads, kStep), kBiased ? map_of_bias(task, kStep) : CUtensorMap{},
      given.wants_ds ? map_of_ds(task) : CUtensorMap{}, static_cast<T*>(task.dk), static_cast<T*>(task.dv), given);
  check_cuda(cudaGetLastError(), "te_cuda_attention_backward: launch");

  if (is_whole) return;
  const int64_t count = rows * Width / 16;
  after_kernel<T, Width><<<static_cast<unsigned>((count + 255) / 256), 256, 0, stream>>>(
      dq, static_cast<T*>(task.dq), heads, queries, given.steps, width, task.scale, count);
  check_cuda(cudaGetLastError(), "te_cuda_attention_backward: launch");
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
    case Sight::kBiased: return drops ? by_type(Kind<Sight::kBiased, true>()) : by_type(Kind<Sight::kBiased, false>());
  }
}

template <int Width, typename T, Sight Seen, bool Drops>
void forward_of(const te_attention& task, T*, Kind<Seen, Drops>) {
  forward<T, Width, Seen, Drops>(task);
}

template <int Width, typename T, Sight Seen, bool Drops>
void backward_of(const te_attention& task, T*, Kind<Seen, Drops>) {
  backward<T, Width, Seen, Drops>(task);
}

template <int Width>
void run_forward(const te_attention& task) {
  by_kind(task, [&](auto* type, auto kind) { forward_of<Width>(task, type, kind); });
}

template <int Width>
void run_backward(const te_attention& task) {
  by_kind(task, [&](auto* type, auto kind) { backward_of<Width>(task, type, kind); });
}

}  // namespace te_compile::attention
