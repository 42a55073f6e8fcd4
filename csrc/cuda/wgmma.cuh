// wgmma: a warp group's products of 64 rows, in 16 bits or FP8, summed in fp32 in its registers.
//
// Operands in shared memory lie in rows of 128 bytes, swizzled as TMA writes them, and are named by `matrix` and `part`.
// Thread t of the group holds of row 16 (t / 32) + (t % 32) / 4 + 8 h the columns 8 j + 2 (t % 4) + e in d[4 j + 2 h + e].
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace te_compile {

/// What names a matrix in shared memory: an address, and how far apart blocks of 64 columns lie where K runs over rows.
template <int BlockBytes>
__device__ __forceinline__ uint32_t matrix(uint32_t address) {
  return ((address & 0x3FFFF) >> 4) | ((BlockBytes >> 4) << 16);
}

/// The part of a matrix that begins so many bytes on. Eight rows are 1024 bytes; the swizzle is that of 128 bytes.
__device__ __forceinline__ uint64_t part(uint32_t matrix, uint32_t bytes) {
  constexpr uint32_t high = (1u << 30) | (1024 >> 4);
  uint64_t name;
  asm("mov.b64 %0, {%1, %2};" : "=l"(name) : "r"(matrix + (bytes >> 4)), "r"(high));
  return name;
}

/// The same value, of which the compiler does not know that it stays the same: what is made of it waits in no register.
__device__ __forceinline__ uint32_t anew(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// Before a group's products: what registers hold is there.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/// Products up to here are one group.
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Waits until all but the last so many groups of products are done.
template <int Pending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

/// After the wait for the products that made it: from here on d has their values.
template <int Count>
__device__ __forceinline__ void arrived(float (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// Goes on once x is known. ptxas moves a wait for products before all that does not need them, and then nothing runs
/// beside them; it moves none across a loop. This one runs where x is negative, which it is nowhere, and then ends.
__device__ __forceinline__ void once_known(int x) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .s32 y;\nmov.s32 y, %0;\nAGAIN:\nsetp.ge.s32 p, y, 0;\n@p bra GO;\nnanosleep.u32 32;\n"
      "add.s32 y, y, 0x10000000;\nbra AGAIN;\nGO:\n}\n" ::"r"(x)
      : "memory");
}

/// a in the low half, b in the high one, rounded to the type of the pointer.
__device__ __forceinline__ uint32_t pair(float a, float b, const __half*) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
  return both;
}
__device__ __forceinline__ uint32_t pair(float a, float b, const __nv_bfloat16*) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
  return both;
}

#define TE_REGISTERS_32 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define TE_SUMS_32 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
  "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define TE_REGISTERS_64 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31}"
#define TE_SUMS_64 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
  "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), \
  "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
  "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define TE_REGISTERS_128 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, " \
  "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define TE_SUMS_128 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
  "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), \
  "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
  "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), \
  "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), \
  "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
  "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), \
  "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

// d += a b, or d = a b unless `more`; a and b: parts. TransposedA: a's rows are K; TransposedB: b's are.
#define TE_PRODUCT_OF_PARTS(N, TYPE, NAME, FIRST, SECOND, THIRD, FOURTH, FIFTH)                                           \
  template <int TransposedA, int TransposedB>                                                                         \
  __device__ __forceinline__ void product(float (&d)[N / 2], uint64_t a, uint64_t b, bool more, const TYPE*) {        \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " FIRST ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME  \
                 "." NAME " " TE_REGISTERS_##N ", " SECOND ", " THIRD ", p, 1, 1, " FOURTH ", " FIFTH "; }"           \
                 : TE_SUMS_##N                                                                                        \
                 : "l"(a), "l"(b), "r"(int(more)), "n"(TransposedA), "n"(TransposedB));                               \
  }
// The same with a [64, 16] in registers, as sums lie there and rounded in pairs. b's rows are K.
#define TE_PRODUCT_OF_PAIRS(N, TYPE, NAME, A0, A1, A2, A3, B, MORE)                                                    \
  __device__ __forceinline__ void product(float (&d)[N / 2], const uint32_t* a, uint64_t b, bool more, const TYPE*) { \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " MORE ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME   \
                 "." NAME " " TE_REGISTERS_##N ", {" A0 ", " A1 ", " A2 ", " A3 "}, " B ", p, 1, 1, 1; }"             \
                 : TE_SUMS_##N                                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(more)));                               \
  }
TE_PRODUCT_OF_PARTS(32, __half, "f16", "%18", "%16", "%17", "%19", "%20")
TE_PRODUCT_OF_PARTS(32, __nv_bfloat16, "bf16", "%18", "%16", "%17", "%19", "%20")
TE_PRODUCT_OF_PARTS(64, __half, "f16", "%34", "%32", "%33", "%35", "%36")
TE_PRODUCT_OF_PAIRS(64, __half, "f16", "%32", "%33", "%34", "%35", "%36", "%37")
TE_PRODUCT_OF_PARTS(64, __nv_bfloat16, "bf16", "%34", "%32", "%33", "%35", "%36")
TE_PRODUCT_OF_PAIRS(64, __nv_bfloat16, "bf16", "%32", "%33", "%34", "%35", "%36", "%37")
TE_PRODUCT_OF_PARTS(128, __half, "f16", "%66", "%64", "%65", "%67", "%68")
TE_PRODUCT_OF_PAIRS(128, __half, "f16", "%64", "%65", "%66", "%67", "%68", "%69")
TE_PRODUCT_OF_PARTS(128, __nv_bfloat16, "bf16", "%66", "%64", "%65", "%67", "%68")
TE_PRODUCT_OF_PAIRS(128, __nv_bfloat16, "bf16", "%64", "%65", "%66", "%67", "%68", "%69")

// d += a bᵀ of codes, or d = a bᵀ unless `more`; a and b: parts, both along K.
#define TE_PRODUCT_OF_CODES(A, A_NAME, B, B_NAME)                                                                        \
  __device__ __forceinline__ void product(float (&d)[64], uint64_t a, uint64_t b, bool more, const A*, const B*) {        \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k32.f32." A_NAME "." B_NAME  \
                 " " TE_REGISTERS_128 ", %64, %65, p, 1, 1; }"                                                            \
                 : TE_SUMS_128                                                                                            \
                 : "l"(a), "l"(b), "r"(int(more)));                                                                       \
  }
TE_PRODUCT_OF_CODES(__nv_fp8_e4m3, "e4m3", __nv_fp8_e4m3, "e4m3")
TE_PRODUCT_OF_CODES(__nv_fp8_e4m3, "e4m3", __nv_fp8_e5m2, "e5m2")
TE_PRODUCT_OF_CODES(__nv_fp8_e5m2, "e5m2", __nv_fp8_e4m3, "e4m3")
#undef TE_PRODUCT_OF_CODES
#undef TE_REGISTERS_32
#undef TE_SUMS_32
#undef TE_REGISTERS_64
#undef TE_SUMS_64
#undef TE_REGISTERS_128
#undef TE_SUMS_128
#undef TE_PRODUCT_OF_PARTS
#undef TE_PRODUCT_OF_PAIRS

}  // namespace te_compile
