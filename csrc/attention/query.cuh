// Rows of the query in the registers of a warp: lane 4g + t has, of row g (and g + 8), the channels that it multiplies, so that norm, rotation and rounding cross
// no other lanes than the four of a row.
#pragma once
#include "attend.cuh"

namespace fp4::attention {

template <typename T> __device__ __forceinline__ void numbers_of(float (&to)[8], const uint4& v) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = to_float(((const T*)words)[i]);
}

// Chunk c of a row has eight channels from channel(c) on. Those of a pair that is rotated lie in two chunks of one lane; but in chunk c of lanes t and t ^ 2 if
// they are 32 apart and keys are codes.
template <typename F> struct QueryRows {
  using T = typename F::T;
  static constexpr int D = F::D, kChunks = D / 32;
  static constexpr bool kCodes = F::kKeys != kSame;
  uint4 rows[F::kTiles][kChunks], norm[kChunks], cos[kChunks], sin[kChunks];

  static __device__ __forceinline__ int channel(int c) {
    const int t = threadIdx.x % 4;
    if constexpr (kCodes)
      return key_channel<F::kKeys, D>(t, 8 * c);
    else
      return exact_channel<D>(t, 8 * c);
  }

  // Weights are nobody's result: before the wait for the kernel ahead.
  __device__ __forceinline__ void request_norm(const AttentionParams& p) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) norm[c] = load_or_zero((const T*)p.q_norm + channel(c), p.q_norm);
  }
  __device__ __forceinline__ void request(const AttentionParams& p, int sequence, int kv_head, int group) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < F::kTiles; ++i) {
      const int row = 8 * i + g;
      const T* from = (const T*)p.query + sequence * p.query_strides[0] + (kv_head * group + row) * p.query_strides[1];
#pragma unroll
      for (int c = 0; c < kChunks; ++c) rows[i][c] = load_or_zero(from + channel(c), row < group);
    }
    const int64_t angles = sequence * p.angle_strides[0];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int64_t at = angles + (channel(c) < p.angles ? channel(c) : channel(c) - p.angles);  // angles are those of all channels or of a half
      cos[c] = load_or_zero((const T*)p.cos + at, channel(c) < p.rotary), sin[c] = load_or_zero((const T*)p.sin + at, channel(c) < p.rotary);
    }
  }

  // Row i after RMSNorm and rotation, rounded once to T.
  __device__ __forceinline__ void prepare(float (&v)[kChunks][8], int i, const AttentionParams& p) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) numbers_of<T>(v[c], rows[i][c]);
    if (p.q_norm) normalise(v, p);
    if (p.rotary == 128) turn<64>(v);
    if (p.rotary == 64) turn<32>(v);
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int j = 0; j < 8; ++j) v[c][j] = to_float(from_float<T>(v[c][j]));
  }

 private:
  __device__ __forceinline__ void normalise(float (&v)[kChunks][8], const AttentionParams& p) const {
    float squares = 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int j = 0; j < 8; ++j) squares += v[c][j] * v[c][j];
    squares += shuffle_xor(squares, 1), squares += shuffle_xor(squares, 2);
    const float factor = rsqrtf(squares / D + p.eps);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float w[8];
      numbers_of<T>(w, norm[c]);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[c][j] = v[c][j] * factor * (p.norm_offset + w[j]);
    }
  }
  // HALF: how many channels lie between the two of a pair.
  template <int HALF> __device__ __forceinline__ void turn(float (&v)[kChunks][8]) const {
    if constexpr (2 * HALF <= D) {
      constexpr int kTurned = 2 * HALF / 32, kApart = kCodes && HALF == 32 ? 0 : kTurned / 2;  // chunks that are turned; from one of a pair to the other
      float turned[kTurned][8];
#pragma unroll
      for (int c = 0; c < kTurned; ++c) {
        float cosine[8], sine[8];
        numbers_of<T>(cosine, cos[c]), numbers_of<T>(sine, sin[c]);
        const bool first = kApart ? c < kApart : threadIdx.x % 4 < 2;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float other = kApart ? v[(c + kApart) % kTurned][j] : shuffle_xor(v[c][j], 2);
          turned[c][j] = v[c][j] * cosine[j] + (first ? -other : other) * sine[j];
        }
      }
#pragma unroll
      for (int c = 0; c < kTurned; ++c)
#pragma unroll
        for (int j = 0; j < 8; ++j) v[c][j] = turned[c][j];
    }
  }
};

