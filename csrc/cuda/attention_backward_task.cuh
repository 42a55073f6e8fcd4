// What the launches of the backward pass of te_cuda_attention are told, and how large their steps are: see
// attention_backward.cuh.
#pragma once

#include "attention_forward_task.cuh"

namespace te_compile::attention {

constexpr int kStep = 64;                // queries at a time
constexpr int kStepBlock = kStep * 128;  // bytes; 64 columns of them are one block after the other
constexpr int kDs = kKeys * kStep * 2;   // bytes of one ds, of which there are two
constexpr int kNumbers = kStep * 4;      // bytes of a number, or a word of bits, of each query
constexpr int kExtras = 6 * kNumbers;    // sums, shifts, four rows of words

/// For heads of so many features, 64 or 128; narrower ones end in zeros.
template <int Width>
struct BackwardSizes {
  static constexpr int kTile = kKeys * Width * 2, kStepBytes = kStep * Width * 2;
  // Registers hold scores, dp and dq at a time, and what is read of queries ahead of its use.
  static constexpr bool kRoomy = Width == 64;
  static constexpr int kStages = kRoomy ? 4 : 2;  // steps under way
  static constexpr int kDq = kStep * Width / 2;   // numbers of one group's dq
  static constexpr int kBytes = 1024 + 2 * kTile + kStages * (2 * kStepBytes + kExtras) + 2 * kDs + 2 * kDq * 4 + 256;
  // Of a bias, if there is one: of a step, the steps under way, and of all these.
  static constexpr int kBias = 2 * kStepBlock, kBiasStages = kRoomy ? kStages : 1, kBiasBytes = 1024 + kBiasStages * kBias;
};
// Every thread that reads numbers says itself that they may be overwritten: one for its warp would do, as they have met
// before, but racecheck follows no order from one thread by way of a second one to a third.
constexpr int kReaders = 256;
// Numbers of barriers among warps; those of ds are four, of a group and a parity, and there is one for each group.
constexpr int kDsThere = 2, kGroupMeets = 6, kHeadStart = 8;

struct Backward {
  const uint32_t* bits;                 // [heads, words, bit_queries], if weights are dropped
  const float *sums, *shifts;           // [heads, 64 steps]: logsumexp times log2(e), Σ dout · out
  void* dq;  // fp32 [heads, steps, halves of the columns, eight columns, threads, 4]; the result itself if is_whole
  bool is_whole;
  int heads, shared, queries, keys, width, tiles, words, bit_queries;  // shared: how many heads of queries read one of keys
  int steps;                                                           // of 64 queries
  float scale, growth, factor;  // scale: times log2(e)
  Window window;
  Tiles mask;
  OwnBias bias;
  bool wants_ds;  // of a bias
};

/// Where things lie in a block's shared memory. Barriers say that its keys have come, that a step has, and that all who read
/// a step have.
template <int Width>
struct BackwardMemory {
  using Sizes = BackwardSizes<Width>;
  uint32_t keys, values, queries, grads, ds, staged, extras, keys_full, full, empty, bias_full, bias_empty, bias;

  __device__ __forceinline__ explicit BackwardMemory(const void* shared) {
    keys = (shared_address(shared) + 1023) & ~1023u;
    values = keys + Sizes::kTile;
    queries = values + Sizes::kTile;
    grads = queries + Sizes::kStages * Sizes::kStepBytes;
    ds = grads + Sizes::kStages * Sizes::kStepBytes;
    staged = ds + 2 * kDs;
    extras = staged + 2 * Sizes::kDq * 4;
    keys_full = extras + Sizes::kStages * kExtras;
    full = keys_full + 8;
    empty = full + 8 * Sizes::kStages;
    bias_full = empty + 8 * Sizes::kStages;
    bias_empty = bias_full + 8 * Sizes::kBiasStages;
    bias = (bias_empty + 8 * Sizes::kBiasStages + 1023) & ~1023u;  // if there is one
  }

  /// By all threads of a block.
  __device__ __forceinline__ void make_barriers() const {
    if (threadIdx.x == 0) {
      barrier_make(keys_full, 1);
      for (int stage = 0; stage < Sizes::kStages; ++stage) {
        barrier_make(full + 8 * stage, 1);
        barrier_make(empty + 8 * stage, kReaders);
      }
      for (int stage = 0; stage < Sizes::kBiasStages; ++stage) {
        barrier_make(bias_full + 8 * stage, 1);
        barrier_make(bias_empty + 8 * stage, kReaders);
      }
      barriers_made();
    }
    __syncthreads();
  }
};

/// The keys of a block, and the places of the steps that see some of them, from `first` to `end`; it begins at `start`. A
/// place is a step, or where a mask shows what is seen, one of its list of steps.
template <Sight Seen, bool Drops>
struct Walk {
  int tile, batch, key_heads, key_head, first_head;  // first_head: of queries
  int first = 0, end, steps, start;
  bool ends_in_tile;  // are some keys not there? A mask shows none of them
  const int32_t* list;

  __device__ __forceinline__ explicit Walk(const Backward& task) {
    const int key_index = blockIdx.x / task.tiles;
    tile = blockIdx.x % task.tiles;
    key_heads = task.heads / task.shared;
    batch = key_index / key_heads;
    key_head = key_index % key_heads;
    ends_in_tile = Seen != Sight::kTiles && (tile + 1) * kKeys > task.keys;
    list = Seen == Sight::kTiles ? task.mask.list(batch, tile) : nullptr;
    end = Seen == Sight::kTiles ? __ldg(list) : task.steps;
    if (Seen == Sight::kCausal) first = tile * (kKeys / kStep);
    if (Seen == Sight::kWindow) {
      first = max(tile * kKeys - task.window.right, 0) / kStep;
      end = min(((tile + 1) * kKeys - 1 + task.window.left) / kStep + 1, task.steps);
    }
    steps = end - first;
    start = first + static_cast<int>(int64_t{tile} * steps / task.tiles);
    first_head = key_head * task.shared;
  }

  __device__ __forceinline__ int following(int place) const { return place + 1 == end ? first : place + 1; }
  __device__ __forceinline__ int step_at(int place) const {
    return Seen == Sight::kTiles ? __ldg(list + 1 + place) >> 1 : place;
  }
  /// Must a mask be read there?
  __device__ __forceinline__ bool is_cut_at(int place) const {
    return Seen == Sight::kTiles && (__ldg(list + 1 + place) & 1);
  }
};

}  // namespace te_compile::attention
