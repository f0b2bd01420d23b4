// The instructions that C++ has no word for, one named wrapper each: asynchronous copies, barriers, clusters, tensor cores.
//
// A test that runs these sources on a CPU (lowering_tests/kernels/emulated) brings its own bodies for the same names, so
// PTX appears in this file only.
#pragma once
#include <cstdint>

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
#if FP4_ARCH >= 90
#include <cuda.h>  // the type of a tensor map; nothing of libcuda is linked
#endif

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

template <int BYTES> __device__ __forceinline__ void copy_async(Shared shared, const void* global) {
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global));
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(BYTES));
}

// Zeros instead where nothing may be read; `global` is not touched then.
template <int BYTES> __device__ __forceinline__ void copy_async_or_zero(Shared shared, const void* global, bool live) {
  static_assert(BYTES == 16, "cp.async.cg copies 16 bytes");
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(live ? 16 : 0));
}

// The first `bytes` of BYTES from global memory, zeros behind them.
template <int BYTES> __device__ __forceinline__ void copy_async_up_to(Shared shared, const void* global, int bytes) {
  static_assert(BYTES < 16, "copy_async_or_zero copies 16");
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(BYTES), "r"(bytes));
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;"); }

// Waits until at most OPEN groups of this thread are in flight. What other threads copied needs a barrier after their wait.
template <int OPEN> __device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(OPEN)); }

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

// Four bytes of a table in shared memory that stays as it is: unlike a plain load it may be moved across barriers and products.
__device__ __forceinline__ uint32_t load_table(Shared at) {
  uint32_t v;
  asm("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}

// The value of the lane whose number differs in the bits of `mask`. Every lane of the warp calls it.
__device__ __forceinline__ float shuffle_xor(float v, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, v, mask); }

// The value of lane t of the caller's four.
__device__ __forceinline__ uint32_t of_quad(uint32_t v, int t) { return __shfl_sync(0xFFFFFFFFu, v, t, 4); }

__device__ __forceinline__ int shuffle_up(int v, int by) { return __shfl_up_sync(0xFFFFFFFFu, v, by); }
// A bit for each lane whose value is the caller's.
__device__ __forceinline__ uint32_t lanes_with(int v) { return __match_any_sync(0xFFFFFFFFu, v); }
// What v holds is needed from here on, not before: a load of it stays in flight until then.
__device__ __forceinline__ void needed(float& v) { asm volatile("" : "+f"(v)); }
__device__ __forceinline__ void needed(int& v) { asm volatile("" : "+r"(v)); }

// The same value, which the compiler now keeps: what follows from threadIdx it computes anew at each use, in loops, too.
__device__ __forceinline__ int kept(int v) { return __shfl_sync(0xFFFFFFFFu, v, threadIdx.x & 31); }

// What is the same in all lanes, so that the compiler knows: addresses of wgmma made of it stay in uniform registers.
__device__ __forceinline__ int uniform(int v) { return __shfl_sync(0xFFFFFFFFu, v, 0); }

// `threads` of the block, a multiple of 32, meet at barrier `id` in 1..15 (__syncthreads is 0).
__device__ __forceinline__ void barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Programmatic dependent launch (sm_90): a kernel launched early may begin while the one before it in its stream is still running, and reads nothing that
// one may have written, and writes nothing, before wait_for_previous(); behind it what earlier kernels wrote is there, and they read nothing any more.
// Once every block has called let_next_begin() the next kernel may begin, if it is launched early. It may read what the kernel before this one wrote, so
// that a kernel waits before it calls this one.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Of a call of two kernels: the second, launched by launch_second(), may begin when every block of the first has called let_second_begin(), and what the
// first wrote is there behind wait_for_first(). The second must read nothing else than the weight before.
__device__ __forceinline__ void let_second_begin() { let_next_begin(); }
__device__ __forceinline__ void wait_for_first() { wait_for_previous(); }

// --- sm_90: copies of whole tiles, and barriers in shared memory that count the bytes that have arrived ----------------------

// A barrier of 8 bytes that completes a phase with `arrivals`, and with the bytes that these promised. Once, before publish_counters().
__device__ __forceinline__ void counter_init(Shared counter, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(counter), "r"(arrivals) : "memory");
}
// Between counter_init() and the __syncthreads behind which others use the counters.
__device__ __forceinline__ void publish_counters() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// It overtakes the thread's loads from shared memory: what the copy that it lets begin overwrites has to be in registers, and used, before.
__device__ __forceinline__ void counter_arrive(Shared counter) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(counter) : "memory"); }
// Arrives, too; call it before the copy.
__device__ __forceinline__ void counter_promise(Shared counter, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(counter), "r"(bytes) : "memory");
}
// Until phase `parity` (0, 1, 0, ...) is complete.
__device__ __forceinline__ void counter_wait(Shared counter, int parity) {
  asm volatile("{.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;}" ::"r"(counter), "r"(parity) : "memory");
}
// Arrives once all copies of this thread by copy_async() so far are there; one of the arrivals that the counter counts.
__device__ __forceinline__ void counter_arrive_behind_copies(Shared counter) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(counter) : "memory");
}
// What threads wrote to shared memory, copy_async() included, and this thread has waited for: wgmma behind it sees it, as it sees bulk copies anyway.
__device__ __forceinline__ void let_wgmma_see() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Arrives at the counter at the same place in another block of the cluster: what this thread has read there may be overwritten by a copy. It does
// not publish what this thread wrote: as a release to the cluster it would be a MEMBAR.ALL.GPU at every call, and counter_wait() would throw
// away L1; cluster_barrier() publishes. The other block must not have ended.
__device__ __forceinline__ void counter_arrive_at(Shared counter, int rank) {
  asm volatile("{.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(counter), "r"(rank) : "memory");
}
// One thread copies; addresses and bytes are multiples of 16.
__device__ __forceinline__ void copy_bulk(Shared shared, const void* global, int bytes, Shared counter) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared), "l"(global), "r"(bytes), "r"(counter) : "memory");
}

