// Attention of up to 16 rows of the query to 16 tokens at a time, by one warp: fragments of the query, loads, scores, softmax, output. call.cuh says which lane
// reads what.
#pragma once
#include "call.cuh"

namespace fp4::attention {

constexpr float kNone = -INFINITY;

// --- fragments of the query: A of each product of the scores, four registers a lane and step, in shared memory ----------------------------------------

// Which channel number i of those that lane 4g + t multiplies is: 16 bytes of codes, or 8, at a time, so that the four lanes of a token read 64 bytes in a row.
template <Kind KIND, int D> __device__ __forceinline__ int key_channel(int t, int i) {
  constexpr int kRun = least_of(D / 4, 16 * kPacked<KIND>);
  return i / kRun * (4 * kRun) + t * kRun + i % kRun;
}
template <int D> __device__ __forceinline__ int exact_channel(int t, int i) { return i / 8 * 32 + t * 8 + i % 8; }

// Scores are these products times `factor` of the row, times the token's scale.
//
// INT8 keys: a row of the query in 16 bits, high bytes as rows 0 to 7 of the product and low bytes as rows 8 to 15: exact products of integers.
// Others: the query in float16, times a power of two that brings the row below 2^15.
template <typename F> struct Query {
  static constexpr int D = F::D;
  static constexpr int kFragments = F::kKeySteps * (F::kKeys == kINT8 ? F::kTiles : 1);  // of 32 lanes x 16 bytes
  static constexpr int kExactFragments = F::kExact ? D / 16 : 0;
  static constexpr int kBytes = (kFragments + kExactFragments) * 512;

  // rows: ROWS of D floats; factor: of each row, made by a warp that has the row.
  static __device__ __forceinline__ float scale_of(float amax, bool finite, float& factor) {
    if constexpr (F::kKeys == kINT8) {
      factor = finite ? amax / 32512.f : __uint_as_float(0x7FC00000);
      return amax > 0 ? 32512.f / amax : 0.f;
    } else {
      const uint32_t exponent = least_of(most_of((int)(__float_as_uint(amax) >> 23), 15), 254);
      factor = __uint_as_float((exponent - 14) << 23) * kUnit<F::kKeys>;
      return __uint_as_float((268 - exponent) << 23);  // 2^(14 - e)
    }
  }

  static __device__ __forceinline__ void fill(uint8_t* fragments, const float* rows, const float* up) {
    uint4* to = (uint4*)fragments;
    for (int i = threadIdx.x; i < kFragments * 32; i += F::kThreads) {
      const int step = i / 32 % F::kKeySteps, tile = i / 32 / F::kKeySteps, g = i % 32 / 4, t = i % 4;
      if constexpr (F::kKeys == kINT8) {
        uint32_t high[2], low[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          high[h] = low[h] = 0;
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            const int row = 8 * tile + g, v = (int)rintf(rows[row * D + key_channel<kINT8, D>(t, 8 * step + 4 * h + b)] * up[row]), upper = (v + 128) >> 8;
            high[h] |= (uint32_t)(upper & 255) << (8 * b), low[h] |= (uint32_t)((v - upper * 256) & 255) << (8 * b);
          }
        }
        to[i] = make_uint4(high[0], low[0], high[1], low[1]);
      } else {
        auto pair = [&](int row, int half) {
          if (row >= F::ROWS) return 0u;
          // FP8: neighbours. NVFP4: code and code + 4 of a word of 8.
          const int first = F::kKeys == kFP8 ? 4 * step + 2 * half : step / 2 * 8 + step % 2 * 2 + half, second = first + (F::kKeys == kFP8 ? 1 : 4);
          const float a = rows[row * D + key_channel<F::kKeys, D>(t, first)] * up[row], b = rows[row * D + key_channel<F::kKeys, D>(t, second)] * up[row];
          return pack_f16x2(a, b);
        };
        to[i] = make_uint4(pair(g, 0), pair(g + 8, 0), pair(g, 1), pair(g + 8, 1));
      }
    }
    for (int i = threadIdx.x; i < kExactFragments * 32; i += F::kThreads) {
      const int step = i / 32, g = i % 32 / 4, t = i % 4;
      auto pair = [&](int row, int half) {
        if (row >= F::ROWS) return 0u;
        const float* at = rows + row * D + exact_channel<D>(t, 4 * step + 2 * half);
        return pack<typename F::T>(at[0], at[1]);
      };
      to[kFragments * 32 + i] = make_uint4(pair(g, 0), pair(g + 8, 0), pair(g, 1), pair(g + 8, 1));
    }
  }
};

