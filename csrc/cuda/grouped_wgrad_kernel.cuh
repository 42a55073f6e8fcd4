// The kernels of te_cuda_grouped_wgrad: the weight gradient of each expert, summed over the tokens that it was sent.
//
// Tokens lie along the contraction, sorted by expert, so that a group begins and ends anywhere. Past a tensor's end TMA
// copies zeros, so each expert gets maps of its own, which end where its group does (maps_kernel). It begins at multiples
// of 16 bytes alone: of the first copy of a tile the multiplying groups clear up to 15 codes in each row, which are the
// last of the group before. All that is cleared never reaches a product, for a NaN among it would not vanish by a zero.
//
// An expert has few tokens and a large result. 512 of them, and tiles of 128 x 128, would have the L2 deliver 128 bytes for
// each 16 thousand multiplications, more than it can; so a block makes 256 x 128 of the result and shares its rows with
// the other block of its cluster, which halves that. Each of two warp groups sums 128 x 128, in registers: of 128 tokens
// first, which the tensor core does in less than fp32, then those ("split"). One more thread has the next tiles copied,
// as far ahead as shared memory lasts, so that while results are written the next tile arrives. There are as many blocks
// as multiprocessors, and each takes one tile after the other.
#pragma once

#include <cuda_runtime.h>

#include "hopper.cuh"
#include "wgmma.cuh"

namespace te_compile::grouped {

constexpr int kGroups = 2, kCluster = 2;                 // warp groups that multiply, blocks that share rows
constexpr int kRows = 128 * kGroups, kColumns = 128;     // of a block's tile
constexpr int kTokens = 128;                             // of a stage
constexpr int kHalf = 64 * kTokens;                      // bytes of what one product has for its rows
constexpr int kRowBytes = kRows * kTokens, kStage = kRowBytes + kColumns * kTokens;
constexpr int kStages = 4;
constexpr int kBytes = 1024 + kStages * (kStage + 2 * 8);
constexpr int kThreads = 128 * (1 + kGroups);
constexpr int kArrivals = kCluster * kGroups * 4;  // the warps that read what one copy wrote

struct Wgrad {
  const CUtensorMap* maps;  // [experts, 2]: of a and b, for boxes of 128 rows
  const int32_t* ends;      // [experts]
  const float *a_scale_inv, *b_scale_inv;
  int experts, rows, columns, tokens;
  int down, across;  // how many tiles an expert's result is high, and how many pairs of them it is wide
};

/// Where a block's tile lies, and which tokens it sums over: `stages` times 128 from `first` on, but for the first `others`.
struct Tile {
  int expert, row, column, first, others, stages;

  __device__ __forceinline__ Tile(const Wgrad& task, int number, int rank) {
    const int each = task.down * task.across;
    expert = number / each;
    const int within = number % each;
    row = within / task.across * kRows;
    column = (within % task.across * kCluster + rank) * kColumns;
    const int start = expert > 0 ? min(__ldg(task.ends + expert - 1), task.tokens) : 0;
    const int end = min(__ldg(task.ends + expert), task.tokens);
    first = start & ~15;
    others = start - first;
    stages = end > start ? (end - first + kTokens - 1) / kTokens : 0;
  }
};

/// Goes round the stages; `parity` is that of the round.
struct Stage {
  int at = 0, parity = 0;

  __device__ __forceinline__ void next() {
    if (++at == kStages) {
      at = 0;
      parity ^= 1;
    }
  }
};

/// Maps that end where the groups do. A block of one warp for each; those of an expert without tokens are not used.
__global__ void maps_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                            const int32_t* ends, int tokens, CUtensorMap* maps) {
  __shared__ alignas(128) CUtensorMap map;
  const CUtensorMap& given = blockIdx.x % 2 ? b : a;
  reinterpret_cast<uint32_t*>(&map)[threadIdx.x] = reinterpret_cast<const uint32_t*>(&given)[threadIdx.x];
  __syncwarp();
  const int end = min(__ldg(ends + blockIdx.x / 2), tokens);
  end_map(maps + blockIdx.x, &map, max(end, 1), threadIdx.x == 0);
}

/// One thread of a block asks for all that its tiles read.
__device__ __forceinline__ void ask(const Wgrad& task, uint32_t stages, uint32_t full, uint32_t empty, int tiles) {
  const int rank = block_of_cluster();
  Stage stage;
  bool is_first_round = true;
  int seen = -1;
  for (int number = blockIdx.x / kCluster; number < tiles; number += gridDim.x / kCluster) {
    const Tile tile(task, number, rank);
    const CUtensorMap* const maps = task.maps + 2 * tile.expert;
    if (tile.stages > 0 && tile.expert != seen) {
      map_is_seen(maps);
      map_is_seen(maps + 1);
      seen = tile.expert;
    }
    for (int i = 0; i < tile.stages; ++i) {
      const uint32_t barrier = full + 8 * stage.at, to = stages + stage.at * kStage;
      const int token = tile.first + i * kTokens, part = rank * (kRows / kCluster);
      if (!is_first_round) barrier_wait(empty + 8 * stage.at, stage.parity ^ 1);
      barrier_expect(barrier, kStage);
      copy_box_to_all(to + part * kTokens, maps, barrier, token, tile.row + part, (1 << kCluster) - 1);
      copy_box(to + kRowBytes, maps + 1, barrier, token, tile.column);
      stage.next();
      if (stage.at == 0) is_first_round = false;
    }
  }
}

