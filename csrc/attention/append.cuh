// The new tokens: norm and rotation of query and key, and rounding of key and value to the cache, by the steps of formats/kv.py.
#pragma once
#include "call.cuh"

namespace fp4::attention {

template <typename F> __device__ __forceinline__ float over_warp(float v, F f) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) v = f(v, shuffle_xor(v, mask));
  return v;
}
__device__ __forceinline__ float warp_sum(float v) {
  return over_warp(v, [](float a, float b) { return a + b; });
}
__device__ __forceinline__ float warp_max(float v) {
  return over_warp(v, [](float a, float b) { return fmaxf(a, b); });
}
__device__ __forceinline__ bool is_finite(float v) { return fabsf(v) <= 3.402823466e38f; }

// A row of D new numbers: this lane's D / 32 neighbours, from number lane * D / 32 on.
template <int D> struct Lanes {
  static constexpr int kEach = D / 32;
  float v[kEach];
};

// A row of the query, of keys or of values, and what it is normalised and rotated by; null: it is not.
template <typename T> struct NewRow {
  const T* x;
  const void *norm, *cos, *sin;
  int64_t angles;  // where its row of cos and sin begins
};

// What this lane reads for a row, all requested at once.
template <int D> struct Requested {
  static constexpr int E = Lanes<D>::kEach;
  float x[E], norm[E], cos[E], sin[E];

  template <typename T, typename W, typename A> __device__ __forceinline__ void load_as(const AttentionParams& p, const NewRow<T>& row) {
    const int first = threadIdx.x % 32 * E;
#pragma unroll
    for (int i = 0; i < E; ++i) x[i] = number(row.x[first + i]);
    if (row.norm)
#pragma unroll
      for (int i = 0; i < E; ++i) norm[i] = number(((const W*)row.norm)[first + i]);
    if (row.cos)
#pragma unroll
      for (int i = 0; i < E; ++i) {
        int of = first + i;
        while (of >= p.angles) of -= p.angles;  // at most once, but for a call that nobody makes
        const int64_t at = row.angles + of;
        cos[i] = first + i < p.rotary ? number(((const A*)row.cos)[at]) : 1.f, sin[i] = first + i < p.rotary ? number(((const A*)row.sin)[at]) : 0.f;
      }
  }
  template <typename T, typename W> __device__ __forceinline__ void load_by_angles(const AttentionParams& p, const NewRow<T>& row) {
    if (p.wide_angles)
      load_as<T, W, float>(p, row);
    else
      load_as<T, W, T>(p, row);
  }
  template <typename T> __device__ __forceinline__ void load(const AttentionParams& p, const NewRow<T>& row) {
    if (p.wide_norms)
      load_by_angles<T, float>(p, row);
    else
      load_by_angles<T, T>(p, row);
  }

 private:
  static __device__ __forceinline__ float number(float v) { return v; }
  static __device__ __forceinline__ float number(__nv_bfloat16 v) { return __bfloat162float(v); }
  static __device__ __forceinline__ float number(__half v) { return __half2float(v); }
};

// The row after RMSNorm and rotation, rounded once to T. buffer: D floats, which hold the result, too.
template <typename T, int D>
__device__ __forceinline__ Lanes<D> prepared(const AttentionParams& p, const NewRow<T>& row, const Requested<D>& r, float* buffer) {
  constexpr int E = Lanes<D>::kEach;
  const int first = threadIdx.x % 32 * E;
  Lanes<D> y;
#pragma unroll
  for (int i = 0; i < E; ++i) y.v[i] = r.x[i];
  if (row.norm) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < E; ++i) squares += y.v[i] * y.v[i];
    const float factor = rsqrtf(warp_sum(squares) / D + p.eps);
