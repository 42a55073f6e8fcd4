// The forward pass of te_cuda_attention: flash attention, which reads which weights to keep as bits if some are dropped.
//
// A block takes 128 queries of one head. One thread has the keys and values copied, tile by tile, the last tile first;
// two warp groups of 64 queries each multiply. A group asks for the scores of the next tile and for the sum over this one's
// values together, and while the tensor cores are at it, it makes weights of those scores.
//
// te_compile/kernels/dropout_attention.py has another form of dropout, and te_compile/ops/dropout_bits.py where bits lie:
// those of the weights that a thread holds of a row are half of each word, so one shift and one permutation of bytes make
// a mask for two weights.
#pragma once

#include "hopper.cuh"
#include "wgmma.cuh"

namespace te_compile::attention {

constexpr int kWidth = 128;   // features of a head; narrower ones end in zeros
constexpr int kQueries = 128; // of a block
constexpr int kKeys = 128;    // of a tile
constexpr int kStages = 2;    // tiles under way
constexpr int kTile = kKeys * kWidth * 2, kBlock = kTile / 2;  // bytes; 64 columns of a tile are one block after the other
constexpr int kForwardBytes = 1024 + (1 + 2 * kStages) * kTile + 256;
constexpr float kLn2 = 0.6931471805599453f;

/// Which keys a query sees: all, none that come after it, those of a window around it, or those that a mask shows.
enum class Sight { kAll, kCausal, kWindow, kTiles };

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
  float scale, growth;  // scale: times log2(e)
  Window window;
  Tiles mask;
};

/// One thread's part of 64 queries: sums over the tiles so far, of rows `row` and `row` + 8.
template <typename T, Sight Seen, bool Drops>
struct Rows {
  static constexpr int kSums = kWidth / 2, kScores = kKeys / 2;
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

