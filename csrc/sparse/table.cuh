// A step of a 2:4-sparse weight by the table of pairs, for mma.sp. The order of its k is that of the kernel for few rows in this folder.
#pragma once
#include "../gemm/table.cuh"

namespace fp4 {

template <int WORDS> struct alignas(4 * WORDS) Words {
  uint32_t of[WORDS];
};

// Of two substeps, the SUBSTEPS of a step are those of SUBSTEPS / 2 warps, and a warp's 16 * R rows by 8 * TILES tokens: the lane's rows lie NEXT * r + high * h rows behind
// its first one. values, meta: where in `shared` its first ones lie, x: those of ldmatrix_x4(); the second
// substep's are the same chunks, the bits of `flip` of their addresses flipped, `next` bytes further on. scales: of both substeps.
template <typename T, int SUBSTEPS, int NEXT, int R, int TILES>
__device__ __forceinline__ void multiply_sparse_by_table(float (&acc)[R][TILES][4], uint8_t* shared, int values_from, int meta_from, const uint8_t* scales, int high,
                                                         int x, int next, int flip,
                                                         int lane) {
  constexpr int kValues = 32 * SUBSTEPS, kMeta = 16 * SUBSTEPS, kScales = 8 * SUBSTEPS;  // bytes of a row
  const Shared table = shared_address(shared);
  const uint32_t lane4 = 4 * lane, lower = 0x5504 | (lane & 1) << 4, upper = lower + 0x20, halves = 0x6240 + 0x1111 * (lane + FP4_FAULT(EXCHANGE_METADATA_HALVES) & 1);
  Words<2> by[R][2];
  uint32_t meta[R][2][2];  // of two products each
#pragma unroll
  for (int r = 0; r < R; ++r) {
    uint32_t both[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int down = NEXT * r + high * h;
      by[r][h] = *(const Words<2>*)(scales + down * kScales);
      const auto low_k = *(const Words<2>*)(shared + meta_from + down * kMeta);
      const auto high_k = *(const Words<2>*)(shared + (meta_from ^ 8 * SUBSTEPS) + down * kMeta);
#pragma unroll
      for (int i = 0; i < 2; ++i) both[h][i] = __byte_perm(low_k.of[i], high_k.of[i], halves);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) meta[r][i][0] = __byte_perm(both[0][i], both[1][i], 0x5410), meta[r][i][1] = __byte_perm(both[0][i], both[1][i], 0x7632);
  }
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    Words<4> q[R][2];
    uint32_t even[R][2], odd[R][2];
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        q[r][h] = *(const Words<4>*)(shared + (values_from ^ s * 16) + (NEXT * r + high * h) * kValues);
        Numbers<T>::place_scales(by[r][h].of[s], even[r][h], odd[r][h]);
      }
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // a product: block i of both pairs' chunks
      uint32_t b[TILES][4];
#pragma unroll
      for (int j = 0; j < TILES; ++j) ldmatrix_x4(b[j], shared_address(shared) + (x ^ i * 32 ^ s * flip) + s * next + j * 1024);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        uint32_t a[4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t word = q[r][h].of[i], scale = i % 2 ? odd[r][h] : even[r][h];
          a[h] = Numbers<T>::mul_by_half(load_table(table + __byte_perm(word, lane4, lower)), scale, i / 2);
          a[h + 2] = Numbers<T>::mul_by_half(load_table(table + __byte_perm(word, lane4, upper)), scale, i / 2);
        }
        const uint32_t e = meta[r][i / 2][i % 2];
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
          if ((s == 0) != FP4_FAULT(METADATA_FROM_OTHER_PAIR))
            mma_sp_m16n8k32<T, 0>(acc[r][j], a[0], a[1], a[2], a[3], b[j][0], b[j][1], b[j][2], b[j][3], e);
          else
            mma_sp_m16n8k32<T, 1>(acc[r][j], a[0], a[1], a[2], a[3], b[j][0], b[j][1], b[j][2], b[j][3], e);
        }
      }
    }
  }
}

}  // namespace fp4
