// NVFP4 on a CPU: block scales and codes of a weight, bit for bit what fp4_inductor/formats/nvfp4.py defines in ATen operations.
//
// Plain C for the compiler to vectorize. Sixteen rows are worked on together, one in each lane: all sums of a block then run
// between registers, in the pairwise order of the definition. grid.h says which flags it needs.
#include "grid.h"

// a / s for 0 <= a <= 6 s, exact enough to be rounded to E2M1 as the rounded quotient is: test_quantize_native.py tries every
// scale and both sides of every tie. With a fused multiply-add two corrections cost less than a division.
static inline float quotient(float a, float s, float r) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  (void)s;
  const float q = a * r;
  return __builtin_fmaf(__builtin_fmaf(-q, s, a), r, q);
#else
  (void)r;
  return a / s;
#endif
}

// The squared error of a block with the scale s in each lane; w: a weight for each k, or null.
static inline void block_error(const block_t x, const float* s, const float* r, const float* w, float* error) {
  block_t d;
  float limit[LANES], divisor[LANES];
  for (int l = 0; l < LANES; ++l) {
    divisor[l] = s[l] > 0.f ? s[l] : 1.f;
    limit[l] = 6.f * divisor[l];
  }
  for (int i = 0; i < GROUP; ++i) {
    const float weight = w ? w[i] : 1.f;
    for (int l = 0; l < LANES; ++l) {
      const float a = x[i][l] < limit[l] ? x[i][l] : limit[l];
      const float off = x[i][l] - to_grid(quotient(a, divisor[l], r[l])) * s[l];
      d[i][l] = off * off * weight;
    }
  }
  for (int half = GROUP / 2; half > 1; half /= 2)
    for (int i = 0; i < half; ++i)
      for (int l = 0; l < LANES; ++l) d[i][l] += d[i + half][l];
  for (int l = 0; l < LANES; ++l) error[l] = d[0][l] + d[1][l];
}

static inline void use_code(const int32_t* code, float* s, float* r) {
  for (int l = 0; l < LANES; ++l) {
    s[l] = S[code[l]];
    r[l] = R[code[l]];
  }
}

// Takes the candidate's code in the lanes where its error is smaller.
static inline void try_code(const block_t x, const int32_t* candidate, const float* w, int32_t* best, float* best_error) {
  float s[LANES], r[LANES], error[LANES];
  use_code(candidate, s, r);
  block_error(x, s, r, w, error);
  for (int l = 0; l < LANES; ++l) {
    const int better = error[l] < best_error[l];
    best[l] = better ? candidate[l] : best[l];
    best_error[l] = better ? error[l] : best_error[l];
  }
}

enum { AMAX, FOUR_OVER_SIX, SWEEP };

// The code of each lane's scale for the magnitudes x of a block, already divided by the global scale.
static inline void choose(const block_t x, int search, const float* w, int32_t* best) {
  float top[LANES], error[LANES];
  int32_t base[LANES], candidate[LANES];
  for (int l = 0; l < LANES; ++l) top[l] = x[0][l];
  for (int i = 1; i < GROUP; ++i)
    for (int l = 0; l < LANES; ++l) top[l] = x[i][l] > top[l] ? x[i][l] : top[l];
  for (int l = 0; l < LANES; ++l) best[l] = base[l] = to_code(top[l] / 6.f);
  if (search == AMAX) return;
  for (int l = 0; l < LANES; ++l) error[l] = INFINITY;
  {
    float s[LANES], r[LANES];
    use_code(base, s, r);
    block_error(x, s, r, w, error);
  }
  if (search == FOUR_OVER_SIX) {
    for (int l = 0; l < LANES; ++l) candidate[l] = to_code(top[l] / 4.f);
    try_code(x, candidate, w, best, error);
    return;
  }
  for (int step = -7; step <= 7; ++step) {
    if (!step) continue;
    for (int l = 0; l < LANES; ++l) {
      int32_t c = base[l] + step;
      c = c < FIRST_CODE ? FIRST_CODE : c > LAST_CODE ? LAST_CODE : c;
      candidate[l] = top[l] > 0.f ? c : base[l];
    }
    try_code(x, candidate, w, best, error);
  }
}

