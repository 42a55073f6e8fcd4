// What a launch of the forward pass of te_cuda_attention is told, which keys a query sees, and what a block of it has to do
// and where: see attention_forward.cuh.
#pragma once

#include "attention_tasks.hpp"
#include "hopper.cuh"
#include "wgmma.cuh"

namespace te_compile::attention {

constexpr int kKeys = 128;           // of a tile
constexpr int kBlock = kKeys * 128;  // bytes; 64 columns of a tile are one block after the other
constexpr float kLn2 = 0.6931471805599453f, kLog2E = 1.4426950408889634f;

/// Of blocks for heads of so many features, 64 or 128; narrower ones end in zeros.
template <int Width, int Groups>
struct ForwardSizes {
  static constexpr int kQueries = 64 * Groups, kQueriesBlock = kQueries * 128, kQueriesBytes = kQueries * Width * 2;
  static constexpr int kTile = kKeys * Width * 2;
  static constexpr int kStages = Width > 64 ? 2 : 4;  // tiles under way
  static constexpr int kBytes = 1024 + 2 * kQueriesBytes + 2 * kStages * kTile + 256;
  static constexpr int kThreads = 128 * (1 + Groups), kRegisters = Groups > 2 ? 160 : 240, kFewer = Groups > 2 ? 32 : 24;
};

/// A mask in bits, and lists of the tiles that it shows: see te_attention. Of a batch both begin so many elements later.
struct Tiles {
  const uint32_t* words;
  const int32_t* lists;
  int64_t words_a_batch, lists_a_batch;
  int words_a_row, length;  // of a list

  /// The list of one block.
  __device__ __forceinline__ const int32_t* list(int batch, int block) const {
    return lists + batch * lists_a_batch + int64_t{block} * length;
  }
  __device__ __forceinline__ const uint32_t* row(int batch, int row) const {
    return words + batch * words_a_batch + int64_t{row} * words_a_row;
  }
};

/// A query sees the keys from `left` before it to `right` after it; both are known to lie within int, added to a position.
struct Window {
  int left, right;

  /// May keys of [key, key + key_count) be hidden from queries of [query, query + query_count)?
  __device__ __forceinline__ bool cuts(int key, int key_count, int query, int query_count) const {
    return key + key_count - 1 > query + right || key < query + query_count - 1 - left;
  }
  __device__ __forceinline__ bool hides(int key, int query) const { return key > query + right || key < query - left; }
};

/// Has a bias a matrix for each batch, and for each head? 1 if so, 0 if they share it.
struct OwnBias {
  int batch, head;
};

struct Forward {
  const uint32_t* bits;  // [heads, words, bit_queries], if weights are dropped
  float* logsumexp;      // [heads, queries]
  int heads, shared, queries, keys, width, tiles, words, bit_queries;  // shared: how many heads of queries read one of keys
  int all_heads, chunk;  // those of all batches, and how many of them blocks walk over together
  float scale, growth;   // scale: times log2(e), but with a bias
  Window window;
  Tiles mask;
  OwnBias bias;
};

/// Some queries of one head, and the tiles of keys that they see, from the last to the first.
template <int Queries, Sight Seen>
struct Item {
  int tile, index, batch, head, behind, last_tile, steps;
  const int32_t* list;

