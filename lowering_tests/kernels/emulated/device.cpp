// Arithmetic of device.h: what one lane multiplies, and what a warp's tensor core does with the fragments of its 32 lanes.
#include "device.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <vector>

namespace emulated {
namespace {

uint64_t bits_of(double v) { return __builtin_bit_cast(uint64_t, v); }
double of_bits(uint64_t bits) { return __builtin_bit_cast(double, bits); }
double power(int e) { return of_bits((uint64_t)(e + 1023) << 52); }  // 2^e
int exponent(double v) { return (int)(bits_of(v) >> 52 & 2047) - 1022; }  // |v| = m * 2^e, m in [0.5, 1); of what is below 2^-1022 another small one

// A double rounded to `bits` significant bits, ties to even, numbers below 2^smallest keeping its spacing.
double rounded(double v, int bits, int smallest) {
  if (v == 0 || !std::isfinite(v)) return v;
  const int shift = bits - std::max(exponent(v), smallest);
  return std::nearbyint(v * power(shift)) * power(-shift);
}

}  // namespace

double from_bf16(unsigned short v) { return __builtin_bit_cast(float, (uint32_t)v << 16); }

unsigned short to_bf16(double v) {
  const float f = (float)rounded(v, 8, -125);  // exact, or infinite
  return std::isnan(v) ? 0x7FFF : (unsigned short)(__builtin_bit_cast(uint32_t, f) >> 16);
}

double from_f16(unsigned short v) {
  const int e = v >> 10 & 31, m = v & 1023;
  const double a = e == 31 ? (m ? NAN : INFINITY) : e ? of_bits((uint64_t)(e + 1008) << 52 | (uint64_t)m << 42) : m * 0x1p-24;
  return v & 0x8000 ? -a : a;
}

unsigned short to_f16(double v) {
  const unsigned short sign = std::signbit(v) ? 0x8000 : 0;
  if (std::isnan(v)) return 0x7FFF;
  const double a = rounded(std::fabs(v), 11, -13);
  if (a >= 65536) return sign | 0x7C00;
  if (a < 0x1p-14) return sign | (unsigned short)(a * 0x1p24);
  return sign | (unsigned short)((exponent(a) + 14) << 10 | (int)(bits_of(a) >> 42 & 1023));
}

double from_e4m3(unsigned char v) {
  const int e = v >> 3 & 15, m = v & 7;
  const double a = (v & 0x7F) == 0x7F ? NAN : e ? of_bits((uint64_t)(e + 1016) << 52 | (uint64_t)m << 49) : m * 0x1p-9;
  return v & 0x80 ? -a : a;
}

unsigned char to_e4m3(double v) {
  const unsigned char sign = std::signbit(v) ? 0x80 : 0;
  if (std::isnan(v)) return 0x7F;
  const double a = std::min(rounded(std::fabs(v), 4, -5), 448.0);
  if (a < 0x1p-6) return sign | (unsigned char)(a * 0x1p9);
  return sign | (unsigned char)((exponent(a) + 6) << 3 | (int)(bits_of(a) >> 49 & 7));
}

}  // namespace emulated

unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
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

namespace fp4 {
namespace {

double value(bool half, uint32_t pair, int i) {
  const uint16_t bits = pair >> (16 * i);
  return half ? emulated::from_f16(bits) : emulated::from_bf16(bits);
}

using emulated::from_e4m3;

// sums[row][:] += a[row][k] * b[k][:] for k = 0, 1, ...: each sum is rounded as one number after the other is added. A compiler can do several columns at once.
template <int K>
void add_products(int depth, int columns, const double (&a)[16][K], const double* b, double* sums) {
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < depth; ++k) {
      const double factor = a[row][k];
      const double* from = b + k * columns;
      double* to = sums + row * columns;
      for (int n = 0; n < columns; ++n) to[n] += factor * from[n];
    }
}

struct Operands {
  bool half;
  float* c;
  const uint32_t *a, *b;
  uint32_t meta;
  int selector;
};

// Registers of lane 4g + t (PTX ISA, "Matrix fragments for mma.m16n8k16"): B's register r holds k = 8 r + 2 t and the next one of
// column g; C's register i row g + 8 (i / 2), column 2 t + i % 2.
void accumulate(Operands** lanes, int k, const double (&a)[16][32]) {
  double b[32][8], sums[16][8];
  for (int lane = 0; lane < 32; ++lane)
    for (int r = 0; r < k / 8; ++r)
      for (int i = 0; i < 2; ++i) b[8 * r + lane % 4 * 2 + i][lane / 4] = value(lanes[lane]->half, lanes[lane]->b[r], i);
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) sums[lane / 4 + 8 * (i / 2)][lane % 4 * 2 + i % 2] = lanes[lane]->c[i];
  add_products(k, 8, a, b[0], sums[0]);
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) lanes[lane]->c[i] = (float)sums[lane / 4 + 8 * (i / 2)][lane % 4 * 2 + i % 2];
}

