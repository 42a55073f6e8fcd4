// What the grouped products of csrc/cuda/grouped_*_kernel.cuh share: a ring of stages in shared memory, and how two warp
// groups that each sum 128 x 128 in registers add a stage to them and write them.
//
// One thread of a block has the next tiles copied, as far ahead as shared memory lasts, so that while results are written
// the next tile arrives. There are as many blocks as multiprocessors, and each takes one tile after the other. The blocks
// of a cluster share one operand, which halves what they have the L2 deliver of it.
#pragma once

#include <cuda_runtime.h>

#include "hopper.cuh"
#include "wgmma.cuh"

namespace te_compile::grouped {

constexpr int kGroups = 2, kThreads = 128 * (1 + kGroups);  // warp groups that multiply; one more has one thread that asks
constexpr int kDepth = 128;                                 // codes of the contraction in a stage: a row is 128 bytes
constexpr int kHalf = 64 * kDepth;                          // bytes of the rows of one product
constexpr int kStage = 3 * 128 * kDepth, kStages = 4;       // 256 rows of one operand and 128 of the other
constexpr int kRing = 1024 + kStages * (kStage + 2 * 8);    // bytes, with what alignment may cost
constexpr int kWide = 232, kNarrow = 40;                    // registers of a thread that multiplies, of another

/// Goes round the stages; `parity` is that of the round.
struct Stage {
  int at = 0, parity = 0;
  bool is_first_round = true;

  __device__ __forceinline__ void next() {
    if (++at < kStages) return;
    at = 0;
    parity ^= 1;
    is_first_round = false;
  }
};

/// The stages, a barrier for each that says that it is full, and one that says that it may be written.
struct Ring {
  uint32_t stages, full, empty;

  __device__ __forceinline__ explicit Ring(void* memory) {
    stages = (shared_address(memory) + 1023) & ~1023u;
    full = stages + kStages * kStage;
    empty = full + 8 * kStages;
  }

  /// By all threads of a cluster of so many blocks: every warp that multiplies arrives at each of them.
  __device__ __forceinline__ void make(int blocks) const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        barrier_make(full + 8 * i, 1);
        barrier_make(empty + 8 * i, 4 * kGroups * blocks);
      }
      barriers_made();
    }
    meet_cluster();
  }

  /// Waits until a stage may be written, and has its barrier wait for the copies; returns that.
  __device__ __forceinline__ uint32_t open(const Stage& stage) const {
    if (!stage.is_first_round) barrier_wait(empty + 8 * stage.at, stage.parity ^ 1);
    barrier_expect(full + 8 * stage.at, kStage);
    return full + 8 * stage.at;
  }

  __device__ __forceinline__ uint32_t at(const Stage& stage) const { return stages + stage.at * kStage; }

  __device__ __forceinline__ uint32_t filled(const Stage& stage) const {
    barrier_wait(full + 8 * stage.at, stage.parity);
    return at(stage);
  }

  /// By each warp, once its products have read a stage; `blocks` wrote it.
  __device__ __forceinline__ void release(int at, int blocks) const {
    const int lane = threadIdx.x % 32;
    if (lane < blocks) barrier_arrive_at(empty + 8 * at, lane);
  }
};

/// sums += 64 rows by 128 columns of a stage, rows and columns from these addresses on.
template <typename A, typename B>
__device__ __forceinline__ void ask_for_products(float (&sums)[64], uint32_t rows, uint32_t columns, bool more) {
  const uint32_t a = matrix<16>(rows), b = matrix<16>(columns);
#pragma unroll
  for (int k = 0; k < kDepth / 32; ++k) {
    product(sums, part(a, 32 * k), part(b, 32 * k), more || k > 0, static_cast<const A*>(nullptr),
            static_cast<const B*>(nullptr));
  }
}

/// Adds the 128 products of a stage in fp32 to what others have given ("split"): the tensor core itself adds in less.
/// `read` is called once nothing reads the stage any more.
template <typename A, typename B, typename Read>
__device__ __forceinline__ void add_split(float (&sums)[2][64], float (&some)[64], uint32_t rows, uint32_t columns, Read read) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    products_begin();
    ask_for_products<A, B>(some, rows + half * kHalf, columns, false);
    products_end();
    products_wait<0>();
    arrived(some);
    if (half == 1) read();
#pragma unroll
    for (int s = 0; s < 64; ++s) sums[half][s] += some[s];
  }
}

/// Without a branch, which around each of so many would cost more than they. Nobody reads it here again.
__device__ __forceinline__ void store_if(bool wanted, void* to, uint32_t first, uint32_t second) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.cs.v2.b32 [%1], {%2, %3}; }" ::"r"(int(wanted)),
               "l"(to), "r"(first), "r"(second)
               : "memory");
}

/// Writes the sums of 64 rows from `row` on, up to `end`, of y [.., columns]. Four lanes hold 16 columns of a row between
/// them, which are 32 bytes that memory takes at once; two of them exchange halves, so that each has four columns that lie
/// side by side.
template <typename T>
__device__ __forceinline__ void write(const float (&sums)[64], T* y, float factor, int row, int end, int column, int columns) {
  const int lane = threadIdx.x % 32, l = lane % 4;
  const bool odd = l % 2;
  row += threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool inside = row + 8 * h < end;
    T* const to = y + int64_t{row + 8 * h} * columns;
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
      const int at = 4 * j + 2 * h;
      const uint32_t first = pair(sums[at] * factor, sums[at + 1] * factor, static_cast<const T*>(nullptr));
      const uint32_t second = pair(sums[at + 4] * factor, sums[at + 5] * factor, static_cast<const T*>(nullptr));
      const uint32_t taken = __shfl_xor_sync(~0u, odd ? first : second, 1);
      const int where = column + 8 * (odd ? j + 1 : j) + 4 * (l / 2);
      store_if(inside && where < columns, to + where, odd ? taken : first, odd ? second : taken);
    }
  }
}

/// In fp32 they are 32 bytes as they are.
__device__ __forceinline__ void write(const float (&sums)[64], float* y, float factor, int row, int end, int column,
                                      int columns) {
  const int lane = threadIdx.x % 32;
  row += threadIdx.x % 128 / 32 * 16 + lane / 4;
  column += 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < 64; i += 2) {
    const int r = row + 8 * (i % 4 / 2), c = column + 8 * (i / 4);
    store_if(r < end && c < columns, y + int64_t{r} * columns + c, __float_as_uint(sums[i] * factor),
             __float_as_uint(sums[i + 1] * factor));
  }
}

}  // namespace te_compile::grouped
