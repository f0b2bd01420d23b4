// The experts of one token in a chain of products: which of them its router chooses, with what weight, and where their rows lie.
//
// Each block has the router's rows of a few experts. Their scores meet in memory, and each block makes the choice again: an expert's rank is the number of
// experts that are better, so that no thread waits for the choice before its own.
#pragma once
#include "../common/rows.cuh"
#include "gemv.cuh"

namespace fp4 {

constexpr int kMostExperts = 512, kMostChosen = 32, kRouterRows = 4;  // rows: of the router in a block
constexpr int kScorers = 512;                                       // threads that score and choose
constexpr int kChoiceBytes = 4 * (3 * kMostChosen + kRouterRows * (kScorers / 32) + kMostExperts);

// In shared memory.
struct Choice {
  uint32_t* keys;   // of all experts, larger for a better one
  int* ids;         // of the chosen ones, the best first
  float *scores, *weights, *sums;  // of the chosen ones; the router's weight times the global scale of down; [row][warp]

  static __device__ __forceinline__ Choice at(uint8_t* p) {
    uint32_t* keys = (uint32_t*)p;
    int* ids = (int*)(keys + kMostExperts);
    float* scores = (float*)(ids + kMostChosen);
    return {keys, ids, scores, scores + kMostChosen, scores + 2 * kMostChosen};
  }
};

template <typename T> __device__ __forceinline__ float product_of(const uint4& a, const uint4& b) {
  float v[8], w[8], sum = 0.f;
  floats_of<T>(a, v), floats_of<T>(b, w);
#pragma unroll
  for (int j = 0; j < 8; ++j) sum += v[j] * w[j];
  return sum;
}

// 8 numbers of T, which they are rounded to.
template <typename T> __device__ __forceinline__ uint4 packed(const float (&v)[8]) {
  struct alignas(16) {
    T v[8];
  } all;
#pragma unroll
  for (int i = 0; i < 8; ++i) all.v[i] = Numbers<T>::from_float(v[i]);
  return *(uint4*)&all;
}

template <typename T> struct Routing {
  const T* router;  // [experts, K]
  const float *gate_up_scale, *down_scale;  // [experts, units], [experts]
  size_t gate_up_bytes, down_bytes;         // of the codes of an expert; those of its scales are an eighth
  int product;                              // gate_up; down is the next one
  int experts, chosen, K, inner, units, form, rounded;  // K: of gate_up; form: of ops/router.py; rounded: the weights are, to T
  uint32_t reciprocal;                      // of inner, times 2^32, rounded up

  // Takes what concerns product i of the call, whose sizes become those of all chosen experts side by side; false if it has no meaning.
  bool take(const ChainParams& call, int i, int blocks, LinearParams& c) {
    if (i == call.routed) {
      product = i, router = (const T*)call.router, gate_up_scale = (const float*)c.global_scale;
      experts = call.experts, chosen = call.top_k, K = c.K, inner = c.N / 2, units = call.units, form = call.form, rounded = call.rounded;
      gate_up_bytes = (size_t)c.N * (c.K / 2), reciprocal = (uint32_t)((0x100000000ull + inner - 1) / inner);
      c.N *= chosen, c.global_scale = nullptr;
      return router && c.N && i + 1 < call.count && experts <= kMostExperts && experts <= kRouterRows * blocks && chosen >= 1 && chosen <= experts &&
             chosen <= kMostChosen && inner % 64 == 0 && units >= 1 && units <= 2 && call.finish[i] == kGlu && !c.bias;
    }
    if (i && i == call.routed + 1) {
      down_scale = (const float*)c.global_scale, down_bytes = (size_t)c.N * (c.K / 2);
      const bool fits = c.K == inner && !c.bias && !c.norm_weight && call.finish[i] == kPointwise;
      c.K *= chosen, c.global_scale = nullptr;
      return fits;
    }
    return true;
  }

  // The chosen expert that entry `at` of all their results belongs to.
  __device__ __forceinline__ int expert_of(int at) const { return __umulhi((uint32_t)at, reciprocal); }

  // From the first expert's rows to those that make column n; n and columns become the expert's own.
  __device__ __forceinline__ void to_gate_up(const int* ids, const uint8_t*& codes, const uint8_t*& scales, int& n, int& columns) const {
    const int slot = expert_of(n);
    const size_t begin = ids[slot] * gate_up_bytes;
    codes += begin, scales += begin / 8, n -= slot * inner, columns = inner;
  }
  // From where the first expert's rows would go on, `byte` and `word` in, to those of the experts whose results lie there.
  __device__ __forceinline__ void to_down(const int* ids, const uint8_t*& codes, const uint8_t*& scales, int byte, int word) const {
    const int one = min(expert_of(2 * byte), chosen - 1), other = min(expert_of(16 * word), chosen - 1);  // past the last one nothing is read
    codes += ids[one] * down_bytes - one * (inner / 2), scales += ids[other] * (down_bytes / 8) - other * (inner / 16);
  }
  __device__ __forceinline__ float scale_of(const int* ids, int n, int part) const {
    return gate_up_scale[ids[expert_of(n)] * units + (units == 2 ? part : 0)];
  }

  // The block's rows begin to come to L2.
  __device__ __forceinline__ void prefetch(int threads) const {
    for (int row = blockIdx.x; row < experts; row += gridDim.x)
      for (int at = threadIdx.x * 64; at < K; at += threads * 64) prefetch_l2(router + (size_t)row * K + at);
  }
  // The warps' sums of the block's rows. x: chunks threadIdx.x + i * kScorers of 8 numbers.
  __device__ __forceinline__ void score(const uint4 (&x)[kBatch], const Choice& choice, int warp, int lane) const {
#pragma unroll 1
    for (int i = 0, row = blockIdx.x; row < experts; ++i, row += gridDim.x) {
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int c = threadIdx.x + j * kScorers;
        if (c * 8 < K) sum += product_of<T>(x[j], *(const uint4*)(router + (size_t)row * K + c * 8));
      }
      sum = sum_of_warp(sum);
      if (lane == 0) choice.sums[i * (kScorers / 32) + warp] = sum;
    }
  }
  __device__ __forceinline__ void store_scores(T* scores, const Choice& choice, int lane) const {
    const int row = blockIdx.x + lane * gridDim.x;
    if (lane >= kRouterRows || row >= experts) return;
    float sum = 0.f;
    for (int warp = 0; warp < kScorers / 32; ++warp) sum += choice.sums[lane * (kScorers / 32) + warp];
    Rows<T>::store(scores + row, Numbers<T>::from_float(sum));
  }

