// What products of one row by canonical NVFP4 weights share: a step of a warp, and x as the step wants it.
//
// Codes become half2 by the conversion from E4M3 (sm_89 and later), elsewhere by shifts and masks. The 16 products of a block are summed in half2, and the sum
// is multiplied by the block's scale in float32. x lies in shared memory as half2, in the order of the decoded pairs. Each block of 16 numbers of x is divided
// by a power of two of its own, so that any bfloat16 is in range; rounding changes a number by at most 2^-33 of the block's largest.
#pragma once
#include <type_traits>

#include "../sm90/ptx.cuh"
#include "weights.cuh"

namespace fp4 {

constexpr int kMostStages = 8;
constexpr int kMostRoom = (FP4_ARCH == 90 || (FP4_ARCH >= 100 && FP4_ARCH < 120) ? 227 : kLargeSharedMemory ? 163 : 99) * 1024;  // bytes of shared memory of a block
constexpr int kSegment = 1024;                          // k a step: 16 bytes of codes and 2 of scales a lane and row
constexpr int kBatch = 4;                               // vectors of 8 numbers of x that a thread loads together
constexpr bool kConverts = FP4_ARCH >= 89;              // E4M3 to half2 in one instruction
constexpr float kUndo = kConverts ? 0x1p-10f : 0x1p-8f;  // undoes the factors of codes (2^-6; 2^-14), scales (1; 2^6), x (2^8), and kWeightUnit, by which the sum is multiplied

// 8 codes -> half2. kConverts: times 2^-6, in the pairs (1,3) (5,7) (0,2) (4,6); else times 2^-14, in the pairs (0,4) (1,5) (2,6) (3,7).
__device__ __forceinline__ void decode_word(uint32_t w, uint32_t (&pairs)[4]) {
  if constexpr (kConverts) {  // a code in a byte: sign at 7, magnitude at 4..2
    unpack_e4m3(masked_or<0x80808080u>(w, (w >> 2) & 0x1C1C1C1Cu), pairs[0], pairs[1]);
    unpack_e4m3(masked_or<0x80808080u>(w << 4, (w << 2) & 0x1C1C1C1Cu), pairs[2], pairs[3]);
  } else {
    place<__half>(w, pairs);
  }
}

// 8 neighbours of x in the same order.
__device__ __forceinline__ uint4 in_order(const float (&x)[8]) {
  if constexpr (kConverts) return {pack_f16x2(x[1], x[3]), pack_f16x2(x[5], x[7]), pack_f16x2(x[0], x[2]), pack_f16x2(x[4], x[6])};
  return {pack_f16x2(x[0], x[4]), pack_f16x2(x[1], x[5]), pack_f16x2(x[2], x[6]), pack_f16x2(x[3], x[7])};
}

// The sum of a block of 16.
__device__ __forceinline__ float dot(uint32_t w0, uint32_t w1, const uint4& x0, const uint4& x1) {
  uint32_t a[4], b[4];
  decode_word(w0, a), decode_word(w1, b);
  uint32_t s = mul_f16x2(a[0], x0.x), t = mul_f16x2(b[0], x1.x);
  s = fma_f16x2(a[1], x0.y, s), t = fma_f16x2(b[1], x1.y, t);
  s = fma_f16x2(a[2], x0.z, s), t = fma_f16x2(b[2], x1.z, t);
  s = fma_f16x2(a[3], x0.w, s), t = fma_f16x2(b[3], x1.w, t);
  s = add_f16x2(s, t);
  return half_of(s, false) + half_of(s, true);
}

// Where chunk number `chunk` of x, 8 neighbours, lies in shared memory. The four chunks that a lane reads lie 512 bytes apart, so that all lanes read different
// banks. The lanes' places are permuted by j, so that the neighbouring chunks that a warp writes lie in different banks, too.
__device__ __forceinline__ int place_of_chunk(int chunk) {
  const int j = chunk % 4, lane = chunk / 4 % 32;
  return chunk / 128 * (kSegment * 2) + j * 512 + (lane ^ 2 * j) * 16;
}

// R rows of W by kSegment k: what a lane has of them in registers, and where it lies in a stage of a warp's ring.
template <int R> struct Step {
  static constexpr int kCodes = R * kSegment / 2, kBytes = kCodes + R * kSegment / 16;
  uint4 codes[R];
  uint32_t scales[R];

  __device__ __forceinline__ void load(const uint8_t* stage, int lane) {
#pragma unroll
    for (int i = 0; i < R; ++i) {
      codes[i] = *(const uint4*)(stage + i * (kSegment / 2) + lane * 16);
      scales[i] = *(const uint16_t*)(stage + kCodes + i * (kSegment / 16) + lane * 2);
    }
  }
  // Adds each row's product with the segment of x; undo: the factors of the lane's two blocks of x.
  __device__ __forceinline__ void multiply(float (&acc)[R], const uint8_t* x, float2 undo, int lane) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {  // the lane's two blocks
      const uint4 x0 = *(const uint4*)(x + 2 * j * 512 + (lane ^ 4 * j) * 16), x1 = *(const uint4*)(x + (2 * j + 1) * 512 + (lane ^ (4 * j + 2)) * 16);
#pragma unroll
      for (int i = 0; i < R; ++i) {
        uint32_t low, high;
        if constexpr (kConverts)
          unpack_e4m3(scales[i], low, high);
        else
          low = Numbers<__half>::scales(scales[i]);
        acc[i] += dot(j ? codes[i].z : codes[i].x, j ? codes[i].w : codes[i].y, x0, x1) * (half_of(low, j) * (j ? undo.y : undo.x));
      }
    }
  }
};

