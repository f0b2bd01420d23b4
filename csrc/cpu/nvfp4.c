// NVFP4 on a CPU: decode rows to float32 / bfloat16, and multiply few activations by packed rows.
//
// Plain C, no torch. Layout: qdata [rows, k/2] two codes a byte (even k low), scale [rows, k/16] E4M3 bytes.
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

#if defined(__AVX512F__)
typedef __m512 vec;  // 16 floats
static inline vec decode16(const uint8_t* q, __m512 lut, __m512i spread, __m512i shifts) {
  __m512i w = _mm512_permutexvar_epi32(spread, _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i*)q)));
  return _mm512_permutexvar_ps(_mm512_srlv_epi32(w, shifts), lut);  // the permutation reads the low 4 bits only
}
#endif

// out[rows, k] (float32 if !bf16 else bfloat16 bits) = e2m1 * scale * g, rounded once.
void fp4_dequantize_rows(const uint8_t* q, const uint8_t* scale, float g, void* out, int64_t rows, int64_t k, int bf16, int threads) {
  float table[256];
  scale_table(table);
  const int64_t blocks = k / 16;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t *qr = q + r * (k / 2), *sr = scale + r * blocks;
#if defined(__AVX512F__)
    const __m512 lut = _mm512_loadu_ps(E2M1);
    const __m512i spread = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i shifts = _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);
    const __m512 vg = _mm512_set1_ps(g);
    for (int64_t b = 0; b < blocks; ++b) {
      __m512 v = _mm512_mul_ps(_mm512_mul_ps(decode16(qr + b * 8, lut, spread, shifts), _mm512_set1_ps(table[sr[b]])), vg);
      if (!bf16) {
        _mm512_storeu_ps((float*)out + r * k + b * 16, v);
      } else {
        __m512i u = _mm512_castps_si512(v);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
        u = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
        __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        u = _mm512_mask_mov_epi32(u, nan, _mm512_set1_epi32(0x7FC0));
        _mm256_storeu_si256((__m256i*)((uint16_t*)out + r * k + b * 16), _mm512_cvtepi32_epi16(u));
      }
    }
#else
    for (int64_t b = 0; b < blocks; ++b) {
      const float s = table[sr[b]];
      for (int i = 0; i < 8; ++i) {
        const uint8_t byte = qr[b * 8 + i];
        const float lo = E2M1[byte & 15] * s * g, hi = E2M1[byte >> 4] * s * g;
        const int64_t at = r * k + b * 16 + 2 * i;
        if (bf16) {
          ((uint16_t*)out)[at] = to_bf16(lo);
          ((uint16_t*)out)[at + 1] = to_bf16(hi);
        } else {
          ((float*)out)[at] = lo;
          ((float*)out)[at + 1] = hi;
        }
      }
    }
#endif
  }
}