/// Clears the first codes, fewer than 16, of a row of 128 that was copied to shared memory.
__device__ __forceinline__ void clear(uint32_t rows, int row, int codes) {
  const uint32_t at = rows + row * kTokens + row % 8 * 16;  // where the swizzle has put the row's first 16
  uint32_t words[4];
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(at)
               : "memory");
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const int gone = codes - 4 * w;
    words[w] &= gone <= 0 ? ~0u : gone >= 4 ? 0u : ~0u << (8 * gone);
  }
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}

/// The multiplying groups clear the codes of others in a stage, each the rows that it reads and a part of the columns.
__device__ __forceinline__ void clear_others(uint32_t stage, int group, int codes) {
  constexpr int kShare = kColumns / kGroups;
  const int thread = threadIdx.x % 128;
  clear(stage, 128 * group + thread, codes);
  if (thread < kShare) clear(stage + kRowBytes, kShare * group + thread, codes);
  written_for_products();
  meet(1, 128 * kGroups);
}

/// Without a branch, which around each of so many would cost more than they. Nobody reads it here again.
__device__ __forceinline__ void store_if(bool wanted, void* to, uint32_t first, uint32_t second) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.cs.v2.b32 [%1], {%2, %3}; }" ::"r"(int(wanted)),
               "l"(to), "r"(first), "r"(second)
               : "memory");
}

/// Writes 64 rows of sums. Four lanes hold 16 columns of a row between them, which are 32 bytes that memory takes at once;
/// two of them exchange halves, so that each has four columns that lie side by side.
template <typename T>
__device__ __forceinline__ void write(const float (&sums)[64], T* y, float factor, int row, int column, const Wgrad& task) {
  const int lane = threadIdx.x % 32, l = lane % 4;
  const bool odd = l % 2;
  row += threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool inside = row + 8 * h < task.rows;
    T* const to = y + int64_t{row + 8 * h} * task.columns;
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
      const int at = 4 * j + 2 * h;
      const uint32_t first = pair(sums[at] * factor, sums[at + 1] * factor, static_cast<const T*>(nullptr));
      const uint32_t second = pair(sums[at + 4] * factor, sums[at + 5] * factor, static_cast<const T*>(nullptr));
      const uint32_t taken = __shfl_xor_sync(~0u, odd ? first : second, 1);
      const int where = column + 8 * (odd ? j + 1 : j) + 4 * (l / 2);
      store_if(inside && where < task.columns, to + where, odd ? taken : first, odd ? second : taken);
    }
  }
}

/// In fp32 they are 32 bytes as they are.
__device__ __forceinline__ void write(const float (&sums)[64], float* y, float factor, int row, int column,
                                      const Wgrad& task) {
  const int lane = threadIdx.x % 32;
  row += threadIdx.x % 128 / 32 * 16 + lane / 4;
  column += 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < 64; i += 2) {
    const int r = row + 8 * (i % 4 / 2), c = column + 8 * (i / 4);
    store_if(r < task.rows && c < task.columns, y + int64_t{r} * task.columns + c, __float_as_uint(sums[i] * factor),
             __float_as_uint(sums[i + 1] * factor));
  }
}

/// A warp group makes its half of each tile.
template <typename T, typename A, typename B>
__device__ __forceinline__ void multiply(const Wgrad& task, T* y, uint32_t stages, uint32_t full, uint32_t empty, int tiles) {
  const int rank = block_of_cluster(), group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
  const float factor = *task.a_scale_inv * *task.b_scale_inv;
  Stage stage;
  for (int number = blockIdx.x / kCluster; number < tiles; number += gridDim.x / kCluster) {
    const Tile tile(task, number, rank);
    float sums[2][64] = {}, some[64];
    for (int i = 0; i < tile.stages; ++i) {
      const uint32_t at = stages + stage.at * kStage;
      barrier_wait(full + 8 * stage.at, stage.parity);
      if (i == 0 && tile.others > 0) clear_others(at, group, tile.others);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t a = matrix<16>(at + (2 * group + half) * kHalf), b = matrix<16>(at + kRowBytes);
        products_begin();
#pragma unroll
        for (int k = 0; k < kTokens / 32; ++k) {
          product(some, part(a, 32 * k), part(b, 32 * k), k > 0, static_cast<const A*>(nullptr),
                  static_cast<const B*>(nullptr));
        }
        products_end();
        products_wait<0>();
        arrived(some);
        if (half == 1 && lane < kCluster) barrier_arrive_at(empty + 8 * stage.at, lane);
#pragma unroll
        for (int s = 0; s < 64; ++s) sums[half][s] += some[s];
      }
      stage.next();
    }
    T* const to = y + int64_t{tile.expert} * task.rows * task.columns;
    const int row = tile.row + 128 * group;
    if (row < task.rows) write(sums[0], to, factor, row, tile.column, task);
    if (row + 64 < task.rows) write(sums[1], to, factor, row + 64, tile.column, task);
  }
}

template <typename T, typename A, typename B>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    wgrad_kernel(const __grid_constant__ Wgrad task, T* y) {
  extern __shared__ uint8_t memory[];
  const uint32_t stages = (shared_address(memory) + 1023) & ~1023u;
  const uint32_t full = stages + kStages * kStage, empty = full + 8 * kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_make(full + 8 * i, 1);
      barrier_make(empty + 8 * i, kArrivals);
    }
    barriers_made();
  }
  cluster_meets();
  const int tiles = task.experts * task.down * task.across;
  if (threadIdx.x < 128) {
    fewer_registers<40>();
    if (threadIdx.x == 0) ask(task, stages, full, empty, tiles);
    __syncwarp();
  } else {
    more_registers<232>();
    multiply<T, A, B>(task, y, stages, full, empty, tiles);
  }
  cluster_meets();  // nobody leaves while the other block's copies or arrivals may come
}

}  // namespace te_compile::grouped
