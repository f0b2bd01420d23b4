// GPTQ for NVFP4 on a CPU: the two loops over columns of fp4_inductor/formats/gptq.py, bit for bit.
//
// Rows are independent. Sixteen of them are worked on together, one in each lane, so that what one column does to the next stays in
// registers and the first cache. grid.h says which flags it needs.
#include "grid.h"

#define PANEL 128
#define TRIED 15   // scales around the present one while rounding, and
#define NEARBY 5   // in the refinement
#define PASSES 2
#define GAIN 1e-6f
typedef float panel_t[PANEL][LANES];

static inline float to_scaled_grid(float x, float s, float divisor) {
  const float y = x / divisor;
  const float a = fabsf(y);
  return copysignf(to_grid(a < 6.f ? a : 6.f), y) * s;
}

static inline float divisor_of(float s) { return s > 0.f ? s : 1.f; }

static inline void load(const float* from, const int64_t* rows, int64_t width, panel_t x) {
  for (int l = 0; l < LANES; ++l)
    for (int64_t c = 0; c < width; ++c) x[c][l] = from[rows[l] * width + c];
}
// keep: [rows, width], 0 for weights that stay zero; NULL: there are none.
static inline const float (*load_kept(const uint8_t* keep, const int64_t* rows, int64_t width, panel_t kept))[LANES] {
  if (!keep) return NULL;
  for (int l = 0; l < LANES; ++l)
    for (int64_t c = 0; c < width; ++c) kept[c][l] = keep[rows[l] * width + c];
  return (const float (*)[LANES])kept;
}
static inline const float (*from_column(const float (*kept)[LANES], int64_t c))[LANES] { return kept ? kept + c : NULL; }
static inline void store(const panel_t x, const int64_t* rows, int count, int64_t width, float* to) {
  for (int l = 0; l < count; ++l)
    for (int64_t c = 0; c < width; ++c) to[rows[l] * width + c] = x[c][l];
}
// Lanes without a row repeat the last one, and are not stored. Returns how many have one.
static inline int rows_of(int64_t tile, int64_t rows, int64_t* at) {
  const int64_t first = tile * LANES;
  const int count = rows - first < LANES ? (int)(rows - first) : LANES;
  for (int l = 0; l < LANES; ++l) at[l] = first + (l < count ? l : count - 1);
  return count;
}

// One column c of a block: rounds it, and takes its error, times 1/u[c][c], from the columns up to end.
static inline void round_column(float (*x)[LANES], int64_t c, int64_t end, const float* u, int64_t width, float inverse, const float* s, const float* divisor,
                                const float (*kept)[LANES], float* q, float* error) {
  for (int l = 0; l < LANES; ++l) q[l] = to_scaled_grid(x[c][l], s[l], divisor[l]);
  if (kept)
    for (int l = 0; l < LANES; ++l) q[l] = kept[c][l] != 0.f ? q[l] : 0.f;
  for (int l = 0; l < LANES; ++l) error[l] = (x[c][l] - q[l]) * inverse;
  for (int64_t j = c + 1; j < end; ++j) {
    const float factor = u[c * width + j];
    for (int l = 0; l < LANES; ++l) x[j][l] -= error[l] * factor;
  }
}

// The code of each lane whose rounding of the block x costs least, feedback included; the smallest of equals.
static inline void best_scale(const block_t x, const float* u, int64_t width, const float* inverse, float g, const float (*kept)[LANES], int32_t* best) {
  float top[LANES], least[LANES];
  int32_t base[LANES];
  for (int l = 0; l < LANES; ++l) top[l] = 0.f;
  for (int i = 0; i < GROUP; ++i)
    for (int l = 0; l < LANES; ++l) {
      const float size = !kept || kept[i][l] != 0.f ? fabsf(x[i][l]) : 0.f;
      top[l] = size > top[l] ? size : top[l];
    }
  for (int l = 0; l < LANES; ++l) {
    base[l] = to_code(top[l] / (g * 6.f));
    best[l] = LAST_CODE;
    least[l] = INFINITY;
  }
  for (int t = 0; t < TRIED; ++t) {
    block_t rest;
    float s[LANES], divisor[LANES], cost[LANES] = {0}, q[LANES], error[LANES];
    int32_t code[LANES];
    for (int l = 0; l < LANES; ++l) {
      int32_t c = base[l] + t - TRIED / 2;
      c = c < FIRST_CODE ? FIRST_CODE : c > LAST_CODE ? LAST_CODE : c;
      code[l] = base[l] > 0 ? c : 0;
      s[l] = S[code[l]] * g;
      divisor[l] = divisor_of(s[l]);
    }
    memcpy(rest, x, sizeof rest);
    for (int c = 0; c < GROUP; ++c) {
      round_column(rest, c, GROUP, u, width, inverse[c], s, divisor, kept, q, error);
      for (int l = 0; l < LANES; ++l) cost[l] += error[l] * error[l];
    }
    for (int l = 0; l < LANES; ++l) {
      const int better = cost[l] < least[l] || (cost[l] == least[l] && code[l] < best[l]);
      best[l] = better ? code[l] : best[l];
      least[l] = better ? cost[l] : least[l];
    }
  }
}

