// Instructions that C++ has no word for, one wrapper each: asynchronous copies, barriers, clusters, tensor cores of every architecture.
//
// A wrapper has the name of its PTX instruction, or that of CUTLASS, where there is one. PTX appears here and in sm90/ (ptx.cuh, wgmma.cuh) only: tests
// that run these sources on a CPU (lowering_tests/kernels/emulated) bring C++ bodies for the same names.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "call.h"

// 160 KB of shared memory a block and more; the others have 99 (CUDA C Programming Guide).
constexpr bool kLargeSharedMemory = FP4_ARCH == 80 || FP4_ARCH == 87 || FP4_ARCH == 90 || (FP4_ARCH >= 100 && FP4_ARCH < 120);

#ifdef FP4_EMULATED
#include "device.h"
#else
// A fault point: one line that a test can break, by its name, where the emulator runs the kernel. It must then say so. nvcc sees a constant.
#define FP4_FAULT(name) false
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace fp4 {

// The block's dynamic shared memory.
__device__ __forceinline__ uint8_t* dynamic_shared() {
  extern __shared__ __align__(1024) uint8_t fp4_shared[];
  return fp4_shared;
}

// A place in shared memory as asynchronous copies and ldmatrix take it: half the registers of a pointer.
using Shared = uint32_t;
__device__ __forceinline__ Shared shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// --- asynchronous copies, global to shared; both addresses aligned to BYTES --------------------------------------------

template <int BYTES> __device__ __forceinline__ void cp_async(Shared shared, const void* global) {
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global));
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(BYTES));
}

// Zeros instead where nothing may be read; `global` is not touched then.
template <int BYTES> __device__ __forceinline__ void cp_async_zfill(Shared shared, const void* global, bool live) {
  static_assert(BYTES == 16, "cp.async.cg copies 16 bytes");
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(live ? 16 : 0));
}

// The first `bytes` of BYTES from global memory, zeros behind them.
template <int BYTES> __device__ __forceinline__ void cp_async_src_size(Shared shared, const void* global, int bytes) {
  static_assert(BYTES < 16, "cp_async_zfill copies 16");
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(BYTES), "r"(bytes));
}

__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;"); }

// Waits until at most OPEN groups of this thread are in flight. What other threads copied needs a barrier after their wait.
template <int OPEN> __device__ __forceinline__ void cp_async_wait_group() { asm volatile("cp.async.wait_group %0;" ::"n"(OPEN)); }

// --- loads and barriers ------------------------------------------------------------------------------------------------

// What nobody writes while the kernel runs.
__device__ __forceinline__ uint4 load_read_only(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// 16 bytes from L2, or zeros where nothing may be read; several stay in flight where the compiler would make a branch of each.
__device__ __forceinline__ uint4 load_or_zero(const void* p, bool live) {
  uint4 v;
  asm volatile("{.reg .pred live;\nsetp.ne.s32 live, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n@live ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
               : "l"(p), "r"((int)live));
  return v;
}

// The line of 128 bytes around p begins to come to L2.
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// As *p, but in one place, and not ahead of a condition: ptxas reorders the loops before it when it sees a plain load here.
__device__ __forceinline__ float load_float(const float* p) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}

