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

#include "attention_tasks.hpp"
#include "hopper.cuh"
#include "wgmma.cuh"

namespace te_compile::attention {

constexpr int kKeys = 128;           // of a tile
constexpr int kBlock = kKeys * 128;  // bytes; 64 columns of a tile are one block after the other
constexpr float kLn2 = 0.6931471805599453f;

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

struct Forward {
  const uint32_t* bits;  // [heads, words, queries], if weights are dropped
  float* logsumexp;      // [heads, queries]
  int heads, shared, queries, keys, width, tiles, words;  // shared: how many heads of queries read one of keys
  int all_heads, chunk;  // those of all batches, and how many of them blocks walk over together
  float scale, growth;   // scale: times log2(e)
  Window window;
  Tiles mask;
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
  /// Must a mask be read there?
  __device__ __forceinline__ bool is_cut_at(int step) const {
    return Seen == Sight::kTiles && (__ldg(list + 1 + step) & 1);
  }
};

/// One thread's part of 64 queries: sums over the tiles so far, of rows `row` and `row` + 8.
template <typename T, int Width, Sight Seen, bool Drops>
struct Rows {
  static constexpr int kSums = Width / 2, kScores = kKeys / 2;
  float sums[kSums], scores[kScores], top[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0}, shrink[2];
  uint32_t weights[kScores / 2], words[4];
  uint4 shown[2];  // keys of a tile, by a mask
  const uint32_t *bits, *shown_rows[2];
  int rows[2], row, lane;

  __device__ __forceinline__ void load_words(const Forward& task, int tile) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int word = 4 * tile + 2 * b;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        words[2 * b + h] = word < task.words ? __ldg(bits + int64_t{word} * task.queries + rows[h]) : 0;
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

  /// Scores become weights, by the largest so far; `shrink` is for what was summed by a smaller one.
  __device__ __forceinline__ void weigh(float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = -INFINITY;
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) largest = fmaxf(largest, scores[4 * (i / 2) + 2 * h + i % 2]);
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const float now = fmaxf(top[h], largest * scale);
      // A row may see nothing of the first tiles, whose weights are to be 0 and no difference of infinities.
      const float base = (Seen == Sight::kWindow || Seen == Sight::kTiles) && now == -INFINITY ? 0.f : now;
      shrink[h] = exp2_fast(top[h] - base);
      top[h] = now;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        float& x = scores[4 * (i / 2) + 2 * h + i % 2];
        x = exp2_fast(fmaf(x, scale, -base));
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

  /// Results of row h. Four lanes hold 16 bytes of each eight columns; every lane takes those of another eight.
  __device__ __forceinline__ void write(T* to, int h, float factor, int width, bool inside) {
    const int l = lane % 4;
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
      if (inside && 32 * c + 8 * l < width) {
        *reinterpret_cast<uint4*>(to + 32 * c + 8 * l) = make_uint4(columns[0], columns[1], columns[2], columns[3]);
      }
    }
  }
};

