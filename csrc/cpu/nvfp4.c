// NVFP4 on a CPU, dense and 2:4-sparse: decode rows to float32 / bfloat16, and multiply few activations by packed rows.
//
// Plain C, no torch. Layout: dense qdata [rows, k/2] two codes a byte (even k low); sparse values [rows, k/4], the two
// kept codes of four a byte, and meta [rows, k/8], a nibble pos0 | pos1 << 2 per four; scale [rows, k/16] E4M3 bytes.
// The 16 code values fill one 512-bit register (or two 256-bit ones), so a table look-up decodes 16 weights at once.
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

static const float E2M1[16] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};

static float e4m3(uint8_t b) {
  int e = (b >> 3) & 15, m = b & 7;
  float v = e ? (float)(8 + m) : (float)m;  // in units of 2^-9, times 2^(e-1) for normals
  int shift = (e ? e - 1 : 0) - 9;
  union { uint32_t u; float f; } p = {.u = (uint32_t)(127 + shift) << 23};
  if (e == 15 && m == 7) { p.u = 0x7FC00000u; v = 1.f; }
  v *= p.f;
  return (b & 0x80) ? -v : v;
}

static void scale_table(float* table) {
  for (int i = 0; i < 256; ++i) table[i] = e4m3((uint8_t)i);
}

static inline uint16_t to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)((u >> 16) | 0x40);
  return (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1)) >> 16);
}

// Bit 0 of each nibble is set where metadata is illegal: not pos0 (bits 1, 0) < pos1 (bits 3, 2).
static inline uint64_t illegal(uint64_t a) {
  const uint64_t b = a >> 1, c = a >> 2, d = a >> 3;
  return ~((d & ~b) | (~(b ^ d) & ~a & c)) & 0x1111111111111111u;
}
// n bytes of metadata, n a multiple of 4.
static inline int meta_is_legal(const uint8_t* meta, int64_t n) {
  uint64_t bad = 0, word;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    memcpy(&word, meta + i, 8);
    bad |= illegal(word);
  }
  if (i < n) {
    uint32_t half;
    memcpy(&half, meta + i, 4);
    bad |= illegal(half) & 0x11111111u;
  }
  return !bad;
}

#if defined(__AVX512F__)
// For a metadata byte (8 k): by how much to shift the word of kept codes so that each k's code comes lowest; 32 where none
// was kept, which shifts in zeros. [1]: for the second byte of a word, whose codes are 16 bits further up.
static int32_t KEPT[2][256][8] __attribute__((aligned(64)));
__attribute__((constructor)) static void fill_kept(void) {
  for (int second = 0; second < 2; ++second)
    for (int byte = 0; byte < 256; ++byte) {
      for (int i = 0; i < 8; ++i) KEPT[second][byte][i] = 32;
      for (int group = 0; group < 2; ++group)
        for (int j = 0; j < 2; ++j) KEPT[second][byte][4 * group + ((byte >> (4 * group + 2 * j)) & 3)] = 16 * second + 8 * group + 4 * j;
    }
}
typedef __m512 vec;  // 16 floats
static inline __m256i bf16x16(vec v) {
  __m512i u = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  u = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(u, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC0)));
}
static inline vec decode24(const uint8_t* values, const uint8_t* meta, __m512 lut) {
  uint32_t word;
  memcpy(&word, values, 4);
  const __m512i shifts = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_load_si256((const __m256i*)KEPT[0][meta[0]])),
                                            _mm256_load_si256((const __m256i*)KEPT[1][meta[1]]), 1);
  return _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_set1_epi32((int)word), shifts), lut);
}
static inline vec decode16(const uint8_t* q, __m512 lut, __m512i spread, __m512i shifts) {
  __m512i w = _mm512_permutexvar_epi32(spread, _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i*)q)));
  return _mm512_permutexvar_ps(_mm512_srlv_epi32(w, shifts), lut);  // the permutation reads the low 4 bits only
}
#define BLOCK16(SPARSE, b) (SPARSE ? decode24(qr + (b) * 4, mr + (b) * 2, lut) : decode16(qr + (b) * 8, lut, spread, shifts))
#else
static inline void block16(int sparse, const uint8_t* qr, const uint8_t* mr, int64_t b, float s, float* w) {
  if (!sparse) {
    for (int i = 0; i < 8; ++i) {
      w[2 * i] = E2M1[qr[b * 8 + i] & 15] * s;
      w[2 * i + 1] = E2M1[qr[b * 8 + i] >> 4] * s;
    }
    return;
  }
  memset(w, 0, 16 * sizeof(float));
  for (int i = 0; i < 4; ++i) {
    const int nibble = (mr[b * 2 + i / 2] >> (4 * (i & 1))) & 15;
    w[4 * i + (nibble & 3)] = E2M1[qr[b * 4 + i] & 15] * s;
    w[4 * i + (nibble >> 2)] = E2M1[qr[b * 4 + i] >> 4] * s;
  }
}
#endif

