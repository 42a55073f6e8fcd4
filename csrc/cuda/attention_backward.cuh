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
//
// Where lengths are no multiples of tiles, copies bring zeros, queries that are not there have an infinite sum, which
// leaves no weights, as those that see nothing do, and keys that are not there are hidden.
#pragma once

#include "attention_forward.cuh"

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
};
// Every thread that reads numbers says itself that they may be overwritten: one for its warp would do, as they have met
// before, but racecheck follows no order from one thread by way of a second one to a third.
constexpr int kReaders = 256;
// Numbers of barriers among warps; those of ds are four, of a group and a parity, and there is one for each group.
constexpr int kDsThere = 2, kGroupMeets = 6, kHeadStart = 8;

struct Backward {
  const uint32_t* bits;                 // [heads, words, queries], if weights are dropped
  const float *sums, *shifts;           // [heads, 64 steps]: logsumexp times log2(e), Σ dout · out
  void* dq;  // fp32 [heads, steps, halves of the columns, eight columns, threads, 4]; the result itself if is_whole
  bool is_whole;
  int heads, shared, queries, keys, width, tiles, words;  // shared: how many heads of queries read one of keys
  int steps;                                              // of 64 queries
  float scale, growth, factor;  // scale: times log2(e)
  Window window;
  Tiles mask;
};

/// sums and shifts of every query, and zeros for what is to be added up of dq, or for a dq of which some may stay unwritten;
/// either may be null. Lanes of eight columns each a query of [batch, 64 steps, head].
template <typename T, int Width>
__global__ void __launch_bounds__(256)
    before_kernel(const T* grad, int64_t batch_stride, int64_t row_stride, int64_t head_stride, const T* out,
                  const float* logsumexp, float* sums, float* shifts, float* dq, T* whole_dq, int heads, int queries, int steps,
                  int width, int64_t rows) {
  constexpr int kLanes = Width / 8;
  const int64_t at = int64_t{blockIdx.x} * (256 / kLanes) + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t length = int64_t{steps} * kStep;
  const int64_t head = at % heads, query = at / heads % length, batch = at / heads / length;
  const bool is_there = query < queries;
  float shift = 0;
  if (at < rows) {
    if (is_there && 8 * lane < width) {
      const T* from = grad + batch * batch_stride + query * row_stride + head * head_stride + 8 * lane;
      const uint4 x = *reinterpret_cast<const uint4*>(from);
      const int64_t place = ((batch * queries + query) * heads + head) * width + 8 * lane;
      const uint4 y = *reinterpret_cast<const uint4*>(out + place);
      if (whole_dq != nullptr) *reinterpret_cast<uint4*>(whole_dq + place) = make_uint4(0, 0, 0, 0);
      const T *u = reinterpret_cast<const T*>(&x), *w = reinterpret_cast<const T*>(&y);
#pragma unroll
      for (int i = 0; i < 8; ++i) shift = fmaf(static_cast<float>(u[i]), static_cast<float>(w[i]), shift);
    }
    if (dq != nullptr) {
      float4* zeros = reinterpret_cast<float4*>(dq + at * Width);
      zeros[lane] = zeros[lane + kLanes] = make_float4(0, 0, 0, 0);
    }
  }
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) shift += __shfl_xor_sync(~0u, shift, i);
  if (at < rows && lane == 0) {
    const int64_t index = batch * heads + head, to = index * length + query;
    shifts[to] = shift;
    const float sum = is_there ? logsumexp[index * queries + query] * 1.4426950408889634f : INFINITY;
    sums[to] = sum == -INFINITY ? INFINITY : sum;
  }
}

