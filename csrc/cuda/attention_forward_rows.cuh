// One thread's part of what a warp group of attention_forward.cuh makes of its 64 queries and of 128 keys at a time.
#pragma once

#include "attention_bias.cuh"
#include "attention_forward_task.cuh"

namespace te_compile::attention {

/// One thread's part of 64 queries: sums over the tiles so far, of rows `row` and `row` + 8.
template <typename T, int Width, Sight Seen, bool Drops>
struct Rows {
  static constexpr int kSums = Width / 2, kScores = kKeys / 2;
  float sums[kSums], scores[kScores], top[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0}, shrink[2];
  uint32_t weights[kScores / 2], words[4];
  uint4 shown[2];  // keys of a tile, by a mask
  const uint32_t *bits, *shown_rows[2];
  int rows[2], row, lane;

  __device__ __forceinline__ Rows(const Forward& task, int index, int batch, int first_row) {
    lane = threadIdx.x % 32;
    row = first_row + threadIdx.x % 128 / 32 * 16 + lane / 4;
    if (Drops) {
      for (int h = 0; h < 2; ++h) rows[h] = min(row + 8 * h, task.queries - 1);
      bits = task.bits + (int64_t{index} * task.words + lane % 4 / 2) * task.bit_queries;
    }
    if (Seen == Sight::kTiles) {
      for (int h = 0; h < 2; ++h) shown_rows[h] = task.mask.row(batch, min(row + 8 * h, task.queries - 1));
    }
  }