#if defined(__AVX512BW__)
// The 16 bfloat16 a code can stand for, for every scale byte: then decoding is a look-up, without a product or a rounding.
static void value_table(const float* table, float g, uint16_t (*values)[16]) {
  const __m512 lut = _mm512_loadu_ps(E2M1), vg = _mm512_set1_ps(g);
  for (int b = 0; b < 256; ++b)
    _mm256_store_si256((__m256i*)values[b], bf16x16(_mm512_mul_ps(_mm512_mul_ps(lut, _mm512_set1_ps(table[b])), vg)));
}
// Two blocks of 16 codes: word 2 i of the index is the low nibble of byte i, word 2 i + 1 the high one; the second block's values are entries 16 to 31.
static inline void decode32_bf16(const uint8_t* q, const uint16_t* first, const uint16_t* second, uint16_t* out) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)q));
  __m512i index = _mm512_and_si512(_mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12)), _mm512_set1_epi16(15));
  index = _mm512_or_si512(index, _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1));
  const __m512i values = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)first)), _mm256_loadu_si256((const __m256i*)second), 1);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(index, values));
}
static void dequantize_bf16(const uint8_t* q, const uint8_t* scale, float g, uint16_t* out, int64_t rows, int64_t k, int threads) {
  float table[256];
  uint16_t values[256][16] __attribute__((aligned(64)));
  scale_table(table);
  value_table(table, g, values);
  const int64_t blocks = k / 16;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t *qr = q + r * (k / 2), *sr = scale + r * blocks;
    uint16_t* to = out + r * k;
    int64_t b = 0;
    for (; b + 1 < blocks; b += 2) decode32_bf16(qr + b * 8, values[sr[b]], values[sr[b + 1]], to + b * 16);
    if (b < blocks)
      for (int i = 0; i < 8; ++i) {
        to[b * 16 + 2 * i] = values[sr[b]][qr[b * 8 + i] & 15];
        to[b * 16 + 2 * i + 1] = values[sr[b]][qr[b * 8 + i] >> 4];
      }
  }
}
#endif

// out[rows, k] (float32 if !bf16 else bfloat16 bits) = e2m1 * scale * g, rounded once. 1 if metadata is illegal, else 0.
static inline __attribute__((always_inline)) int dequantize_rows(const int sparse, const uint8_t* q, const uint8_t* meta, const uint8_t* scale, float g,
                                                                 void* out, int64_t rows, int64_t k, int bf16, int threads) {
  float table[256];
  scale_table(table);
  const int64_t blocks = k / 16;
  int bad = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : bad) if (threads > 1)
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t *qr = q + r * (sparse ? k / 4 : k / 2), *mr = sparse ? meta + r * (k / 8) : 0, *sr = scale + r * blocks;
    if (sparse) bad |= !meta_is_legal(mr, k / 8);
#if defined(__AVX512F__)
    const __m512 lut = _mm512_loadu_ps(E2M1);
    const __m512i spread = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i shifts = _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);
    const __m512 vg = _mm512_set1_ps(g);
    for (int64_t b = 0; b < blocks; ++b) {
      __m512 v = _mm512_mul_ps(_mm512_mul_ps(BLOCK16(sparse, b), _mm512_set1_ps(table[sr[b]])), vg);
      if (!bf16) {
        _mm512_storeu_ps((float*)out + r * k + b * 16, v);
      } else {
        _mm256_storeu_si256((__m256i*)((uint16_t*)out + r * k + b * 16), bf16x16(v));
      }
    }
#else
    for (int64_t b = 0; b < blocks; ++b) {
      float w[16];
      block16(sparse, qr, mr, b, table[sr[b]], w);
      for (int i = 0; i < 16; ++i) {
        const int64_t at = r * k + b * 16 + i;
        if (bf16) {
          ((uint16_t*)out)[at] = to_bf16(w[i] * g);
        } else {
          ((float*)out)[at] = w[i] * g;
        }
      }
    }
#endif
  }
  return bad;
}