/// dq of [heads, steps, half of the columns, eight columns, warp, row, four lanes, 4], fp32, to [batch, query, head, width].
template <typename T, int Width>
__global__ void __launch_bounds__(256)
    after_kernel(const float* from, T* dq, int heads, int queries, int steps, int width, float factor, int64_t count) {
  const int64_t at = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (at >= count) return;
  constexpr int kEights = Width / 8;
  const int eight = at % kEights, row = at / kEights % 8, warp = at / kEights / 8 % 4;  // both halves are side by side
  const int64_t step = at / kEights / 32;
  if (8 * eight >= width) return;
  const float4* x = reinterpret_cast<const float4*>(from) + (step * kEights + eight) * 128 + warp * 32 + row * 4;
  uint32_t upper[4], lower[4];
#pragma unroll
  for (int l = 0; l < 4; ++l) {
    const float4 four = x[l];
    upper[l] = pair(four.x * factor, four.y * factor, static_cast<const T*>(nullptr));
    lower[l] = pair(four.z * factor, four.w * factor, static_cast<const T*>(nullptr));
  }
  const int64_t index = step / steps, query = step % steps * kStep + warp * 16 + row;
  T* to = dq + ((index / heads * queries + query) * heads + index % heads) * width + 8 * eight;
  if (query < queries) *reinterpret_cast<uint4*>(to) = make_uint4(upper[0], upper[1], upper[2], upper[3]);
  if (query + 8 < queries) {
    *reinterpret_cast<uint4*>(to + int64_t{8} * heads * width) = make_uint4(lower[0], lower[1], lower[2], lower[3]);
  }
}

/// Numbers of a step's queries, or words of bits, of which a thread needs two side by side of each eight: read from shared
/// memory all at once, or where there are no registers to hold them, as they are needed.
template <typename X, bool AtOnce>
struct OfQueries {
  static_assert(sizeof(X) == 4);
  uint32_t from;
  X held[AtOnce ? kStep / 4 : 2];

  __device__ __forceinline__ void read(int j, X* to) {
    uint32_t x, y;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(from + 32 * j));
    memcpy(to, &x, 4);
    memcpy(to + 1, &y, 4);
  }
  __device__ __forceinline__ explicit OfQueries(uint32_t at) : from(at) {
#pragma unroll
    for (int j = 0; AtOnce && j < kStep / 8; ++j) read(j, held + 2 * j);
  }
  __device__ __forceinline__ const X* of(int j) {
    if (AtOnce) return held + 2 * j;
    read(j, held);
    return held;
  }
};

/// One thread's part of 64 keys, of which it has rows `row` and `row` + 8.
template <typename T, int Width, Sight Seen, bool Drops>
struct Keys {
  static constexpr bool kAtOnce = BackwardSizes<Width>::kRoomy;
  using Numbers = OfQueries<float, kAtOnce>;
  using Words = OfQueries<uint32_t, kAtOnce && Drops>;
  float dk[Width / 2], dv[Width / 2], scores[kStep / 2], dp[kStep / 2], dq[Width / 4];
  uint32_t weights[kStep / 4];
  int group, thread, lane;
  uint32_t bit, next_bit;  // of this thread's keys, in the words of a query

  /// Products of this group's keys or values, rows of `mine`, with rows of queries.
  __device__ __forceinline__ void ask_for(float (&d)[kStep / 2], uint32_t mine, uint32_t queries) {
    const uint32_t a = matrix<16>(anew(mine)), b = matrix<16>(queries);
#pragma unroll
    for (int k = 0; k < Width / 16; ++k) {
      product<0, 0>(d, part(a, (k / 4) * kBlock + (k % 4) * 32), part(b, (k / 4) * kStepBlock + (k % 4) * 32), k > 0,
                    static_cast<const T*>(nullptr));
    }
    products_end();
  }

