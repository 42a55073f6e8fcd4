// The backward pass of te_cuda_attention, in three launches.
//
// A block takes 128 keys of one head, walks over the queries of all heads that read them, 64 at a time, and makes five
// products of each tile:
//
//     s = k qᵀ    dp = v doutᵀ    dv += p dout    dk += ds q    dq = dsᵀ k
//
// Two warp groups have 64 keys each, whose dk and dv stay in registers. dq takes the ds of all 128: both groups write
// theirs to shared memory, and each makes half of dq's columns while the tensor cores have its next scores to make as well.
// dq's sums over blocks are added up in memory, in fp32 and in the order in which blocks come: its last bits may differ
// from run to run. They lie there as registers do, so that each group adds its half in one piece; a last launch sorts and
// rounds them. Programs of a head begin at different queries, so that few add to the same place at a time. Where all keys of a
// head are in one block, its dq is whole, and written as it is to be.
// A bias comes with its step, turned over on its way to registers; its gradient is ds, which lies in shared memory for products
// already, a row for each key, and is written from there.
//
// Where lengths are no multiples of tiles, copies bring zeros, queries that are not there have an infinite sum, which
// leaves no weights, as those that see nothing do, and keys that are not there are hidden.
#pragma once

#include "attention_around_backward.cuh"
#include "attention_backward_keys.cuh"
#include "attention_backward_task.cuh"

namespace te_compile::attention {

struct BackwardMaps {
  const CUtensorMap &q, &k, &v, &grad, &bias;
};

template <int Width, Sight Seen, bool Drops>
__device__ __forceinline__ void ask_for_bias(const Backward& task, const CUtensorMap& map,
                                             const BackwardMemory<Width>& memory, const Walk<Seen, Drops>& walk, int head,
                                             int step, int count) {
  constexpr int kStages = BackwardSizes<Width>::kBiasStages, kBias = BackwardSizes<Width>::kBias;
  const int stage = count % kStages;
  barrier_wait(memory.bias_empty + 8 * stage, (count / kStages & 1) ^ 1);
  barrier_expect(memory.bias_full + 8 * stage, kBias);
  for (int c = 0; c < 2; ++c) {
    copy_box(memory.bias + stage * kBias + c * kStepBlock, &map, memory.bias_full + 8 * stage, walk.tile * kKeys + 64 * c,
             step * kStep, head * task.bias.head, walk.batch * task.bias.batch);
  }
}

/// One thread of a block has all copied that the block reads: its keys, and the steps of each head, as far ahead as there
/// are stages.
template <int Width, Sight Seen, bool Drops>
__device__ __forceinline__ void ask(const Backward& task, const BackwardMaps& maps, const BackwardMemory<Width>& memory,
                                    const Walk<Seen, Drops>& walk) {
  constexpr int kStages = BackwardSizes<Width>::kStages, kStepBytes = BackwardSizes<Width>::kStepBytes;
  barrier_expect(memory.keys_full, 2 * BackwardSizes<Width>::kTile);
  for (int c = 0; c < Width / 64; ++c) {
    copy_box(memory.keys + c * kBlock, &maps.k, memory.keys_full, 64 * c, walk.tile * kKeys, walk.key_head, walk.batch);
    copy_box(memory.values + c * kBlock, &maps.v, memory.keys_full, 64 * c, walk.tile * kKeys, walk.key_head, walk.batch);
  }
  int head = walk.first_head;
  for (int count = 0, place = walk.start, left = walk.steps; count < walk.steps * task.shared;
       ++count, place = walk.following(place), --left) {
    const int step = walk.step_at(place);
    if (left == 0) {
      left = walk.steps;
      ++head;
    }
    const int stage = count % kStages, index = walk.batch * task.heads + head;
    const uint32_t barrier = memory.full + 8 * stage, extra = memory.extras + stage * kExtras;
    const int64_t at = (int64_t{index} * task.steps + step) * kStep;
    const uint32_t* words = task.bits + (int64_t{index} * task.words + 4 * walk.tile) * task.bit_queries + step * kStep;
    barrier_wait(memory.empty + 8 * stage, (count / kStages & 1) ^ 1);
    barrier_expect(barrier, 2 * kStepBytes + (Drops ? kExtras : 2 * kNumbers));
    for (int c = 0; c < Width / 64; ++c) {
      copy_box(memory.queries + stage * kStepBytes + c * kStepBlock, &maps.q, barrier, 64 * c, step * kStep, head, walk.batch);
    }
    copy_bytes(extra, task.sums + at, kNumbers, barrier);
    for (int i = 0; Drops && i < 4; ++i) {
      copy_bytes(extra + (2 + i) * kNumbers, words + int64_t{i} * task.bit_queries, kNumbers, barrier);
    }
    for (int c = 0; c < Width / 64; ++c) {
      copy_box(memory.grads + stage * kStepBytes + c * kStepBlock, &maps.grad, barrier, 64 * c, step * kStep, head, walk.batch);
    }
    copy_bytes(extra + kNumbers, task.shifts + at, kNumbers, barrier);
    if (Seen == Sight::kBiased) ask_for_bias(task, maps.bias, memory, walk, head, step, count);
  }
}

/// Where a group's half of dq goes. It is made with the scores of the step after, which may be of the next head.
template <int Width>
struct PlaceOfDq {
  int64_t row, of_step, of_head;  // from one to the next: of a whole dq, in numbers; in bytes
  int queries_before = 0;         // how many there are of the step before
  char *before, *here;            // that of the step before, and of the head that the group is at

