// Decoding NVFP4 in registers, for bfloat16 and float16 tensor cores. Torch-free.
//
// A 32-bit word holds 8 codes, nibble i = code of k + i. decode() returns four pairs (i, i + 4): the nibbles of a pair are
// 16 bits apart, so that a shift and a mask place both, and the order of k inside an MMA is free as long as the activations
// follow it. Every product e2m1 * e4m3 has six significant bits: exact in both types.
#pragma once
#include "device.cuh"

namespace fp4 {

// What decode * scale leaves to the epilogue: weights are handed to the MMA as value * 2^-8.
constexpr float kWeightUnit = 256.f;

template <typename T> struct Numbers;

template <> struct Numbers<__nv_bfloat16> {
  static constexpr uint32_t kMagnitude = 0x01C001C0u;  // ee m at bits 8..6: value * 2^-126
  static constexpr int kShift = 6;
  static constexpr uint32_t kSpread = 0x00040040u;  // times a byte of two codes: both magnitudes under kMagnitude
  static __device__ __forceinline__ uint32_t mul(uint32_t a, uint32_t b) { return mul_bf16x2(a, b); }
  // Two E4M3 bytes (bits 0..15 of v) -> bfloat16 pair, times 2^118.
  static __device__ __forceinline__ uint32_t scales(uint32_t v) {
    const uint32_t u = ((v & 0x7Fu) << 4) | ((v & 0x7F00u) << 12);  // * 2^-120
    return mul(mul(u, 0x7F007F00u), 0x77007700u);                     // * 2^127 * 2^111
  }
  static __device__ __forceinline__ uint32_t lifted(uint32_t u) { return mul(mul(u, 0x7F007F00u), 0x77007700u); }  // * 2^238
  // Four E4M3 bytes -> pairs (0, 2) and (1, 3), times 2^-120; lifted, times 2^118.
  static __device__ __forceinline__ void place_scales(uint32_t v, uint32_t& even, uint32_t& odd) { even = (v & 0x007F007Fu) << 4, odd = (v >> 4) & 0x07F007F0u; }
  static __device__ __forceinline__ void four_scales(uint32_t v, uint32_t& even, uint32_t& odd) { even = lifted((v & 0x007F007Fu) << 4), odd = lifted((v >> 4) & 0x07F007F0u); }
  static __device__ __forceinline__ uint32_t mul_by_half(uint32_t a, uint32_t b, bool high) { return mul_bf16x2_by_half(a, b, high); }
  static __device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
  static __device__ __forceinline__ __nv_bfloat16 from_float(float v) { return __float2bfloat16_rn(v); }
};

template <> struct Numbers<__half> {
  static constexpr uint32_t kMagnitude = 0x0E000E00u;  // ee m at bits 11..9: value * 2^-14
  static constexpr int kShift = 3;
  static constexpr uint32_t kSpread = 0x00200200u;
  static __device__ __forceinline__ uint32_t mul(uint32_t a, uint32_t b) { return mul_f16x2(a, b); }
  // Two E4M3 bytes -> float16 pair, times 2^6.
  static __device__ __forceinline__ uint32_t scales(uint32_t v) {
    const uint32_t u = ((v & 0x7Fu) << 7) | ((v & 0x7F00u) << 15);  // * 2^-8
    return mul(u, 0x74007400u);                                       // * 2^14
  }
  static __device__ __forceinline__ uint32_t lifted(uint32_t u) { return mul(u, 0x74007400u); }  // * 2^14
  // Four E4M3 bytes -> pairs (0, 2) and (1, 3), times 2^-8; lifted, times 2^6.
  static __device__ __forceinline__ void place_scales(uint32_t v, uint32_t& even, uint32_t& odd) { even = (v & 0x007F007Fu) << 7, odd = (v >> 1) & 0x3F803F80u; }
  static __device__ __forceinline__ void four_scales(uint32_t v, uint32_t& even, uint32_t& odd) { even = lifted((v & 0x007F007Fu) << 7), odd = lifted((v >> 1) & 0x3F803F80u); }
  static __device__ __forceinline__ uint32_t mul_by_half(uint32_t a, uint32_t b, bool high) { return mul_f16x2_by_half(a, b, high); }
  static __device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
  static __device__ __forceinline__ __half from_float(float v) { return __float2half_rn(v); }
};

// The bits of a number of two bytes, and the number of such bits.
template <typename T> __device__ __forceinline__ uint32_t two_bytes_of(T v) { return *(const unsigned short*)&v; }
template <typename T> __device__ __forceinline__ T of_two_bytes(uint32_t bits) {
  const unsigned short half = bits;
  return *(const T*)&half;
}

constexpr uint32_t kSigns = 0x80008000u;

// 8 codes -> the bits of pairs (0,4) (1,5) (2,6) (3,7): signs at 15, magnitudes under kMagnitude.
template <typename T> __device__ __forceinline__ void place(uint32_t w, uint32_t (&out)[4]) {
  using F = Numbers<T>;
  if constexpr (F::kShift == 6) {  // first the magnitudes of two neighbours away from their signs, with room for both: 13 instructions for 15
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32_t v = w << (8 - 4 * i), apart = masked_or<0x88008800u>(v, (v >> 6) & 0x01DC01DCu);
      out[i] = (apart << 4) & (kSigns | F::kMagnitude);
      out[i + 1] = apart & (kSigns | F::kMagnitude);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t v = w << (12 - 4 * i);
      out[i] = masked_or<kSigns>(v, (v >> F::kShift) & F::kMagnitude);
    }
  }
}