// The 16 bits at p. What is loaded plainly and used only later ptxas extends at once, for which it waits.
__device__ __forceinline__ uint32_t load_16(const void* p) {
  uint32_t v;
  asm volatile("ld.global.u16 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

// The byte at p, likewise.
__device__ __forceinline__ uint32_t load_8(const void* p) {
  uint32_t v;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

// The 16 bytes at p, likewise.
__device__ __forceinline__ uint4 load_128(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// Adds one and returns what was there. What the block's threads wrote before a barrier ahead of it is seen by the block that adds later, behind a barrier there.
__device__ __forceinline__ int count_arrival(int* counter) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Adds one in no order with other accesses, and waits until a counter that is added to so is `count` or more. Only blocks of the same launch that run at once may
// be waited for.
__device__ __forceinline__ void arrive_relaxed(int* counter) { asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory"); }
__device__ __forceinline__ void wait_for_relaxed(const int* counter, int count) {
  int arrived;
  do {
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
  } while (arrived < count);
}

// 16 bytes as they are now, and two bytes for others to see, of this GPU and of those that it shares memory with; in no order with other accesses.
__device__ __forceinline__ uint4 load_relaxed(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
// The same, or zeros where nothing may be read; several stay in flight.
__device__ __forceinline__ uint4 load_relaxed_or_zero(const void* p, bool live) {
  uint4 v;
  asm volatile("{.reg .pred live;\nsetp.ne.s32 live, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n@live ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
               : "l"(p), "r"((int)live)
               : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_relaxed_16(const void* p) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u16 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_relaxed_16(void* p, uint32_t bits) {
  asm volatile("st.relaxed.sys.global.u16 [%0], %1;" ::"l"(p), "h"((unsigned short)bits) : "memory");
}

// Four bytes of a table in shared memory that stays as it is: unlike a plain load it may be moved across barriers and products.
__device__ __forceinline__ uint32_t load_table(Shared at) {
  uint32_t v;
  asm("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}

// The value of the lane whose number differs in the bits of `mask`. Every lane of the warp calls it.
__device__ __forceinline__ float shuffle_xor(float v, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, v, mask); }

// The value of lane `lane`.
__device__ __forceinline__ float shuffle_from(float v, int lane) { return __shfl_sync(0xFFFFFFFFu, v, lane); }
__device__ __forceinline__ uint32_t shuffle_from(uint32_t v, int lane) { return __shfl_sync(0xFFFFFFFFu, v, lane); }
__device__ __forceinline__ bool any_lane(bool v) { return __any_sync(0xFFFFFFFFu, v); }
// A bit for each lane.
__device__ __forceinline__ uint32_t lanes_where(bool v) { return __ballot_sync(0xFFFFFFFFu, v); }

// The value of lane t of the caller's four.
__device__ __forceinline__ uint32_t shuffle_in_quad(uint32_t v, int t) { return __shfl_sync(0xFFFFFFFFu, v, t, 4); }

__device__ __forceinline__ int shuffle_up(int v, int by) { return __shfl_up_sync(0xFFFFFFFFu, v, by); }
// A bit for each lane whose value is the caller's.
__device__ __forceinline__ uint32_t match_any(int v) { return __match_any_sync(0xFFFFFFFFu, v); }
// What v holds is needed from here on, not before: a load of it stays in flight until then.
__device__ __forceinline__ void needed(float& v) { asm volatile("" : "+f"(v)); }
__device__ __forceinline__ void needed(int& v) { asm volatile("" : "+r"(v)); }

// The same value, which the compiler now keeps: what follows from threadIdx it computes anew at each use, in loops, too.
__device__ __forceinline__ int kept(int v) { return __shfl_sync(0xFFFFFFFFu, v, threadIdx.x & 31); }

// What is the same in all lanes, so that the compiler knows: addresses of wgmma made of it stay in uniform registers.
__device__ __forceinline__ int uniform(int v) { return __shfl_sync(0xFFFFFFFFu, v, 0); }

// `threads` of the block, a multiple of 32, meet at barrier `id` in 1..15 (__syncthreads is 0).
__device__ __forceinline__ void named_barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Clusters exist from sm_90; elsewhere a block is alone in its cluster.
__device__ __forceinline__ int cluster_size() {
  uint32_t n = 1;
#if FP4_ARCH >= 90
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
#endif
  return (int)n;
}
__device__ __forceinline__ int cluster_rank() {
  uint32_t n = 0;
#if FP4_ARCH >= 90
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(n));
#endif
  return (int)n;
}
__device__ __forceinline__ void cluster_sync() {
#if FP4_ARCH >= 90
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}
// In two halves: all blocks of the cluster run once they have arrived. What threads wrote before is not published.
__device__ __forceinline__ void cluster_arrive() {
#if FP4_ARCH >= 90
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if FP4_ARCH >= 90
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
// The same place in the shared memory of another block of the cluster.
template <typename T> __device__ __forceinline__ T* map_to_rank(T* shared, int rank) {
#if FP4_ARCH >= 90
  uint64_t there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(shared), "r"(rank));
  return (T*)there;
#else
  return shared;
#endif
}

// --- arithmetic on pairs -----------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  // mul.bf16x2 exists from sm_90; a * b + -0 is the same number everywhere
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
  return d;
}
__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// a * b + c.
__device__ __forceinline__ uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ uint32_t add_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// One number of a pair; `high` is known when compiling.
__device__ __forceinline__ float half_of(uint32_t pair, bool high) {
  float v;
  if (high)
    asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, h;}" : "=f"(v) : "r"(pair));
  else
    asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;}" : "=f"(v) : "r"(pair));
  return v;
}
// Rounded to nearest even.
__device__ __forceinline__ uint32_t pack_f16x2(float low, float high) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(d) : "f"(low), "f"(high));
  return d;
}

// Both halves of a times one half of b; `high` is known when compiling. Unpacking becomes an operand modifier of the multiplication.
__device__ __forceinline__ uint32_t mul_bf16x2_by_half(uint32_t a, uint32_t b, bool high) {
  uint32_t d;
  if (high)
    asm("{.reg .b16 l, h; .reg .b32 s;\nmov.b32 {l, h}, %2;\nmov.b32 s, {h, h};\nfma.rn.bf16x2 %0, %1, s, %3;}" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
  else
    asm("{.reg .b16 l, h; .reg .b32 s;\nmov.b32 {l, h}, %2;\nmov.b32 s, {l, l};\nfma.rn.bf16x2 %0, %1, s, %3;}" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
  return d;
}
__device__ __forceinline__ uint32_t mul_f16x2_by_half(uint32_t a, uint32_t b, bool high) {
  uint32_t d;
  if (high)
    asm("{.reg .b16 l, h; .reg .b32 s;\nmov.b32 {l, h}, %2;\nmov.b32 s, {h, h};\nmul.rn.f16x2 %0, %1, s;}" : "=r"(d) : "r"(a), "r"(b));
  else
    asm("{.reg .b16 l, h; .reg .b32 s;\nmov.b32 {l, h}, %2;\nmov.b32 s, {l, l};\nmul.rn.f16x2 %0, %1, s;}" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// 2^v and log2(v), with an error of about 2^-22.
__device__ __forceinline__ float exp2_approx(float v) {
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v));
  return d;
}
__device__ __forceinline__ float log2_approx(float v) {
  float d;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v));
  return d;
}
__device__ __forceinline__ float reciprocal_approx(float v) {
  float d;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v));
  return d;
}

// --- E4M3 (sm_89 and later) ------------------------------------------------------------------------------------------------

// Four E4M3 bytes -> two float16 pairs, the low bytes' first.
__device__ __forceinline__ void unpack_e4m3(uint32_t v, uint32_t& low, uint32_t& high) {
  asm("{.reg .b16 x, y; mov.b32 {x, y}, %2; cvt.rn.f16x2.e4m3x2 %0, x; cvt.rn.f16x2.e4m3x2 %1, y;}" : "=r"(low), "=r"(high) : "r"(v));
}
// And back, rounded to nearest even; what is too large becomes 448.
__device__ __forceinline__ uint32_t pack_e4m3(uint32_t low, uint32_t high) {
  uint32_t d;
  asm("{.reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f16x2 x, %1; cvt.rn.satfinite.e4m3x2.f16x2 y, %2; mov.b32 %0, {x, y};}" : "=r"(d) : "r"(low), "r"(high));
  return d;
}
// Likewise, from float32.
__device__ __forceinline__ uint32_t round_e4m3(float a, float b, float c, float d) {
  uint32_t v;
  asm("{.reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f32 x, %2, %1; cvt.rn.satfinite.e4m3x2.f32 y, %4, %3; mov.b32 %0, {x, y};}" : "=r"(v) : "f"(a), "f"(b), "f"(c), "f"(d));
  return v;
}

// __byte_perm(low, high, selector), which the compiler does not take apart; selectors have no bit 3 set.
__device__ __forceinline__ uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(selector));
  return d;
}
// Byte i of v in byte 0, eight times its highest bit in byte 3, zeros between them; selector: signed_byte(i).
__device__ __forceinline__ uint32_t signed_byte(int i) { return 0x8440 | i | i << 12; }
__device__ __forceinline__ uint32_t pick_signed_byte(uint32_t v, uint32_t selector) {
  uint32_t d;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(d) : "r"(v), "r"(selector));
  return d;
}
// v & MASK, once for all that is made of it.
template <uint32_t MASK> __device__ __forceinline__ uint32_t masked(uint32_t v) {
  uint32_t d;
  asm("and.b32 %0, %1, %2;" : "=r"(d) : "r"(v), "n"(MASK));
  return d;
}

