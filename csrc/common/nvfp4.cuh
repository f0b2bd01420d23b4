// Decoding NVFP4 in registers, for bfloat16 and float16 tensor cores. Torch-free.
//
// A 32-bit word holds 8 codes, nibble i = code of k + i. decode() returns four pairs (i, i + 4): with the nibbles of a
// pair 16 bits apart, one shift and two masks place both signs and both magnitudes, and the order of k inside an MMA is
// free as long as the activations follow it. Every product e2m1 * e4m3 has six significant bits: exact in both types.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace fp4 {

// What decode * scale leaves to the epilogue: weights are handed to the MMA as value * 2^-8.
constexpr float kWeightUnit = 256.f;

template <typename T> struct Numbers;

template <> struct Numbers<__nv_bfloat16> {
  static constexpr uint32_t kMagnitude = 0x01C001C0u;  // ee m at bits 8..6: value * 2^-126
  static constexpr int kShift = 6;
  static __device__ __forceinline__ uint32_t mul(uint32_t a, uint32_t b) {
    uint32_t d;
    // mul.bf16x2 exists from sm_90; a * b + -0 is the same number everywhere
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
    return d;
  }
  // Two E4M3 bytes (bits 0..15 of v) -> bfloat16 pair, times 2^118.
  static __device__ __forceinline__ uint32_t scales(uint32_t v) {
    const uint32_t u = ((v & 0x7Fu) << 4) | ((v & 0x7F00u) << 12);  // * 2^-120
    return mul(mul(u, 0x7F007F00u), 0x77007700u);                     // * 2^127 * 2^111
  }
  static __device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
  static __device__ __forceinline__ __nv_bfloat16 from_float(float v) { return __float2bfloat16_rn(v); }
};

template <> struct Numbers<__half> {
  static constexpr uint32_t kMagnitude = 0x0E000E00u;  // ee m at bits 11..9: value * 2^-14
  static constexpr int kShift = 3;
  static __device__ __forceinline__ uint32_t mul(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }
  // Two E4M3 bytes -> float16 pair, times 2^6.
  static __device__ __forceinline__ uint32_t scales(uint32_t v) {
    const uint32_t u = ((v & 0x7Fu) << 7) | ((v & 0x7F00u) << 15);  // * 2^-8
    return mul(u, 0x74007400u);                                       // * 2^14
  }
  static __device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
  static __device__ __forceinline__ __half from_float(float v) { return __float2half_rn(v); }
};

// (a & mask_a) | (b & mask_b) cannot be one LOP3 with two masks; with b already masked it is.
__device__ __forceinline__ uint32_t sign_or(uint32_t signs, uint32_t magnitude) {
  uint32_t d;
  asm("lop3.b32 %0, %1, 0x80008000, %2, 0xEA;" : "=r"(d) : "r"(signs), "r"(magnitude));
  return d;
}

// 8 codes -> pairs (0,4) (1,5) (2,6) (3,7), each times `scale` (a pair of equal numbers).
template <typename T> __device__ __forceinline__ void decode(uint32_t w, uint32_t scale, uint32_t (&out)[4]) {
  using F = Numbers<T>;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t v = w << (12 - 4 * i);
    out[i] = F::mul(sign_or(v, (v >> F::kShift) & F::kMagnitude), scale);
  }
}

// 8 consecutive activations -> the same pairs.
__device__ __forceinline__ void pair_up(const uint4& x, uint32_t (&out)[4]) {
  out[0] = __byte_perm(x.x, x.z, 0x5410);
  out[1] = __byte_perm(x.x, x.z, 0x7632);
  out[2] = __byte_perm(x.y, x.w, 0x5410);
  out[3] = __byte_perm(x.y, x.w, 0x7632);
}

}  // namespace fp4