  // A score's bits in an order of their own: NaN above all, -0 as 0; then the lower index first.
  static __device__ __forceinline__ uint32_t key_of(T score, int expert) {
    const float value = Numbers<T>::to_float(score);
    uint32_t bits = value == 0.f ? 0 : two_bytes_of(score);
    bits = value != value ? 0xFFFF : bits & 0x8000 ? 0xFFFF - bits : bits | 0x8000;
    return bits << 16 | (0xFFFF - expert);
  }
  static __device__ __forceinline__ float score_of(uint32_t key) {
    const uint32_t bits = key >> 16;
    return Numbers<T>::to_float(of_two_bytes<T>(bits & 0x8000 ? bits & 0x7FFF : 0xFFFF - bits));  // 0xFFFF, a NaN, becomes 0x7FFF, a NaN
  }

  // By kScorers threads.
  __device__ __forceinline__ void choose(const T* scores, const Choice& choice) const {
    int all = 32;  // a power of two
    while (all < experts) all *= 2;
    if ((int)threadIdx.x < all) {
      choice.keys[threadIdx.x] = (int)threadIdx.x < experts ? key_of(Rows<T>::load_exact(scores + threadIdx.x), threadIdx.x) : 0;
    }
    if (!FP4_FAULT(SKIP_BARRIER_BEFORE_RANK)) named_barrier_sync(1, kScorers);
    const int share = kScorers / all, expert = threadIdx.x / share, part = threadIdx.x % share;  // threads to an expert, in one warp
    const uint32_t key = choice.keys[expert];
    int rank = 0;
#pragma unroll 4
    for (int i = part; i < all / 4; i += share) {
      const uint4 other = ((const uint4*)choice.keys)[i];
      rank += (other.x > key) + (other.y > key) + (other.z > key) + (other.w > key);
    }
    for (int mask = 1; mask < share; mask *= 2) rank += __float_as_int(shuffle_xor(__int_as_float(rank), mask));
    if (part == 0 && rank < chosen && expert < experts) choice.ids[rank] = expert, choice.scores[rank] = score_of(key);
  }
  // By one warp.
  __device__ __forceinline__ void weigh(const Choice& choice, int lane) const {
    const float peak = choice.scores[0];
    float mine = lane < chosen ? expf(choice.scores[lane] - peak) : 0.f, sum = mine;
    if (form == 0) {
      sum = 0.f;
      for (int i = lane; i < experts; i += 32) sum += expf(score_of(choice.keys[i]) - peak);
    }
    mine /= sum_of_warp(sum);
    if (rounded) mine = Numbers<T>::to_float(Numbers<T>::from_float(mine));
    if (lane < chosen) choice.weights[lane] = mine * down_scale[choice.ids[lane]];
  }
};

}  // namespace fp4
