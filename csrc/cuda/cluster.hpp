// What blocks of a cluster work together with: barriers in shared memory that count arrivals and bytes, bulk copies and
// stores to other blocks that such barriers count. Device code of compute capability 9.0 and later.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

namespace te_compile {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Makes a barrier whose phase ends with this many arrivals and all bytes expected.
__device__ inline void start_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ inline void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/// Arrives, and has the phase wait for these bytes too.
__device__ inline void expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

/// Says that this thread has begun. Shared memory of a block that has not begun must not be touched by another.
__device__ inline void has_begun() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

/// Waits until every thread of the cluster has said so.
__device__ inline void await_all_begun() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

/// Every thread of the cluster waits for every other; what was written to shared memory before is seen after.
__device__ inline void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// Stores two numbers in the shared memory of another block of the cluster, at the place that `to` has in this one, and
/// counts their bytes at that block's `barrier`.
__device__ inline void send(float2 pair, const void* to, const uint64_t* barrier, int block) {
  asm volatile(
      "{ .reg .b32 place, counter; mapa.shared::cluster.u32 place, %0, %2; mapa.shared::cluster.u32 counter, %1, %2; "
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [place], {%3, %4}, [counter]; }" ::"r"(
          shared_address(to)),
      "r"(shared_address(barrier)), "r"(block), "r"(__float_as_int(pair.x)), "r"(__float_as_int(pair.y))
      : "memory");
}

/// Copies into this block's shared memory, counting the bytes at its `barrier`; all aligned to 16 bytes.
__device__ inline void copy_in(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

/// Waits for the end of the barrier's phase whose number has this parity.
__device__ inline void await(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

/// Between making barriers and letting copies or other blocks use them.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace te_compile

#endif