  __device__ __forceinline__ void ask_for_dv(uint32_t grad, bool more) {
    const uint32_t b = matrix<kStepBlock>(grad);
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
      product(dv, weights + 4 * k, part(b, k * 2048), more || k > 0, static_cast<const T*>(nullptr));
    }
    products_end();
  }

  __device__ __forceinline__ void ask_for_dk(uint32_t ds, uint32_t queries, bool more) {
    const uint32_t a = matrix<16>(ds + group * 64 * 128), b = matrix<kStepBlock>(queries);
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
      product<0, 1>(dk, part(a, k * 32), part(b, k * 2048), more || k > 0, static_cast<const T*>(nullptr));
    }
    products_end();
  }

  __device__ __forceinline__ void ask_for_dq(uint32_t ds, uint32_t keys) {
    const uint32_t a = matrix<16>(ds), b = matrix<16>(anew(keys) + (Width > 64 ? group * kBlock : group * 64));
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      product<1, 1>(dq, part(a, k * 2048), part(b, k * 2048), k > 0, static_cast<const T*>(nullptr));
    }
    products_end();
  }

  /// Scores become weights, by the sums of their queries.
  __device__ __forceinline__ void weigh(Numbers& sums, float scale) {
#pragma unroll
    for (int j = 0; j < kStep / 8; ++j) {
      const float* sum = sums.of(j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = scores[4 * j + i];
        x = exp2_fast(fmaf(x, scale, -sum[i % 2]));
      }
    }
  }

  /// No weights for keys that their query does not see, or that are not there.
  __device__ __forceinline__ void mask(const Backward& task, int first_key, int first_query) {
    const int key = first_key + group * 64 + thread / 32 * 16 + lane / 4, query = first_query + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i) {
      const int this_key = key + 8 * (i % 4 / 2), this_query = query + 8 * (i / 4) + i % 2;
      const bool hidden = Seen == Sight::kCausal ? this_key > this_query
                                                 : Seen == Sight::kWindow && task.window.hides(this_key, this_query);
      if (hidden || (!Drops && this_key >= task.keys)) scores[i] = 0;
    }
  }

  /// No weights for what the mask does not show; rows: its words of this thread's two keys.
  __device__ __forceinline__ void mask_shown(const uint2 (&rows)[2]) {
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i) {
      const uint32_t word = i < 16 ? rows[i % 4 / 2].x : rows[i % 4 / 2].y;
      if (((word >> (2 * (lane % 4))) & (1u << (8 * (i / 4 % 4) + i % 2))) == 0) scores[i] = 0;
    }
  }

  /// Rounds the weights that are kept, and zeros for the others. Returns what is known once all are, and not negative.
  __device__ __forceinline__ int round(Words& words) {
    uint32_t all = 0;
#pragma unroll
    for (int j = 0; j < kStep / 8; ++j) {
      const uint32_t* word = Drops ? words.of(j) : nullptr;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t kept = h ? next_bit : bit;
        const float a = !Drops || word[0] & kept ? scores[4 * j + 2 * h] : 0.f;
        const float b = !Drops || word[1] & kept ? scores[4 * j + 2 * h + 1] : 0.f;
        weights[2 * j + h] = pair(a, b, static_cast<const T*>(nullptr));
        all |= weights[2 * j + h];
      }
    }
    return static_cast<int>(all);
  }

  /// ds = p (z dp - shift), rounded, to shared memory, a row for each key.
  __device__ __forceinline__ void write_ds(uint32_t ds, Numbers& shifts, Words& words, float growth) {
    uint32_t both[kStep / 4];
#pragma unroll
    for (int j = 0; j < kStep / 8; ++j) {
      float x[4];
      const float* shift = shifts.of(j);
      const uint32_t* word = Drops ? words.of(j) : nullptr;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (Drops) {
          const float kept = fmaf(dp[4 * j + i], growth, -shift[i % 2]);
          x[i] = scores[4 * j + i] * (word[i % 2] & (i / 2 ? next_bit : bit) ? kept : -shift[i % 2]);
        } else {
          x[i] = scores[4 * j + i] * (dp[4 * j + i] - shift[i % 2]);
        }
      }
      both[2 * j] = pair(x[0], x[1], static_cast<const T*>(nullptr));
      both[2 * j + 1] = pair(x[2], x[3], static_cast<const T*>(nullptr));
    }
    const uint32_t row = ds + (group * 64 + thread / 32 * 16 + lane % 16) * 128;