// meta: null for dense codes.
int fp4_dequantize_rows(const uint8_t* q, const uint8_t* meta, const uint8_t* scale, float g, void* out, int64_t rows, int64_t k, int bf16, int threads) {
#if defined(__AVX512BW__)
  if (!meta && bf16 && rows * k >= 16 * 1024) {  // the table is 4096 values
    dequantize_bf16(q, scale, g, (uint16_t*)out, rows, k, threads);
    return 0;
  }
#endif
  return meta ? dequantize_rows(1, q, meta, scale, g, out, rows, k, bf16, threads) : dequantize_rows(0, q, meta, scale, g, out, rows, k, bf16, threads);
}

// y[m, n] = g * sum_k x[m, k] * e2m1 * scale for m < 8 rows of float32 activations; y has row stride n. 1 if metadata is illegal, else 0.
#define MAX_M 8
#define ARGUMENTS                                                                                   \
  const float *x, const uint8_t *q, const uint8_t *meta, const uint8_t *scale, const float *table, float g, float *y, \
      int64_t n, int64_t k, int64_t first, int64_t last
#if defined(__AVX512F__)
#define CONSTANTS                                                                                   \
  const __m512 lut = _mm512_loadu_ps(E2M1);                                                         \
  const __m512i spread = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);          \
  const __m512i shifts = _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);
#define DENSE(M)                                                                                                          \
  static int dense_##M(ARGUMENTS) {                                                                                       \
    CONSTANTS                                                                                                             \
    const int64_t blocks = k / 16;                                                                                        \
    (void)meta;                                                                                                           \
    for (int64_t r = first; r < last; ++r) {                                                                              \
      const uint8_t *qr = q + r * (k / 2), *sr = scale + r * blocks;                                                      \
      __m512 even[M], odd[M];                                                                                             \
      for (int m = 0; m < M; ++m) even[m] = odd[m] = _mm512_setzero_ps();                                                 \
      int64_t b = 0;                                                                                                      \
      for (; b + 1 < blocks; b += 2) {                                                                                    \
        const __m512 w0 = _mm512_mul_ps(decode16(qr + b * 8, lut, spread, shifts), _mm512_set1_ps(table[sr[b]]));         \
        const __m512 w1 = _mm512_mul_ps(decode16(qr + b * 8 + 8, lut, spread, shifts), _mm512_set1_ps(table[sr[b + 1]])); \
        for (int m = 0; m < M; ++m) {                                                                                     \
          even[m] = _mm512_fmadd_ps(w0, _mm512_loadu_ps(x + m * k + b * 16), even[m]);                                    \
          odd[m] = _mm512_fmadd_ps(w1, _mm512_loadu_ps(x + m * k + b * 16 + 16), odd[m]);                                 \
        }                                                                                                                 \
      }                                                                                                                   \
      if (b < blocks) {                                                                                                   \
        const __m512 w0 = _mm512_mul_ps(decode16(qr + b * 8, lut, spread, shifts), _mm512_set1_ps(table[sr[b]]));         \
        for (int m = 0; m < M; ++m) even[m] = _mm512_fmadd_ps(w0, _mm512_loadu_ps(x + m * k + b * 16), even[m]);          \
      }                                                                                                                   \
      for (int m = 0; m < M; ++m) y[m * n + r] = g * _mm512_reduce_add_ps(_mm512_add_ps(even[m], odd[m]));                \
    }                                                                                                                     \
    return 0;                                                                                                             \
  }
// 32 k: 16 kept weights in one register, and of each activation row the 16 that they meet.
#define KEPT32(M, sum, b)                                                                                                      \
  {                                                                                                                            \
    uint32_t word;                                                                                                             \
    memcpy(&word, mr + (b) * 2, 4);                                                                                            \
    const __m512i at = _mm512_ternarylogic_epi32(_mm512_srlv_epi32(_mm512_set1_epi32((int)word), pairs), three, groups, 0xEA); \
    const __m512 s = _mm512_mask_broadcastss_ps(_mm512_set1_ps(table[sr[b]]), 0xFF00, _mm_load_ss(table + sr[(b) + 1]));       \
    const __m512 w = _mm512_mul_ps(decode16(qr + (b) * 4, lut, spread, shifts), s);                                            \
    for (int m = 0; m < M; ++m) {                                                                                              \
      const float* xb = x + m * k + (b) * 16;                                                                                  \
      sum[m] = _mm512_fmadd_ps(w, _mm512_permutex2var_ps(_mm512_loadu_ps(xb), at, _mm512_loadu_ps(xb + 16)), sum[m]);          \
    }                                                                                                                          \
  }
