// wgmma with A in registers (sm_90a): D[64, 8 * TILES] += A[64, 16] B[16, 8 * TILES] for the four warps of a warpgroup.
//
// A and D lie as in mma.m16n8k16, warp w of the warpgroup holding rows 16w .. 16w + 15. B lies in shared memory token by token:
// 128 bytes (64 k) a token, 16-byte chunk c of token n at place c ^ (n % 8), the tile at a multiple of 1024 bytes.
#pragma once
#include "device.cuh"

#ifndef FP4_EMULATED
namespace fp4 {

// Before the first wgmma, and after every change of registers that one reads.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until then neither sums nor registers nor the tile in shared memory may be touched.
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// Between plain stores to a tile and the barrier behind which wgmma reads it.
__device__ __forceinline__ void publish_tile() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Where k = 16 * block of a tile lies, as wgmma takes it: 128-byte swizzle, eight tokens every 1024 bytes.
__device__ __forceinline__ uint64_t tile_of(Shared tile, int block) {
  return (uint64_t)1 << 62 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 16 | ((tile + 32 * block) >> 4 & 0x3FFF);
}

template <typename T, int TILES> struct Wgmma;

#define FP4_D(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FP4_D4(i) FP4_D(i), FP4_D(i + 1), FP4_D(i + 2), FP4_D(i + 3)
#define FP4_D8(i) FP4_D4(i), FP4_D4(i + 4)
#define FP4_D16(i) FP4_D8(i), FP4_D8(i + 8)
#define FP4_SUMS32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FP4_SUMS64 FP4_SUMS32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define FP4_SUMS128 FP4_SUMS64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95" \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// SUMS, A, B: the operands' numbers; the rest names the registers of SUMS.
#define FP4_WGMMA(T, TILES, SHAPE, TYPE, SUMS, A, B, ...) \
  template <> struct Wgmma<T, TILES> { \
    static __device__ __forceinline__ void run(float (&d)[TILES][4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) { \
      asm volatile("wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "." TYPE " {" SUMS "}, {" A "}, " B ", 1, 1, 1, 0;" \
                   : __VA_ARGS__ \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b)); \
    } \
  };
#define FP4_WGMMA_SIZES(T, TYPE) \
  FP4_WGMMA(T, 8, "m64n64k16", TYPE, FP4_SUMS32, "%32,%33,%34,%35", "%36", FP4_D8(0)) \
  FP4_WGMMA(T, 16, "m64n128k16", TYPE, FP4_SUMS64, "%64,%65,%66,%67", "%68", FP4_D16(0)) \
  FP4_WGMMA(T, 32, "m64n256k16", TYPE, FP4_SUMS128, "%128,%129,%130,%131", "%132", FP4_D16(0), FP4_D16(16))

FP4_WGMMA_SIZES(__nv_bfloat16, "bf16")
FP4_WGMMA_SIZES(__half, "f16")

#undef FP4_WGMMA_SIZES
#undef FP4_WGMMA
#undef FP4_SUMS128
#undef FP4_SUMS64
#undef FP4_SUMS32
#undef FP4_D16
#undef FP4_D8
#undef FP4_D4
#undef FP4_D

template <typename T, int TILES>
__device__ __forceinline__ void wgmma(float (&d)[TILES][4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {
  Wgmma<T, TILES>::run(d, a0, a1, a2, a3, b);
}

}  // namespace fp4
#endif