#pragma unroll
    for (int j = 0; j < kStep / 8; j += 2) {
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       row + ((j + lane / 16) ^ (lane % 8)) * 16),
                   "r"(both[2 * j]), "r"(both[2 * j + 1]), "r"(both[2 * j + 2]), "r"(both[2 * j + 3])
                   : "memory");
    }
  }

  /// To shared memory, from where it is added to memory's; what was there before has been read.
  __device__ __forceinline__ void stage_dq(uint32_t staged) {
#pragma unroll
    for (int i = 0; i < Width / 16; ++i) {
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(staged + thread * 16 + i * 2048), "f"(dq[4 * i]),
                   "f"(dq[4 * i + 1]), "f"(dq[4 * i + 2]), "f"(dq[4 * i + 3])
                   : "memory");
    }
  }

  /// This group's columns of a dq that is whole; count: how many of the queries are there.
  __device__ __forceinline__ void write_dq(T* to, int64_t row, int count, float factor, int width) {
    const int query = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < Width / 16; ++i) {
        const int column = group * Width / 2 + 8 * i;
        if (query + 8 * h < count && column < width) {
          *reinterpret_cast<uint32_t*>(to + (query + 8 * h) * row + column + 2 * (lane % 4)) =
              pair(dq[4 * i + 2 * h] * factor, dq[4 * i + 2 * h + 1] * factor, static_cast<const T*>(nullptr));
        }
      }
    }
  }

  __device__ __forceinline__ void write(T* to, const float (&sums)[Width / 2], int h, float factor, int width) {
#pragma unroll
    for (int j = 0; j < Width / 8; ++j) {
      if (8 * j < width) {
        *reinterpret_cast<uint32_t*>(to + 8 * j + 2 * (lane % 4)) =
            pair(sums[4 * j + 2 * h] * factor, sums[4 * j + 2 * h + 1] * factor, static_cast<const T*>(nullptr));
      }
    }
  }
};

