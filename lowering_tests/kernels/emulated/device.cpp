// Arithmetic of device.h: what one lane multiplies, and what a warp's tensor core does with the fragments of its 32 lanes.
#include "device.h"

#include <vector>

namespace fp4 {
namespace {

double value(bool half, uint32_t pair, int i) {
  static const std::vector<float> halves = [] {
    std::vector<float> table(1 << 16);
    for (size_t v = 0; v < table.size(); ++v) table[v] = (float)emulated::from_f16(v);
    return table;
  }();
  const uint16_t bits = pair >> (16 * i);
  return half ? halves[bits] : emulated::from_bf16(bits);
}

struct Operands {
  bool half;
  float* c;
  const uint32_t *a, *b;
  uint32_t meta;
};

// Registers of lane 4g + t (PTX ISA, "Matrix fragments for mma.m16n8k16"): B's register r holds k = 8 r + 2 t and the next one of
// column g; C's register i row g + 8 (i / 2), column 2 t + i % 2.
void accumulate(Operands** lanes, int k, const double (&a)[16][32]) {
  double b[32][8];
  for (int lane = 0; lane < 32; ++lane)
    for (int r = 0; r < k / 8; ++r)
      for (int i = 0; i < 2; ++i) b[8 * r + lane % 4 * 2 + i][lane / 4] = value(lanes[lane]->half, lanes[lane]->b[r], i);
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
      double sum = lanes[lane]->c[i];
      for (int j = 0; j < k; ++j) sum += a[row][j] * b[j][column];
      lanes[lane]->c[i] = (float)sum;
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

void mma_dense(bool half, float* c, const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  Operands mine{half, c, a, b, 0};
  emulated::together("mma", &mine, [](void** all) {
    Operands** lanes = (Operands**)all;
    double a[16][32];
    for (int lane = 0; lane < 32; ++lane)
      for (int r = 0; r < 4; ++r)
        for (int i = 0; i < 2; ++i) a[lane / 4 + r % 2 * 8][r / 2 * 8 + lane % 4 * 2 + i] = value(lanes[lane]->half, lanes[lane]->a[r], i);
    accumulate(lanes, 16, a);
  });
}

// 2:4-sparse A: register r of lane 4g + t holds the two kept numbers of row g + 8 (r % 2), group of four t + 4 (r / 2).
// Lane 4g holds the metadata of k 0..15 of rows g (low half) and g + 8, lane 4g + 1 that of k 16..31 (selector 0).
void mma_sparse(bool half, float* c, const uint32_t (&a)[4], const uint32_t (&b)[4], uint32_t meta) {
  Operands mine{half, c, a, b, meta};
  emulated::together("sparse mma", &mine, [](void** all) {
    Operands** lanes = (Operands**)all;
    double a[16][32] = {};
    for (int lane = 0; lane < 32; ++lane)
      for (int r = 0; r < 4; ++r) {
        const int row = lane / 4 + r % 2 * 8, group = lane % 4 + r / 2 * 4;
        const unsigned nibble = lanes[lane / 4 * 4 + group / 4]->meta >> (16 * (r % 2) + 4 * (group % 4)) & 15;
        if ((nibble & 3) >= nibble >> 2) emulated::fail("sparse mma: metadata %u is not ordered", nibble);
        a[row][4 * group + (nibble & 3)] = value(lanes[lane]->half, lanes[lane]->a[r], 0);
        a[row][4 * group + (nibble >> 2)] = value(lanes[lane]->half, lanes[lane]->a[r], 1);
      }
    accumulate(lanes, 32, a);
  });
}

// ldmatrix.x4: four 8x8 matrices of 16-bit numbers. Lane 8 i + r names row r of matrix i; lane 4 g + t receives pair t of row g of each.
void load_matrices(uint32_t (&to)[4], Shared row) {
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

}  // namespace fp4
