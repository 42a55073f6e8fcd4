// The kernels of te_cuda_grouped_wgrad: the weight gradient of each expert, summed over the tokens that it was sent.
//
// Tokens lie along the contraction, sorted by expert, so that a group begins and ends anywhere. Past a tensor's end TMA
// copies zeros, so each expert gets maps of its own, which end where its group does (maps_kernel). It begins at multiples
// of 16 bytes alone: of the first copy of a tile the multiplying groups clear up to 15 codes in each row, which are the
// last of the group before. All that is cleared never reaches a product, for a NaN among it would not vanish by a zero.
//
// An expert has few tokens and a large result. With 512 of them tiles of 128 x 128 would have the L2 deliver 2 bytes for
// each 128 multiplications, more than it can; so a block makes 256 x 128 of the result and shares its rows with the
// other block of its cluster, which halves that.
#pragma once

#include "grouped_kernel.cuh"

namespace te_compile::grouped {

constexpr int kCluster = 2;                           // blocks that share rows
constexpr int kRows = 128 * kGroups, kColumns = 128;  // of a block's tile
constexpr int kRowBytes = kRows * kDepth;

struct Wgrad {
  const CUtensorMap* maps;  // [experts, 2]: of a and b, for boxes of 128 rows
  const int32_t* ends;      // [experts]
  const float *a_scale_inv, *b_scale_inv;
  int rows, columns, tokens, tiles;
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
    stages = end > start ? (end - first + kDepth - 1) / kDepth : 0;
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
__device__ __forceinline__ void ask(const Wgrad& task, const Ring& ring) {
  const int rank = block_of_cluster(), part = rank * (kRows / kCluster);
  Stage stage;
  int seen = -1;
  for (int number = blockIdx.x / kCluster; number < task.tiles; number += gridDim.x / kCluster) {
    const Tile tile(task, number, rank);
    const CUtensorMap* const maps = task.maps + 2 * tile.expert;
    if (tile.stages > 0 && tile.expert != seen) {
      map_is_seen(maps);
      map_is_seen(maps + 1);
      seen = tile.expert;
    }
    for (int i = 0; i < tile.stages; ++i, stage.next()) {
      const uint32_t barrier = ring.open(stage), to = ring.at(stage);
      const int token = tile.first + i * kDepth;
      copy_box_to_all(to + part * kDepth, maps, barrier, token, tile.row + part, (1 << kCluster) - 1);
      copy_box(to + kRowBytes, maps + 1, barrier, token, tile.column);
    }
  }
}

/// Clears the first codes, fewer than 16, of a row of 128 that was copied to shared memory.
__device__ __forceinline__ void clear(uint32_t rows, int row, int codes) {
  const uint32_t at = rows + row * kDepth + row % 8 * 16;  // where the swizzle has put the row's first 16
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

/// A warp group makes its half of each tile.
template <typename T, typename A, typename B>
__device__ __forceinline__ void multiply(const Wgrad& task, T* y, const Ring& ring) {
  const int rank = block_of_cluster(), group = threadIdx.x / 128 - 1;
  const float factor = *task.a_scale_inv * *task.b_scale_inv;
  Stage stage;
  for (int number = blockIdx.x / kCluster; number < task.tiles; number += gridDim.x / kCluster) {
    const Tile tile(task, number, rank);
    float sums[2][64] = {}, some[64];
    for (int i = 0; i < tile.stages; ++i, stage.next()) {
      const uint32_t at = ring.filled(stage);
      if (i == 0 && tile.others > 0) clear_others(at, group, tile.others);
      add_split<A, B>(sums, some, at + 2 * group * kHalf, at + kRowBytes, [&] { ring.release(stage.at, kCluster); });
    }
    T* const to = y + int64_t{tile.expert} * task.rows * task.columns;
    const int row = tile.row + 128 * group;
    if (row < task.rows) write(sums[0], to, factor, row, task.rows, tile.column, task.columns);
    if (row + 64 < task.rows) write(sums[1], to, factor, row + 64, task.rows, tile.column, task.columns);
  }
}

template <typename T, typename A, typename B>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    wgrad_kernel(const __grid_constant__ Wgrad task, T* y) {
  extern __shared__ uint8_t memory[];
  const Ring ring(memory);
  ring.make(kCluster);
  if (threadIdx.x < 128) {
    fewer_registers<kNarrow>();
    if (threadIdx.x == 0) ask(task, ring);
    __syncwarp();
  } else {
    more_registers<kWide>();
    multiply<T, A, B>(task, y, ring);
  }
  meet_cluster();  // nobody leaves while the other block's copies or arrivals may come
}

}  // namespace te_compile::grouped