template <typename T, int Width, int Groups, Sight Seen, bool Drops>
__global__ void __launch_bounds__(ForwardSizes<Width, Groups>::kThreads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                   const __grid_constant__ CUtensorMap v, T* out, const Forward task) {
  using Sizes = ForwardSizes<Width, Groups>;
  constexpr int kQueries = Sizes::kQueries, kTile = Sizes::kTile, kStages = Sizes::kStages;
  static_assert(Seen != Sight::kTiles || kQueries == 128, "lists of tiles are of 128 queries");
  extern __shared__ unsigned char shared[];
  constexpr int kItems = 2;  // queries under way
  const uint32_t queries = (shared_address(shared) + 1023) & ~1023u, keys = queries + kItems * Sizes::kQueriesBytes;
  const uint32_t values = keys + kStages * kTile, queries_full = values + kStages * kTile;
  const uint32_t queries_empty = queries_full + 8 * kItems, keys_full = queries_empty + 8 * kItems;
  const uint32_t keys_empty = keys_full + 8 * kStages, values_full = keys_empty + 8 * kStages;
  const uint32_t values_empty = values_full + 8 * kStages;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kItems; ++i) {
      barrier_make(queries_full + 8 * i, 1);
      barrier_make(queries_empty + 8 * i, 4 * Groups);  // warps
    }
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_make(keys_full + 8 * stage, 1);
      barrier_make(keys_empty + 8 * stage, 4 * Groups);
      barrier_make(values_full + 8 * stage, 1);
      barrier_make(values_empty + 8 * stage, 4 * Groups);
    }
    barriers_made();
  }
  __syncthreads();
  const int items = task.tiles * task.all_heads;
  int count = 0, turn = 0;  // steps and items so far

  if (group == 0) {
    fewer_registers<Sizes::kFewer>();
    if (threadIdx.x != 0) return;
    for (int number = blockIdx.x; number < items; number += gridDim.x, ++turn) {
      const Item<kQueries, Seen> item(task, number);
      const uint32_t place = turn % kItems, barrier = queries_full + 8 * place;
      barrier_wait(queries_empty + 8 * place, (turn / kItems & 1) ^ 1);
      barrier_expect(barrier, Sizes::kQueriesBytes);
      for (int c = 0; c < Width / 64; ++c) {
        copy_box(queries + place * Sizes::kQueriesBytes + c * Sizes::kQueriesBlock, &q, barrier, 64 * c,
                 item.tile * kQueries, item.head, item.batch);
      }
      const int key_head = item.head / task.shared;
      for (int step = 0; step < item.steps; ++step, ++count) {
        const int stage = count % kStages, parity = count / kStages & 1, row = item.tile_at(step) * kKeys;
        barrier_wait(keys_empty + 8 * stage, parity ^ 1);
        barrier_expect(keys_full + 8 * stage, kTile);
        for (int c = 0; c < Width / 64; ++c) {
          copy_box(keys + stage * kTile + c * kBlock, &k, keys_full + 8 * stage, 64 * c, row, key_head, item.batch);
        }
        barrier_wait(values_empty + 8 * stage, parity ^ 1);
        barrier_expect(values_full + 8 * stage, kTile);
        for (int c = 0; c < Width / 64; ++c) {
          copy_box(values + stage * kTile + c * kBlock, &v, values_full + 8 * stage, 64 * c, row, key_head, item.batch);
        }
      }
    }
    return;
  }

  more_registers<Sizes::kRegisters>();
