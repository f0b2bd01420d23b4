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

unsigned __byte_perm(unsigned a, unsigned b, unsigned selector);

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

// In device.cpp, which is optimised and not instrumented: what a GPU does in one instruction.
double from_bf16(unsigned short v);
unsigned short to_bf16(double v);
double from_f16(unsigned short v);
unsigned short to_f16(double v);
double from_e4m3(unsigned char v);
unsigned char to_e4m3(double v);  // what is too large becomes 448

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