// --- loads ----------------------------------------------------------------------------------------------------------------------------------------------

template <int WORDS> __device__ __forceinline__ void load_words(uint32_t (&to)[WORDS], const uint8_t* from, int stride) {
  if constexpr (WORDS == 1) {
    to[0] = *(const uint32_t*)from;
  } else if constexpr (WORDS == 2) {
    const uint2 v = *(const uint2*)from;
    to[0] = v.x, to[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < WORDS / 4; ++i) {
      const uint4 v = *(const uint4*)(from + i * stride);
      to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
    }
  }
}

// Where the 16 tokens from position `at` on lie: token i in row `slot + i`, or, behind the end of a ring, `slots` rows before. Beyond `count` tokens the last one
// stands in.
struct Tokens {
  int slot, count, slots;
  __device__ __forceinline__ int row(int i) const {
    const int r = slot + least_of(i, count - 1);
    return r >= slots ? r - slots : r;
  }
  __device__ __forceinline__ bool in_a_row() const { return count >= kTokens && slot + kTokens <= slots; }
  static __device__ __forceinline__ uint32_t byte(const uint8_t* p) { return load_8(p); }
  static __device__ __forceinline__ uint32_t pair(const void* p) { return load_16(p); }
};
// The same where all 16 lie one behind the other: addresses differ by constants.
struct InARow {
  int slot;
  __device__ __forceinline__ int row(int i) const { return slot + i; }
  static __device__ __forceinline__ uint32_t byte(const uint8_t* p) { return load_8(p); }
  static __device__ __forceinline__ uint32_t pair(const void* p) { return load_16(p); }
};
// A copy of them in shared memory, of which `count` are there.
struct InShared {
  int count;
  __device__ __forceinline__ int row(int i) const { return least_of(i, count - 1); }
  static __device__ __forceinline__ uint32_t byte(const uint8_t* p) { return *p; }
  static __device__ __forceinline__ uint32_t pair(const void* p) { return *(const uint16_t*)p; }
};
__device__ __forceinline__ Tokens tokens_of(const AttentionParams& p, int at, int end) { return {slot_of(p, at), end - at, p.slots}; }

// Token j of the four of lane t, of a tile.
__device__ __forceinline__ int own_token(int t, int j) { return j / 2 * 8 + 2 * t + j % 2; }

// This lane's part of the keys of a tile, and the scales of the tokens of its scores.
template <typename F> struct Keys {
  static constexpr int kBytes = F::D / 4 / kPacked<F::kKeys>, kWords = kBytes / 4, kBlocks = F::kKeys == kNVFP4 ? (F::D > 128 ? 2 : 1) : 0;
  uint32_t codes[2][kWords], blocks[2][kBlocks ? kBlocks : 1], scale[4];

  template <typename Where> __device__ __forceinline__ void load_from(const Rows& from, const Where& tokens) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tokens.row(8 * i + g);
      load_words(codes[i], from.codes + row * (F::D / kPacked<F::kKeys>) + t * least_of(kBytes, 16), 64);
      if constexpr (F::kKeys == kNVFP4) {
        const uint8_t* at = from.blocks + row * (F::D / 16);
        if constexpr (F::D == 64)
          blocks[i][0] = tokens.byte(at + t);
        else
#pragma unroll
          for (int c = 0; c < kBlocks; ++c) blocks[i][c] = tokens.pair(at + 8 * c + 2 * t);
      }
    }
    if constexpr (F::kScaled)
#pragma unroll
      for (int j = 0; j < 4; ++j) scale[j] = tokens.pair(from.scale + tokens.row(own_token(t, j)));
  }
};

// Of the values. blocks[j]: of token j, one or two bytes.
template <typename F> struct Values {
  static constexpr int kBytes = F::D / 8 / kPacked<F::kValues>, kWords = kBytes / 4;
  uint32_t codes[4][kWords], blocks[F::kValues == kNVFP4 ? 4 : 1], scale[4];

  template <typename Where> __device__ __forceinline__ void load_from(const Rows& from, const Where& tokens) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = tokens.row(own_token(t, j));
      load_words(codes[j], from.codes + row * (F::D / kPacked<F::kValues>) + g * kBytes, 16);
      if constexpr (F::kValues == kNVFP4) {
        const uint8_t* at = from.blocks + row * (F::D / 16);
        blocks[j] = F::D == 64 ? tokens.byte(at + g / 2) : F::D == 128 ? tokens.byte(at + g) : tokens.pair(at + 2 * g);
      }
      if constexpr (F::kScaled) scale[j] = tokens.pair(from.scale + row);
    }
  }
};

