// te_cuda_attention and its backward pass: checks a request and hands it to the kernels for its width.
#include <algorithm>
#include <string>

#include "attention_tasks.hpp"
#include "device.hpp"
#include "tensor_map.hpp"

namespace te_compile {
namespace {

using namespace attention;

constexpr int64_t kQueriesOfStep = 64, kWordsOfTile = 4;  // of the backward pass

void check(const te_heads& x, const char* name) {
  const bool aligned = reinterpret_cast<uintptr_t>(x.x) % 16 == 0;
  const bool strided = x.batch > 0 && x.row > 0 && x.head > 0 && x.batch % 8 == 0 && x.row % 8 == 0 && x.head % 8 == 0;
  const std::string what = "te_cuda_attention: " + std::string(name);
  require(x.x != nullptr && aligned && strided,
          (what + " must be aligned to 16 bytes, its strides positive multiples of 8").c_str());
}

void check_bias(const te_attention& task) {
  require(task.tiles == nullptr && task.left < 0 && task.right < 0,
          "te_cuda_attention: with a bias there is no window, and no mask but in the bias");
  require(reinterpret_cast<uintptr_t>(task.bias) % 16 == 0 && task.bias_row >= task.keys && task.bias_row % 8 == 0,
          "te_cuda_attention: a bias must be aligned to 16 bytes, its rows a multiple of 8 of at least as many as keys");
  require((task.bias_batches == 1 || task.bias_batches == task.batches) &&
              (task.bias_heads == 1 || task.bias_heads == task.heads),
          "te_cuda_attention: there must be a bias for each batch, or one for all, and for each head, or one for all");
}

void check(const te_attention& task) {
  require(task.batches > 0 && task.heads > 0 && task.queries > 0 && task.keys > 0,
          "te_cuda_attention: there must be a query and a key");
  require(task.width > 0 && task.width % 8 == 0 && task.width <= kWide,
          "te_cuda_attention: heads must have a multiple of 8 features, up to 128");
  const bool is_by_place = sight_of(task) == Sight::kCausal || sight_of(task) == Sight::kWindow;
  require(!is_by_place || task.queries == task.keys,
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
  require(task.bits == nullptr || (task.bit_words >= (task.keys + 63) / 64 * 2 && task.bit_queries >= task.queries),
          "te_cuda_attention: bits must be those of all keys and queries");
  require((task.mask == nullptr) == (task.tiles == nullptr) && reinterpret_cast<uintptr_t>(task.mask) % 16 == 0,
          "te_cuda_attention: a mask has tiles, and is aligned to 16 bytes");
  require(task.tiles == nullptr || (task.left < 0 && task.right < 0),
          "te_cuda_attention: under a mask there is no window");
  require(task.tiles == nullptr || task.mask_batches == 1 || task.mask_batches == task.batches,
          "te_cuda_attention: there must be a mask for each batch, or one for all");
  if (task.bias != nullptr) check_bias(task);
  require(task.out != nullptr && task.logsumexp != nullptr, "te_cuda_attention: out or logsumexp is null");
  check(task.q, "q");
  check(task.k, "k");
  check(task.v, "v");
  const int64_t longest = std::max(task.queries, task.keys);
  if (longest > INT32_MAX / 2 || (longest + 127) / 128 * task.batches * task.heads > INT32_MAX) {
    throw Failure(TE_UNSUPPORTED, "te_cuda_attention: more tiles than a launch has blocks");
  }
}

void check_backward(const te_attention& task) {
  require(task.bits == nullptr || (task.bit_queries % kQueriesOfStep == 0 && task.bit_words % kWordsOfTile == 0),
          "te_cuda_attention_backward: bits must be those of a multiple of 64 queries and of 128 keys");
  require(task.ds == nullptr || (task.bias != nullptr && reinterpret_cast<uintptr_t>(task.ds) % 16 == 0 &&
                                 task.ds_row >= task.queries && task.ds_row % 8 == 0),
          "te_cuda_attention_backward: ds is of a bias, aligned to 16 bytes, its rows a multiple of 8 of at least as many as "
          "queries");
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

}  // namespace
}  // namespace te_compile

using namespace te_compile;

extern "C" te_status te_cuda_attention(const te_attention* task) {
  return guarded([&] {
    require(task != nullptr, "te_cuda_attention: task is null");
    check(*task);
    require_hopper(task->device, kName);
    const DeviceGuard guard(task->device);
    task->width <= kNarrow ? run_forward<kNarrow>(*task) : run_forward<kWide>(*task);
  });
}

extern "C" te_status te_cuda_attention_backward(const te_attention* task) {
  return guarded([&] {
    require(task != nullptr, "te_cuda_attention_backward: task is null");
    check(*task);
    check_backward(*task);
    require_hopper(task->device, kName);
    const DeviceGuard guard(task->device);
    task->width <= kNarrow ? run_backward<kNarrow>(*task) : run_backward<kWide>(*task);
  });
}