#pragma unroll 1
  for (int number = blockIdx.x; number < items; number += gridDim.x, ++turn) {
    const Item<kQueries, Seen> item(task, number);
    Rows<T, Width, Seen, Drops> mine;
    const int first_row = item.tile * kQueries + (group - 1) * 64;  // of this group
    mine.lane = threadIdx.x % 32;
    mine.row = first_row + threadIdx.x % 128 / 32 * 16 + mine.lane / 4;
    if (Drops) {
      for (int h = 0; h < 2; ++h) mine.rows[h] = min(mine.row + 8 * h, task.queries - 1);
      mine.bits = task.bits + (int64_t{item.index} * task.words + mine.lane % 4 / 2) * task.queries;
    }
    if (Seen == Sight::kTiles) {
      for (int h = 0; h < 2; ++h) mine.shown_rows[h] = task.mask.row(item.batch, min(mine.row + 8 * h, task.queries - 1));
    }
    const uint32_t place = turn % kItems, my_queries = queries + place * Sizes::kQueriesBytes + (group - 1) * 64 * 128;
    const bool first_lane = mine.lane == 0;

    // Queries of an earlier group may see nothing of the last tile; of causal attention each sees something of its first.
    int begin = 0;
    if (Groups > 2 && (Seen == Sight::kCausal || Seen == Sight::kWindow)) {
      begin = item.last_tile - (min(first_row + 64 + item.behind, task.keys) - 1) / kKeys;
      if (begin > 0) {
        // What is not there yet may have no place yet: another group may still read what is there from before.
        const int stage = count % kStages, parity = count / kStages & 1;
        barrier_wait(keys_full + 8 * stage, parity);
        if (first_lane) barrier_arrive(keys_empty + 8 * stage);
        barrier_wait(values_full + 8 * stage, parity);
        if (first_lane) barrier_arrive(values_empty + 8 * stage);
        ++count;
      }
    }
    if (Drops) mine.load_words(task, item.tile_at(begin));
    if (item.is_cut_at(begin)) mine.load_shown(item.tile_at(begin));
    int stage = count % kStages;
    barrier_wait(queries_full + 8 * place, turn / kItems & 1);
    barrier_wait(keys_full + 8 * stage, count / kStages & 1);
    products_begin();
    mine.template ask_for_scores<Sizes::kQueriesBlock>(my_queries, keys + stage * kTile);
    products_wait<0>();
    arrived(mine.scores);
    if (first_lane) barrier_arrive(keys_empty + 8 * stage);
    if (Seen == Sight::kTiles) {
      if (item.is_cut_at(0)) mine.mask_shown();
    } else if (Seen != Sight::kAll || task.keys % kKeys != 0) {
      mine.mask(task, item.last_tile - begin);
    }
    mine.weigh(task.scale);
    mine.round();
#pragma unroll 1
    for (int step = begin + 1; step < item.steps; ++step) {
      const int before = stage, before_parity = count / kStages & 1;
      ++count;
      stage = count % kStages;
      const bool is_cut = item.is_cut_at(step);
      if (Drops) mine.load_words(task, item.tile_at(step));
      if (is_cut) mine.load_shown(item.tile_at(step));
      barrier_wait(keys_full + 8 * stage, count / kStages & 1);
      products_begin();
      mine.template ask_for_scores<Sizes::kQueriesBlock>(my_queries, keys + stage * kTile);
      barrier_wait(values_full + 8 * before, before_parity);
      products_begin();
      mine.ask_for_sums(values + before * kTile, step > begin + 1);
      products_wait<1>();
      arrived(mine.scores);
      if (first_lane) barrier_arrive(keys_empty + 8 * stage);
      if (Seen == Sight::kWindow && task.window.cuts((item.last_tile - step) * kKeys, kKeys, first_row, 64)) {
        mine.mask(task, item.last_tile - step);
      }
      if (is_cut) mine.mask_shown();
      mine.weigh(task.scale);
      once_known(__float_as_int(mine.total[0]) | __float_as_int(mine.total[1]));
      products_wait<0>();
      arrived(mine.sums);
      if (first_lane) barrier_arrive(values_empty + 8 * before);
      mine.shrink_sums();
      mine.round();
    }
    if (first_lane) barrier_arrive(queries_empty + 8 * place);
    barrier_wait(values_full + 8 * stage, count / kStages & 1);
    ++count;
    products_begin();
    mine.ask_for_sums(values + stage * kTile, item.steps > begin + 1);
    float factor[2];
    for (int h = 0; h < 2; ++h) {
      float total = mine.total[h];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      factor[h] = Seen == Sight::kTiles && total == 0 ? 0.f : task.growth / total;  // a row may see nothing
      const int row = mine.row + 8 * h;
      if (mine.lane % 4 == 0 && row < task.queries) {
        task.logsumexp[int64_t{item.index} * task.queries + row] = (mine.top[h] + __log2f(total)) * kLn2;
      }
    }
    products_wait<0>();
    arrived(mine.sums);
    if (first_lane) barrier_arrive(values_empty + 8 * stage);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = mine.row + 8 * h;
      T* to = out + ((int64_t{item.batch} * task.queries + row) * task.heads + item.head) * task.width;
      mine.write(to, h, factor[h], task.width, row < task.queries);
    }
  }
}

}  // namespace te_compile::attention