// Loads Keys or Values.
template <typename Part> __device__ __forceinline__ void load(Part& part, const Rows& from, const Tokens& tokens) {
  if (tokens.in_a_row())
    part.load_from(from, InARow{tokens.slot});
  else
    part.load_from(from, tokens);
}

// --- products -------------------------------------------------------------------------------------------------------------------------------------------

// Two E4M3 bytes of v, and the two above them -> pairs of float16 numbers times 1 / kUnit<kFP8>.
__device__ __forceinline__ void numbers_of_fp8(uint32_t v, uint32_t& low, uint32_t& high) {
#if FP4_ARCH >= 89
  unpack_e4m3(v, low, high);
#else
  const uint32_t a = __byte_perm(v, 0, 0x1404), b = __byte_perm(v, 0, 0x3424);  // each byte above a zero
  low = (a & 0x80008000u) | (a >> 1 & 0x3F803F80u), high = (b & 0x80008000u) | (b >> 1 & 0x3F803F80u);
#endif
}

// Scores of this lane's rows (g, g + 8) with its four tokens, without factors. fragment(i): number i of those of Query.
template <typename F, typename Fragment> __device__ __forceinline__ void score(float (&s)[F::kTiles][4], const Keys<F>& k, const Fragment& fragment) {
  if constexpr (F::kKeys == kINT8) {
#pragma unroll
    for (int tile = 0; tile < F::kTiles; ++tile) {
      int c[2][4] = {};
#pragma unroll
      for (int step = 0; step < F::kKeySteps; ++step) {
        const uint4 a = fragment(tile * F::kKeySteps + step);
#pragma unroll
        for (int i = 0; i < 2; ++i) mma_int8(c[i], a.x, a.y, a.z, a.w, k.codes[i][2 * step], k.codes[i][2 * step + 1]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) s[tile][j] = (float)(c[j / 2][j % 2] * 256 + c[j / 2][j % 2 + 2]);
    }
  } else {
    float c[2][4] = {};
#pragma unroll
    for (int word = 0; word < Keys<F>::kWords; ++word) {
      uint32_t b[2][4];  // of a word: two registers for each of its products
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if constexpr (F::kKeys == kFP8) {
          numbers_of_fp8(k.codes[i][word], b[i][0], b[i][1]);
        } else {
          const int chunk = word / 4, byte = F::D == 64 ? 0 : word / 2 % 2;  // 16 codes have a scale
          decode<__half>(k.codes[i][word], Numbers<__half>::scales((k.blocks[i][chunk] >> (8 * byte) & 255) * 0x101), b[i]);
        }
      constexpr int kSteps = F::kKeys == kFP8 ? 1 : 2;
#pragma unroll
      for (int h = 0; h < kSteps; ++h) {
        const uint4 a = fragment(word * kSteps + h);
#pragma unroll
        for (int i = 0; i < 2; ++i) mma_m16n8k16<__half>(c[i], a.x, a.y, a.z, a.w, b[i][2 * h], b[i][2 * h + 1]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < F::kTiles; ++tile)
#pragma unroll
      for (int j = 0; j < 4; ++j) s[tile][j] = c[j / 2][j % 2 + 2 * tile];
  }
}

// What the outputs of a tile's rows are multiplied by, because their peaks have risen.
template <int TILES> struct Shrink {
  float by[TILES];
  bool any = false;  // does any row of this warp change?
};

// The running softmax, base 2, and the output of this lane. Weights are exp2(score + log2(value scale) - peak), so that they are at most 1 and the scales of
// values need no other place; `total` sums them without the scales, over this lane's tokens only.
template <typename F> struct State {
  float peak[F::kTiles], total[F::kTiles];
  float out[F::D / 16][F::kTiles][4];  // [m][..]: channels 2m and 2m + 1 of the lane's, rows 2t and 2t + 1 of a tile: (0, 0) (0, 1) (1, 0) (1, 1)

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int tile = 0; tile < F::kTiles; ++tile) {
      peak[tile] = kNone, total[tile] = 0;
#pragma unroll
      for (int m = 0; m < F::D / 16; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[m][tile][i] = 0;
    }
  }

  // s: scores in base 2. scale: of the values of the four tokens. used: which of them are attended to; ALL: every one. -> their weights.
  template <bool ALL>
  __device__ __forceinline__ Shrink<F::kTiles> add_scores(float (&s)[F::kTiles][4], const float (&scale)[4], const bool (&used)[F::kTiles][4]) {
    float logarithm[4], inverse[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) logarithm[j] = log2_approx(scale[j]), inverse[j] = reciprocal_approx(scale[j]);
    Shrink<F::kTiles> shrink;
    bool changed = false;
#pragma unroll
    for (int tile = 0; tile < F::kTiles; ++tile) {
      float most = peak[tile];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        s[tile][j] = ALL || used[tile][j] ? s[tile][j] + logarithm[j] : kNone;
        most = fmaxf(most, s[tile][j]);
      }
      most = fmaxf(most, shuffle_xor(most, 1));
      most = fmaxf(most, shuffle_xor(most, 2));
      const float reference = most == kNone ? 0.f : most;  // -inf - -inf is NaN
      shrink.by[tile] = exp2_approx(peak[tile] - reference);
      changed |= peak[tile] != most;
      peak[tile] = most;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        s[tile][j] = exp2_approx(s[tile][j] - reference);
        sum += ALL || used[tile][j] ? s[tile][j] * inverse[j] : 0.f;
      }
      total[tile] = total[tile] * shrink.by[tile] + sum;
    }
    shrink.any = any_lane(changed);
    return shrink;
  }

  __device__ __forceinline__ void multiply(float by) {
#pragma unroll
    for (int m = 0; m < F::D / 16; ++m)
#pragma unroll
      for (int tile = 0; tile < F::kTiles; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[m][tile][i] *= by;
  }

  // Before the values of the tile are added. Rows of the output lie in other lanes than those of the scores.
  __device__ __forceinline__ void apply(const Shrink<F::kTiles>& shrink) {
    if (!shrink.any || FP4_FAULT(OLD_PEAK_KEPT)) return;
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < F::kTiles; ++tile) {
      const float first = shuffle_from(shrink.by[tile], 8 * t), second = shuffle_from(shrink.by[tile], 8 * t + 4);
#pragma unroll
      for (int m = 0; m < F::D / 16; ++m) {
        out[m][tile][0] *= first, out[m][tile][1] *= second;
        out[m][tile][2] *= first, out[m][tile][3] *= second;
      }
    }
  }

  // a: numbers of channels 2m (a0, a2) and 2m + 1 (a1, a3) of tokens (0, 1) and (2, 3).
  template <typename T>
  __device__ __forceinline__ void add_product(int m, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, const uint32_t (&weights)[F::kTiles][2]) {
#pragma unroll
    for (int tile = 0; tile < F::kTiles; ++tile) mma_m16n8k16<T>(out[m][tile], a0, a1, a2, a3, weights[tile][0], weights[tile][1]);
  }

  // w: eight neighbouring channels of each of four tokens, of products m to m + 3.
  template <typename T> __device__ __forceinline__ void add_numbers(int m, const uint4 (&w)[4], const uint32_t (&weights)[F::kTiles][2]) {
    auto product = [&](int m, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
      add_product<T>(m, __byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410), __byte_perm(c, d, 0x7632), weights);
    };
    product(m, w[0].x, w[1].x, w[2].x, w[3].x);
    product(m + 1, w[0].y, w[1].y, w[2].y, w[3].y);
    product(m + 2, w[0].z, w[1].z, w[2].z, w[3].z);
    product(m + 3, w[0].w, w[1].w, w[2].w, w[3].w);
  }

  // value(chunk, j): 16 bytes of numbers in T of own_token(t, j).
  template <typename T, typename Value> __device__ __forceinline__ void add_exact(const float (&p)[F::kTiles][4], const Value& value) {
    uint32_t weights[F::kTiles][2];
#pragma unroll
    for (int tile = 0; tile < F::kTiles; ++tile) weights[tile][0] = pack<T>(p[tile][0], p[tile][1]), weights[tile][1] = pack<T>(p[tile][2], p[tile][3]);
#pragma unroll
    for (int chunk = 0; chunk < F::D / 64; ++chunk) {
      uint4 w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) w[j] = value(chunk, j);
      add_numbers<T>(4 * chunk, w, weights);
    }
  }

  __device__ __forceinline__ void add_values(const Values<F>& v, const float (&p)[F::kTiles][4]) {
    uint32_t weights[F::kTiles][2];
#pragma unroll
    for (int tile = 0; tile < F::kTiles; ++tile) weights[tile][0] = pack_f16x2(p[tile][0], p[tile][1]), weights[tile][1] = pack_f16x2(p[tile][2], p[tile][3]);
#pragma unroll
    for (int word = 0; word < Values<F>::kWords; ++word) {
      if constexpr (F::kValues == kNVFP4) {
        const int byte = word / 2;  // of the scales: 16 codes have one
        uint32_t numbers[2][2][4];  // [pair of tokens][4 codes of 8]
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t a = v.codes[2 * h][word], b = v.codes[2 * h + 1][word];
          const uint32_t scales = Numbers<__half>::scales((v.blocks[2 * h] >> (8 * byte) & 255) | (v.blocks[2 * h + 1] >> (8 * byte) & 255) << 8);
          decode<__half>(__byte_perm(a, b, 0x5410), scales, numbers[h][0]);  // the same four channels of both tokens
          decode<__half>(__byte_perm(a, b, 0x7632), scales, numbers[h][1]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int half = i / 2, c = i % 2 * 2;
          add_product<__half>(4 * word + i, numbers[0][half][c], numbers[0][half][c + 1], numbers[1][half][c], numbers[1][half][c + 1], weights);
        }
      } else {
        uint32_t numbers[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t a = v.codes[2 * h][word], b = v.codes[2 * h + 1][word];
          numbers_of_fp8(__byte_perm(a, b, 0x5140), numbers[h][0], numbers[h][1]);
          numbers_of_fp8(__byte_perm(a, b, 0x7362), numbers[h][2], numbers[h][3]);
        }
        add_product<__half>(2 * word, numbers[0][0], numbers[0][1], numbers[1][0], numbers[1][1], weights);
        add_product<__half>(2 * word + 1, numbers[0][2], numbers[0][3], numbers[1][2], numbers[1][3], weights);
      }
    }
  }
};