// The 8 numbers of 16 bytes.
template <typename T> __device__ __forceinline__ void floats_of(const uint4& v, float (&to)[8]) {
  struct alignas(16) {
    T v[8];
  } all;
  *(uint4*)&all = v;
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = Numbers<T>::to_float(all.v[i]);
}

// Rounds two numbers to T by one instruction: an instruction that converts one number takes eight times as long.
template <typename T> __device__ __forceinline__ void round_pair(float& a, float& b) {
  if constexpr (std::is_same_v<T, __half>) {
    const uint32_t pair = pack_f16x2(a, b);
    a = half_of(pair, false), b = half_of(pair, true);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    a = Numbers<T>::to_float(pair.x), b = Numbers<T>::to_float(pair.y);
  }
}

// Of the 8 numbers of 16 bytes.
template <typename T> __device__ __forceinline__ float sum_of_squares(const uint4& raw) {
  float v[8], sum = 0.f;
  floats_of<T>(raw, v);
#pragma unroll
  for (int j = 0; j < 8; ++j) sum += v[j] * v[j];
  return sum;
}

// The end of an RMSNorm; by: one over the root mean square.
template <typename T> __device__ __forceinline__ void normalise(float (&v)[8], const uint4& norm_weight, float by, float offset) {
  float weight[8];
  floats_of<T>(norm_weight, weight);
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] *= by * (offset + weight[j]);
#pragma unroll
  for (int j = 0; j < 8; j += 2) round_pair<T>(v[j], v[j + 1]);
}

// Half of a block of 16, whose other half the lane beside this one has, times 2^8 over its power of two; returns what undoes that.
__device__ __forceinline__ float to_half_range(float (&v)[8]) {
  float largest = 0.f;
#pragma unroll
  for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(v[j]));
  largest = fmaxf(largest, shuffle_xor(largest, 1));
  const uint32_t exponent = max(__float_as_uint(largest) & 0x7F800000u, 0x08000000u);  // 2^-111: below it activations count as zero
  const float up = __uint_as_float(0x7F000000u - exponent + 0x04000000u);
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] *= up;
  return __uint_as_float(exponent) * kUndo;
}

// Waits until at most `groups` groups of this thread's copies are under way. cp.async.wait_group takes a constant only. USUAL: asked about first, for a switch
// is a table of jumps.
template <int USUAL = -1> __device__ __forceinline__ void wait_for_all_but(int groups) {
  if constexpr (USUAL >= 0)
    if (groups == USUAL) return cp_async_wait_group<USUAL>();
  switch (groups) {
    case 0: cp_async_wait_group<0>(); break;
    case 1: cp_async_wait_group<1>(); break;
    case 2: cp_async_wait_group<2>(); break;
    case 3: cp_async_wait_group<3>(); break;
    case 4: cp_async_wait_group<4>(); break;
    case 5: cp_async_wait_group<5>(); break;
    case 6: cp_async_wait_group<6>(); break;
    case 7: cp_async_wait_group<7>(); break;
    default: cp_async_wait_group<8>();
  }
}

__device__ __forceinline__ float sum_of_warp(float v) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) v += shuffle_xor(v, mask);
  return v;
}

// The lanes' sums of R rows: lane l gets that of row l / (32 / R).
template <int R> __device__ __forceinline__ float sum_of_lanes(float (&acc)[R], int lane) {
  int mask = 16;
#pragma unroll
  for (int n = R; n > 1; n /= 2, mask /= 2)
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const bool upper = lane & mask;
      const float mine = upper ? acc[i + n / 2] : acc[i], other = upper ? acc[i] : acc[i + n / 2];
      acc[i] = mine + shuffle_xor(other, mask);
    }
  for (; mask; mask /= 2) acc[0] += shuffle_xor(acc[0], mask);
  return acc[0];
}

// Rounded up.
constexpr int divided(int a, int b) { return (a + b - 1) / b; }

}  // namespace fp4