  template <Sight Seen, bool Drops>
  __device__ __forceinline__ PlaceOfDq(const Backward& task, const Walk<Seen, Drops>& walk, int group) {
    constexpr int kHalf = BackwardSizes<Width>::kDq * 4;
    row = int64_t{task.heads} * task.width;
    of_step = task.is_whole ? kStep * row * 2 : 2 * kHalf;
    of_head = task.is_whole ? task.width * 2 : task.steps * of_step;
    here = static_cast<char*>(task.dq) + (task.is_whole
                                              ? int64_t{walk.batch} * task.queries * row * 2 + walk.first_head * of_head
                                              : (walk.batch * task.heads + walk.first_head) * of_head + group * kHalf);
    before = here;
  }
  /// Of the step before, if a whole dq is made.
  template <typename Mine>
  __device__ __forceinline__ void write(Mine& mine, const Backward& task) const {
    mine.write_dq(before, row, queries_before, task.factor, task.width);
  }
  /// And if not, from shared memory.
  __device__ __forceinline__ void add(const Backward& task, uint32_t staged, int thread) const {
    if (!task.is_whole && thread == 0) add_bytes(reinterpret_cast<float*>(before), staged, BackwardSizes<Width>::kDq * 4);
  }
  /// The group leaves a step behind.
  __device__ __forceinline__ void pass(const Backward& task, int step) {
    before = here + step * of_step;
    queries_before = task.queries - step * kStep;
  }
};

/// One of the steps that a group takes: the how manieth, which, and where its operands lie.
struct Step {
  int count, parity, number;
  uint32_t queries, grads;
};

/// Asks for dq of the step before. At first there is none: what is made of nothing is added to nothing.
template <int Width, typename Mine>
__device__ __forceinline__ void ask_for_dq_before(Mine& mine, const BackwardMemory<Width>& memory, const Step& step,
                                                  int other) {
  if (step.count > 0) {
    if (mine.thread == 0) added_bytes_are_read();
    meet(kDsThere + 2 * other + (step.parity ^ 1), 256);
  }
  products_begin();
  mine.ask_for_dq(memory.ds + (step.parity ^ 1) * kDs, memory.keys);
}

/// Makes scores, and with them what registers have room for: asks for dp too, or for the dq of the step before.
template <typename T, int Width, Sight Seen, bool Drops>
__device__ __forceinline__ void make_scores(Keys<T, Width, Seen, Drops>& mine, const BackwardMemory<Width>& memory,
                                            uint32_t keys, uint32_t values, const Step& step, int other) {
  products_begin();
  mine.ask_for(mine.scores, keys, step.queries);
  if constexpr (BackwardSizes<Width>::kRoomy) {
    mine.ask_for(mine.dp, values, step.grads);
  } else {
    ask_for_dq_before(mine, memory, step, other);
  }
  products_wait<1>();
  arrived(mine.scores);
  arrived(mine.dk);
  arrived(mine.dv);
}

/// A thread's two rows of a mask; there is none for a key that is not there.
template <Sight Seen, bool Drops>
__device__ __forceinline__ void find_shown(const uint32_t* (&rows)[2], const Backward& task, const Walk<Seen, Drops>& walk,
                                           int group, int row) {
  for (int h = 0; h < 2; ++h) {
    const int key = walk.tile * kKeys + group * 64 + row + 8 * h;
    rows[h] = key < task.keys ? task.mask.row(walk.batch, key) : nullptr;
  }
}

/// What a mask shows of a step to a thread's two keys, of which those that are not there have no row.
__device__ __forceinline__ void load_shown(uint2 (&shown)[2], const uint32_t* const (&rows)[2], int step) {
  for (int h = 0; h < 2; ++h) {
    const uint2* of_key = reinterpret_cast<const uint2*>(rows[h]);
    shown[h] = of_key != nullptr ? __ldg(of_key + step) : make_uint2(0, 0);
  }
}

/// Makes weights of scores, and none where keys are not seen: `cut` says that some may be hidden from this step because of where
/// they are, and `is_cut` that a mask hides some.
template <typename T, int Width, Sight Seen, bool Drops>
__device__ __forceinline__ void weigh(Keys<T, Width, Seen, Drops>& mine, const Backward& task, const Walk<Seen, Drops>& walk,
                                      OfQueries<float, BackwardSizes<Width>::kRoomy>& sums, const BackwardMemory<Width>& memory,
                                      int count, int step, bool cut, bool is_cut, const uint2 (&shown)[2]) {
  if constexpr (Seen == Sight::kBiased) {
    constexpr int kStages = BackwardSizes<Width>::kBiasStages;
    const int stage = count % kStages;
    barrier_wait(memory.bias_full + 8 * stage, count / kStages & 1);
    mine.weigh(sums, task.scale, memory.bias + stage * BackwardSizes<Width>::kBias);
    barrier_arrive(memory.bias_empty + 8 * stage);
  } else {
    mine.weigh(sums, task.scale);
  }
  if (cut || walk.ends_in_tile) mine.mask(task, walk.tile * kKeys, step * kStep);
  if (is_cut) mine.mask_shown(shown);
}

/// Makes ds where registers hold dq beside dp. dv and the dq of the step before are made along with it.
template <typename T, int Width, Sight Seen, bool Drops>
__device__ __forceinline__ void make_ds_beside_dq(Keys<T, Width, Seen, Drops>& mine, const Backward& task,
                                                  const BackwardMemory<Width>& memory, const PlaceOfDq<Width>& place_of_dq,
                                                  typename Keys<T, Width, Seen, Drops>::Numbers& shifts,
                                                  typename Keys<T, Width, Seen, Drops>::Words& words, const Step& step,
                                                  uint32_t staged, int other) {
  products_begin();
  mine.ask_for_dv(step.grads, step.count > 0);
  ask_for_dq_before(mine, memory, step, other);
  products_wait<2>();
  arrived(mine.dp);
  mine.write_ds(memory.ds + step.parity * kDs, shifts, words, task.growth);
  products_wait<0>();
  arrived(mine.dq);
  if (task.is_whole) {
    place_of_dq.write(mine, task);
  } else {
    mine.stage_dq(staged);
  }
}

/// Makes ds where they do not: the dq of the step before was asked for with the scores, and leaves before dp comes.
template <typename T, int Width, Sight Seen, bool Drops>
__device__ __forceinline__ void make_ds_behind_dq(Keys<T, Width, Seen, Drops>& mine, const Backward& task,
                                                  const BackwardMemory<Width>& memory, const PlaceOfDq<Width>& place_of_dq,
                                                  typename Keys<T, Width, Seen, Drops>::Numbers& shifts,
                                                  typename Keys<T, Width, Seen, Drops>::Words& words, uint32_t values,
                                                  const Step& step, uint32_t staged) {
  products_wait<0>();
  arrived(mine.dq);
  if (task.is_whole) {
    place_of_dq.write(mine, task);
  } else if (step.count > 0) {
    mine.stage_dq(staged);
    written_for_products();
  }
  products_begin();
  mine.ask_for(mine.dp, values, step.grads);
  products_begin();
  mine.ask_for_dv(step.grads, step.count > 0);
  products_wait<1>();
  arrived(mine.dp);
  mine.write_ds(memory.ds + step.parity * kDs, shifts, words, task.growth);
}

/// Makes dq of the last step, which none follows.
template <typename T, int Width, Sight Seen, bool Drops>
__device__ __forceinline__ void finish_dq(Keys<T, Width, Seen, Drops>& mine, const Backward& task,
                                          const BackwardMemory<Width>& memory, const PlaceOfDq<Width>& place_of_dq,
                                          uint32_t staged, int parity, int other) {
  if (mine.thread == 0) added_bytes_are_read();
  meet(kDsThere + 2 * other + parity, 256);
  products_begin();
  mine.ask_for_dq(memory.ds + parity * kDs, memory.keys);
  products_wait<0>();
  arrived(mine.dk);
  arrived(mine.dv);
  arrived(mine.dq);
  if (task.is_whole) {
    place_of_dq.write(mine, task);
  } else {
    mine.stage_dq(staged);
    written_for_products();
    meet(kGroupMeets + mine.group, 128);
    place_of_dq.add(task, staged, mine.thread);
  }
}

/// dk and dv of a thread's two keys, if they are there.
template <typename T, int Width, Sight Seen, bool Drops>
__device__ __forceinline__ void write(Keys<T, Width, Seen, Drops>& mine, T* dk, T* dv, const Backward& task,
                                      const Walk<Seen, Drops>& walk, int row) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int key = walk.tile * kKeys + mine.group * 64 + row + 8 * h;
    const int64_t at = ((int64_t{walk.batch} * task.keys + key) * walk.key_heads + walk.key_head) * task.width;
    const int width = key < task.keys ? task.width : 0;
    mine.write(dk + at, mine.dk, h, task.factor, width);
    mine.write(dv + at, mine.dv, h, task.growth, width);
  }
}