// (a & MASK) | b as one LOP3: with a second mask in b it would be two.
template <uint32_t MASK> __device__ __forceinline__ uint32_t masked_or(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "n"(MASK), "r"(b));
  return d;
}

// --- tensor cores, float32 accumulation (sm_80 and later) ----------------------------------------------------------------

#define FP4_MMA(T, type)                                                                                                                          \
  template <> __device__ __forceinline__ void mma_m16n8k16<T>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) { \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                        \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                                                          \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                                                                  \
  }                                                                                                                                               \
  FP4_MMA_SPARSE(T, type, 0)                                                                                                                      \
  FP4_MMA_SPARSE(T, type, 1)
#define FP4_MMA_SPARSE(T, type, selector)                                                                                                         \
  template <>                                                                                                                                     \
  __device__ __forceinline__ void mma_sp_m16n8k32<T, selector>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, \
                                                               uint32_t b2, uint32_t b3, uint32_t meta) {                                         \
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, "         \
        "{%0,%1,%2,%3}, %12, " #selector ";"                                                                                                      \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                                                          \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(b2), "r"(b3), "r"(meta));                                                     \
  }

// c += A B, A 16x16 and B 16x8 in the fragment layout of mma.m16n8k16.
template <typename T> __device__ __forceinline__ void mma_m16n8k16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);

