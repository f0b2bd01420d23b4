// fp4.sparse_linear for a few hundred to a few thousand rows on sm_90, by sparse FP8 tensor cores: y[M, N] = x8[M, K] @ W8[N, K]^T * x_scale (+ bias), x8
// E4M3 with a scale per token, W8 canonical 2:4-sparse NVFP4 rounded to E4M3 in registers: bit for bit the codes of fp4.sparse_dequantize_fp8.
//
// An MMA covers 64 k as they lie in memory, of activations and of the weight alike: the metadata word of 8 groups is what it takes.
#include "../gemm/multiply_fp8.cuh"

namespace {

using namespace fp4;

// Values, metadata and scales of 256 k of a row of W a step.
struct Sparse {
  static constexpr int kMeta = kRows * 64, kScales = kRows * 96, kRowBytes = 64 + 32 + 16;
  static constexpr int weight_stages(int tokens) { return tokens == 64 ? 6 : tokens == 128 ? 5 : 4; }
  static constexpr int token_stages(int tokens) { return tokens == 256 ? 4 : tokens == 192 ? 6 : tokens == 128 ? 8 : 12; }

  struct Maps {
    TensorMap values, meta, scales;
  };
  struct Parts {
    const uint8_t *values, *meta, *scales;
  };
  static cudaError_t map(Maps* maps, const Parts& p, int N, int K) {
    return first_error({tensor_map_2d(&maps->values, p.values, N, K / 4, kRows, 64), tensor_map_2d(&maps->meta, p.meta, N, K / 8, kRows, 32),
                        tensor_map_2d(&maps->scales, p.scales, N, K / 16, kRows, 16)});
  }

  __device__ __forceinline__ static void prefetch(const Maps& maps) {
    prefetch_tensor_map(maps.values), prefetch_tensor_map(maps.meta), prefetch_tensor_map(maps.scales);
  }
  __device__ __forceinline__ static void fetch(Shared to, const Maps& maps, int k, int row, Shared full) {
    tma_load_2d(to, maps.values, k * 64, row, full);
    tma_load_2d(to + kMeta, maps.meta, k * 32, row, full);
    tma_load_2d(to + kScales, maps.scales, k * 16, row, full);
  }

  // Places of the lane's in stage 0. Of an MMA lane t of a quad takes the groups 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t of rows g and g + 8 and holds the metadata
  // of groups 8 (t / 2) .. + 7 of row g + 8 (t % 2).
  const uint8_t* shared;
  int values, meta, scales, meta_row;
  uint32_t two_scales;
  __device__ __forceinline__ Sparse(const uint8_t* shared, int local, int lane) : shared(shared) {
    const int g = lane >> 2, t = lane & 3;
    meta_row = g + 8 * (FP4_FAULT(METADATA_OF_OTHER_ROW) ? t >> 1 : t & 1);
    values = kept((local + g) * 64 + (FP4_FAULT(SKIP_SWIZZLE) ? 0 : g >> 1 & 3) * 16 + 2 * t);
    meta = kept(kMeta + (local + meta_row) * 32 + (FP4_FAULT(SKIP_METADATA_SWIZZLE) ? 0 : g >> 2 & 1) * 16 + (FP4_FAULT(METADATA_OF_OTHER_HALF) ? t & 1 : t >> 1) * 4);
    scales = kept(kScales + (local + g) * 16);
    two_scales = kept(0x6420 + 0x1111 * (FP4_FAULT(SCALES_OF_OTHER_HALF) ? t & 1 : t >> 1));
  }

  // The two codes each of two groups, times one half of `scales`, in E4M3.
  __device__ __forceinline__ static uint32_t decode(uint32_t codes, uint32_t scales, bool half) {
    // value * kFactor in float16 has a low byte of zeros; the high bytes of the eight magnitudes.
    const uint32_t high = pick_bytes(0x32302C00u, 0x3A383634u, masked<0x7777u>(codes));
    const uint32_t magnitudes =
        pack_e4m3(mul_f16x2_by_half(__byte_perm(high, 0, 0x1404), scales, half), mul_f16x2_by_half(__byte_perm(high, 0, 0x3424), scales, half));
    return masked_or<0x80808080u>(__byte_perm(codes << 4, codes, 0x5140) & (FP4_FAULT(LOSE_A_SIGN) ? 0x00FFFFFFu : 0xFFFFFFFFu), magnitudes);
  }

  // rows: how many of the warp's are rows of W.
  template <int TILES, typename Arrived, typename Done>
  __device__ __forceinline__ void multiply(float (&acc)[TILES][4], int stage, int rows, Arrived arrived, Done done) const {
    const int legal = meta_row < rows || FP4_FAULT(ZERO_METADATA_PAST_N) ? 0 : 0x44444444;  // rows past N come as zeros, which are no metadata: 0 and 1 are kept there
    uint32_t codes[4][2][2];
    uint4 s[2];
    int e[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int c = 0; c < 2; ++c) codes[i][h][c] = *(const uint16_t*)(shared + (values + stage ^ i * 16) + h * 512 + c * 8);
#pragma unroll
    for (int h = 0; h < 2; ++h) s[h] = *(const uint4*)(shared + scales + stage + h * 128);
#pragma unroll
    for (int j = 0; j < 2; ++j) {  // two MMAs are decoded while the products of those before are worked on
      const uint32_t blocks[2][2] = {{j ? s[0].z : s[0].x, j ? s[1].z : s[1].x}, {j ? s[0].w : s[0].y, j ? s[1].w : s[1].y}};
      uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t pair[2];
        unpack_e4m3(__byte_perm(blocks[i][0], blocks[i][1], two_scales), pair[0], pair[1]);
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int c = 0; c < 2; ++c) a[i][h + 2 * c] = decode(codes[2 * j + i][h][c], pair[h], c);
      }
      if (j == 0) {
        wgmma_wait<0>();  // it reads metadata, too, while it runs, which ptxas does not know: registers of the last step's would be written here
#pragma unroll
        for (int i = 0; i < 4; ++i) e[i] = *(const int*)(shared + (meta + stage ^ i / 2 * 16) + i % 2 * 8) | legal;
#pragma unroll
        for (int i = 0; i < 4; ++i) needed(e[i]);  // before the fence
      }
      const Shared x = arrived(j);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 2; ++i) wgmma_sparse<E4M3, 0>(acc, a[i][0], a[i][1], a[i][2], a[i][3], wgmma_descriptor(x, 64 * (i ^ FP4_FAULT(TOKENS_OF_OTHER_HALF))), e[2 * j + i]);
      wgmma_commit_group();
      wgmma_wait<1>();
      done(j);
    }
  }
};

constexpr Costs kCosts{{0.67f, 0.84f, 1.02f, 1.21f}, 4.8f, 7.3f, 9.2f};

}  // namespace

extern "C" int64_t fp4_sparse_linear_wide_fp8_scratch(const LinearParams* call) { return is_call(call) ? scratch_bytes(*call) : 0; }

// serve() of multiply_fp8.cuh, with codes uint8 [N, K/4], meta uint8 [N, K/8], all legal metadata, and scale.
extern "C" int fp4_sparse_linear_wide_fp8(const LinearParams* call) {
  return serve<Sparse>(call, kCosts, [&] { return Sparse::Parts{(const uint8_t*)call->codes, (const uint8_t*)call->meta, (const uint8_t*)call->scale}; });
}