unsigned ordered(unsigned nibble) {
  if ((nibble & 3) >= nibble >> 2) emulated::fail("sparse mma: metadata %u is not ordered", nibble);
  return nibble;
}

// 2:4-sparse A: register r of lane 4g + t holds the two kept numbers of row g + 8 (r % 2), group of four t + 4 (r / 2).
// Lane 4g + 2 selector holds the metadata of k 0..15 of rows g (low half) and g + 8, the next one that of k 16..31. The same for the warps of a wgmma.
template <int K>
void spread(bool half, const uint32_t* const (&registers)[32], const uint32_t (&metas)[32], int selector, double (&a)[16][K]) {
  memset(a, 0, sizeof a);
  for (int lane = 0; lane < 32; ++lane)
    for (int r = 0; r < 4; ++r) {
      const int row = lane / 4 + r % 2 * 8, group = lane % 4 + r / 2 * 4;
      const unsigned nibble = ordered(metas[lane / 4 * 4 + 2 * selector + group / 4] >> (16 * (r % 2) + 4 * (group % 4)) & 15);
      a[row][4 * group + (nibble & 3)] = value(half, registers[lane][r], 0);
      a[row][4 * group + (nibble >> 2)] = value(half, registers[lane][r], 1);
    }
}

// The same in E4M3: four kept numbers a register, of the groups 2 t + 8 (r / 2) and the next one. Lane 4g + t holds the metadata of row g + 8 (t % 2), groups
// 8 (t / 2) .. + 7.
void spread_e4m3(const uint32_t* const (&registers)[32], const uint32_t (&metas)[32], double (&a)[16][64]) {
  memset(a, 0, sizeof a);
  for (int lane = 0; lane < 32; ++lane)
    for (int r = 0; r < 4; ++r)
      for (int i = 0; i < 2; ++i) {
        const int row = lane / 4 + r % 2 * 8, group = lane % 4 * 2 + r / 2 * 8 + i;
        const unsigned nibble = ordered(metas[lane / 4 * 4 + row / 8 + group / 8 * 2] >> 4 * (group % 8) & 15);
        a[row][4 * group + (nibble & 3)] = from_e4m3(registers[lane][r] >> (16 * i) & 255);
        a[row][4 * group + (nibble >> 2)] = from_e4m3(registers[lane][r] >> (16 * i + 8) & 255);
      }
}

}  // namespace

uint32_t multiply_pairs(bool half, uint32_t a, uint32_t b) {
  uint32_t d = 0;
  for (int i = 0; i < 2; ++i) {
    const double product = value(half, a, i) * value(half, b, i);
    d |= (uint32_t)(half ? emulated::to_f16(product) : emulated::to_bf16(product)) << (16 * i);
  }
  return d;
}

uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d = 0;
  for (int i = 0; i < 2; ++i) d |= (uint32_t)emulated::to_f16(value(true, a, i) * value(true, b, i) + value(true, c, i)) << (16 * i);
  return d;
}

void unpack_e4m3(uint32_t v, uint32_t& low, uint32_t& high) {
  auto half = [&](int i) { return (uint32_t)emulated::to_f16(from_e4m3(v >> (8 * i) & 255)); };
  low = half(0) | half(1) << 16, high = half(2) | half(3) << 16;
}

