// E2M1 and E4M3 on a CPU, bit for bit what fp4_inductor/formats/e2m1.py and nvfp4.py define in ATen operations.
//
// For files that are compiled with -ffp-contract=off (the compiler may not fuse what the definition rounds twice) and
// -fno-trapping-math (a choice between two numbers may become a blend of both).
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define GROUP 16
#define FIRST_CODE 1
#define LAST_CODE 126  // E4M3 without sign and without NaN
typedef float block_t[GROUP][LANES];  // 16 columns of 16 rows, a row in each lane

static inline uint32_t bits_of(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}
static inline float float_of(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

// S: the value of every E4M3 code. R: its reciprocal, rounded. A zero scale divides by one.
static float S[128], R[128];
__attribute__((constructor)) static void fill_tables(void) {
  for (int i = 0; i < 128; ++i) {
    const int e = i >> 3, m = i & 7;
    S[i] = e ? ldexpf((float)(8 + m), e - 10) : ldexpf((float)m, -9);
    R[i] = i ? 1.f / S[i] : 1.f;
  }
}

// f >= 0 to the nearest E4M3 code, ties to even, saturating; a positive number never becomes zero.
static inline int32_t to_code(float f) {
  if (!(f > 0.f)) return 0;
  if (f >= 448.f) return LAST_CODE;
  int32_t code;
  if (f < 0x1p-6f) {
    code = (int32_t)(bits_of(f + 0x1p14f) - bits_of(0x1p14f));  // 2^14 has ulps of 2^-9, the step of E4M3's subnormal numbers
  } else {
    const uint32_t u = bits_of(f);
    code = (int32_t)((u + 0x7FFFFu + ((u >> 20) & 1)) >> 20) - ((127 - 7) << 3);
  }
  return code < FIRST_CODE ? FIRST_CODE : code > LAST_CODE ? LAST_CODE : code;
}

// 0 <= q <= 6 to the nearest magnitude of E2M1, ties to the even code. The step is 1/2 below 2, 1 below 4, else 2; a number whose
// ulp is the step, added and taken away, rounds to it.
static inline float to_grid(float q) {
  const uint32_t e = bits_of(q) & 0x7F800000u;
  const float big = float_of((e > 0x3F800000u ? e : 0x3F800000u) + (22u << 23));
  return (q + big) - big;
}