// To the same place in each block of the cluster whose bit is set in `blocks`; the counter at the same place in each counts the bytes, which each block
// promises to itself, before or after.
__device__ __forceinline__ void copy_bulk_to_cluster(Shared shared, const void* global, int bytes, Shared counter, uint16_t blocks) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(shared), "l"(global),
               "r"(bytes), "r"(counter), "h"(blocks)
               : "memory");
}

#if FP4_ARCH >= 90
// A row-major matrix of bytes and the shape of its tiles: made by tile_map() on the host, given to a kernel as `const __grid_constant__ TileMap`.
using TileMap = CUtensorMap;

// One thread calls it, early.
__device__ __forceinline__ void prefetch_tile_map(const TileMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
// One thread copies the tile that begins at (row, byte), byte a multiple of 16 (else it is an illegal instruction): what lies outside the matrix is zero, and its bytes are counted. Row r of
// the tile lies at r * tile_bytes; of its 16-byte chunks, chunk c lies at place c ^ r % 8 for tiles of 128 bytes a row, c ^ r / 2 % 4 for
// 64, c ^ r / 4 % 2 for 32, c for 16. The tile begins at a multiple of 1024, 512, 256 or 128 bytes.
__device__ __forceinline__ void copy_tile(Shared to, const TileMap& map, int byte, int row, Shared counter) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map), "r"(byte), "r"(row),
               "r"(counter)
               : "memory");
}
// The same of a map of planes: the tile's planes lie one behind the other.
__device__ __forceinline__ void copy_planes(Shared to, const TileMap& map, int byte, int row, int plane, Shared counter) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to), "l"(&map), "r"(byte),
               "r"(row), "r"(plane), "r"(counter)
               : "memory");
}
// As copy_bulk_to_cluster() copies.
__device__ __forceinline__ void copy_tile_to_cluster(Shared to, const TileMap& map, int byte, int row, Shared counter, uint16_t blocks) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(&map),
               "r"(byte), "r"(row), "r"(counter), "h"(blocks)
               : "memory");
}
#endif

// Registers of each thread of a warpgroup, all of which call it together; one waits until others have given up what it asks for (sm_90a).
template <int N> __device__ __forceinline__ void more_registers() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void fewer_registers() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// Between blocks of a grid, through global memory: a thread that has seen the flag set also sees what the thread that set it wrote before; for the other
// threads of both blocks, a __threadfence() and a barrier on each side. Only blocks that have begun may be waited for.
__device__ __forceinline__ void flag_set(int* flag) { asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory"); }
__device__ __forceinline__ int flag_get(const int* flag) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");
  return v;
}

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
__device__ __forceinline__ void cluster_barrier() {
#if FP4_ARCH >= 90
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}
// The same place in the shared memory of another block of the cluster.
template <typename T> __device__ __forceinline__ const T* of_block(const T* shared, int rank) {
#if FP4_ARCH >= 90
  uint64_t there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(shared), "r"(rank));
  return (const T*)there;
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
  template <> __device__ __forceinline__ void mma16816<T>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) { \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                        \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                                                          \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                                                                  \
  }                                                                                                                                               \
  FP4_MMA_SPARSE(T, type, 0)                                                                                                                      \
  FP4_MMA_SPARSE(T, type, 1)