uint32_t pack_e4m3(uint32_t low, uint32_t high) {
  uint32_t d = 0;
  for (int i = 0; i < 4; ++i) d |= (uint32_t)emulated::to_e4m3(value(true, i < 2 ? low : high, i % 2)) << (8 * i);
  return d;
}

uint32_t round_e4m3(float a, float b, float c, float d) {
  return (uint32_t)emulated::to_e4m3(a) | (uint32_t)emulated::to_e4m3(b) << 8 | (uint32_t)emulated::to_e4m3(c) << 16 | (uint32_t)emulated::to_e4m3(d) << 24;
}

void mma_dense(bool half, float* c, const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  Operands mine{half, c, a, b, 0, 0};
  emulated::together("mma", &mine, [](void** all) {
    Operands** lanes = (Operands**)all;
    double a[16][32];
    for (int lane = 0; lane < 32; ++lane)
      for (int r = 0; r < 4; ++r)
        for (int i = 0; i < 2; ++i) a[lane / 4 + r % 2 * 8][r / 2 * 8 + lane % 4 * 2 + i] = value(lanes[lane]->half, lanes[lane]->a[r], i);
    accumulate(lanes, 16, a);
  });
}

void mma_sparse(bool half, int selector, float* c, const uint32_t (&a)[4], const uint32_t (&b)[4], uint32_t meta) {
  Operands mine{half, c, a, b, meta, selector};
  emulated::together("sparse mma", &mine, [](void** all) {
    Operands** lanes = (Operands**)all;
    const uint32_t* registers[32];
    uint32_t metas[32];
    for (int lane = 0; lane < 32; ++lane) registers[lane] = lanes[lane]->a, metas[lane] = lanes[lane]->meta;
    double a[16][32];
    spread(lanes[0]->half, registers, metas, lanes[0]->selector, a);
    accumulate(lanes, 32, a);
  });
}

// int8 (PTX ISA, "Matrix fragments for mma.m16n8k32"): register r of A in lane 4g + t holds row g + 8 (r % 2), k = 16 (r / 2) + 4 t onwards; B's column g, likewise.
void mma_int8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  struct Mine {
    int* c;
    uint32_t a[4], b[2];
  } mine{c, {a0, a1, a2, a3}, {b0, b1}};
  emulated::together("int8 mma", &mine, [](void** all) {
    auto lane = [&](int i) { return (Mine*)all[i]; };
    int a[16][32], b[32][8];
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) {
        for (int r = 0; r < 4; ++r) a[l / 4 + r % 2 * 8][r / 2 * 16 + l % 4 * 4 + i] = (int8_t)(lane(l)->a[r] >> (8 * i));
        for (int r = 0; r < 2; ++r) b[r * 16 + l % 4 * 4 + i][l / 4] = (int8_t)(lane(l)->b[r] >> (8 * i));
      }
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 32; ++k) lane(l)->c[i] += a[l / 4 + i / 2 * 8][k] * b[k][l % 4 * 2 + i % 2];
  });
}

// Block-scaled FP4 (PTX ISA, mma with .block_scale, kind::mxf4nvf4, scale_vec::4X): register r of A in lane 4g + t holds eight codes of
// row g + 8 (r % 2), k = 32 (r / 2) + 8 t onwards; B's register r column g, likewise. Not checked on hardware.
void mma_nvfp4(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, uint32_t a_scales, uint32_t b_scales) {
  struct Mine {
    float* c;
    uint32_t a[4], b[2], a_scales, b_scales;
  } mine{c, {a0, a1, a2, a3}, {b0, b1}, a_scales, b_scales};
  emulated::together("FP4 mma", &mine, [](void** all) {
    static const double magnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    auto lane = [&](int i) { return (Mine*)all[i]; };
    auto number = [](uint32_t word, int i) { return magnitudes[word >> (4 * i) & 7] * (word >> (4 * i) & 8 ? -1 : 1); };
    auto scale = [](uint32_t word, int k) {
      const int byte = word >> (8 * (k / 16)) & 255, e = byte >> 3 & 15, m = byte & 7;
      return byte == 0x7F ? NAN : e ? std::ldexp(8 + m, e - 10) : std::ldexp(m, -9);
    };
    double a[16][64], b[64][8];
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 8; ++i) {
        for (int r = 0; r < 4; ++r) {
          const int k = 32 * (r / 2) + l % 4 * 8 + i;
          a[l / 4 + r % 2 * 8][k] = number(lane(l)->a[r], i) * scale(lane(l / 4 * 4 + r % 2)->a_scales, k);
        }
        for (int r = 0; r < 2; ++r) {
          const int k = 32 * r + l % 4 * 8 + i;
          b[k][l / 4] = number(lane(l)->b[r], i) * scale(lane(l / 4 * 4)->b_scales, k);
        }
      }
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) {
        double sum = lane(l)->c[i];
        for (int k = 0; k < 64; ++k) sum += a[l / 4 + 8 * (i / 2)][k] * b[k][l % 4 * 2 + i % 2];
        lane(l)->c[i] = (float)sum;
      }
  });
}