  __device__ __forceinline__ void load_words(const Forward& task, int tile) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int word = 4 * tile + 2 * b;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        words[2 * b + h] = word < task.words ? __ldg(bits + int64_t{word} * task.bit_queries + rows[h]) : 0;
      }
    }
  }

  __device__ __forceinline__ void load_shown(int tile) {
#pragma unroll
    for (int h = 0; h < 2; ++h) shown[h] = __ldg(reinterpret_cast<const uint4*>(shown_rows[h]) + tile);
  }

  /// -infinity for the scores of keys that the words loaded last do not show.
  __device__ __forceinline__ void mask_shown() {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const uint4& four = shown[i % 4 / 2];
      const uint32_t word = i < 16 ? four.x : i < 32 ? four.y : i < 48 ? four.z : four.w;
      if (((word >> (2 * (lane % 4))) & (1u << (8 * (i / 4 % 4) + i % 2))) == 0) scores[i] = -INFINITY;
    }
  }

  /// queries: where those of this group begin, whose blocks of 64 columns are so many bytes.
  template <int QueriesBlock>
  __device__ __forceinline__ void ask_for_scores(uint32_t queries, uint32_t keys) {
    const uint32_t a = matrix<16>(anew(queries)), b = matrix<16>(anew(keys));
#pragma unroll
    for (int k = 0; k < Width / 16; ++k) {
      const uint32_t at = (k % 4) * 32;
      product<0, 0>(scores, part(a, (k / 4) * QueriesBlock + at), part(b, (k / 4) * kBlock + at), k > 0,
                    static_cast<const T*>(nullptr));
    }
    products_end();
  }

  __device__ __forceinline__ void ask_for_sums(uint32_t values, bool more) {
    const uint32_t b = matrix<kBlock>(anew(values));
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      product(sums, weights + 4 * k, part(b, k * 2048), more || k > 0, static_cast<const T*>(nullptr));
    }
    products_end();
  }

  __device__ __forceinline__ void mask(const Forward& task, int tile) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int key = tile * kKeys + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      const int query = row + 8 * (i % 4 / 2);
      const bool hidden = Seen == Sight::kCausal ? key > query : Seen == Sight::kWindow && task.window.hides(key, query);
      if (key >= task.keys || hidden) scores[i] = -INFINITY;
    }
  }

  /// What a bias adds to the scores of a tile, which are multiplied by `scale` with that: not by log2(e) as well, by which the
  /// lowest numbers of 16 bits would become infinite. The tile is that of this group's queries.
  template <int Groups>
  __device__ __forceinline__ void add_bias(const ForwardMemory<Width, Groups>& memory, int group, int count, float scale) {
    using Bias = ForwardBias<Width, Groups>;
    const int stage = count % Bias::kStages;
    barrier_wait(memory.bias_full + 8 * stage, count / Bias::kStages & 1);
    const uint32_t tile = memory.bias + stage * Bias::kTile + group * 64 * 128;
    const uint32_t from = tile + (threadIdx.x % 128 / 32 * 16 + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
    for (int j = 0; j < kScores / 4; j += 2) {
      uint32_t two[4];  // of columns 8 j and 8 j + 8, of both rows
      load_matrices(two, (from ^ (j % 8 * 16)) + j / 8 * (Bias::kTile / 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 added = both(two[i], static_cast<const T*>(nullptr));
        float* const x = scores + 4 * j + 2 * i;
        x[0] = fmaf(x[0], scale, added.x);
        x[1] = fmaf(x[1], scale, added.y);
      }
    }
    barrier_arrive(memory.bias_empty + 8 * stage);  // every reader, as racecheck follows no order by way of another thread
  }

  /// Scores become weights, by the largest so far; `shrink` is for what was summed by a smaller one.
  __device__ __forceinline__ void weigh(float scale) {
    constexpr bool kBiased = Seen == Sight::kBiased;  // scores are what they are to be, but for log2(e)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = -INFINITY;
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) largest = fmaxf(largest, scores[4 * (i / 2) + 2 * h + i % 2]);
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const float now = fmaxf(top[h], kBiased ? largest : largest * scale);
      // A row may see nothing of the first tiles, whose weights are to be 0 and no difference of infinities.
      const bool sees_nothing = (Seen == Sight::kWindow || Seen == Sight::kTiles || kBiased) && now == -INFINITY;
      const float base = sees_nothing ? 0.f : now;
      shrink[h] = exp2_fast(kBiased ? (top[h] - base) * kLog2E : top[h] - base);
      top[h] = now;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        float& x = scores[4 * (i / 2) + 2 * h + i % 2];
        x = exp2_fast(kBiased ? (x - base) * kLog2E : fmaf(x, scale, -base));
        sum += x;
      }
      total[h] = total[h] * shrink[h] + sum;
    }
  }

  /// Rounds the weights that are kept, and zeros for the others. Bits j and 8 + j of half a word become the signs of two
  /// bytes, and these, spread, the halves of a mask.
  __device__ __forceinline__ void round() {
    const uint32_t signs = lane % 2 ? 0xBBAA : 0x9988;
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const int j = i / 4, h = i % 4 / 2;
      uint32_t kept = ~0u;
      if (Drops) {
        const uint32_t moved = words[2 * (j / 8) + h] << (7 - j % 8);
        asm("prmt.b32 %0, %1, %1, %2;" : "=r"(kept) : "r"(moved), "r"(signs));
      }
      weights[i / 2] = pair(scores[i], scores[i + 1], static_cast<const T*>(nullptr)) & kept;
    }
  }

  __device__ __forceinline__ void shrink_sums() {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] *= shrink[i % 4 / 2];
  }

  /// Makes weights of the first tile that these queries see of an item.
  template <int Groups, int Queries>
  __device__ __forceinline__ void take_first(const Forward& task, const ForwardMemory<Width, Groups>& memory,
                                             const Item<Queries, Seen>& item, int step, uint32_t queries, int group,
                                             int count, int stage) {
    using Sizes = ForwardSizes<Width, Groups>;
    barrier_wait(memory.keys_full + 8 * stage, count / Sizes::kStages & 1);
    products_begin();
    ask_for_scores<Sizes::kQueriesBlock>(queries, memory.keys + stage * Sizes::kTile);
    products_wait<0>();
    arrived(scores);
    if (lane == 0) barrier_arrive(memory.keys_empty + 8 * stage);
    if (Seen == Sight::kBiased) add_bias(memory, group, count, task.scale);
    if (Seen == Sight::kTiles) {
      if (item.is_cut_at(0)) mask_shown();
    } else if ((Seen != Sight::kAll && Seen != Sight::kBiased) || task.keys % kKeys != 0) {
      mask(task, item.last_tile - step);
    }
    weigh(task.scale);
    round();
  }

  /// Makes weights of the next tile, and meanwhile sums over the values of the one before. `count` and `stage` are the one's,
  /// `before` is the other's stage; `more` says that there are sums already.
  template <int Groups, int Queries>
  __device__ __forceinline__ void take(const Forward& task, const ForwardMemory<Width, Groups>& memory,
                                       const Item<Queries, Seen>& item, int step, bool is_cut, bool more, uint32_t queries,
                                       int group, int first_row, int count, int stage, int before, int before_parity) {
    using Sizes = ForwardSizes<Width, Groups>;
    barrier_wait(memory.keys_full + 8 * stage, count / Sizes::kStages & 1);
    products_begin();
    ask_for_scores<Sizes::kQueriesBlock>(queries, memory.keys + stage * Sizes::kTile);
    barrier_wait(memory.values_full + 8 * before, before_parity);
    products_begin();
    ask_for_sums(memory.values + before * Sizes::kTile, more);
    products_wait<1>();
    arrived(scores);
    if (lane == 0) barrier_arrive(memory.keys_empty + 8 * stage);
    if (Seen == Sight::kBiased) add_bias(memory, group, count, task.scale);
    if (Seen == Sight::kWindow && task.window.cuts((item.last_tile - step) * kKeys, kKeys, first_row, 64)) {
      mask(task, item.last_tile - step);
    }
    if (is_cut) mask_shown();
    weigh(task.scale);
    once_known(__float_as_int(total[0]) | __float_as_int(total[1]));
    products_wait<0>();
    arrived(sums);
    if (lane == 0) barrier_arrive(memory.values_empty + 8 * before);
    shrink_sums();
    round();
  }

  /// Writes the logsumexp of row h; returns what its sums are still to be multiplied by.
  __device__ __forceinline__ float factor_of(const Forward& task, int index, int h) {
    float sum = total[h];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    constexpr bool kBiased = Seen == Sight::kBiased;
    const float factor = (Seen == Sight::kTiles || kBiased) && sum == 0 ? 0.f : task.growth / sum;  // a row may see nothing
    const int this_row = row + 8 * h;
    if (lane % 4 == 0 && this_row < task.queries) {
      const float sees = kBiased ? fmaf(__log2f(sum), kLn2, top[h]) : (top[h] + __log2f(sum)) * kLn2;
      task.logsumexp[int64_t{index} * task.queries + this_row] = kBiased && top[h] < kLowest ? -INFINITY : sees;
    }
    return factor;
  }

  /// The results of row h. Four lanes hold 16 bytes of each eight columns; every lane takes those of another eight.
  __device__ __forceinline__ void write(T* out, const Forward& task, int batch, int head, int h, float factor) {
    const int this_row = row + 8 * h, l = lane % 4;
    T* const to = out + ((int64_t{batch} * task.queries + this_row) * task.heads + head) * task.width;
#pragma unroll
    for (int c = 0; c < Width / 32; ++c) {
      uint32_t mine[4], columns[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (4 * c + i) + 2 * h;
        mine[i] = pair(sums[at] * factor, sums[at + 1] * factor, static_cast<const T*>(nullptr));
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int other = l ^ r;
        const uint32_t give = other == 0 ? mine[0] : other == 1 ? mine[1] : other == 2 ? mine[2] : mine[3];
        const uint32_t taken = __shfl_xor_sync(~0u, give, r);
        if (other == 0) columns[0] = taken;
        if (other == 1) columns[1] = taken;
        if (other == 2) columns[2] = taken;
        if (other == 3) columns[3] = taken;
      }
      if (this_row < task.queries && 32 * c + 8 * l < task.width) {
        *reinterpret_cast<uint4*>(to + 32 * c + 8 * l) = make_uint4(columns[0], columns[1], columns[2], columns[3]);
      }
    }
  }

  /// Sums over the values of the last tile, and writes the results.
  template <int Groups, int Queries>
  __device__ __forceinline__ void finish(T* out, const Forward& task, const ForwardMemory<Width, Groups>& memory,
                                         const Item<Queries, Seen>& item, bool more, int stage) {
    using Sizes = ForwardSizes<Width, Groups>;
    products_begin();
    ask_for_sums(memory.values + stage * Sizes::kTile, more);
    float factor[2];
    for (int h = 0; h < 2; ++h) factor[h] = factor_of(task, item.index, h);
    products_wait<0>();
    arrived(sums);
    if (lane == 0) barrier_arrive(memory.values_empty + 8 * stage);
#pragma unroll
    for (int h = 0; h < 2; ++h) write(out, task, item.batch, item.head, h, factor[h]);
  }
};

}  // namespace te_compile::attention