// The query as products take it, four registers for each chunk, and what scores of rows g and g + 8 are multiplied by and get added: as Query of attend.cuh.
template <typename F> struct QueryFragments {
  static constexpr int kChunks = F::D / 32;
  uint4 of[F::kTiles][kChunks];
  Rest<F> rest;

  // mean: of keys; null: what does not depend on the token is not wanted.
  __device__ __forceinline__ QueryFragments(const QueryRows<F>& rows, const AttentionParams& p, const float* mean) {
#pragma unroll
    for (int i = 0; i < F::kTiles; ++i) {
      float v[kChunks][8];
      rows.prepare(v, i, p);
      rest.factor[i] = p.scale, rest.shift[i] = 0, rest.position[i] = 0;
      if constexpr (F::kKeys == kSame)
        pack_row<typename F::T>(of[i], v, 1.f);
      else
        round_row(i, v, p, mean);
    }
  }
  // Number i of those that score() of attend.cuh asks for.
  __device__ __forceinline__ uint4 operator()(int i) const {
    if constexpr (F::kKeys == kINT8) return of[i / kChunks][i % kChunks];
    const uint4 a = of[0][i / 2], b = F::kTiles == 2 ? of[F::kTiles - 1][i / 2] : uint4{0, 0, 0, 0};
    return i % 2 ? uint4{a.z, b.z, a.w, b.w} : uint4{a.x, b.x, a.y, b.y};
  }

 private:
  template <typename T> static __device__ __forceinline__ void pack_row(uint4 (&to)[kChunks], const float (&v)[kChunks][8], float up) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      to[c] = make_uint4(pack<T>(v[c][0] * up, v[c][1] * up), pack<T>(v[c][2] * up, v[c][3] * up), pack<T>(v[c][4] * up, v[c][5] * up),
                         pack<T>(v[c][6] * up, v[c][7] * up));
  }
  __device__ __forceinline__ void round_row(int i, const float (&v)[kChunks][8], const AttentionParams& p, const float* mean) {
    uint32_t most = 0;  // bits of the largest size: those of Inf and NaN are above all others
    float shift = 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t bits = __float_as_uint(v[c][j]) & 0x7FFFFFFF;
        most = most > bits ? most : bits;
        if (mean) shift += v[c][j] * mean[QueryRows<F>::channel(c) + j];
      }
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
      const uint32_t other = shuffle_in_quad(most, t ^ mask);
      most = most > other ? most : other;
      if (mean) shift += shuffle_xor(shift, mask);
    }
    const bool finite = most < 0x7F800000;
    float factor;
    const float up = Query<F>::scale_of(finite ? __uint_as_float(most) : 0.f, finite, factor);
    rest.factor[i] = factor * p.scale, rest.shift[i] = shift * p.scale;
    if constexpr (F::kKeys == kINT8) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        uint32_t high[2], low[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          uint32_t n[4], m[4];  // whole numbers in the low 16 bits, and with 128 added, for the high byte
#pragma unroll
          for (int b = 0; b < 4; ++b) n[b] = __float_as_uint(fmaf(v[c][4 * h + b], up, 12582912.f)), m[b] = n[b] + 128;  // 1.5 * 2^23
          low[h] = __byte_perm(__byte_perm(n[0], n[1], 0x0040), __byte_perm(n[2], n[3], 0x0040), 0x5410);
          high[h] = __byte_perm(__byte_perm(m[0], m[1], 0x0051), __byte_perm(m[2], m[3], 0x0051), 0x5410);
        }
        of[i][c] = make_uint4(high[0], low[0], high[1], low[1]);
      }
    } else {
      pack_row<__half>(of[i], v, up);
    }
  }
};

}  // namespace fp4::attention