// w, u, q, error: [rows, width], keep as load_kept has it, u [width, width], inverse [width]: 1 / diagonal of u, codes [rows, width/16]. width <= PANEL.
void fp4_gptq_round(const float* w, const float* u, const float* inverse, const uint8_t* keep, float g, int64_t rows, int64_t width, float* q, float* error,
                    uint8_t* codes, int threads) {
  const int64_t tiles = (rows + LANES - 1) / LANES;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t tile = 0; tile < tiles; ++tile) {
    int64_t at[LANES];
    panel_t x, rounded, off, mask;
    const int count = rows_of(tile, rows, at);
    load(w, at, width, x);
    const float (*kept)[LANES] = load_kept(keep, at, width, mask);
    for (int64_t b = 0; b < width; b += GROUP) {
      float s[LANES], divisor[LANES];
      int32_t best[LANES];
      best_scale((const float (*)[LANES])x[b], u + b * width + b, width, inverse + b, g, from_column(kept, b), best);
      for (int l = 0; l < LANES; ++l) {
        s[l] = S[best[l]] * g;
        divisor[l] = divisor_of(s[l]);
      }
      for (int64_t c = b; c < b + GROUP; ++c) round_column(x, c, width, u, width, inverse[c], s, divisor, kept, rounded[c], off[c]);
      for (int l = 0; l < count; ++l) codes[at[l] * (width / GROUP) + b / GROUP] = (uint8_t)best[l];
    }
    store(rounded, at, count, width, q);
    store(off, at, count, width, error);
  }
}

// Coordinate descent over the 16 codes of a block with the scales near the present one. d: the best change, zero where none lowers the error.
static inline void descend(const block_t pull, const block_t q, const float* h, int64_t width, const float* inverse, float g, const float (*kept)[LANES],
                           int32_t* code, block_t d) {
  float most[LANES];
  int32_t best[LANES];
  memset(d, 0, sizeof(block_t));
  for (int l = 0; l < LANES; ++l) {
    most[l] = 0.f;
    best[l] = code[l];
  }
  for (int t = 0; t < NEARBY; ++t) {
    block_t p, change;
    float s[LANES], divisor[LANES], gain[LANES] = {0}, size[LANES] = {0};
    int32_t tried[LANES], valid[LANES], better[LANES];
    for (int l = 0; l < LANES; ++l) {
      tried[l] = code[l] + t - NEARBY / 2;
      valid[l] = tried[l] >= FIRST_CODE && tried[l] <= LAST_CODE;
      s[l] = S[valid[l] ? tried[l] : 1] * g;
      divisor[l] = divisor_of(s[l]);
    }
    memcpy(p, pull, sizeof p);
    memset(change, 0, sizeof change);
    for (int pass = 0; pass < PASSES; ++pass)
      for (int c = 0; c < GROUP; ++c) {
        const float own = h[c * width + c];
        float step[LANES];
        for (int l = 0; l < LANES; ++l) {
          const float now = q[c][l] + change[c][l];
          step[l] = to_scaled_grid(now + p[c][l] * inverse[c], s[l], divisor[l]) - now;
          if (kept) step[l] = kept[c][l] != 0.f ? step[l] : 0.f;
          const float pushed = step[l] * own;
          gain[l] += step[l] * (p[c][l] * 2.f - pushed);
          size[l] += step[l] * pushed;
          change[c][l] += step[l];
        }
        for (int j = 0; j < GROUP; ++j) {
          const float factor = h[c * width + j];
          for (int l = 0; l < LANES; ++l) p[j][l] -= step[l] * factor;
        }
      }
    for (int l = 0; l < LANES; ++l) {
      const float net = gain[l] - size[l] * GAIN;
      better[l] = valid[l] && net > most[l];
      best[l] = better[l] ? tried[l] : best[l];
      most[l] = better[l] ? net : most[l];
    }
    for (int c = 0; c < GROUP; ++c)
      for (int l = 0; l < LANES; ++l) d[c][l] = better[l] ? change[c][l] : d[c][l];
  }
  memcpy(code, best, sizeof best);
}

// pull, q, change: [rows, width], keep as load_kept has it, h [width, width], inverse [width]: 1 / diagonal of h, codes [rows, width/16]. width <= PANEL.
// q and codes are read and written, change is written.
void fp4_gptq_refine(const float* pull, float* q, uint8_t* codes, const float* h, const float* inverse, const uint8_t* keep, float g, int64_t rows,
                     int64_t width, float* change, int threads) {
  const int64_t tiles = (rows + LANES - 1) / LANES, blocks = width / GROUP;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t tile = 0; tile < tiles; ++tile) {
    int64_t at[LANES];
    panel_t p, now, moved, mask;
    const int count = rows_of(tile, rows, at);
    load(pull, at, width, p);
    load(q, at, width, now);
    const float (*kept)[LANES] = load_kept(keep, at, width, mask);
    for (int64_t b = 0; b < width; b += GROUP) {
      int32_t code[LANES];
      block_t d;
      for (int l = 0; l < LANES; ++l) code[l] = codes[at[l] * blocks + b / GROUP];
      descend((const float (*)[LANES])p[b], (const float (*)[LANES])now[b], h + b * width + b, width, inverse + b, g, from_column(kept, b), code, d);
      for (int c = 0; c < GROUP; ++c) {
        for (int l = 0; l < LANES; ++l) now[b + c][l] += d[c][l];
        for (int64_t j = 0; j < width; ++j) {
          const float factor = h[(b + c) * width + j];
          for (int l = 0; l < LANES; ++l) p[j][l] -= d[c][l] * factor;
        }
      }
      memcpy(moved[b], d, sizeof d);
      for (int l = 0; l < count; ++l) codes[at[l] * blocks + b / GROUP] = (uint8_t)code[l];
    }
    store(now, at, count, width, q);
    store(moved, at, count, width, change);
  }
}