// --- a tile ---------------------------------------------------------------------------------------------------------------------------------------------

// What the rows of this lane need for every tile.
template <typename F> struct Rest {
  float factor[F::kTiles];  // of a row's scores
  float shift[F::kTiles];   // its product with the mean of keys
  int position[F::kTiles];  // of its query
};

// (Does row `tile` of this lane attend to the token at `at`?) EXACT: to its exact copy.
template <typename F, bool EXACT> __device__ __forceinline__ bool attends(const AttentionParams& p, int query, int at) {
  bool used = at <= query && (!p.window || at > query - p.window);
  if (F::kExact) used = used && (at < kFirst || at > query - kLast) == EXACT;
  return used;
}

// Base 2: softcap * tanh(s / softcap).
template <typename F> __device__ __forceinline__ void cap(const AttentionParams& p, float (&s)[F::kTiles][4]) {
  if (p.softcap <= 0) return;
  const float by = __fdividef(2.f, p.softcap);
#pragma unroll
  for (int tile = 0; tile < F::kTiles; ++tile)
#pragma unroll
    for (int j = 0; j < 4; ++j) s[tile][j] = p.softcap * (1.f - __fdividef(2.f, 1.f + __expf(s[tile][j] * by)));
}

__device__ __forceinline__ bool unmasked(const AttentionParams& p, const uint8_t* mask, int at) {
  return !mask || (at < p.mask_length && mask[at * p.mask_strides[1]]);
}