#define SPARSE(M)                                                                                                                    \
  static int sparse_##M(ARGUMENTS) {                                                                                                 \
    CONSTANTS                                                                                                                        \
    const __m512i pairs = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0), three = _mm512_set1_epi32(3); \
    const __m512i groups = _mm512_set_epi32(28, 28, 24, 24, 20, 20, 16, 16, 12, 12, 8, 8, 4, 4, 0, 0);                               \
    const int64_t blocks = k / 16;                                                                                                   \
    for (int64_t r = first; r < last; ++r) {                                                                                         \
      const uint8_t *qr = q + r * (k / 4), *mr = meta + r * (k / 8), *sr = scale + r * blocks;                                       \
      if (!meta_is_legal(mr, k / 8)) return 1;                                                                                       \
      __m512 even[M], odd[M];                                                                                                        \
      for (int m = 0; m < M; ++m) even[m] = odd[m] = _mm512_setzero_ps();                                                            \
      int64_t b = 0;                                                                                                                 \
      for (; b + 2 < blocks; b += 4) {                                                                                               \
        KEPT32(M, even, b)                                                                                                           \
        KEPT32(M, odd, b + 2)                                                                                                        \
      }                                                                                                                              \
      if (b < blocks) KEPT32(M, even, b)                                                                                             \
      for (int m = 0; m < M; ++m) y[m * n + r] = g * _mm512_reduce_add_ps(_mm512_add_ps(even[m], odd[m]));                           \
    }                                                                                                                                \
    return 0;                                                                                                                        \
  }
#else
#define ROWS(NAME, M, SPARSE_ROWS)                                                                                                     \
  static int NAME##_##M(ARGUMENTS) {                                                                                                   \
    const int64_t blocks = k / 16;                                                                                                     \
    for (int64_t r = first; r < last; ++r) {                                                                                           \
      const uint8_t *qr = q + r * (SPARSE_ROWS ? k / 4 : k / 2), *mr = SPARSE_ROWS ? meta + r * (k / 8) : 0, *sr = scale + r * blocks; \
      if (SPARSE_ROWS && !meta_is_legal(mr, k / 8)) return 1;                                                                          \
      float acc[M][16];                                                                                                                \
      memset(acc, 0, sizeof acc);                                                                                                      \
      for (int64_t b = 0; b < blocks; ++b) {                                                                                           \
        float w[16];                                                                                                                   \
        block16(SPARSE_ROWS, qr, mr, b, table[sr[b]], w);                                                                              \
        for (int m = 0; m < M; ++m)                                                                                                    \
          for (int i = 0; i < 16; ++i) acc[m][i] += w[i] * x[m * k + b * 16 + i];                                                      \
      }                                                                                                                                \
      for (int m = 0; m < M; ++m) {                                                                                                    \
        float sum = 0;                                                                                                                 \
        for (int i = 0; i < 16; ++i) sum += acc[m][i];                                                                                 \
        y[m * n + r] = g * sum;                                                                                                        \
      }                                                                                                                                \
    }                                                                                                                                  \
    return 0;                                                                                                                          \
  }
#define DENSE(M) ROWS(dense, M, 0)
#define SPARSE(M) ROWS(sparse, M, 1)
#endif
DENSE(1) DENSE(2) DENSE(3) DENSE(4) DENSE(5) DENSE(6) DENSE(7) DENSE(8)
SPARSE(1) SPARSE(2) SPARSE(3) SPARSE(4) SPARSE(5) SPARSE(6) SPARSE(7) SPARSE(8)
typedef int (*gemv_fn)(ARGUMENTS);
static const gemv_fn GEMVS[2][MAX_M] = {{dense_1, dense_2, dense_3, dense_4, dense_5, dense_6, dense_7, dense_8},
                                        {sparse_1, sparse_2, sparse_3, sparse_4, sparse_5, sparse_6, sparse_7, sparse_8}};

// meta: null for dense codes. Returns 0, 1 if metadata is illegal (y is then not complete), or 2 if m is not in 1..8.
int fp4_gemv(const float* x, const uint8_t* q, const uint8_t* meta, const uint8_t* scale, float g, float* y, int64_t m, int64_t n, int64_t k, int threads) {
  if (m < 1 || m > MAX_M) return 2;
  float table[256];
  scale_table(table);
  const gemv_fn rows = GEMVS[meta != 0][m - 1];
  int bad = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : bad) if (threads > 1)
  for (int t = 0; t < threads; ++t) bad |= rows(x, q, meta, scale, table, g, y, n, k, n * t / threads, n * (t + 1) / threads);
  return bad;
}

const char* fp4_isa(void) {
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
