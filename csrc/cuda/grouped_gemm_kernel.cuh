// The kernel of te_cuda_grouped_gemm: each token's product with the weight of the expert that it was sent to.
//
// Tokens lie along rows, sorted by expert. A tile is 128 tokens of one group by 256 features, of which each of the two
// warp groups sums 128, and the blocks of a cluster take features side by side, so that they share the tokens. What a tile
// copies of the next group's tokens is multiplied and not written. How many tiles there are, the device alone knows: every
// thread counts those of the groups as it goes, by the ends, which lie in shared memory.
#pragma once

#include "grouped_kernel.cuh"

namespace te_compile::grouped {

constexpr int kTokens = 128, kFeatures = 128 * kGroups;  // of a block's tile
constexpr int kTokenBytes = kTokens * kDepth;
constexpr int kMostExperts = 1024;
constexpr int kGemmBytes = kRing + 4 * kMostExperts;

struct Gemm {
  const int32_t* ends;  // [experts]
  const float *a_scale_inv, *b_scale_inv;
  int experts, tokens, features, depth;
  int cluster;  // blocks that share tokens
  int across;   // how many tiles of all blocks of a cluster are as wide as the result
};

/// Goes from tile to tile, and from group to group as their numbers rise. After the last group come the tokens of nobody.
struct Tiles {
  const Gemm& task;
  const int32_t* ends;
  int expert = 0, before = 0, start = 0, end, high;

  __device__ __forceinline__ Tiles(const Gemm& task, const int32_t* ends) : task(task), ends(ends) { look(); }

  __device__ __forceinline__ void look() {
    end = expert < task.experts ? max(min(ends[expert], task.tokens), start) : task.tokens;
    high = (end - start + kTokens - 1) / kTokens;
  }

  /// Whether there is such a tile; if so, it is one of `expert`, of the tokens from `row` to `end`.
  __device__ __forceinline__ bool find(int number, int& row, int& column) {
    while (number >= before + high * task.across) {
      if (expert == task.experts) return false;
      before += high * task.across;
      start = end;
      ++expert;
      look();
    }
    const int within = number - before;
    row = start + within % high * kTokens;
    column = within / high * task.cluster * kFeatures;
    return true;
  }

  __device__ __forceinline__ int stages() const { return expert < task.experts ? (task.depth + kDepth - 1) / kDepth : 0; }
};

/// One thread of a block asks for all that its tiles read.
__device__ __forceinline__ void ask(const Gemm& task, const CUtensorMap& a, const CUtensorMap& b, const Ring& ring,
                                    const int32_t* ends) {
  const int rank = block_of_cluster(), part = rank * (kTokens / task.cluster);
  Tiles tiles(task, ends);
  Stage stage;
  int row, column;
  for (int number = blockIdx.x / task.cluster; tiles.find(number, row, column); number += gridDim.x / task.cluster) {
    const int stages = tiles.stages();
    for (int i = 0; i < stages; ++i, stage.next()) {
      const uint32_t barrier = ring.open(stage), to = ring.at(stage);
      copy_box_to_all(to + part * kDepth, &a, barrier, i * kDepth, row + part, (1 << task.cluster) - 1);
      copy_box(to + kTokenBytes, &b, barrier, i * kDepth, column + rank * kFeatures, tiles.expert);
    }
  }
}

/// A warp group makes its half of each tile. Unless Split, the tensor core adds up all products of a sum.
template <bool Split, typename T, typename A, typename B>
__device__ __forceinline__ void multiply(const Gemm& task, T* y, const Ring& ring, const int32_t* ends) {
  const int group = threadIdx.x / 128 - 1;
  const int beside = block_of_cluster() * kFeatures + group * 128;
  const float factor = *task.a_scale_inv * *task.b_scale_inv;
  Tiles tiles(task, ends);
  Stage stage;
  int row, column;
  for (int number = blockIdx.x / task.cluster; tiles.find(number, row, column); number += gridDim.x / task.cluster) {
    const int stages = tiles.stages();
    float sums[2][64] = {};
    if constexpr (Split) {
      float some[64];
      for (int i = 0; i < stages; ++i, stage.next()) {
        const uint32_t at = ring.filled(stage);
        add_split<A, B>(sums, some, at, at + kTokenBytes + 2 * group * kHalf, [&] { ring.release(stage.at, task.cluster); });
      }
    } else {
      int last = 0;
      for (int i = 0; i < stages; ++i, stage.next()) {
        const uint32_t at = ring.filled(stage), features = at + kTokenBytes + 2 * group * kHalf;
        products_begin();
        ask_for_products<A, B>(sums[0], at, features, i > 0);
        ask_for_products<A, B>(sums[1], at + kHalf, features, i > 0);
        products_end();
        products_wait<1>();
        if (i > 0) ring.release(last, task.cluster);
        last = stage.at;
      }
      products_wait<0>();
      arrived(sums[0]);
      arrived(sums[1]);
      if (stages > 0) ring.release(last, task.cluster);
    }
    if (row < tiles.end) write(sums[0], y, factor, row, tiles.end, column + beside, task.features);
    if (row + 64 < tiles.end) write(sums[1], y, factor, row + 64, tiles.end, column + beside, task.features);
  }
}

template <bool Split, typename T, typename A, typename B>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, const __grid_constant__ Gemm task,
                T* y) {
  extern __shared__ uint8_t memory[];
  const Ring ring(memory);
  int32_t* const ends = reinterpret_cast<int32_t*>(memory + kRing);
  for (int i = threadIdx.x; i < task.experts; i += kThreads) ends[i] = __ldg(task.ends + i);
  __syncthreads();
  ring.make(task.cluster);
  if (threadIdx.x < 128) {
    fewer_registers<kNarrow>();
    if (threadIdx.x == 0) ask(task, a, b, ring, ends);
    __syncwarp();
  } else {
    more_registers<kWide>();
    multiply<Split, T, A, B>(task, y, ring, ends);
  }
  meet_cluster();  // nobody leaves while the other block's copies or arrivals may come
}

}  // namespace te_compile::grouped
