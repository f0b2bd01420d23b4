// As wide.cuh, for FP8 wgmma: activations in E4M3, weights rounded to E4M3 in registers.
#pragma once
#include "wide.cuh"

namespace fp4 {

constexpr float kFactor = 0.125f;  // WEIGHT_FACTOR of ops/dequantize_fp8.py: weights are handed to the MMA as value * scale * kFactor

// Activations are row-major [M, K], each 256 k of a row in the order of fp4.quantize_rows_fp8(lane_order=True): byte 16 c + 4 t + e is k = 64 t + 4 c + e, so that
// what MMAs take of lane t of a quad are k that lie side by side in the weight: it decodes k = 64 t .. 64 t + 63.

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
      for (int i = 0; i < 2; ++i) wgmma<E4M3>(acc, a[i][0], a[i][1], a[i][2], a[i][3], wgmma_descriptor(x, 32 * (2 * b + i)));
      wgmma_commit_group();
      if (!FP4_FAULT(SKIP_WGMMA_WAIT)) wgmma_wait<1>();
      if (b == 0) done(j);
    }
  }
}

// A lane's codes and scales of rows g and g + HIGH of a stage, from row `local` on: 128 bytes of codes a row, behind those of all rows 16 bytes of scales a row.
template <int HIGH> struct StageFP8 {
  const uint8_t *codes[2], *scales;  // in stage 0

  __device__ __forceinline__ StageFP8(const uint8_t* shared, int scales_begin, int local, int lane) {
    const int g = lane >> 2, t = lane & 3;
    codes[0] = shared + (local + g) * 128 + ((2 * t) ^ g) * 16, codes[1] = shared + (local + g) * 128 + ((2 * t + 1) ^ g) * 16;
    scales = shared + scales_begin + (local + g) * 16 + 4 * t;
  }
  template <int TILES, typename Arrived, typename Done>
  __device__ __forceinline__ void multiply(float (&acc)[TILES][4], int stage, Arrived arrived, Done done) const {
    uint4 q[2][2];
    uint32_t s[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      s[h] = *(const uint32_t*)(scales + stage + h * HIGH * 16);
#pragma unroll
      for (int j = 0; j < 2; ++j) q[j][h] = *(const uint4*)(codes[j] + stage + h * HIGH * 128);
    }
    multiply_step_fp8(acc, q, s, arrived, done);
  }
};

// The mainloop of a warp that multiplies: `count` steps of both rings. A stage of activations holds half a step and is shared by the CLUSTER blocks of a cluster. It is
// given back when the products of the next half have been issued, because only then its own are complete. multiply(stage, arrived, done) multiplies one step
// (multiply_step_fp8); stage: the bytes to the stage of weights.
template <int CLUSTER, int W_BYTES, int X_BYTES, int TILES, int W_STAGES, int X_STAGES, typename Multiply>
__device__ __forceinline__ void multiply_steps_fp8(float (&acc)[TILES][4], int count, const Ring<>& w_ring, Place<W_STAGES>& w, const Ring<>& x_ring,
                                                   Place<X_STAGES>& x, Shared activations, Multiply multiply) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  bool frees = false;  // this lane gives back the half that was multiplied last, to block `lane` of the cluster
  Shared last_half = x_ring.free;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    if (!FP4_FAULT(SKIP_WEIGHTS_WAIT)) w_ring.wait(w);
    multiply(
        w.i * W_BYTES,
        [&](int) {
          if (!FP4_FAULT(SKIP_TOKENS_WAIT)) x_ring.wait(x);
          return activations + x.i * X_BYTES;
        },
        [&](int) {
          if (frees && !(lane && FP4_FAULT(OTHER_BLOCK_NOT_TOLD)) && !(!warp && FP4_FAULT(ONE_WARP_KEEPS_TOKENS))) mbarrier_arrive_remote(last_half, lane);
          frees = lane < CLUSTER;
          last_half = x_ring.free_of(x);
          x.next();
        });
    __syncwarp();
    if (lane == 0) w_ring.release(w);
    w.next();
  }
  wgmma_wait<0>();
  wgmma_fence_operand(acc);
  if (frees) mbarrier_arrive_remote(last_half, lane);  // others may fill the last half while this tile's sums are stored
}

// Tokens 8 FROM .. 8 TO - 1 of a warp's rows n0 .. n0 + 15 of W, the tile's first token being row m0 of y [M, N]: sums * unit * scale of the token + added, units and
// added of the lane's rows g and g + 8. staging: 2048 bytes of the warp's; token_scales: of the tile's tokens.
template <int FROM, int TO, int TILES>
__device__ __forceinline__ void store_tokens(const float (&acc)[TILES][4], const float (&units)[2], const float (&added)[2], const float* token_scales, uint8_t* staging,
                                             __nv_bfloat16* __restrict__ y, int m0, int M, int n0, int N) {
  const int lane = threadIdx.x & 31, t = lane & 3;
  // Rows of 32 bytes, a token each; the two halves of every other four tokens change places, so that eight rows lie in different banks.
  const Shared to = shared_address(staging) + (8 * (lane >> 4) + (lane & 7)) * 32 + ((lane >> 3 & 1) ^ (lane >> 2 & 1)) * 16;
  const int token = lane >> 1, n = n0 + 8 * ((lane & 1) ^ (token >> 2 & 1));
#pragma unroll
  for (int i0 = FROM; i0 < TO; i0 += 8) {
#pragma unroll
    for (int i = i0; i < (i0 + 8 < TO ? i0 + 8 : TO); i += 2) {
      uint32_t pairs[4];
#pragma unroll
      for (int d = 0; d < 2; ++d)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float* s = token_scales + 8 * (i + d) + 2 * t;
          const __nv_bfloat162 pair =
              __floats2bfloat162_rn(fmaf(acc[i + d][2 * h] * units[h], s[0], added[h]), fmaf(acc[i + d][2 * h + 1] * units[h], s[1], added[h]));
          pairs[2 * d + h] = *(const uint32_t*)&pair;
        }
      stmatrix_x4_trans(to + (i - i0) * 256, pairs);
    }
    if (!FP4_FAULT(SKIP_SYNC_OF_STAGING)) __syncwarp();
#pragma unroll
    for (int i = i0; i < (i0 + 8 < TO ? i0 + 8 : TO); i += 2) {
      const uint4 v = *(const uint4*)(staging + (i - i0) * 256 + lane * 16);
      const int m = m0 + 8 * i + token;
      if ((m >= M && !FP4_FAULT(STORE_TOKENS_PAST_M)) || (n >= N && !FP4_FAULT(STORE_COLUMNS_PAST_N))) continue;
      __nv_bfloat16* at = y + (size_t)m * N + n;
      if (N % 8 == 0) {
        *(uint4*)at = v;
      } else {
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int c = 0; c < 8; ++c)
          if (n + c < N) ((uint16_t*)at)[c] = (uint16_t)(words[c / 2] >> c % 2 * 16);
      }
    }
    __syncwarp();  // staging is read before it is filled again
  }
}

}  // namespace fp4