// Scores of products, in base 2; scale: of the values of the four tokens, key_scale and value_scale as they are stored.
template <typename F>
__device__ __forceinline__ void finish_scores(float (&s)[F::kTiles][4], float (&scale)[4], const uint32_t (&key_scale)[4], const uint32_t (&value_scale)[4],
                                              const AttentionParams& p, const Rest<F>& rest) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float of_key = 1.f;
    scale[j] = kUnit<F::kValues>;
    if constexpr (F::kScaled) {
      const float value = half_of(value_scale[j], false);
      of_key = half_of(key_scale[j], false);
      scale[j] = (value == 0 ? kLeastScale : value) * kUnit<F::kValues>;  // zero: a row of zeros
    }
#pragma unroll
    for (int tile = 0; tile < F::kTiles; ++tile) s[tile][j] = s[tile][j] * (rest.factor[tile] * of_key) + rest.shift[tile];
  }
  cap<F>(p, s);
}

// The weights of the tokens from `at` to `end`, at most 16 of them, in s. mask: of the sequence, or null. ALL: every row attends to 16 tokens.
template <typename F, bool ALL>
__device__ __forceinline__ Shrink<F::kTiles> weigh(State<F>& state, float (&s)[F::kTiles][4], const Keys<F>& k, const uint32_t (&value_scale)[4],
                                                   const AttentionParams& p, const Rest<F>& rest, const uint8_t* mask, int at, int end) {
  const int t = threadIdx.x % 4;
  float scale[4];
  bool used[F::kTiles][4];
  finish_scores<F>(s, scale, k.scale, value_scale, p, rest);
  if constexpr (!ALL)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int token = at + own_token(t, j);
      const bool there = token < end && unmasked(p, mask, token);
#pragma unroll
      for (int tile = 0; tile < F::kTiles; ++tile) used[tile][j] = there && attends<F, false>(p, rest.position[tile], token);
    }
  return state.template add_scores<ALL>(s, scale, used);
}