namespace {

struct Pending {
  Type type;
  int tiles;
  const uint8_t* tile;
  int selector;  // of lanes with metadata; < 0: A is dense
  float (*d[128])[4];
  uint32_t a[128][4], meta[128];
};
struct Mine {
  Type type;
  float (*d)[4];
  int tiles;
  const uint32_t* a;
  const uint8_t* tile;
  uint32_t meta;
  int selector;
};

std::vector<Pending>& queue() {  // of the calling warpgroup
  static std::map<std::tuple<int, const uint8_t*, int>, std::vector<Pending>> all;
  if (!all.empty() && std::get<0>(all.begin()->first) != emulated::launch_number()) all.clear();
  return all[{emulated::launch_number(), emulated::dynamic_shared(), emulated::warpgroup()}];
}

void nothing(void**) {}

// Chunk c of token n of a tile: the swizzle works on the address, bits 4..6 ^= bits 7..9; shared memory begins at a multiple of 1024.
const uint8_t* chunk_of(const uint8_t* tile, int n, int c) {
  const uint8_t* shared = emulated::dynamic_shared();
  const size_t at = tile + n * 128 + c * 16 - shared;
  return shared + (at ^ (at >> 7 & 7) << 4);
}

// Number i of a register: two of 16 bits, or four of 8.
double number(Type type, uint32_t word, int i) {
  if (type == kE4M3) return from_e4m3(word >> (8 * i) & 255);
  return value(type == kFloat16, word, i);
}

}  // namespace

void set_registers() { emulated::together("setmaxnreg", nullptr, nothing, 128); }

void wgmma_fence() { emulated::together("wgmma.fence", nullptr, nothing, 128); }

void wgmma_issue(Type type, float (*d)[4], int tiles, const uint32_t (&a)[4], const uint8_t* tile, uint32_t meta, int selector) {
  Mine mine{type, d, tiles, a, tile, meta, selector};
  emulated::together(
      "wgmma", &mine,
      [](void** all) {
        Mine** lanes = (Mine**)all;
        Pending p{lanes[0]->type, lanes[0]->tiles, lanes[0]->tile, lanes[0]->selector, {}, {}, {}};
        for (int i = 0; i < 128; ++i) {
          if (lanes[i]->tile != p.tile) emulated::fail("wgmma: the tile is not the same for all threads");
          p.d[i] = lanes[i]->d;
          std::copy(lanes[i]->a, lanes[i]->a + 4, p.a[i]);
          p.meta[i] = lanes[i]->meta;
        }
        for (int n = 0; n < 8 * p.tiles; ++n)
          for (int c = 0; c < 2; ++c) emulated::check_published(chunk_of(p.tile, n, c), 16);
        queue().push_back(p);
      },
      128);
}

void wgmma_commit_group() {
  emulated::together("wgmma.commit", nullptr, [](void**) { queue().push_back({}); }, 128);  // tiles == 0: the end of a group
}