#pragma unroll
    for (int i = 0; i < E; ++i) y.v[i] = y.v[i] * factor * (p.norm_offset + r.norm[i]);
  }
  if (row.cos) {
#pragma unroll
    for (int i = 0; i < E; ++i) buffer[first + i] = y.v[i];
    __syncwarp();
    const int half = p.rotary / 2;
    float turned[E];
#pragma unroll
    for (int i = 0; i < E; ++i) {
      const int d = first + i;
      const float other = d < p.rotary ? buffer[d < half ? d + half : d - half] : 0.f;
      turned[i] = y.v[i] * r.cos[i] + (d < half ? -other : other) * r.sin[i];
      if (d >= p.rotary) turned[i] = y.v[i];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < E; ++i) y.v[i] = turned[i];
  }
#pragma unroll
  for (int i = 0; i < E; ++i) buffer[first + i] = y.v[i] = to_float(from_float<T>(y.v[i]));
  return y;
}

// The E4M3 code of v, |v| <= 448, to nearest, ties to even.
__device__ __forceinline__ uint32_t e4m3_of(float v) {
  const float a = fminf(fabsf(v), 448.f);
  const uint32_t bits = __float_as_uint(a), normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3);
  return (a < 0x1p-6f ? (uint32_t)rintf(a * 512.f) : normal) | (__float_as_uint(v) >> 24 & 0x80);
}
// The number of a code without sign.
__device__ __forceinline__ float e4m3_number(uint32_t code) {
  return code >> 3 ? __uint_as_float((code << 20) + (120u << 23)) : (float)code * 0x1p-9f;
}
// The E2M1 code of v: the comparison that a tie passes is the one towards the even code.
__device__ __forceinline__ uint32_t e2m1_of(float v) {
  const float a = fabsf(v);
  const int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.f);
  return (uint32_t)code | (__float_as_uint(v) >> 28 & 8);
}
__device__ __forceinline__ float e2m1_number(uint32_t code) {
  const uint32_t c = code & 7;
  return c < 2 ? 0.5f * (float)c : __uint_as_float((126u + (c >> 1)) << 23 | (c & 1) << 22);
}

// The rows of one KV head of one sequence in a cache.
struct Rows {
  uint8_t* codes;
  __half* scale;
  uint8_t* blocks;
  void* exact;

  template <Kind KIND, int D, typename T> static __device__ __forceinline__ Rows of(const CacheParams& c, int64_t of_all, int slots, int exact_slots) {
    const int64_t row = of_all * slots;
    return {(uint8_t*)c.codes + row * (D / kPacked<KIND>), (__half*)c.scale + row, (uint8_t*)c.blocks + row * (D / 16), (T*)c.exact + of_all * exact_slots * D};
  }
};

// a / b to nearest, where a / b and b * 2^-24 are no denormal numbers, without the branch that those need: work for several rows can be in flight at once.
struct Divisor {
  float by, inverse;
  __device__ __forceinline__ explicit Divisor(float b) : by(b), inverse(reciprocal_approx(b)) { inverse = fmaf(fmaf(-b, inverse, 1.f), inverse, inverse); }
};
__device__ __forceinline__ float operator/(float a, const Divisor& b) {
  const float q = a * b.inverse, closer = fmaf(fmaf(-b.by, q, a), b.inverse, q);
  return fmaf(fmaf(-b.by, closer, a), b.inverse, closer);
}

