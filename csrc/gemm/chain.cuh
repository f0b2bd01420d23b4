// Of a chain of products (linear_chain.cu): what the host hands over, what a block's shared memory holds, and the steps that a warp fetches.
//
// A block has the same share of the rows of every product: `groups` groups of R rows. A warp works on every kWarps >> log_k_groups-th of them, and of those on
// every 1 << log_k_groups-th segment of K; a step is R rows by a segment. So a warp knows its steps of all products from the start.
#pragma once
#include "../common/exchange.cuh"
#include "routing.cuh"

namespace fp4 {

static_assert(kMostExperts <= kMostScores);
constexpr int kMostProducts = kMostRows + 1, R = 4, kWarps = 16, kMultiplying = 32 * kWarps, kThreads = kMultiplying + 32, kMostK = kBatch * kMultiplying * 8;
static_assert(kMostK <= kMostColumns);

// Of experts K, columns and the groups are those of all chosen ones side by side.
template <typename T> struct Product {
  const T* x;
  const uint8_t *q, *scale;
  const float* global_scale;
  const T *bias, *residual, *norm_weight;
  T* y;
  int K, columns, parts, act, second, third;  // parts: rows of W that make one column of y, `columns` rows apart
  float eps, norm_offset;
  int all, groups, segments, log_k_groups, log_width;  // groups of R rows, of each block; of K; of warps that share K; of the columns of a group
  uint32_t row, step;                                  // bytes of the codes of a row; those between a warp's steps
  int blocks;                                          // that have groups
  int added;                                           // the number of the product whose y is the residual, or -1
  int to_group;                                        // from a warp's group to its next one; 0: to be found from the beginning

  // log2 of the warps that share K, so that the warp with most steps has fewest; of those alike the fewest warps, whose sums are then added.
  int best_k_groups() const {
    int best = 0, least = groups * segments;
    for (int log = 0; 1 << log <= kWarps && 1 << log <= segments; ++log) {
      const int steps = divided(groups, kWarps >> log) * divided(segments, 1 << log);
      if (steps < least) best = log, least = steps;
    }
    return best;
  }
  // Which of the warps that share K it is.
  __device__ __forceinline__ int k_group_of(int warp) const { return warp & ((1 << log_k_groups) - 1); }
  // How many groups this block has, 0 or less where the blocks before have taken all.
  __device__ __forceinline__ int groups_of(int block) const { return min(groups, all - block * groups); }
  // Its first column, and how many it has.
  __device__ __forceinline__ int first_of(int block) const { return block * groups << log_width; }
  __device__ __forceinline__ int columns_of(int block) const { return min(groups << log_width, columns - first_of(block)); }
};

// Shared memory: x in half2, the factors of its blocks of 16, the warps' sums of squares, operands of the epilogue [5][columns], sums [k_groups][groups * R],
// and from byte `ring` on the rings.
template <typename T> struct Chain {
  Product<T> products[kMostProducts];
  int count, stages, segments, columns, ring;  // segments, columns of a block: the most of any product
  Rows<T> rows;
  Routing<T> routing;
  Exchange<T> exchange;
  int sum[kMostProducts];                // of each product -1, or the number of the sum over the ranks that its results go into
  const T* sum_residual[kMostProducts];  // what is added to that sum, or null; the product's own residual is null then
};

template <typename T> __device__ __forceinline__ float from_l2(const T* p) {
  return Numbers<T>::to_float(of_two_bytes<T>(__ldcg((const unsigned short*)p)));
}

// What the epilogue of a product needs for the block's columns: copied to shared memory while the product is computed.
template <typename T> struct Operands {
  float *scales, *added, *residual;  // [2][columns]; [2][columns]; [columns]
  int columns;

  // earlier: the row of the product whose result is added, or null. experts: of the product of gate and up, else null. A product over experts has its global scales in x.
  __device__ __forceinline__ void load(const Product<T>& p, int n, int c, const Routing<T>* experts, const int* chosen, const T* earlier) const {
#pragma unroll
    for (int part = 0; part < 2; ++part)
      if (part < p.parts) {
        const int up = FP4_FAULT(UP_WITH_GATE_SCALE) ? 0 : part, row = n + up * p.columns;
        const float scale = experts ? experts->scale_of(chosen, n, up) : !p.global_scale ? 1.f : p.global_scale[row < p.second ? 0 : row < p.third ? 1 : 2];
        scales[part * columns + c] = scale * kWeightUnit;
        added[part * columns + c] = p.bias ? Numbers<T>::to_float(p.bias[n + part * p.columns]) : 0.f;
      }
    residual[c] = !p.residual ? 0.f : earlier ? Rows<T>::load(earlier + n) : from_l2(p.residual + n);
  }
  __device__ __forceinline__ T value(const Product<T>& p, const float (&sums)[2], int c) const {
    float v = activate(sums[0] * scales[c] + added[c], p.act);
    if (p.parts == 2) v *= sums[1] * scales[columns + c] + added[columns + c];
    if (p.residual) v += residual[c];
    return Numbers<T>::from_float(v);
  }
};

// Where the parts of a block's shared memory lie.
template <typename T> struct Memory {
  uint8_t* x;
  float *factors, *squares, *sums;
  Operands<T> operands;
  uint8_t* rings;

  static __device__ __forceinline__ Memory of(const Chain<T>& chain) {
    uint8_t* shared = dynamic_shared();
    float* factors = (float*)(shared + chain.segments * (kSegment * 2));
    float* squares = factors + chain.segments * (kSegment / 16);
    float* operands = squares + kWarps;
    return {shared, factors, squares, operands + 5 * chain.columns,
            {operands, operands + 2 * chain.columns, operands + 4 * chain.columns, chain.columns}, shared + chain.ring};
  }
  static __device__ __forceinline__ Choice choice(const Chain<T>& chain) { return Choice::at(dynamic_shared() + chain.ring - kChoiceBytes); }
};

// The steps that a warp fetches, product after product up to `end`. Its instructions take turns with those that decode, which a GPU of much bandwidth waits for:
// so a step's places are those of the step before, moved on by numbers that the host has computed.
template <typename T, bool kRouted> struct Fetching {
  int product, group, end, rest;  // rest: k of the group's rows, from the step on
  const uint8_t *codes, *scales;  // what the lane copies of the first row, and of row lane / 16
  uint32_t next_row, next_pair;   // bytes of codes from a pair's first row to its second one, and from the first pair to the second one

  __device__ __forceinline__ void begin(const Chain<T>& chain, int first, int warp, int lane) {
    for (product = first; product < end; ++product) {
      const Product<T>& p = chain.products[product];
      group = warp >> p.log_k_groups;
      if (group < p.groups_of(blockIdx.x)) return begin_group(chain, warp, lane);
    }
  }
  __device__ __forceinline__ void begin_group(const Chain<T>& chain, int warp, int lane) {
    const Product<T>& p = chain.products[product];
    int columns = p.columns, n = (blockIdx.x * p.groups + group) << p.log_width;
    const uint32_t row = p.row, segment = p.k_group_of(warp);
    const uint8_t *q = p.q, *scale = p.scale;
    if (kRouted && product == chain.routing.product) chain.routing.to_gate_up(Memory<T>::choice(chain).ids, q, scale, n, columns);  // of one expert
    rest = p.K - segment * kSegment;
    // Of a last group with fewer columns, two of four, the rows past the last one are rows before it, and not stored.
    next_row = n + 1 < columns || FP4_FAULT(READ_ROWS_PAST_N) ? row : 0;
    next_pair = p.parts == 2 ? columns * row : n + 2 < columns || FP4_FAULT(READ_ROWS_PAST_N) ? 2 * row : 0;
    const uint32_t begin = n * row;
    codes = q + begin + (segment * (kSegment / 2) + lane * 16);
    scales = scale + begin / 8 + ((lane < 16 ? 0 : next_row / 8) + segment * (kSegment / 16) + lane % 16 * 4);
  }
  __device__ __forceinline__ void next(const Chain<T>& chain, Shared to, int warp, int lane) {
    if (product < end) {
      const Product<T>& p = chain.products[product];
      const uint8_t *q = codes, *scale = scales;
      if (kRouted && product == chain.routing.product + 1) {  // the lane's expert changes with k
        const uint32_t k = p.K - rest;
        chain.routing.to_down(Memory<T>::choice(chain).ids, q, scale, k / 2 + lane * 16, k / 16 + lane % 16 * 4);
      }
      to += lane * 16;
      const Shared scales_to = to + Step<R>::kCodes - lane * 12;
      if (rest >= kSegment || FP4_FAULT(READ_K_PAST_K)) {
        cp_async<16>(to, q), cp_async<16>(to + kSegment / 2, q + next_row);
        q += next_pair;
        cp_async<16>(to + kSegment, q), cp_async<16>(to + 3 * (kSegment / 2), q + next_row);
        cp_async<4>(scales_to, scale), cp_async<4>(scales_to + kSegment / 8, scale + next_pair / 8);
      } else {  // zeros behind the rows' ends
        const bool live = lane * 32 < rest;
        const int live_scales = lane % 16 * 64 < rest ? 4 : 0;
        cp_async_zfill<16>(to, q, live), cp_async_zfill<16>(to + kSegment / 2, q + next_row, live);
        q += next_pair;
        cp_async_zfill<16>(to + kSegment, q, live), cp_async_zfill<16>(to + 3 * (kSegment / 2), q + next_row, live);
        cp_async_src_size<4>(scales_to, scale, live_scales), cp_async_src_size<4>(scales_to + kSegment / 8, scale + next_pair / 8, live_scales);
      }
      const uint32_t step = p.step;
      codes += step, scales += step / 8, rest -= 2 * step;
      if (rest <= 0) {
        group += kWarps >> p.log_k_groups;
        if (group >= p.groups_of(blockIdx.x))
          begin(chain, product + 1, warp, lane);
        else if (p.to_group) {
          const int k = p.K - p.k_group_of(warp) * kSegment, by = p.to_group - (k - rest) / 2;
          codes += by, scales += by / 8, rest = k;
        } else {
          begin_group(chain, warp, lane);
        }
      }
    }
    cp_async_commit_group();
  }
};

// The rows of a product that this block will multiply begin to come to L2.
template <typename T> __device__ __forceinline__ void fetch_to_l2(const Product<T>& p) {
  const int n0 = p.first_of(blockIdx.x), rows = p.columns_of(blockIdx.x);
  for (int part = 0; part < p.parts; ++part) {
    const size_t first = n0 + part * p.columns, codes = first * (p.K / 2), scales = first * (p.K / 16);
    for (int at = threadIdx.x * 128; at < rows * (p.K / 2); at += kMultiplying * 128) prefetch_l2(p.q + codes + at);
    for (int at = threadIdx.x * 128; at < rows * (p.K / 16); at += kMultiplying * 128) prefetch_l2(p.scale + scales + at);
  }
}

}  // namespace fp4