void wgmma_wait_until(int open) {
  emulated::together(
      "wgmma.wait", &open,
      [](void** lanes) {
        const int left = *(int*)lanes[0];
        std::vector<Pending>& all = queue();
        int groups = (int)std::count_if(all.begin(), all.end(), [](const Pending& p) { return p.tiles == 0; });
        if (left == 0 && !all.empty() && all.back().tiles) emulated::fail("wgmma: a product outside every committed group is never waited for");
        while (groups > left) {
          const Pending p = all.front();
          all.erase(all.begin());
          if (p.tiles == 0) {
            --groups;
            continue;
          }
          const bool sparse = p.selector >= 0;
          const int per = p.type == kE4M3 ? 4 : 2, depth = 8 * per * (sparse ? 2 : 1);  // numbers a register, k a product
          const int columns = 8 * p.tiles;
          std::vector<double> b(depth * columns), sums(16 * columns);
          for (int n = 0; n < 8 * p.tiles; ++n)
            for (int c = 0; c < depth / (4 * per); ++c) {
              const uint8_t* chunk = chunk_of(p.tile, n, c);
              emulated::check_published(chunk, 16);
              uint32_t words[4];
              memcpy(words, chunk, 16);
              for (int i = 0; i < 4 * per; ++i) b[(4 * per * c + i) * columns + n] = number(p.type, words[i / per], i % per);
            }
          for (int w = 0; w < 4; ++w) {
            double a[16][64];
            if (sparse) {
              const uint32_t* registers[32];
              uint32_t metas[32];
              for (int lane = 0; lane < 32; ++lane) registers[lane] = p.a[32 * w + lane], metas[lane] = p.meta[32 * w + lane];
              if (p.type == kE4M3)
                spread_e4m3(registers, metas, a);
              else
                spread(p.type == kFloat16, registers, metas, p.selector, a);
            } else {
              for (int lane = 0; lane < 32; ++lane)
                for (int r = 0; r < 4; ++r)
                  for (int i = 0; i < per; ++i) a[lane / 4 + r % 2 * 8][(r / 2 * 4 + lane % 4) * per + i] = number(p.type, p.a[32 * w + lane][r], i);
            }
            auto sum_of = [&](int lane, int j, int i) -> double& { return sums[(lane / 4 + 8 * (i / 2)) * columns + 8 * j + lane % 4 * 2 + i % 2]; };
            for (int lane = 0; lane < 32; ++lane)
              for (int j = 0; j < p.tiles; ++j)
                for (int i = 0; i < 4; ++i) sum_of(lane, j, i) = p.d[32 * w + lane][j][i];
            add_products(depth, columns, a, b.data(), sums.data());
            for (int lane = 0; lane < 32; ++lane)
              for (int j = 0; j < p.tiles; ++j)
                for (int i = 0; i < 4; ++i) p.d[32 * w + lane][j][i] = (float)sum_of(lane, j, i);
          }
        }
      },
      128);
}

// ldmatrix.x4: four 8x8 matrices of 16-bit numbers. Lane 8 i + r names row r of matrix i; lane 4 g + t receives pair t of row g of each.
void ldmatrix_x4(uint32_t (&to)[4], Shared row) {
  struct Mine {
    const uint8_t* row;
    uint32_t* to;
  } mine{row, to};
  if ((uintptr_t)row % 16) emulated::fail("ldmatrix: a row is not 16-byte aligned");
  emulated::check(row, 16, false);
  emulated::together("ldmatrix", &mine, [](void** lanes) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) memcpy(((Mine*)lanes[lane])->to + i, ((Mine*)lanes[8 * i + lane / 4])->row + lane % 4 * 4, 4);
  });
}

// stmatrix.x4.trans: lane 8 i + r names row r of matrix i; lane 4 g + t holds rows 2 t and 2 t + 1 of column g of each.
void stmatrix_x4_trans(Shared row, const uint32_t (&from)[4]) {
  struct Mine {
    uint8_t* row;
    const uint32_t* from;
  } mine{row, from};
  if ((uintptr_t)row % 16) emulated::fail("stmatrix: a row is not 16-byte aligned");
  emulated::check(row, 16, true);
  emulated::together("stmatrix", &mine, [](void** lanes) {
    for (int lane = 0; lane < 32; ++lane)
      for (int column = 0; column < 8; ++column)
        memcpy(((Mine*)lanes[lane])->row + 2 * column, (const uint8_t*)&((Mine*)lanes[4 * column + lane % 8 / 2])->from[lane / 8] + lane % 2 * 2, 2);
  });
}

}  // namespace fp4