typedef float lanes_t __attribute__((vector_size(4 * LANES)));
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t index_t __attribute__((vector_size(4 * LANES)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (index_t){__VA_ARGS__})
#endif
// Swaps the off-diagonal quarters of every square of 2 h rows and columns.
#define EXCHANGE(h, low, high)                     \
  for (int i = 0; i < LANES; ++i)                  \
    if (!(i & h)) {                                \
      const lanes_t a = t[i], b = t[i + h];        \
      t[i] = low(a, b), t[i + h] = high(a, b);     \
    }
#define LOW8(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define HIGH8(a, b) SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
#define LOW4(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
#define HIGH4(a, b) SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
#define LOW2(a, b) SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH2(a, b) SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define LOW1(a, b) SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#define HIGH1(a, b) SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)

// Sixteen blocks at column 16 b of rows: magnitudes / g, and the signs in bit 31.
static inline void load(const void* w, int bf16, int64_t k, const int64_t* rows, int64_t b, const float* restrict g, block_t x, uint32_t sign[GROUP][LANES]) {
  lanes_t t[LANES];
  for (int l = 0; l < LANES; ++l) {
    const int64_t at = rows[l] * k + b * GROUP;
    if (bf16) {
      uint32_t wide[GROUP];
      for (int i = 0; i < GROUP; ++i) wide[i] = (uint32_t)((const uint16_t*)w)[at + i] << 16;
      memcpy(&t[l], wide, sizeof wide);
    } else {
      memcpy(&t[l], (const float*)w + at, sizeof t[l]);
    }
  }
  // Rows to lanes. Through memory, one element after the other, it would take longer than all the rest.
  EXCHANGE(8, LOW8, HIGH8)
  EXCHANGE(4, LOW4, HIGH4)
  EXCHANGE(2, LOW2, HIGH2)
  EXCHANGE(1, LOW1, HIGH1)
  for (int i = 0; i < GROUP; ++i) {
    uint32_t row[LANES], negative[LANES];
    float magnitude[LANES];
    memcpy(row, &t[i], sizeof row);
    for (int l = 0; l < LANES; ++l) negative[l] = row[l] & 0x80000000u;
    for (int l = 0; l < LANES; ++l) magnitude[l] = float_of(row[l] & 0x7FFFFFFFu) / g[l];
    memcpy(sign[i], negative, sizeof negative);
    memcpy(x[i], magnitude, sizeof magnitude);
  }
}

static inline void store(const block_t x, uint32_t sign[GROUP][LANES], const int32_t* code, int64_t k, const int64_t* rows, int count, int64_t b, uint8_t* q,
                         uint8_t* scale) {
  float s[LANES], r[LANES], limit[LANES];
  uint32_t words[2][LANES];  // eight codes each, the first lowest
  use_code(code, s, r);
  for (int l = 0; l < LANES; ++l) {
    s[l] = s[l] > 0.f ? s[l] : 1.f;
    limit[l] = 6.f * s[l];
  }
  for (int half = 0; half < 2; ++half) {
    uint32_t word[LANES] = {0};
    for (int i = 0; i < 8; ++i)
      for (int l = 0; l < LANES; ++l) {
        const float a = x[8 * half + i][l];
        const uint32_t u = bits_of(to_grid(quotient(a < limit[l] ? a : limit[l], s[l], r[l])));
        // From 1 on, the exponent and the first bit of the mantissa count the grid's values; 1/2 is the one before.
        const int32_t above = (int32_t)(u >> 22) - 252, below = (int32_t)(u >> 29);
        word[l] |= ((uint32_t)(above > below ? above : below) | sign[8 * half + i][l] >> 28) << (4 * i);
      }
    memcpy(words[half], word, sizeof word);
  }
  for (int l = 0; l < count; ++l) {
    uint8_t* to = q + rows[l] * (k / 2) + b * (GROUP / 2);
    memcpy(to, &words[0][l], 4);
    memcpy(to + 4, &words[1][l], 4);
    scale[rows[l] * (k / GROUP) + b] = (uint8_t)code[l];
  }
}

// w [rows, k], finite, float32 or (bf16) bfloat16 bits; row_scale [rows]: each row's global scale; weight [k] or null.
// q [rows, k/2] and scale [rows, k/16] are written.
void fp4_quantize(const void* w, int bf16, int64_t rows, int64_t k, const float* row_scale, int search, const float* weight, uint8_t* q,
                  uint8_t* scale, int threads) {
  const int64_t tiles = (rows + LANES - 1) / LANES;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t tile = 0; tile < tiles; ++tile) {
    int64_t at[LANES];
    float g[LANES];
    const int64_t first = tile * LANES;
    const int count = rows - first < LANES ? (int)(rows - first) : LANES;
    for (int l = 0; l < LANES; ++l) {
      at[l] = first + (l < count ? l : count - 1);  // lanes without a row repeat the last one, and are not stored
      g[l] = row_scale[at[l]];
    }
    for (int64_t b = 0; b < k / GROUP; ++b) {
      block_t x;
      uint32_t sign[GROUP][LANES];
      int32_t code[LANES];
      load(w, bf16, k, at, b, g, x, sign);
      choose(x, search, weight ? weight + b * GROUP : 0, code);
      store(x, sign, code, k, at, count, b, q, scale);
    }
  }
}