template <typename T, int Width, Sight Seen, bool Drops>
__global__ void __launch_bounds__(384, 1)
    backward_kernel(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                    const __grid_constant__ CUtensorMap v, const __grid_constant__ CUtensorMap grad, T* dk, T* dv,
                    const Backward task) {
  using Sizes = BackwardSizes<Width>;
  constexpr int kTile = Sizes::kTile, kStepBytes = Sizes::kStepBytes, kStages = Sizes::kStages, kDq = Sizes::kDq;
  constexpr bool kRoomy = Sizes::kRoomy;
  extern __shared__ unsigned char shared[];
  const uint32_t keys = (shared_address(shared) + 1023) & ~1023u, values = keys + kTile, queries = values + kTile;
  const uint32_t grads = queries + kStages * kStepBytes, ds = grads + kStages * kStepBytes, staged = ds + 2 * kDs;
  const uint32_t extras = staged + 2 * kDq * 4, keys_full = extras + kStages * kExtras, full = keys_full + 8;
  const uint32_t empty = full + 8 * kStages;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    barrier_make(keys_full, 1);
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_make(full + 8 * stage, 1);
      barrier_make(empty + 8 * stage, kReaders);
    }
    barriers_made();
  }
  __syncthreads();
  const int tile = blockIdx.x % task.tiles, key_index = blockIdx.x / task.tiles, key_heads = task.heads / task.shared;
  const int batch = key_index / key_heads, key_head = key_index % key_heads;
  const bool ends_in_tile = !Drops && Seen != Sight::kTiles && (tile + 1) * kKeys > task.keys;
  const int32_t* const list = Seen == Sight::kTiles ? task.mask.list(batch, tile) : nullptr;
  int first = 0, end = Seen == Sight::kTiles ? __ldg(list) : task.steps;  // of the list, if there is one
  if (Seen == Sight::kCausal) first = tile * (kKeys / kStep);
  if (Seen == Sight::kWindow) {
    first = max(tile * kKeys - task.window.right, 0) / kStep;
    end = min(((tile + 1) * kKeys - 1 + task.window.left) / kStep + 1, task.steps);
  }
  const int steps = end - first;
  const int start = first + static_cast<int>(int64_t{tile} * steps / task.tiles);
  const auto following = [&](int step) { return step + 1 == end ? first : step + 1; };
  const auto step_at = [&](int place) { return Seen == Sight::kTiles ? __ldg(list + 1 + place) >> 1 : place; };
  const int first_head = key_head * task.shared;  // of queries

  if (group == 0) {
    fewer_registers<24>();
    if (threadIdx.x != 0) return;
    barrier_expect(keys_full, 2 * kTile);
    for (int c = 0; c < Width / 64; ++c) {
      copy_box(keys + c * kBlock, &k, keys_full, 64 * c, tile * kKeys, key_head, batch);
      copy_box(values + c * kBlock, &v, keys_full, 64 * c, tile * kKeys, key_head, batch);
    }
    int head = first_head;
    for (int count = 0, place = start, left = steps; count < steps * task.shared;
         ++count, place = following(place), --left) {
      const int step = step_at(place);
      if (left == 0) {
        left = steps;
        ++head;
      }
      const int stage = count % kStages, index = batch * task.heads + head;
      const uint32_t barrier = full + 8 * stage, extra = extras + stage * kExtras;
      const int64_t at = (int64_t{index} * task.steps + step) * kStep;
      const uint32_t* words = task.bits + (int64_t{index} * task.words + 4 * tile) * task.queries + step * kStep;
      barrier_wait(empty + 8 * stage, (count / kStages & 1) ^ 1);
      barrier_expect(barrier, 2 * kStepBytes + (Drops ? kExtras : 2 * kNumbers));
      for (int c = 0; c < Width / 64; ++c) {
        copy_box(queries + stage * kStepBytes + c * kStepBlock, &q, barrier, 64 * c, step * kStep, head, batch);
      }
      copy_bytes(extra, task.sums + at, kNumbers, barrier);
      for (int i = 0; Drops && i < 4; ++i) {
        copy_bytes(extra + (2 + i) * kNumbers, words + int64_t{i} * task.queries, kNumbers, barrier);
      }
      for (int c = 0; c < Width / 64; ++c) {
        copy_box(grads + stage * kStepBytes + c * kStepBlock, &grad, barrier, 64 * c, step * kStep, head, batch);
      }
      copy_bytes(extra + kNumbers, task.shifts + at, kNumbers, barrier);
    }
    return;
  }

  more_registers<240>();
  using Group = Keys<T, Width, Seen, Drops>;
  Group mine;
  mine.group = group - 1;
  mine.thread = threadIdx.x % 128;
  mine.lane = threadIdx.x % 32;
  const int row = mine.thread / 32 * 16 + mine.lane / 4, other = 1 - mine.group;
  mine.bit = 1u << (16 * (row / 2 % 2) + 8 * (row % 2) + row / 8);
  mine.next_bit = mine.bit << 1;
  const uint32_t my_keys = keys + mine.group * 64 * 128, my_values = my_keys + kTile, my_staged = staged + mine.group * kDq * 4;
  // dq of a head, where this group's begins, and of the step before.
  const int64_t dq_row = int64_t{task.heads} * task.width;
  const int64_t dq_step = task.is_whole ? kStep * dq_row * 2 : 2 * kDq * 4;  // bytes from one to the next
  const int64_t dq_head = task.is_whole ? task.width * 2 : task.steps * dq_step;
  char* my_dq = static_cast<char*>(task.dq) + (task.is_whole ? int64_t{batch} * task.queries * dq_row * 2 + first_head * dq_head
                                                             : (batch * task.heads + first_head) * dq_head + mine.group * kDq * 4);
  char* dq_before = my_dq;
  int queries_before = 0;
  const auto write_dq = [&] {
    mine.write_dq(reinterpret_cast<T*>(dq_before), dq_row, queries_before, task.factor, task.width);
  };
  const auto add_dq = [&] {
    if (!task.is_whole && mine.thread == 0) add_bytes(reinterpret_cast<float*>(dq_before), my_staged, kDq * 4);
  };
  const uint32_t* shown_rows[2];
  if (Seen == Sight::kTiles) {
    for (int h = 0; h < 2; ++h) {
      const int key = tile * kKeys + mine.group * 64 + row + 8 * h;
      shown_rows[h] = key < task.keys ? task.mask.row(batch, key) : nullptr;
    }
  }
  barrier_wait(keys_full, 0);
  const int count_of_all = steps * task.shared;
  int place = start, left = steps;
