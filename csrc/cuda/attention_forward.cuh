// The forward pass of te_cuda_attention: flash attention, which reads which weights to keep as bits if some are dropped.
//
// A block takes 128 or 192 queries of one head. One thread has the keys and values copied, tile by tile, the last tile
// first; two or three warp groups of 64 queries each multiply. A group asks for the scores of the next tile and for the sum
// over this one's values together, and while the tensor cores are at it, it makes weights of those scores.
//
// te_compile/kernels/dropout_attention.py has another form of dropout, and te_compile/ops/dropout_bits.py where bits lie:
// those of the weights that a thread holds of a row are half of each word, so one shift and one permutation of bytes make
// a mask for two weights.
#pragma once

#include "attention_forward_rows.cuh"
#include "attention_forward_task.cuh"

namespace te_compile::attention {

struct ForwardMaps {
  const CUtensorMap &q, &k, &v, &bias;
};

template <int Width, int Groups, Sight Seen>
__device__ __forceinline__ void ask_for_bias(const Forward& task, const CUtensorMap& map,
                                             const ForwardMemory<Width, Groups>& memory, const Item<64 * Groups, Seen>& item,
                                             int key, int count) {
  using Bias = ForwardBias<Width, Groups>;
  const int stage = count % Bias::kStages;
  barrier_wait(memory.bias_empty + 8 * stage, (count / Bias::kStages & 1) ^ 1);
  barrier_expect(memory.bias_full + 8 * stage, Bias::kTile);
  for (int c = 0; c < 2; ++c) {
    copy_box(memory.bias + stage * Bias::kTile + c * (Bias::kTile / 2), &map, memory.bias_full + 8 * stage, key + 64 * c,
             item.tile * 64 * Groups, item.head * task.bias.head, item.batch * task.bias.batch);
  }
}

/// One thread of a block has all copied that the block's items read, as far ahead as there is room.
template <int Width, int Groups, Sight Seen>
__device__ __forceinline__ void ask(const Forward& task, const ForwardMaps& maps, const ForwardMemory<Width, Groups>& memory,
                                    int items, int& turn) {
  using Sizes = ForwardSizes<Width, Groups>;
  constexpr int kQueries = Sizes::kQueries, kTile = Sizes::kTile, kStages = Sizes::kStages;
  int count = 0;  // of steps, as `turn` is of items
  for (int number = blockIdx.x; number < items; number += gridDim.x, ++turn) {
    const Item<kQueries, Seen> item(task, number);
    const uint32_t place = turn % kItems, barrier = memory.queries_full + 8 * place;
    barrier_wait(memory.queries_empty + 8 * place, (turn / kItems & 1) ^ 1);
    barrier_expect(barrier, Sizes::kQueriesBytes);
    for (int c = 0; c < Width / 64; ++c) {
      copy_box(memory.queries + place * Sizes::kQueriesBytes + c * Sizes::kQueriesBlock, &maps.q, barrier, 64 * c,
               item.tile * kQueries, item.head, item.batch);
    }
    const int key_head = item.head / task.shared;
    for (int step = 0; step < item.steps; ++step, ++count) {
      const int stage = count % kStages, parity = count / kStages & 1, row = item.tile_at(step) * kKeys;
      barrier_wait(memory.keys_empty + 8 * stage, parity ^ 1);
      barrier_expect(memory.keys_full + 8 * stage, kTile);
      for (int c = 0; c < Width / 64; ++c) {
        copy_box(memory.keys + stage * kTile + c * kBlock, &maps.k, memory.keys_full + 8 * stage, 64 * c, row, key_head,
                 item.batch);
      }
      if (Seen == Sight::kBiased) ask_for_bias(task, maps.bias, memory, item, row, count);
      barrier_wait(memory.values_empty + 8 * stage, parity ^ 1);
      barrier_expect(memory.values_full + 8 * stage, kTile);
      for (int c = 0; c < Width / 64; ++c) {
        copy_box(memory.values + stage * kTile + c * kBlock, &maps.v, memory.values_full + 8 * stage, 64 * c, row, key_head,
                 item.batch);
      }
    }
  }
}

template <typename T, int Width, int Groups, Sight Seen, bool Drops>
__global__ void __launch_bounds__(ForwardSizes<Width, Groups>::kThreads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                   const __grid_constant__ CUtensorMap v, const __grid_constant__ CUtensorMap bias, T* out,
                   const Forward task) {
  using Sizes = ForwardSizes<Width, Groups>;
  constexpr int kQueries = Sizes::kQueries, kStages = Sizes::kStages;
  static_assert(Seen != Sight::kTiles || kQueries == 128, "lists of tiles are of 128 queries");
  extern __shared__ unsigned char shared[];
  const ForwardMemory<Width, Groups> memory(shared);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  memory.make_barriers();
  const int items = task.tiles * task.all_heads;
  int count = 0, turn = 0;  // steps and items so far
  if (group == 0) {
    fewer_registers<Sizes::kFewer>();
    if (threadIdx.x != 0) return;
    ask<Width, Groups, Seen>(task, {q, k, v, bias}, memory, items, turn);
    return;
  }

  more_registers<Sizes::kRegisters>();
#pragma unroll 1
  for (int number = blockIdx.x; number < items; number += gridDim.x, ++turn) {
    const Item<kQueries, Seen> item(task, number);
    const int first_row = item.tile * kQueries + (group - 1) * 64;  // of this group
    Rows<T, Width, Seen, Drops> mine(task, item.index, item.batch, first_row);
    const uint32_t place = turn % kItems, my_queries = memory.queries + place * Sizes::kQueriesBytes + (group - 1) * 64 * 128;
    const bool first_lane = mine.lane == 0;

    int begin = 0;
    if (Groups > 2 && (Seen == Sight::kCausal || Seen == Sight::kWindow)) {
      begin = item.unseen_by(task, first_row);
      if (begin > 0) memory.pass(count++, first_lane);
    }
    if (Drops) mine.load_words(task, item.tile_at(begin));
    if (item.is_cut_at(begin)) mine.load_shown(item.tile_at(begin));
    int stage = count % kStages;
    barrier_wait(memory.queries_full + 8 * place, turn / kItems & 1);
    mine.take_first(task, memory, item, begin, my_queries, group - 1, count, stage);
#pragma unroll 1
    for (int step = begin + 1; step < item.steps; ++step) {
      const int before = stage, before_parity = count / kStages & 1;
      ++count;
      stage = count % kStages;
      const bool is_cut = item.is_cut_at(step);
      if (Drops) mine.load_words(task, item.tile_at(step));
      if (is_cut) mine.load_shown(item.tile_at(step));
      mine.take(task, memory, item, step, is_cut, step > begin + 1, my_queries, group - 1, first_row, count, stage, before,
                before_parity);
    }
    if (first_lane) barrier_arrive(memory.queries_empty + 8 * place);
    barrier_wait(memory.values_full + 8 * stage, count / kStages & 1);
    ++count;
    mine.finish(out, task, memory, item, item.steps > begin + 1, stage);
  }
}

}  // namespace te_compile::attention
