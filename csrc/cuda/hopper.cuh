// Hopper's barriers in shared memory, copies that arrive at them, and barriers among some of a block's warps.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cluster.hpp"

namespace te_compile {

__device__ __forceinline__ void barrier_make(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

/// After barrier_make by one thread, before __syncthreads: other threads and copies see the barriers.
__device__ __forceinline__ void barriers_made() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Arrives, and so many bytes of copies must before the barrier's phase ends.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/// Waits for the end of the phase of this parity.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra GO;\nbra AGAIN;\nGO:\n}\n" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}

/// Copies a box that begins at [batch, head, row, column] to shared memory, zeros where the tensor has ended.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int column, int row, int head,
                                         int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

/// Writes a box of shared memory, as copy_box would bring it, but for what lies past the tensor's ends. The thread waits as for
/// add_bytes.
__device__ __forceinline__ void write_box(const CUtensorMap* map, uint32_t from, int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n"
      "cp.async.bulk.commit_group;" ::"l"(reinterpret_cast<uint64_t>(map)),
      "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

/// Copies a box that begins at [row, column] to the same place in every block of the cluster that `blocks` has a bit for,
/// and tells the barrier of each.
__device__ __forceinline__ void copy_box_to_all(uint32_t to, const CUtensorMap* map, uint32_t barrier, int column, int row,
                                                int blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(column), "r"(row), "h"(static_cast<uint16_t>(blocks))
      : "memory");
}

/// The same for this block alone.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}

/// And of a tensor of three dimensions.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int column, int row, int layer) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
          to),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(column), "r"(row), "r"(layer)
      : "memory");
}

/// Arrives at the barrier that lies there in another block of the cluster, or in this one. It says that copies may write
/// what was read, and publishes nothing: to release writes to the whole cluster would be a fence of the whole GPU.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, int block) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier),
      "r"(block)
      : "memory");
}

__device__ __forceinline__ int block_of_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

/// Has a map in shared memory end after so many columns, and copies it to memory, for map_is_seen elsewhere. By a warp.
__device__ __forceinline__ void end_map(CUtensorMap* to, const CUtensorMap* map, int columns, bool first_lane) {
  if (first_lane) {
    asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 0, %1;" ::"l"(
                     static_cast<uint64_t>(shared_address(map))),
                 "r"(columns)
                 : "memory");
  }
  __syncwarp();
  asm volatile(
      "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;" ::"l"(
          reinterpret_cast<uint64_t>(to)),
      "r"(shared_address(map))
      : "memory");
}

/// Before a copy by a map in memory.
__device__ __forceinline__ void map_is_seen(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

/// Copies multiples of 16 bytes, aligned so.
__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

/// Adds fp32 numbers of shared memory to as many in memory, aligned to 16 bytes. The thread waits by the two below.
__device__ __forceinline__ void add_bytes(float* to, uint32_t from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to),
               "r"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void added_bytes_are_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void added_bytes_are_there() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/// What this thread wrote to shared memory is seen by products and copies of those it meets next.
__device__ __forceinline__ void written_for_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// So many threads meet at a numbered barrier; 0 is __syncthreads'.
__device__ __forceinline__ void meet(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
/// Counts as one of them and waits for nobody.
__device__ __forceinline__ void tell(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// Registers of each thread from here on, for the whole warp group.
template <int Count>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

/// 2 to the x, to within 2 units of the last place; as fast as it goes.
__device__ __forceinline__ float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace te_compile