// 8 codes -> their pairs, each times `scale` (a pair of equal numbers).
template <typename T> __device__ __forceinline__ void decode(uint32_t w, uint32_t scale, uint32_t (&out)[4]) {
  place<T>(w, out);
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = Numbers<T>::mul(out[i], scale);
}

// The same, times one half of `scales`, known when compiling.
template <typename T> __device__ __forceinline__ void decode_by_half(uint32_t w, uint32_t scales, bool high, uint32_t (&out)[4]) {
  place<T>(w, out);
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = Numbers<T>::mul_by_half(out[i], scales, high);
}

// The two codes of one byte, low nibble first -> their pair as place() leaves it. Multiplications place the bits: the integer pipe that shifts
// and masks is the one that runs out first.
template <typename T> __device__ __forceinline__ uint32_t place_byte(uint32_t byte) {
  return masked_or<kSigns>(byte * 0x01001000u, byte * Numbers<T>::kSpread & Numbers<T>::kMagnitude);
}

// The same times one half of `scales`.
template <typename T> __device__ __forceinline__ uint32_t decode_byte(uint32_t byte, uint32_t scales, bool high) {
  return Numbers<T>::mul_by_half(place_byte<T>(byte), scales, high);
}

// place_byte() of byte i of a word, selector: own_byte(i). For bfloat16 the byte comes with its sign in byte 3, -2^24 times it, of which the multiplication
// makes bit 31, where the second sign belongs, and 30: 4 instructions, 2 of them the integer pipe's, instead of 5.
template <typename T> __device__ __forceinline__ uint32_t own_byte(int i) { return Numbers<T>::kShift == 6 ? signed_byte(i) : 0x4440 + i; }
template <typename T> __device__ __forceinline__ uint32_t place_own_byte(uint32_t word, uint32_t selector) {
  using F = Numbers<T>;
  if constexpr (F::kShift == 6) {
    const uint32_t byte = pick_signed_byte(word, selector);
    return (byte << 12 | byte * F::kSpread) & (kSigns | F::kMagnitude);
  } else {
    return place_byte<T>(__byte_perm(word, 0, selector));
  }
}

// The pairs of neighbours (0,1) (2,3) (4,5) (6,7) by table, one byte of codes an entry, one copy of it a lane so that lanes read different banks: byte b's
// pair for lane l lies 256 b + 4 l behind the table's beginning, so that one PRMT makes an address. For the integer pipe 4 instructions instead of 13.
constexpr int kPairTable = 256 * 256;

// By all threads of whole warps; a barrier has to follow. LIFTED: the entries are, so that scales need not be.
template <typename T, bool LIFTED = false> __device__ __forceinline__ void fill_pairs(uint8_t* table, int thread, int threads) {
  for (int b = thread / 32; b < 256; b += threads / 32) {
    const uint32_t pair = place_byte<T>(b);
    *(uint32_t*)(table + 256 * b + 4 * (thread % 32)) = LIFTED ? Numbers<T>::lifted(pair) : pair;
  }
}

// 8 codes -> their pairs of neighbours, each times one half of `scales`. lane4: four times the lane's number.
template <typename T> __device__ __forceinline__ void decode_by_table(uint32_t w, Shared table, uint32_t lane4, uint32_t scales, bool high, uint32_t (&out)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = load_table(table + __byte_perm(w, lane4, 0x5504 | i << 4));
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = Numbers<T>::mul_by_half(out[i], scales, high);
}

// 8 consecutive activations -> the same pairs.
__device__ __forceinline__ void pair_up(const uint4& x, uint32_t (&out)[4]) {
  out[0] = __byte_perm(x.x, x.z, 0x5410);
  out[1] = __byte_perm(x.x, x.z, 0x7632);
  out[2] = __byte_perm(x.y, x.w, 0x5410);
  out[3] = __byte_perm(x.y, x.w, 0x7632);
}

}  // namespace fp4