#pragma unroll 1
  for (int count = 0; count < count_of_all; ++count) {
    const int step = step_at(place);
    const bool is_cut = Seen == Sight::kTiles && (__ldg(list + 1 + place) & 1);
    uint2 shown[2];
    if (is_cut) {
      for (int h = 0; h < 2; ++h) {
        const uint2* of_key = reinterpret_cast<const uint2*>(shown_rows[h]);
        shown[h] = of_key != nullptr ? __ldg(of_key + step) : make_uint2(0, 0);
      }
    }
    const int stage = count % kStages, parity = count & 1;
    const uint32_t query = queries + stage * kStepBytes, dout = grads + stage * kStepBytes;
    const uint32_t columns = extras + stage * kExtras + 8 * (mine.lane % 4);
    // dq of the step before. At first there is none: what is made of nothing is added to nothing.
    const auto ask_for_dq = [&] {
      if (count > 0) {
        if (mine.thread == 0) added_bytes_are_read();
        meet(kDsThere + 2 * other + (parity ^ 1), 256);
      }
      products_begin();
      mine.ask_for_dq(ds + (parity ^ 1) * kDs, keys);
    };
    barrier_wait(full + 8 * stage, count / kStages & 1);
    // The groups take turns: one has the tensor cores while the other makes weights.
    if (count == 0 && mine.group == 1) meet(kHeadStart, 256);
    typename Group::Numbers sums(columns), shifts(columns + kNumbers);
    products_begin();
    mine.ask_for(mine.scores, my_keys, query);
    if constexpr (kRoomy) {
      mine.ask_for(mine.dp, my_values, dout);
    } else {
      ask_for_dq();
    }
    products_wait<1>();
    arrived(mine.scores);
    arrived(mine.dk);
    arrived(mine.dv);
    if (count > 0) barrier_arrive(empty + 8 * ((count - 1) % kStages));
    mine.weigh(sums, task.scale);
    const bool cut = Seen == Sight::kCausal
                         ? step < first + kKeys / kStep
                         : Seen == Sight::kWindow && task.window.cuts(tile * kKeys, kKeys, step * kStep, kStep);
    if (cut || ends_in_tile) mine.mask(task, tile * kKeys, step * kStep);
    if (is_cut) mine.mask_shown(shown);
    typename Group::Words words(columns + (2 + 2 * mine.group + mine.lane / 16) * kNumbers);
    [[maybe_unused]] const int known = mine.round(words);
    if (count == 0 && mine.group == 0) tell(kHeadStart, 256);
    if constexpr (kRoomy) {
      products_begin();
      mine.ask_for_dv(dout, count > 0);
      ask_for_dq();
      products_wait<2>();
      arrived(mine.dp);
      mine.write_ds(ds + parity * kDs, shifts, words, task.growth);
      products_wait<0>();
      arrived(mine.dq);
      if (task.is_whole) {
        write_dq();
      } else {
        mine.stage_dq(my_staged);
      }
    } else {
      once_known(known);
      products_wait<0>();
      arrived(mine.dq);
      if (task.is_whole) {
        write_dq();
      } else if (count > 0) {
        mine.stage_dq(my_staged);
        written_for_products();
      }
      products_begin();
      mine.ask_for(mine.dp, my_values, dout);
      products_begin();
      mine.ask_for_dv(dout, count > 0);
      products_wait<1>();
      arrived(mine.dp);
      mine.write_ds(ds + parity * kDs, shifts, words, task.growth);
    }
    written_for_products();
    tell(kDsThere + 2 * mine.group + parity, 256);
    meet(kGroupMeets + mine.group, 128);
    if (count > 0) add_dq();
    products_begin();
    mine.ask_for_dk(ds + parity * kDs, query, count > 0);
    dq_before = my_dq + step * dq_step;
    queries_before = task.queries - step * kStep;
    place = following(place);
    if (--left == 0) {
      left = steps;
      my_dq += dq_head;
    }
  }
  const int parity = (count_of_all - 1) & 1;
  if (mine.thread == 0) added_bytes_are_read();
  meet(kDsThere + 2 * other + parity, 256);
  products_begin();
  mine.ask_for_dq(ds + parity * kDs, keys);
  products_wait<0>();
  arrived(mine.dk);
  arrived(mine.dv);
  arrived(mine.dq);
  if (task.is_whole) {
    write_dq();
  } else {
    mine.stage_dq(my_staged);
    written_for_products();
    meet(kGroupMeets + mine.group, 128);
    add_dq();
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int key = tile * kKeys + mine.group * 64 + row + 8 * h;
    const int64_t at = ((int64_t{batch} * task.keys + key) * key_heads + key_head) * task.width;
    const int width = Drops || key < task.keys ? task.width : 0;
    mine.write(dk + at, mine.dk, h, task.factor, width);
    mine.write(dv + at, mine.dv, h, task.growth, width);
  }
  if (mine.thread == 0) added_bytes_are_there();
}

}  // namespace te_compile::attention