/// What a warp group does: dk and dv of its 64 keys, and half of dq. dq lags by a step, for it needs the ds of both groups. The
/// last of a step's products, for dk, is left to the next step, which waits for it with its scores.
template <typename T, int Width, Sight Seen, bool Drops>
__device__ __forceinline__ void work(T* dk, T* dv, const CUtensorMap& ds, const Backward& task,
                                     const BackwardMemory<Width>& memory, const Walk<Seen, Drops>& walk, int group) {
  using Sizes = BackwardSizes<Width>;
  using Mine = Keys<T, Width, Seen, Drops>;
  constexpr int kStages = Sizes::kStages, kStepBytes = Sizes::kStepBytes;
  Mine mine;
  const int row = mine.begin(group), other = 1 - mine.group;
  const uint32_t my_keys = memory.keys + mine.group * 64 * 128, my_values = my_keys + Sizes::kTile;
  const uint32_t my_staged = memory.staged + mine.group * Sizes::kDq * 4;
  PlaceOfDq<Width> place_of_dq(task, walk, mine.group);
  const uint32_t* shown_rows[2];
  if (Seen == Sight::kTiles) find_shown(shown_rows, task, walk, mine.group, row);
  barrier_wait(memory.keys_full, 0);
  const int count_of_all = walk.steps * task.shared;
  int place = walk.start, left = walk.steps, head = walk.first_head;
#pragma unroll 1
  for (int count = 0; count < count_of_all; ++count) {
    const int number = walk.step_at(place);
    const bool is_cut = walk.is_cut_at(place);
    uint2 shown[2];
    if (is_cut) load_shown(shown, shown_rows, number);
    const int stage = count % kStages;
    const Step step{count, count & 1, number, memory.queries + stage * kStepBytes, memory.grads + stage * kStepBytes};
    const uint32_t columns = memory.extras + stage * kExtras + 8 * (mine.lane % 4);
    barrier_wait(memory.full + 8 * stage, count / kStages & 1);
    // The groups take turns: one has the tensor cores while the other makes weights.
    if (count == 0 && mine.group == 1) meet(kHeadStart, 256);
    typename Mine::Numbers sums(columns), shifts(columns + kNumbers);
    make_scores(mine, memory, my_keys, my_values, step, other);
    if (count > 0) barrier_arrive(memory.empty + 8 * ((count - 1) % kStages));
    const bool cut = Seen == Sight::kCausal
                         ? number < walk.first + kKeys / kStep
                         : Seen == Sight::kWindow && task.window.cuts(walk.tile * kKeys, kKeys, number * kStep, kStep);
    weigh(mine, task, walk, sums, memory, count, number, cut, is_cut, shown);
    typename Mine::Words words(columns + (2 + 2 * mine.group + mine.lane / 16) * kNumbers);
    [[maybe_unused]] const int known = mine.round(words);
    if (count == 0 && mine.group == 0) tell(kHeadStart, 256);
    if constexpr (Sizes::kRoomy) {
      make_ds_beside_dq(mine, task, memory, place_of_dq, shifts, words, step, my_staged, other);
    } else {
      once_known(known);
      make_ds_behind_dq(mine, task, memory, place_of_dq, shifts, words, my_values, step, my_staged);
    }
    written_for_products();
    tell(kDsThere + 2 * mine.group + step.parity, 256);
    meet(kGroupMeets + mine.group, 128);
    if (count > 0) place_of_dq.add(task, my_staged, mine.thread);
    if (Seen == Sight::kBiased && task.wants_ds && mine.thread == 0) {
      write_box(&ds, memory.ds + step.parity * kDs + mine.group * 64 * 128, number * kStep,
                walk.tile * kKeys + mine.group * 64, head, walk.batch);
    }
    products_begin();
    mine.ask_for_dk(memory.ds + step.parity * kDs, step.queries, count > 0);
    place_of_dq.pass(task, number);
    place = walk.following(place);
    if (--left == 0) {
      left = walk.steps;
      ++head;
      place_of_dq.here += place_of_dq.of_head;
    }
  }
  finish_dq(mine, task, memory, place_of_dq, my_staged, (count_of_all - 1) & 1, other);
  write(mine, dk, dv, task, walk, row);
  if (mine.thread == 0) added_bytes_are_there();
}

template <typename T, int Width, Sight Seen, bool Drops>
__global__ void __launch_bounds__(384, 1)
    backward_kernel(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                    const __grid_constant__ CUtensorMap v, const __grid_constant__ CUtensorMap grad,
                    const __grid_constant__ CUtensorMap bias, const __grid_constant__ CUtensorMap ds, T* dk, T* dv,
                    const Backward task) {
  extern __shared__ unsigned char shared[];
  const BackwardMemory<Width> memory(shared);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  memory.make_barriers();
  const Walk<Seen, Drops> walk(task);

  if (group == 0) {
    fewer_registers<24>();
    if (threadIdx.x != 0) return;
    ask(task, {q, k, v, grad, bias}, memory, walk);
    return;
  }

  more_registers<240>();
  work(dk, dv, ds, task, memory, walk, group - 1);
}

}  // namespace te_compile::attention