#define FP4_MMA_SPARSE(T, type, selector)                                                                                                         \
  template <>                                                                                                                                     \
  __device__ __forceinline__ void mma_sparse16832<T, selector>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, \
                                                               uint32_t b2, uint32_t b3, uint32_t meta) {                                         \
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, "         \
        "{%0,%1,%2,%3}, %12, " #selector ";"                                                                                                      \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                                                          \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(b2), "r"(b3), "r"(meta));                                                     \
  }

// c += A B, A 16x16 and B 16x8 in the fragment layout of mma.m16n8k16.
template <typename T> __device__ __forceinline__ void mma16816(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);

// c += A B, A 16x32 with two of four kept, B 32x8. Register r of lane 4g + t holds the kept pair of row g + 8 (r % 2), group
// t + 4 (r / 2); lane 4g + 2 SELECTOR gives the metadata of k 0..15 of rows g (low half) and g + 8, the lane behind it that of k 16..31.
template <typename T, int SELECTOR = 0>
__device__ __forceinline__ void mma_sparse16832(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, uint32_t b2,
                                                uint32_t b3, uint32_t meta);

FP4_MMA(__nv_bfloat16, "bf16")
FP4_MMA(__half, "f16")
#undef FP4_MMA
#undef FP4_MMA_SPARSE

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
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], Shared row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

// The way back, transposed (sm_90): lane 4g + t gives column g, rows 2t and 2t + 1 of each.
__device__ __forceinline__ void store_matrices_transposed(Shared row, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]) : "memory");
}

// --- host --------------------------------------------------------------------------------------------------------------

#if FP4_ARCH >= 90
// Rows of row_bytes every row_pitch bytes, in planes every plane_pitch bytes.
struct Planes {
  int64_t row_bytes, rows, planes, row_pitch, plane_pitch;
};

inline cudaError_t encode_tile_map(TileMap* map, const void* matrix, int dimensions, const Planes& of, int tile_planes, int tile_rows, int tile_bytes) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    return status == cudaSuccess && result == cudaDriverEntryPointSuccess ? (Encode)found : nullptr;
  }();
  if (!encode) return cudaErrorNotSupported;
  if ((tile_bytes != 16 && tile_bytes != 32 && tile_bytes != 64 && tile_bytes != 128) || of.rows < 1 || of.row_bytes < 1 || of.planes < 1 || tile_rows < 1)
    return cudaErrorInvalidValue;
  const CUtensorMapSwizzle swizzle = tile_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : tile_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                     : tile_bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                        : CU_TENSOR_MAP_SWIZZLE_NONE;
  const cuuint64_t size[3] = {(cuuint64_t)of.row_bytes, (cuuint64_t)of.rows, (cuuint64_t)of.planes}, pitch[2] = {(cuuint64_t)of.row_pitch, (cuuint64_t)of.plane_pitch};
  const cuuint32_t tile[3] = {(cuuint32_t)tile_bytes, (cuuint32_t)tile_rows, (cuuint32_t)tile_planes}, each[3] = {1, 1, 1};
  const CUresult made = encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, dimensions, (void*)matrix, size, pitch, tile, each, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// For copy_tile(): `rows` rows of row_bytes, in tiles of up to 256 rows of 16, 32, 64 or 128 bytes. The matrix lies at a multiple of 16 bytes, and so
// does every row. cudaErrorInvalidValue if there is no such map, cudaErrorNotSupported if the driver is older than CUDA 12.
inline cudaError_t tile_map(TileMap* map, const void* matrix, int64_t rows, int64_t row_bytes, int tile_rows, int tile_bytes) {
  return encode_tile_map(map, matrix, 2, {row_bytes, rows, 1, row_bytes, 0}, 1, tile_rows, tile_bytes);
}
// For copy_planes(); the pitches are multiples of 16.
inline cudaError_t plane_map(TileMap* map, const void* matrix, const Planes& of, int tile_planes, int tile_rows, int tile_bytes) {
  return encode_tile_map(map, matrix, 3, of, tile_planes, tile_rows, tile_bytes);
}
#endif

inline int multiprocessors() {
  int device = 0, count = 0;
  return cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess ? count : 1;
}

// Where a kernel is launched; early: it may begin while the one before it is still running.
struct Stream {
  cudaStream_t at;
  bool early;
  Stream(cudaStream_t at, bool early = false) : at(at), early(early) {}
};

// blocks.z is a multiple of `cluster`, the number of blocks (1 or, from sm_90, up to 8) that share K.
template <typename... P, typename... A>
cudaError_t launch(void (*kernel)(P...), dim3 blocks, int threads, int shared_bytes, int cluster, Stream stream, A... arguments) {
  if (shared_bytes > 48 * 1024) {
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (status != cudaSuccess) return status;
  }
  cudaLaunchAttribute attributes[2] = {};
  int count = 0;
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {1, 1, (unsigned)cluster};
  }
  if (stream.early) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
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

// Right behind the first kernel of the call, with which it may overlap (sm_90).
template <typename... P, typename... A>
cudaError_t launch_second(void (*kernel)(P...), dim3 blocks, int threads, int shared_bytes, int cluster, Stream stream, A... arguments) {
  return launch(kernel, blocks, threads, shared_bytes, cluster, {stream.at, true}, arguments...);
}

}  // namespace fp4
#endif
