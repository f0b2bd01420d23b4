// wgmma with A in registers (sm_90a): D[64, 8 * TILES] += A[64, 16] B[16, 8 * TILES] for the four warps of a warpgroup.
//
// A and D lie as in mma.m16n8k16, warp w of the warpgroup holding rows 16w .. 16w + 15. B lies in shared memory token by token:
// 128 bytes (64 k) a token, 16-byte chunk c of token n at place c ^ (n % 8), the tile at a multiple of 1024 bytes.
// Sparse A (2:4): 32 k and 64 bytes of a token a product; A's registers and metadata lie as in mma_sp_m16n8k32(), but lanes 4g + 2 SELECTOR and the next one
// hold the metadata.
// E4M3: 32 k in the same bytes, four k where a register holds two else: a0 of lane 4g + t is row g, k = 4t .. 4t + 3, a2 those + 16. Sparse: 64 k; a0 holds what is
// kept of k = 8t .. 8t + 7, a2 of those + 32; every lane holds metadata (SELECTOR 0): lane 4g + t that of row g + 8 (t % 2), k = 32 (t / 2) onwards.
#pragma once
#include "ptx.cuh"

namespace fp4 {
struct E4M3 {};  // names the type of products
}

#ifndef FP4_EMULATED
namespace fp4 {

// Before the first wgmma, and after every change of registers that one reads.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most OPEN groups are in flight. Until then neither their sums nor registers nor tiles in shared memory may be touched.
template <int OPEN> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(OPEN) : "memory"); }

// Behind wgmma_wait<0>(): from here on the compiler may read the sums, which it does not know the wait to be about.
template <int TILES> __device__ __forceinline__ void wgmma_fence_operand(float (&d)[TILES][4]) {
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) needed(d[i][c]);
}

// What lies `bytes` behind the beginning of a tile, as wgmma takes it: the low half of a descriptor. The high half is the same for all:
// 128-byte swizzle, eight tokens every 1024 bytes.
__device__ __forceinline__ uint32_t wgmma_descriptor(Shared tile, int bytes) { return (tile >> 4 | 1 << 16) + (bytes >> 4); }

template <typename T, int TILES> struct Wgmma;
template <typename T, int TILES> struct WgmmaSparse;