// c += A B, A 16x32 with two of four kept, B 32x8. Register r of lane 4g + t holds the kept pair of row g + 8 (r % 2), group
// t + 4 (r / 2); lane 4g + 2 SELECTOR gives the metadata of k 0..15 of rows g (low half) and g + 8, the lane behind it that of k 16..31.
template <typename T, int SELECTOR = 0>
__device__ __forceinline__ void mma_sp_m16n8k32(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, uint32_t b2,
                                                uint32_t b3, uint32_t meta);

FP4_MMA(__nv_bfloat16, "bf16")
FP4_MMA(__half, "f16")
#undef FP4_MMA
#undef FP4_MMA_SPARSE

// c += A B of int8, A 16x32 and B 32x8. a0: row g, k = 4t..4t+3 of lane 4g + t; a1: row g + 8; a2, a3: k + 16; b0, b1 likewise, column g.
__device__ __forceinline__ void mma_int8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c += A B, A 16x64 and B 64x8 of E2M1 codes, eight a register, with an E4M3 scale for every 16 k of a row of A and a column of B
// (sm_120a, sm_121a). a0: row g, k = 8t..8t+7 of lane 4g + t; a1: row g + 8; a2, a3: k + 32; b0, b1 likewise, column g. a_scales:
// lane 4g of row g, lane 4g + 1 of row g + 8; b_scales: lane 4g of column g; byte i belongs to k = 16i..16i+15.
__device__ __forceinline__ void mma_nvfp4(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, uint32_t a_scales,
                                          uint32_t b_scales) {
  asm("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3}, {%10}, {0, 0}, {%11}, {0, 0};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(a_scales), "r"(b_scales));
}

// Four 8x8 matrices of 16-bit numbers from shared memory: lane 8i + r gives the address of row r of matrix i (16 bytes,
// aligned), lane 4g + t receives pair t of row g of each.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&to)[4], Shared row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

// The way back, transposed (sm_90): lane 4g + t gives column g, rows 2t and 2t + 1 of each.
__device__ __forceinline__ void stmatrix_x4_trans(Shared row, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]) : "memory");
}

