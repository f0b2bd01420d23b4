// The names of cuda_runtime.h, cuda_bf16.h and cuda_fp16.h that csrc/ uses.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "emulated.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define threadIdx (emulated::place().thread)
#define blockIdx (emulated::place().block)
#define gridDim (emulated::place().blocks)
#define blockDim (emulated::place().threads)

using std::max;
using std::min;

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename T> inline T __ldg(const T* p) { return *p; }
template <typename T> inline T __ldcg(const T* p) { return *p; }
template <typename T> inline void __stcg(T* p, T v) { *p = v; }
inline void __threadfence() {}

using cudaStream_t = void*;
using cudaError_t = int;
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline float __expf(float v) { return std::exp(v); }
inline float rsqrtf(float v) { return 1.f / std::sqrt(v); }
inline float __fdividef(float a, float b) { return a / b; }

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = (uint64_t)b << 32 | a;
  unsigned d = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = selector >> (4 * i) & 15;
    unsigned byte = bytes >> (8 * (s & 7)) & 255;
    if (s & 8) byte = byte & 128 ? 255 : 0;
    d |= byte << (8 * i);
  }
  return d;
}

inline void __syncthreads() { emulated::block_barrier(0, (int)blockDim.x); }
inline void __syncwarp() { emulated::warp_barrier(); }
inline float __uint_as_float(uint32_t v) {
  float f;
  memcpy(&f, &v, 4);
  return f;
}
inline float __int_as_float(int v) { return __uint_as_float((uint32_t)v); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint64_t)a * b >> 32; }
inline uint32_t __float_as_uint(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  return bits;
}

inline int __float_as_int(float v) { return (int)__float_as_uint(v); }

namespace emulated {

// A double rounded to `bits` significant bits, ties to even, numbers below 2^smallest keeping its spacing.
inline double rounded(double v, int bits, int smallest) {
  if (v == 0 || !std::isfinite(v)) return v;
  int e;
  std::frexp(v, &e);
  return std::ldexp(std::nearbyint(std::ldexp(v, bits - std::max(e, smallest))), std::max(e, smallest) - bits);
}

inline double from_bf16(unsigned short v) {
  const unsigned u = (unsigned)v << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline unsigned short to_bf16(double v) {
  const double r = rounded(v, 8, -125);
  const float f = (float)r;  // exact, or infinite
  unsigned u;
  memcpy(&u, &f, 4);
  return std::isnan(v) ? 0x7FFF : (unsigned short)(u >> 16);
}
inline double from_f16(unsigned short v) {
  const int e = v >> 10 & 31, m = v & 1023;
  const double a = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(1024 + m, e - 25) : std::ldexp(m, -24);
  return v & 0x8000 ? -a : a;
}
inline unsigned short to_f16(double v) {
  const unsigned short sign = std::signbit(v) ? 0x8000 : 0;
  if (std::isnan(v)) return 0x7FFF;
  const double a = rounded(std::fabs(v), 11, -13);
  if (a >= 65536) return sign | 0x7C00;
  if (a < 0x1p-14) return sign | (unsigned short)std::ldexp(a, 24);
  int e;
  const double m = std::frexp(a, &e);  // a = m * 2^e, m in [0.5, 1)
  return sign | (unsigned short)((e + 14) << 10 | ((int)std::ldexp(m, 11) - 1024));
}

inline double from_e4m3(unsigned char v) {
  const int e = v >> 3 & 15, m = v & 7;
  const double a = (v & 0x7F) == 0x7F ? NAN : e ? std::ldexp(8 + m, e - 10) : std::ldexp(m, -9);
  return v & 0x80 ? -a : a;
}
inline unsigned char to_e4m3(double v) {  // what is too large becomes 448
  const unsigned char sign = std::signbit(v) ? 0x80 : 0;
  if (std::isnan(v)) return 0x7F;
  const double a = std::min(rounded(std::fabs(v), 4, -5), 448.0);
  if (a < 0x1p-6) return sign | (unsigned char)std::ldexp(a, 9);
  int e;
  const double m = std::frexp(a, &e);
  return sign | (unsigned char)((e + 6) << 3 | ((int)std::ldexp(m, 4) - 8));
}

}  // namespace emulated

struct __nv_bfloat16 {
  unsigned short bits;
  operator float() const { return (float)emulated::from_bf16(bits); }
};
struct __half {
  unsigned short bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float __bfloat162float(__nv_bfloat16 v) { return (float)emulated::from_bf16(v.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float v) { return {emulated::to_bf16(v)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
inline float __half2float(__half v) { return (float)emulated::from_f16(v.bits); }
inline __half __float2half_rn(float v) { return {emulated::to_f16(v)}; }