// Do all rows attend to the rounded copies of all 16 tokens from `at` on?
template <typename F> __device__ __forceinline__ bool attends_to_all(const AttentionParams& p, const Place& place, const uint8_t* mask, int at, int end) {
  const int last = at + kTokens - 1;
  return !mask && last < end && last <= place.held - (F::kExact ? kLast : 0) && (!p.window || at > place.held + p.queries - 1 - p.window);
}

// Attention to exact tokens: number i of them is the i-th of the first ones, then the i-th of those from kLast - 1 before the first query on.
template <typename F>
__device__ __forceinline__ void attend_exact(State<F>& state, const AttentionParams& p, const Place& place, const Rows& keys, const Rows& values,
                                             const uint8_t* fragments, const Rest<F>& rest, const uint8_t* mask, int first) {
  using T = typename F::T;
  constexpr int D = F::D;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, end = place.held + p.queries;
  auto position_of = [&](int i) { return i < kFirst ? i : place.held - kLast + 1 + i - kFirst; };
  auto is_there = [&](int i) {
    const int at = position_of(i);
    return at < end && (i < kFirst || at >= kFirst) && (!p.window || at > place.held - p.window) && unmasked(p, mask, at);
  };
  const uint4* q = (const uint4*)fragments + Query<F>::kFragments * 32 + threadIdx.x % 32;
  uint4 k[2][D / 32];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool there = is_there(first + 8 * i + g);
    const T* row = (const T*)keys.exact + (there ? exact_slot(p, position_of(first + 8 * i + g)) : 0) * D;
#pragma unroll
    for (int chunk = 0; chunk < D / 32; ++chunk) k[i][chunk] = load_or_zero(row + exact_channel<D>(t, 8 * chunk), there);
  }
  bool used[F::kTiles][4], there[4];
  const T* row[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int i = first + own_token(t, j);
    there[j] = is_there(i);
    row[j] = (const T*)values.exact + (there[j] ? exact_slot(p, position_of(i)) : 0) * D + g * (D / 8);
#pragma unroll
    for (int tile = 0; tile < F::kTiles; ++tile) used[tile][j] = there[j] && attends<F, true>(p, rest.position[tile], position_of(i));
  }
  constexpr int kAhead = D <= 128 ? D / 64 : 1;  // chunks of values that are requested before the scores are there
  uint4 v[kAhead][4];
#pragma unroll
  for (int chunk = 0; chunk < kAhead; ++chunk)
#pragma unroll
    for (int j = 0; j < 4; ++j) v[chunk][j] = load_or_zero(row[j] + 8 * chunk, there[j]);
  float c[2][4] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int chunk = 0; chunk < D / 32; ++chunk) {
      const uint4 low = q[(2 * chunk) * 32], high = q[(2 * chunk + 1) * 32];
      mma_m16n8k16<T>(c[i], low.x, low.y, low.z, low.w, k[i][chunk].x, k[i][chunk].y);
      mma_m16n8k16<T>(c[i], high.x, high.y, high.z, high.w, k[i][chunk].z, k[i][chunk].w);
    }
  float s[F::kTiles][4];
  const float ones[4] = {1.f, 1.f, 1.f, 1.f};
#pragma unroll
  for (int tile = 0; tile < F::kTiles; ++tile)
#pragma unroll
    for (int j = 0; j < 4; ++j) s[tile][j] = c[j / 2][j % 2 + 2 * tile] * p.scale;
  cap<F>(p, s);
  state.apply(state.template add_scores<false>(s, ones, used));
  state.template add_exact<T>(s, [&](int chunk, int j) { return chunk < kAhead ? v[chunk % kAhead][j] : load_or_zero(row[j] + 8 * chunk, there[j]); });
}

}  // namespace fp4::attention
