// What kernels of many tokens share on sm_90: weights decoded in registers are wgmma's A operand, tokens in shared memory its B operand, so
// that a weight is decoded once for all of them. One thread of a block fetches weights, one fetches activations, the others multiply.
#pragma once
#include <type_traits>

#include "../common/wgmma.cuh"
#include "weights.cuh"

namespace fp4 {

constexpr int at_most(int a, int b) { return a < b ? a : b; }
constexpr int at_least(int a, int b) { return a > b ? a : b; }

// Of weights that a block fetches before its first activations are there: more would only be in their way, for a block's copies are served in order.
constexpr int kEarlyBytes = 64 * 1024;

constexpr int kWideK = 256;  // k a step: 128 bytes of codes and 16 of scales a row of W

// Activations as wgmma takes them: [M / TOKENS][steps] of kActivations bytes, zeros beyond M and K. A step is four tiles of 64 k, 128 bytes a
// token each. Lane t of a quad decodes k = 64 t .. 64 t + 63 of a step, eight words of eight codes; a tile holds two words of all four lanes.
template <int TOKENS> constexpr int kActivations = TOKENS * kWideK * 2;
// Codes are decoded by table where there is room for it beside the activations, and where rings need not be deep: with four warpgroups for the same 64 rows they do.
template <int ROWS, int TOKENS> constexpr bool kByTable = TOKENS <= 32 && ROWS > 64;
template <int TOKENS> constexpr int kArranging = TOKENS * 8 < 256 ? TOKENS * 8 : 256;  // threads of a block, one a word of a token

// Of a step of a token's row of K, the eight k from 8 * word on of each lane of a quad: four of the 16-byte chunks that the step's tiles, at `to`, hold of the token.
template <typename T, int TOKENS, bool BY_TABLE> __device__ __forceinline__ void arrange_word(const T* row, bool live, int K, int step, int word, int token, uint8_t* to) {
  uint32_t p[4][4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int k = step * kWideK + 64 * t + 8 * word;
    const uint4 v = live && k < K ? *(const uint4*)(row + k) : make_uint4(0, 0, 0, 0);
    if constexpr (BY_TABLE)
      p[t][0] = v.x, p[t][1] = v.y, p[t][2] = v.z, p[t][3] = v.w;
    else
      pair_up(v, p[t]);
  }
  to += word / 2 * (TOKENS * 128) + token * 128;
  // Pair c of decode() of the four lanes makes 16 bytes: lane t's first pair of a k-block of 16 is k 2t, 2t + 1 of it, its second pair those + 8.
#pragma unroll
  for (int c = 0; c < 4; ++c) *(uint4*)(to + ((word % 2 * 4 + c) ^ (token & 7)) * 16) = make_uint4(p[0][c], p[1][c], p[2][c], p[3][c]);
}

// x is no __restrict__ pointer: a load past the read-only path is what sees what a kernel wrote that was still running when this one began.
template <typename T, int TOKENS, bool BY_TABLE>
__global__ void __launch_bounds__(256) arrange(const T* x, uint8_t* __restrict__ to, int M, int K, int* __restrict__ flags, int count) {
  let_second_begin();
  wait_for_previous();
  if (blockIdx.x == 0 && blockIdx.y == 0)
    for (int i = threadIdx.x; i < count; i += kArranging<TOKENS>) flags[i] = 0;
  const int step = blockIdx.x, m = (blockIdx.y * kArranging<TOKENS> + threadIdx.x) / 8, place = m / TOKENS;
  arrange_word<T, TOKENS, BY_TABLE>(x + (size_t)m * K, m < M, K, step, threadIdx.x % 8, m % TOKENS, to + ((size_t)place * gridDim.x + step) * kActivations<TOKENS>);
}

// One step of a warp's 16 rows: q[h][j] are the codes of rows g + 8 h of the lane's k 32 j onwards, scales[h] four E4M3 bytes. `held`: the step's
// activations; arrived(j) waits for half j of them, done(j) is called when the products of the half before are complete.
template <typename T, int TOKENS, int BATCH, bool BY_TABLE, typename Arrived, typename Done>
__device__ __forceinline__ void multiply_step(float (&acc)[TOKENS / 8][4], const uint4 (&q)[2][2], const uint32_t (&scales)[2], Shared held, Shared table,
                                              uint32_t lane4, Arrived arrived, Done done) {
  uint32_t even[2], odd[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) Numbers<T>::four_scales(scales[h], even[h], odd[h]);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    arrived(j);
#pragma unroll
    for (int b = 0; b < 4; b += BATCH) {  // BATCH words are decoded while the products of those before are worked on
      uint32_t a[BATCH][2][4];
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint4& c = q[h][j];
          const uint32_t word = b + i == 0 ? c.x : b + i == 1 ? c.y : b + i == 2 ? c.z : c.w;
          const uint32_t by = (b + i) / 2 ? odd[h] : even[h];
          if constexpr (BY_TABLE)
            decode_by_table<T>(word, table, lane4, by, j, a[i][h]);
          else
            decode_by_half<T>(word, by, j, a[i][h]);
        }
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
#pragma unroll
        for (int z = 0; z < 2; ++z) {
          const int at = (2 * j + (b + i) / 2) * (TOKENS * 128) + (b + i) % 2 * 64 + z * 32;
          wgmma<T>(acc, a[i][0][2 * z], a[i][1][2 * z], a[i][0][2 * z + 1], a[i][1][2 * z + 1], tile_of(held, at));
        }
      wgmma_commit();
      wgmma_wait<1>();
      if (b == 0) done(j);
    }
  }
}

