// As wide.cuh, for FP8 wgmma: activations in E4M3, weights rounded to E4M3 in registers.
#pragma once
#include "wide.cuh"

namespace fp4 {

constexpr float kFactor = 0.125f;  // WEIGHT_FACTOR of ops/dequantize_fp8.py: weights are handed to the MMA as value * scale * kFactor

// to: [M / TOKENS][steps][2 halves][TOKENS][128 bytes], zeros beyond M. Byte 32 z + 16 h + 4 t + e of a token's half j is k = 64 t + 32 j + 8 z + 4 h + e
// of the step: lane t of a quad decodes k = 64 t .. 64 t + 63, as in wide.cuh. Sixteen threads a token and step.
template <int TOKENS>
__global__ void __launch_bounds__(256) arrange_fp8(const uint8_t* x, uint8_t* __restrict__ to, int M, int K, int* __restrict__ flags, int count) {
  constexpr int kAtOnce = 4;  // steps whose loads are in flight together
  let_second_begin();
  wait_for_previous();
  if (blockIdx.x == 0 && blockIdx.y == 0)
    for (int i = threadIdx.x; i < count; i += blockDim.x) flags[i] = 0;
  const int steps = K / kWideK, chunk = threadIdx.x % 16, m = blockIdx.y * 16 + threadIdx.x / 16, place = m / TOKENS, token = m % TOKENS;
  for (int first = blockIdx.x; first < steps; first += kAtOnce * gridDim.x) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int step = first + i * gridDim.x;
      const uint32_t* from = (const uint32_t*)(x + (size_t)m * K + step * kWideK) + chunk;
      v[i] = m < M && step < steps ? make_uint4(from[0], from[16], from[32], from[48]) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int step = first + i * gridDim.x;
      uint8_t* row = to + ((((size_t)place * steps + step) * 2 + chunk / 8) * TOKENS + token) * 128;
      if (step < steps) *(uint4*)(row + (chunk % 8 ^ (token & 7)) * 16) = v[i];
    }
  }
}

// The eight magnitudes of a block of 16 weights, value * scale * kFactor rounded to E4M3: byte i of (low, high) is that of code i. `scales`: a float16
// pair, one half of it the block's. The products are exact in float16: six bits, 2^-13 to 336.
struct Magnitudes {
  uint32_t low, high;
  __device__ __forceinline__ Magnitudes(uint32_t scales, bool half) {
    low = pack_e4m3(mul_f16x2_by_half(0x2C000000u, scales, half), mul_f16x2_by_half(0x32003000u, scales, half));
    high = pack_e4m3(mul_f16x2_by_half(0x36003400u, scales, half), mul_f16x2_by_half(0x3A003800u, scales, half));
  }
  // 8 codes -> bytes of codes 0..3 and 4..7.
  __device__ __forceinline__ void look_up(uint32_t w, uint32_t& first, uint32_t& second) const {
    const uint32_t m = masked<0x77777777u>(w), v = w << 4;  // sign of code i on top of byte i / 2 of v (even i) or w
    first = masked_or<0x80808080u>(__byte_perm(v, w, 0x5140), pick_bytes(low, high, m));
    second = masked_or<0x80808080u>(__byte_perm(v, w, 0x7362), pick_bytes(low, high, m >> 16));
  }
};

// One step of a warp's 16 rows: q[j][h] are the codes of rows g + 8 h of the lane's k 32 j onwards, scales[h] four E4M3 bytes. arrived(j) waits for half
// j of the activations and returns it, done(j) is called when the products of the half before are complete.
template <int TILES, typename Arrived, typename Done>
__device__ __forceinline__ void multiply_step_fp8(float (&acc)[TILES][4], const uint4 (&q)[2][2], const uint32_t (&scales)[2], Arrived arrived, Done done) {
  uint32_t s[2][2];
#pragma unroll
  for (int h = 0; h < 2; ++h) unpack_e4m3(scales[h], s[h][0], s[h][1]);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    Shared x = 0;
#pragma unroll
    for (int b = 0; b < 2; ++b) {  // two words, which share a scale, are decoded while the products of those before are worked on
      uint32_t a[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4& c = q[j][h];
        const Magnitudes all(s[h][j], b);
        all.look_up(b ? c.z : c.x, a[0][h], a[0][2 + h]);
        all.look_up(b ? c.w : c.y, a[1][h], a[1][2 + h]);
      }
      if (b == 0) x = arrived(j);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 2; ++i) wgmma<E4M3>(acc, a[i][0], a[i][1], a[i][2], a[i][3], tile_of(x, 32 * (2 * b + i)));
      wgmma_commit();
      wgmma_wait<1>();
      if (b == 0) done(j);
    }
  }
}

}  // namespace fp4