// --- host --------------------------------------------------------------------------------------------------------------

inline int multiprocessors() {
  int device = 0, count = 0;
  return cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess ? count : 1;
}

// Each kernel chooses its tile itself, in the function best() of its source: a compiled graph whose M is symbolic calls the kernel without Python in between, so
// M is not known before. A caller that names a tile gets that one, which is for benchmarks and tests.

// Where a kernel is launched; early: by programmatic dependent launch, so that it may start while the kernel before it in the stream still runs. together: its
// blocks wait for each other, so none may begin unless all of them find room (a cooperative launch).
struct Stream {
  cudaStream_t at;
  bool early, together;
  Stream(cudaStream_t at, bool early = false, bool together = false) : at(at), early(early), together(together) {}
};

// blocks.z is a multiple of `cluster`, the number of blocks (1 or, from sm_90, up to 8; more: allow_large_clusters) that share K.
template <typename... P, typename... A>
cudaError_t launch(void (*kernel)(P...), dim3 blocks, int threads, int shared_bytes, int cluster, Stream stream, A... arguments) {
  if (shared_bytes > 48 * 1024) {
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (status != cudaSuccess) return status;
  }
  cudaLaunchAttribute attributes[3] = {};
  int count = 0;
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {1, 1, (unsigned)cluster};
  }
  if (stream.early) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (stream.together) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream.at;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, (P)arguments...);
}

// Of a kernel that takes less shared memory than there is: the rest is not to be L1 cache. Where it is, a block of the next kernel begins when none of this one's is
// left on its multiprocessor, because memory is divided anew then.
template <typename... P> cudaError_t prefer_shared_memory(void (*kernel)(P...)) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}

// Clusters of more than eight blocks, which not every GPU with clusters takes.
template <typename... P> cudaError_t allow_large_clusters(void (*kernel)(P...)) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

// How many clusters of so many blocks find room at once; 0: none, or the driver does not say.
template <typename... P> int clusters_at_once(void (*kernel)(P...), int threads, int shared_bytes, int cluster) {
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes) != cudaSuccess || allow_large_clusters(kernel) != cudaSuccess) return 0;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {1, 1, (unsigned)cluster};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1, 1, cluster);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  return cudaOccupancyMaxActiveClusters(&count, kernel, &config) == cudaSuccess ? count : 0;
}

// Right behind the first kernel of the call, with which it may overlap (sm_90).
template <typename... P, typename... A>
cudaError_t launch_second(void (*kernel)(P...), dim3 blocks, int threads, int shared_bytes, int cluster, Stream stream, A... arguments) {
  return launch(kernel, blocks, threads, shared_bytes, cluster, {stream.at, true}, arguments...);
}

}  // namespace fp4
#endif

namespace fp4 {

inline Stream stream_of(const LinearParams& p) { return {(cudaStream_t)p.stream, p.early != 0}; }

// f(zero), zero of the type that the dtype of a call names.
template <typename F> cudaError_t by_dtype(int dtype, F f) { return dtype == 0 ? f(__nv_bfloat16()) : f(__half()); }

inline cudaError_t first_error(std::initializer_list<cudaError_t> results) {
  for (const cudaError_t result : results)
    if (result != cudaSuccess) return result;
  return cudaSuccess;
}

}  // namespace fp4