// A place in a ring of STAGES, and the parity of its phase.
template <int STAGES> struct Place {
  int i = 0, parity = 0;
  __device__ __forceinline__ void next(int steps = 1) {  // at most STAGES
    i += steps;
    if (i >= STAGES) i -= STAGES, parity ^= 1;
  }
};

// Bytes of shared memory that sum_k_groups_and_store needs.
template <int ROWS> constexpr int kSumPitch = ROWS + 4;
template <int ROWS, int TOKENS, int KGROUPS> constexpr int kWideSums = KGROUPS * TOKENS * kSumPitch<ROWS> * 4;

// Of KGROUPS warpgroups for each 64 rows and `splits` blocks of the cluster, each with its share of K, in a fixed order. All threads that multiplied call it,
// `local` the first row of a warp; when splits > 1 the block's other threads meet both barriers of the cluster, too.
template <typename T, int ROWS, int TOKENS, int KGROUPS>
__device__ __forceinline__ void sum_k_groups_and_store(const float (&acc)[TOKENS / 8][4], float* sums, int k_group, int local, int splits, int rank, int n0, int m0,
                                                       const Result<T>& out) {
  constexpr int kThreads = 2 * ROWS * KGROUPS, kPitch = kSumPitch<ROWS>, kParts = Result<T>::kParts, kColumns = kBlockColumns<T, ROWS>;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  barrier(1, kThreads);  // nobody reads the rings any more
#pragma unroll
  for (int i = 0; i < TOKENS / 8; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[(k_group * TOKENS + 8 * i + 2 * t + (c & 1)) * kPitch + local + g + 8 * (c >> 1)] = acc[i][c];
  const int first = rank * (TOKENS / splits);
  if (splits > 1)
    cluster_barrier();
  else
    barrier(1, kThreads);
  auto add_up = [&](auto blocks) {  // as many loads in flight as can be: it is their latency that costs
    constexpr int kSplits = decltype(blocks)::value;
#pragma unroll kFinish == kPlain ? 4 : 1
    for (int i = threadIdx.x; i < kColumns / 4 * (TOKENS / kSplits); i += kThreads) {
      const int m = first + i / (kColumns / 4), n = i % (kColumns / 4) * 4;
      float all[4][kParts] = {};
#pragma unroll
      for (int b = 0; b < kSplits; ++b)
#pragma unroll
        for (int kg = 0; kg < KGROUPS; ++kg)
#pragma unroll
          for (int p = 0; p < kParts; ++p) {
            const float* from = (kSplits > 1 ? of_block(sums, b) : sums) + (kg * TOKENS + m) * kPitch + n + p * kColumns;
            const float4 v = *(const float4*)from;
            all[0][p] += v.x, all[1][p] += v.y, all[2][p] += v.z, all[3][p] += v.w;
          }
      out.template store_run<4>(m0 + m, n0 + n, all);
    }
  };
  if (splits == 1)
    add_up(std::integral_constant<int, 1>());
  else if (splits == 2)
    add_up(std::integral_constant<int, 2>());
  else
    add_up(std::integral_constant<int, 4>());
  if (splits > 1) cluster_barrier();  // nobody leaves while its sums are being read
}

}  // namespace fp4