// A row, rounded: this lane's codes, and the scales, which every lane of the row (scale), or of 16 numbers (block), has.
template <Kind KIND, int D> struct Rounded {
  static constexpr int E = Lanes<D>::kEach, kShare = 16 / E;  // lanes of 16 numbers
  static constexpr int kBytes = E / kPacked<KIND>;
  uint32_t codes[(kBytes + 3) / 4] = {};
  __half scale;
  uint8_t block;

  __device__ __forceinline__ explicit Rounded(const Lanes<D>& x) {
    float amax = 0, bad = 0;
#pragma unroll
    for (int i = 0; i < E; ++i) amax = fmaxf(amax, fabsf(x.v[i])), bad = is_finite(x.v[i]) ? bad : 1.f;
    amax = warp_max(amax);
    const bool finite = warp_max(bad) == 0, some = finite && amax > 0;
    scale = __float2half_rn(finite ? some ? fminf(fmaxf(amax / Divisor(kTop<KIND>), kLeastScale), kMostScale) : 0.f : __uint_as_float(0x7FC00000));
    const Divisor divisor(some ? __half2float(scale) : 1.f);
    float y[E];
#pragma unroll
    for (int i = 0; i < E; ++i) y[i] = finite ? x.v[i] / divisor : 0.f;
    if constexpr (KIND != kNVFP4) {
#pragma unroll
      for (int i = 0; i < E; ++i)
        codes[i / 4] |= (KIND == kFP8 ? e4m3_of(y[i]) : (uint32_t)(int)fminf(fmaxf(rintf(y[i]), -127.f), 127.f) & 255) << (8 * (i % 4));
    } else {
      float most = 0;
#pragma unroll
      for (int i = 0; i < E; ++i) most = fmaxf(most, fabsf(y[i]));
#pragma unroll
      for (int mask = 1; mask < kShare; mask *= 2) most = fmaxf(most, shuffle_xor(most, mask));
      auto code_of = [](float s) { return s > 0 ? (uint32_t)most_of(least_of((int)e4m3_of(s), 126), 1) : 0u; };
      const uint32_t six = code_of(most / Divisor(6.f)), four = code_of(most * 0.25f);
      auto error_of = [&](uint32_t code) {
        const float s = e4m3_number(code);
        const Divisor by(s > 0 ? s : 1.f);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < E; ++i) {
          const float d = fabsf(y[i]) - e2m1_number(e2m1_of(y[i] / by)) * s;
          sum += d * d;
        }
#pragma unroll
        for (int mask = 1; mask < kShare; mask *= 2) sum += shuffle_xor(sum, mask);
        return sum;
      };
      const float error_of_four = error_of(four), error_of_six = error_of(six);
      block = (uint8_t)(error_of_four < error_of_six ? four : six);
      const float s = e4m3_number(block);
      const Divisor by(s > 0 ? s : 1.f);
#pragma unroll
      for (int i = 0; i < E; ++i) codes[i / 8] |= e2m1_of(y[i] / by) << (4 * (i % 8));
    }
  }

  // By a scale that is given: sizes beyond its range become the largest, NaN stays.
  __device__ __forceinline__ Rounded(const Lanes<D>& x, float by) {
    static_assert(KIND == kFP8);
#pragma unroll
    for (int i = 0; i < E; ++i) {
      const float y = x.v[i] / by;
      codes[i / 4] |= (y == y ? e4m3_of(y) : 0x7Fu) << (8 * (i % 4));
    }
  }

  // Whole words, for which lanes give each other what they have. SCALED: and the scale.
  template <bool SCALED = true> __device__ __forceinline__ void store(const Rows& to, int row) const {
    const int lane = threadIdx.x % 32;
    uint32_t* at = (uint32_t*)(to.codes + (int64_t)row * (D / kPacked<KIND>));
    if constexpr (kBytes >= 4) {
#pragma unroll
      for (int i = 0; i < kBytes / 4; ++i) at[lane * (kBytes / 4) + i] = codes[i];
    } else {
      const uint32_t word = gathered<4 / kBytes, 8 * kBytes>(codes[0], 1);
      if (lane < 8 * kBytes) at[lane] = word;
    }
    if constexpr (KIND == kNVFP4) {
      const uint32_t word = gathered<4, 8>(block, kShare);
      if (lane < D / 64) ((uint32_t*)(to.blocks + (int64_t)row * (D / 16)))[lane] = word;
    }
    if (SCALED && lane == 0) to.scale[row] = scale;
  }

 private:
  // Of COUNT values, each `apart` lanes from the one before it: those of lane i begin at the (i * COUNT)-th.
  template <int COUNT, int BITS> static __device__ __forceinline__ uint32_t gathered(uint32_t v, int apart) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) word |= shuffle_from(v, (threadIdx.x % 32 * COUNT + i) * apart % 32) << (BITS * i);
    return word;
  }
};

}  // namespace fp4::attention