// The value of a code's magnitude: from 2 on, the code counts exponents and first bits of the mantissa; 1 is 1/2, and 0 is 0.
static inline float value_of(uint32_t magnitude) {
  const uint32_t above = (magnitude + 252u) << 22;
  return float_of(magnitude > 1 ? above : magnitude * 0x3F000000u);
}

// For each row of w [rows, k] and its quantized form with the global scale g: sums[row] = {|w - quantized|^2, |w|^2} in float64.
// A row's sums do not depend on the number of threads.
void fp4_rounding_error(const void* w, int bf16, int64_t rows, int64_t k, const uint8_t* q, const uint8_t* scale, float g, double (*sums)[2], int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    double error[GROUP] = {0}, norm[GROUP] = {0};
    for (int64_t b = 0; b < k / GROUP; ++b) {
      const uint8_t* from = q + row * (k / 2) + b * (GROUP / 2);
      const float s = S[scale[row * (k / GROUP) + b] & 127];
      float dense[GROUP];
      uint32_t codes[GROUP];
      if (bf16) {
        for (int i = 0; i < GROUP; ++i) dense[i] = float_of((uint32_t)((const uint16_t*)w)[row * k + b * GROUP + i] << 16);
      } else {
        memcpy(dense, (const float*)w + row * k + b * GROUP, sizeof dense);
      }
      for (int i = 0; i < GROUP / 2; ++i) {
        codes[2 * i] = from[i] & 15u;
        codes[2 * i + 1] = from[i] >> 4;
      }
      for (int i = 0; i < GROUP; ++i) {
        const float value = float_of(bits_of(value_of(codes[i] & 7u) * s * g) | (codes[i] & 8u) << 28);
        const double d = (double)(value - dense[i]), x = (double)dense[i];
        error[i] += d * d;
        norm[i] += x * x;
      }
    }
    for (int half = GROUP / 2; half; half /= 2)
      for (int i = 0; i < half; ++i) {
        error[i] += error[i + half];
        norm[i] += norm[i + half];
      }
    sums[row][0] = error[0];
    sums[row][1] = norm[0];
  }
}

const char* fp4_quantize_isa(void) {
#if defined(__AVX512F__)
  return "avx512";
#elif defined(__AVX2__)
  return "avx2";
#elif defined(__ARM_NEON)
  return "neon";
#else
  return "generic";
#endif
}