  /// Of the heads of a chunk the last queries come first: in causal attention, and under most masks, they see the most.
  __device__ __forceinline__ Item(const Forward& task, int number) {
    const int chunk = number / (task.chunk * task.tiles), first = chunk * task.chunk;
    const int of_chunk = number - first * task.tiles, heads_here = min(task.chunk, task.all_heads - first);
    const int place = of_chunk / heads_here;
    tile = Seen == Sight::kCausal || Seen == Sight::kTiles ? task.tiles - 1 - place : place;
    index = first + of_chunk - place * heads_here;
    batch = index / task.heads;
    head = index - batch * task.heads;
    behind = Seen == Sight::kWindow ? task.window.right : 0;
    int first_key = 0, end_key = task.keys;
    if (Seen == Sight::kCausal || Seen == Sight::kWindow) end_key = min((tile + 1) * Queries + behind, task.keys);
    if (Seen == Sight::kWindow) first_key = max(tile * Queries - task.window.left, 0);
    last_tile = (end_key - 1) / kKeys;
    list = Seen == Sight::kTiles ? task.mask.list(batch, tile) : nullptr;
    steps = Seen == Sight::kTiles ? __ldg(list) : last_tile - first_key / kKeys + 1;
  }
  /// The tile of keys of a step.
  __device__ __forceinline__ int tile_at(int step) const {
    return Seen == Sight::kTiles ? __ldg(list + 1 + step) >> 1 : last_tile - step;
  }
  /// How many of the first steps, one at most, 64 queries from `first_row` on see nothing of. Of causal attention, and of a
  /// window, those of an earlier group may see nothing of the last tile, and each sees something of the one before.
  __device__ __forceinline__ int unseen_by(const Forward& task, int first_row) const {
    return last_tile - (min(first_row + 64 + behind, task.keys) - 1) / kKeys;
  }
  /// Must a mask be read there?
  __device__ __forceinline__ bool is_cut_at(int step) const {
    return Seen == Sight::kTiles && (__ldg(list + 1 + step) & 1);
  }
};

constexpr int kItems = 2;  // of which queries are under way

/// Tiles of a bias: two blocks of 64 columns, of which so many tiles are under way.
template <int Width, int Groups>
struct ForwardBias {
  static constexpr int kTile = 2 * 64 * Groups * 128, kStages = Width > 64 ? 1 : 2, kBytes = 1024 + kStages * kTile;
};

/// Where things lie in a block's shared memory: the queries of two items, and stages of keys and of values. Of each of them
/// a barrier says that it has come, and one that it may be written.
template <int Width, int Groups>
struct ForwardMemory {
  using Sizes = ForwardSizes<Width, Groups>;
  uint32_t queries, keys, values, queries_full, queries_empty, keys_full, keys_empty, values_full, values_empty, bias_full,
      bias_empty, bias;

  __device__ __forceinline__ explicit ForwardMemory(const void* shared) {
    queries = (shared_address(shared) + 1023) & ~1023u;
    keys = queries + kItems * Sizes::kQueriesBytes;
    values = keys + Sizes::kStages * Sizes::kTile;
    queries_full = values + Sizes::kStages * Sizes::kTile;
    queries_empty = queries_full + 8 * kItems;
    keys_full = queries_empty + 8 * kItems;
    keys_empty = keys_full + 8 * Sizes::kStages;
    values_full = keys_empty + 8 * Sizes::kStages;
    values_empty = values_full + 8 * Sizes::kStages;
    bias_full = values_empty + 8 * Sizes::kStages;
    bias_empty = bias_full + 8 * ForwardBias<Width, Groups>::kStages;
    bias = (bias_empty + 8 * ForwardBias<Width, Groups>::kStages + 1023) & ~1023u;  // if there is one
  }

  /// By all threads of a block.
  __device__ __forceinline__ void make_barriers() const {
    constexpr int kWarps = 4 * Groups;  // that read
    if (threadIdx.x == 0) {
      for (int i = 0; i < kItems; ++i) {
        barrier_make(queries_full + 8 * i, 1);
        barrier_make(queries_empty + 8 * i, kWarps);
      }
      for (int stage = 0; stage < Sizes::kStages; ++stage) {
        barrier_make(keys_full + 8 * stage, 1);
        barrier_make(keys_empty + 8 * stage, kWarps);
        barrier_make(values_full + 8 * stage, 1);
        barrier_make(values_empty + 8 * stage, kWarps);
      }
      for (int stage = 0; stage < ForwardBias<Width, Groups>::kStages; ++stage) {
        barrier_make(bias_full + 8 * stage, 1);
        barrier_make(bias_empty + 8 * stage, 32 * kWarps);
      }
      barriers_made();
    }
    __syncthreads();
  }

  /// By a warp that reads nothing of a step. It waits for it all the same: what is not there yet may have no place yet, for
  /// another group may still read what is there from before.
  __device__ __forceinline__ void pass(int count, bool first_lane) const {
    const int stage = count % Sizes::kStages, parity = count / Sizes::kStages & 1;
    barrier_wait(keys_full + 8 * stage, parity);
    if (first_lane) barrier_arrive(keys_empty + 8 * stage);
    barrier_wait(values_full + 8 * stage, parity);
    if (first_lane) barrier_arrive(values_empty + 8 * stage);
  }
};

}  // namespace te_compile::attention