  __device__ __forceinline__ void ask_for_scores(uint32_t queries, uint32_t keys) {
    const uint32_t a = matrix<16>(anew(queries)), b = matrix<16>(anew(keys));
#pragma unroll
    for (int k = 0; k < kWidth / 16; ++k) {
      const uint32_t at = (k / 4) * kBlock + (k % 4) * 32;
      product<0, 0>(scores, part(a, at), part(b, at), k > 0, static_cast<const T*>(nullptr));
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
    for (int c = 0; c < kWidth / 32; ++c) {
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

template <typename T, Sight Seen, bool Drops>
__global__ void __launch_bounds__(384, 1)
    forward_kernel(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                   const __grid_constant__ CUtensorMap v, T* out, const Forward task) {
  extern __shared__ unsigned char shared[];
  const uint32_t queries = (shared_address(shared) + 1023) & ~1023u, keys = queries + kTile, values = keys + kStages * kTile;
  const uint32_t queries_full = values + kStages * kTile, keys_full = queries_full + 8, keys_empty = keys_full + 8 * kStages;
  const uint32_t values_full = keys_empty + 8 * kStages, values_empty = values_full + 8 * kStages;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    barrier_make(queries_full, 1);
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_make(keys_full + 8 * stage, 1);
      barrier_make(keys_empty + 8 * stage, 8);  // warps
      barrier_make(values_full + 8 * stage, 1);
      barrier_make(values_empty + 8 * stage, 8);
    }
    barriers_made();
  }
  __syncthreads();
  // The longest of causal attention first, which most masks are.
  constexpr bool kFromTheEnd = Seen == Sight::kCausal || Seen == Sight::kTiles;
  const int place = blockIdx.x % task.tiles, tile = kFromTheEnd ? task.tiles - 1 - place : place;
  const int index = blockIdx.x / task.tiles, batch = index / task.heads, head = index % task.heads;
  const int key_head = head / task.shared;
  int first_key = 0, end_key = task.keys;
  if (Seen == Sight::kCausal) end_key = min((tile + 1) * kQueries, task.keys);
  if (Seen == Sight::kWindow) {
    first_key = max(tile * kQueries - task.window.left, 0);
    end_key = min((tile + 1) * kQueries + task.window.right, task.keys);
  }
  const int last_tile = (end_key - 1) / kKeys;
  const int32_t* const list = Seen == Sight::kTiles ? task.mask.list(batch, tile) : nullptr;
  const int steps = Seen == Sight::kTiles ? __ldg(list) : last_tile - first_key / kKeys + 1;
  // The tile of keys of a step, and whether its mask must be read.
  const auto tile_at = [&](int step) { return Seen == Sight::kTiles ? __ldg(list + 1 + step) >> 1 : last_tile - step; };
  const auto is_cut_at = [&](int step) { return Seen == Sight::kTiles && (__ldg(list + 1 + step) & 1); };

  if (group == 0) {
    fewer_registers<24>();
    if (threadIdx.x != 0) return;
    barrier_expect(queries_full, kTile);
    for (int c = 0; c < 2; ++c) copy_box(queries + c * kBlock, &q, queries_full, 64 * c, tile * kQueries, head, batch);
    for (int step = 0; step < steps; ++step) {
      const int stage = step % kStages, parity = step / kStages & 1, row = tile_at(step) * kKeys;
      barrier_wait(keys_empty + 8 * stage, parity ^ 1);
      barrier_expect(keys_full + 8 * stage, kTile);
      for (int c = 0; c < 2; ++c) {
        copy_box(keys + stage * kTile + c * kBlock, &k, keys_full + 8 * stage, 64 * c, row, key_head, batch);
      }
      barrier_wait(values_empty + 8 * stage, parity ^ 1);
      barrier_expect(values_full + 8 * stage, kTile);
      for (int c = 0; c < 2; ++c) {
        copy_box(values + stage * kTile + c * kBlock, &v, values_full + 8 * stage, 64 * c, row, key_head, batch);
      }
    }
    return;
  }

  more_registers<240>();
  Rows<T, Seen, Drops> mine;
  mine.lane = threadIdx.x % 32;
  mine.row = tile * kQueries + (group - 1) * 64 + threadIdx.x % 128 / 32 * 16 + mine.lane / 4;
  if (Drops) {
    for (int h = 0; h < 2; ++h) mine.rows[h] = min(mine.row + 8 * h, task.queries - 1);
    mine.bits = task.bits + (int64_t{index} * task.words + mine.lane % 4 / 2) * task.queries;
  }
  if (Seen == Sight::kTiles) {
    for (int h = 0; h < 2; ++h) mine.shown_rows[h] = task.mask.row(batch, min(mine.row + 8 * h, task.queries - 1));
  }
  const uint32_t my_queries = queries + (group - 1) * 64 * 128;
  const bool first_lane = mine.lane == 0;

  if (Drops) mine.load_words(task, tile_at(0));
  if (is_cut_at(0)) mine.load_shown(tile_at(0));
  barrier_wait(queries_full, 0);
  barrier_wait(keys_full, 0);
  products_begin();
  mine.ask_for_scores(my_queries, keys);
  products_wait<0>();
  arrived(mine.scores);
  if (first_lane) barrier_arrive(keys_empty);
  if (Seen == Sight::kTiles) {
    if (is_cut_at(0)) mine.mask_shown();
  } else if (Seen != Sight::kAll || task.keys % kKeys != 0) {
    mine.mask(task, last_tile);
  }
  mine.weigh(task.scale);
  mine.round();
  for (int step = 1; step < steps; ++step) {
    const int before = (step - 1) % kStages, stage = step % kStages;
    const bool is_cut = is_cut_at(step);
    if (Drops) mine.load_words(task, tile_at(step));
    if (is_cut) mine.load_shown(tile_at(step));
    barrier_wait(keys_full + 8 * stage, step / kStages & 1);
    products_begin();
    mine.ask_for_scores(my_queries, keys + stage * kTile);
    barrier_wait(values_full + 8 * before, (step - 1) / kStages & 1);
    products_begin();
    mine.ask_for_sums(values + before * kTile, step > 1);
    products_wait<1>();
    arrived(mine.scores);
    if (first_lane) barrier_arrive(keys_empty + 8 * stage);
    if (Seen == Sight::kWindow && task.window.cuts((last_tile - step) * kKeys, kKeys, tile * kQueries, kQueries)) {
      mine.mask(task, last_tile - step);
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
  const int stage = (steps - 1) % kStages;
  barrier_wait(values_full + 8 * stage, (steps - 1) / kStages & 1);
  products_begin();
  mine.ask_for_sums(values + stage * kTile, steps > 1);
  float factor[2];
  for (int h = 0; h < 2; ++h) {
    float total = mine.total[h];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    factor[h] = Seen == Sight::kTiles && total == 0 ? 0.f : task.growth / total;  // a row may see nothing
    const int row = mine.row + 8 * h;
    if (mine.lane % 4 == 0 && row < task.queries) {
      task.logsumexp[int64_t{index} * task.queries + row] = (mine.top[h] + __log2f(total)) * kLn2;
    }
  }
  products_wait<0>();
  arrived(mine.sums);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = mine.row + 8 * h;
    T* to = out + ((int64_t{batch} * task.queries + row) * task.heads + head) * task.width;
    mine.write(to, h, factor[h], task.width, row < task.queries);
  }
}

}  // namespace te_compile::attention