// y[m, n] = g * sum_k x[m, k] * e2m1 * scale for m < 8 rows of float32 activations; y has row stride n.
#define MAX_M 8
#if defined(__AVX512F__)
#define GEMV(M)                                                                                                      \
  static void gemv_##M(const float* x, const uint8_t* q, const uint8_t* scale, const float* table, float g, float* y, \
                       int64_t n, int64_t k, int64_t first, int64_t last) {                                          \
    const __m512 lut = _mm512_loadu_ps(E2M1);                                                                        \
    const __m512i spread = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);                         \
    const __m512i shifts = _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);               \
    const int64_t blocks = k / 16;                                                                                   \
    for (int64_t r = first; r < last; ++r) {                                                                         \
      const uint8_t *qr = q + r * (k / 2), *sr = scale + r * blocks;                                                 \
      __m512 even[M], odd[M];                                                                                        \
      for (int m = 0; m < M; ++m) even[m] = odd[m] = _mm512_setzero_ps();                                            \
      int64_t b = 0;                                                                                                 \
      for (; b + 1 < blocks; b += 2) {                                                                               \
        const __m512 w0 = _mm512_mul_ps(decode16(qr + b * 8, lut, spread, shifts), _mm512_set1_ps(table[sr[b]]));     \
        const __m512 w1 = _mm512_mul_ps(decode16(qr + b * 8 + 8, lut, spread, shifts), _mm512_set1_ps(table[sr[b + 1]])); \
        for (int m = 0; m < M; ++m) {                                                                                \
          even[m] = _mm512_fmadd_ps(w0, _mm512_loadu_ps(x + m * k + b * 16), even[m]);                               \
          odd[m] = _mm512_fmadd_ps(w1, _mm512_loadu_ps(x + m * k + b * 16 + 16), odd[m]);                            \
        }                                                                                                            \
      }                                                                                                              \
      if (b < blocks) {                                                                                              \
        const __m512 w0 = _mm512_mul_ps(decode16(qr + b * 8, lut, spread, shifts), _mm512_set1_ps(table[sr[b]]));     \
        for (int m = 0; m < M; ++m) even[m] = _mm512_fmadd_ps(w0, _mm512_loadu_ps(x + m * k + b * 16), even[m]);     \
      }                                                                                                              \
      for (int m = 0; m < M; ++m) y[m * n + r] = g * _mm512_reduce_add_ps(_mm512_add_ps(even[m], odd[m]));           \
    }                                                                                                                \
  }
#else
#define GEMV(M)                                                                                                      \
  static void gemv_##M(const float* x, const uint8_t* q, const uint8_t* scale, const float* table, float g, float* y, \
                       int64_t n, int64_t k, int64_t first, int64_t last) {                                          \
    const int64_t blocks = k / 16;                                                                                   \
    for (int64_t r = first; r < last; ++r) {                                                                         \
      const uint8_t *qr = q + r * (k / 2), *sr = scale + r * blocks;                                                 \
      float acc[M][16];                                                                                              \
      memset(acc, 0, sizeof acc);                                                                                    \
      for (int64_t b = 0; b < blocks; ++b) {                                                                         \
        float w[16];                                                                                                 \
        for (int i = 0; i < 8; ++i) {                                                                                \
          w[2 * i] = E2M1[qr[b * 8 + i] & 15] * table[sr[b]];                                                        \
          w[2 * i + 1] = E2M1[qr[b * 8 + i] >> 4] * table[sr[b]];                                                    \
        }                                                                                                            \
        for (int m = 0; m < M; ++m)                                                                                  \
          for (int i = 0; i < 16; ++i) acc[m][i] += w[i] * x[m * k + b * 16 + i];                                    \
      }                                                                                                              \
      for (int m = 0; m < M; ++m) {                                                                                  \
        float sum = 0;                                                                                               \
        for (int i = 0; i < 16; ++i) sum += acc[m][i];                                                               \
        y[m * n + r] = g * sum;                                                                                      \
      }                                                                                                              \
    }                                                                                                                \
  }
#endif
GEMV(1) GEMV(2) GEMV(3) GEMV(4) GEMV(5) GEMV(6) GEMV(7) GEMV(8)
typedef void (*gemv_fn)(const float*, const uint8_t*, const uint8_t*, const float*, float, float*, int64_t, int64_t, int64_t, int64_t);
static const gemv_fn GEMVS[MAX_M] = {gemv_1, gemv_2, gemv_3, gemv_4, gemv_5, gemv_6, gemv_7, gemv_8};

// Returns 0, or 1 if m is not in 1..8.
int fp4_gemv(const float* x, const uint8_t* q, const uint8_t* scale, float g, float* y, int64_t m, int64_t n, int64_t k, int threads) {
  if (m < 1 || m > MAX_M) return 1;
  float table[256];
  scale_table(table);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int t = 0; t < threads; ++t) GEMVS[m - 1](x, q, scale, table, g, y, n, k, n * t / threads, n * (t + 1) / threads);
  return 0;
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