#define FP4_D(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FP4_D4(i) FP4_D(i), FP4_D(i + 1), FP4_D(i + 2), FP4_D(i + 3)
#define FP4_D8(i) FP4_D4(i), FP4_D4(i + 4)
#define FP4_D16(i) FP4_D8(i), FP4_D8(i + 8)
#define FP4_D32(i) FP4_D16(i), FP4_D16(i + 16)
#define FP4_SUMS4 "%0,%1,%2,%3"
#define FP4_SUMS8 FP4_SUMS4 ",%4,%5,%6,%7"
#define FP4_D12(i) FP4_D8(i), FP4_D4(i + 8)
#define FP4_SUMS16 FP4_SUMS8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define FP4_SUMS32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FP4_SUMS24 FP4_SUMS16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define FP4_D10(i) FP4_D8(i), FP4_D(i + 8), FP4_D(i + 9)
#define FP4_SUMS40 FP4_SUMS32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define FP4_SUMS48 FP4_SUMS32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define FP4_SUMS72 FP4_SUMS64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define FP4_SUMS80 FP4_SUMS72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define FP4_SUMS64 FP4_SUMS32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define FP4_SUMS96 FP4_SUMS64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define FP4_SUMS128 FP4_SUMS96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// LAST: whether sums are added to, signs of A and B, and for types of 16 bits the order of B; SUMS, A, B: the operands' numbers; the rest names the
// registers of SUMS.
#define FP4_WGMMA(T, TILES, SHAPE, TYPE, LAST, SUMS, A, B, ...) \
  template <> struct Wgmma<T, TILES> { \
    static __device__ __forceinline__ void run(float (&d)[TILES][4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b) { \
      asm volatile("{.reg .b64 tile; mov.b64 tile, {" B ", 0x40000040};\nwgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "." TYPE " {" SUMS "}, {" A "}, tile, " LAST ";}" \
                   : __VA_ARGS__ \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b)); \
    } \
  };
#define FP4_WGMMA_SIZES(T, TYPE) \
  FP4_WGMMA(T, 1, "m64n8k16", TYPE, "1, 1, 1, 0", FP4_SUMS4, "%4,%5,%6,%7", "%8", FP4_D(0)) \
  FP4_WGMMA(T, 2, "m64n16k16", TYPE, "1, 1, 1, 0", FP4_SUMS8, "%8,%9,%10,%11", "%12", FP4_D(0), FP4_D(1)) \
  FP4_WGMMA(T, 4, "m64n32k16", TYPE, "1, 1, 1, 0", FP4_SUMS16, "%16,%17,%18,%19", "%20", FP4_D4(0)) \
  FP4_WGMMA(T, 6, "m64n48k16", TYPE, "1, 1, 1, 0", FP4_SUMS24, "%24,%25,%26,%27", "%28", FP4_D4(0), FP4_D(4), FP4_D(5)) \
  FP4_WGMMA(T, 8, "m64n64k16", TYPE, "1, 1, 1, 0", FP4_SUMS32, "%32,%33,%34,%35", "%36", FP4_D8(0)) \
  FP4_WGMMA(T, 10, "m64n80k16", TYPE, "1, 1, 1, 0", FP4_SUMS40, "%40,%41,%42,%43", "%44", FP4_D10(0)) \
  FP4_WGMMA(T, 12, "m64n96k16", TYPE, "1, 1, 1, 0", FP4_SUMS48, "%48,%49,%50,%51", "%52", FP4_D12(0)) \
  FP4_WGMMA(T, 16, "m64n128k16", TYPE, "1, 1, 1, 0", FP4_SUMS64, "%64,%65,%66,%67", "%68", FP4_D16(0))

FP4_WGMMA_SIZES(__nv_bfloat16, "bf16")
FP4_WGMMA_SIZES(__half, "f16")
FP4_WGMMA(E4M3, 4, "m64n32k32", "e4m3", "1, 1, 1", FP4_SUMS16, "%16,%17,%18,%19", "%20", FP4_D4(0))
FP4_WGMMA(E4M3, 8, "m64n64k32", "e4m3", "1, 1, 1", FP4_SUMS32, "%32,%33,%34,%35", "%36", FP4_D8(0))
FP4_WGMMA(E4M3, 10, "m64n80k32", "e4m3", "1, 1, 1", FP4_SUMS40, "%40,%41,%42,%43", "%44", FP4_D10(0))
FP4_WGMMA(E4M3, 12, "m64n96k32", "e4m3", "1, 1, 1", FP4_SUMS48, "%48,%49,%50,%51", "%52", FP4_D12(0))
FP4_WGMMA(E4M3, 16, "m64n128k32", "e4m3", "1, 1, 1", FP4_SUMS64, "%64,%65,%66,%67", "%68", FP4_D16(0))
FP4_WGMMA(E4M3, 18, "m64n144k32", "e4m3", "1, 1, 1", FP4_SUMS72, "%72,%73,%74,%75", "%76", FP4_D16(0), FP4_D(16), FP4_D(17))
FP4_WGMMA(E4M3, 20, "m64n160k32", "e4m3", "1, 1, 1", FP4_SUMS80, "%80,%81,%82,%83", "%84", FP4_D16(0), FP4_D4(16))
FP4_WGMMA(E4M3, 24, "m64n192k32", "e4m3", "1, 1, 1", FP4_SUMS96, "%96,%97,%98,%99", "%100", FP4_D16(0), FP4_D8(16))
FP4_WGMMA(E4M3, 32, "m64n256k32", "e4m3", "1, 1, 1", FP4_SUMS128, "%128,%129,%130,%131", "%132", FP4_D32(0))

// META, SELECTOR: the operands' numbers.
#define FP4_WGMMA_SPARSE(T, TILES, SHAPE, TYPE, LAST, SUMS, A, B, META, SELECTOR, ...) \
  template <> struct WgmmaSparse<T, TILES> { \
    template <int LANES> \
    static __device__ __forceinline__ void run(float (&d)[TILES][4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b, uint32_t meta) { \
      asm volatile("{.reg .b64 tile; mov.b64 tile, {" B ", 0x40000040};\nwgmma.mma_async.sp.sync.aligned." SHAPE ".f32." TYPE "." TYPE " {" SUMS "}, {" A "}, tile, " META ", " SELECTOR ", " LAST ";}" \
                   : __VA_ARGS__ \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "r"(meta), "n"(LANES)); \
    } \
  };
#define FP4_WGMMA_SPARSE_SIZES(T, TYPE) \
  FP4_WGMMA_SPARSE(T, 2, "m64n16k32", TYPE, "1, 1, 1, 0", FP4_SUMS8, "%8,%9,%10,%11", "%12", "%13", "%14", FP4_D(0), FP4_D(1)) \
  FP4_WGMMA_SPARSE(T, 4, "m64n32k32", TYPE, "1, 1, 1, 0", FP4_SUMS16, "%16,%17,%18,%19", "%20", "%21", "%22", FP4_D4(0)) \
  FP4_WGMMA_SPARSE(T, 8, "m64n64k32", TYPE, "1, 1, 1, 0", FP4_SUMS32, "%32,%33,%34,%35", "%36", "%37", "%38", FP4_D8(0)) \
  FP4_WGMMA_SPARSE(T, 16, "m64n128k32", TYPE, "1, 1, 1, 0", FP4_SUMS64, "%64,%65,%66,%67", "%68", "%69", "%70", FP4_D16(0))

FP4_WGMMA_SPARSE_SIZES(__nv_bfloat16, "bf16")
FP4_WGMMA_SPARSE_SIZES(__half, "f16")
FP4_WGMMA_SPARSE(E4M3, 8, "m64n64k64", "e4m3", "1, 1, 1", FP4_SUMS32, "%32,%33,%34,%35", "%36", "%37", "%38", FP4_D8(0))
FP4_WGMMA_SPARSE(E4M3, 16, "m64n128k64", "e4m3", "1, 1, 1", FP4_SUMS64, "%64,%65,%66,%67", "%68", "%69", "%70", FP4_D16(0))
FP4_WGMMA_SPARSE(E4M3, 24, "m64n192k64", "e4m3", "1, 1, 1", FP4_SUMS96, "%96,%97,%98,%99", "%100", "%101", "%102", FP4_D16(0), FP4_D8(16))
FP4_WGMMA_SPARSE(E4M3, 32, "m64n256k64", "e4m3", "1, 1, 1", FP4_SUMS128, "%128,%129,%130,%131", "%132", "%133", "%134", FP4_D32(0))

template <typename T, int TILES>
__device__ __forceinline__ void wgmma(float (&d)[TILES][4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b) {
  Wgmma<T, TILES>::run(d, a0, a1, a2, a3, b);
}
template <typename T, int SELECTOR, int TILES>
__device__ __forceinline__ void wgmma_sparse(float (&d)[TILES][4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b, uint32_t meta) {
  static_assert(SELECTOR == 0 || SELECTOR == 1);
  WgmmaSparse<T, TILES>::template run<SELECTOR>(d, a0, a1, a2, a3, b, meta);
}

}  // namespace fp4
#endif
