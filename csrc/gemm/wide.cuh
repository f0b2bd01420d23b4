// What kernels of many tokens share on sm_90: weights decoded in registers are wgmma's A operand, tokens in shared memory its B operand, so
// that a weight is decoded once for all of them. One thread of a block fetches weights, one fetches activations, the others multiply.
#pragma once
#include <type_traits>

#include "../sm90/pipeline.cuh"
#include "../sm90/wgmma.cuh"
#include "weights.cuh"

namespace fp4 {

constexpr int at_most(int a, int b) { return a < b ? a : b; }
constexpr int at_least(int a, int b) { return a > b ? a : b; }

// Of weights that a block fetches before its first activations are there: more would only be in their way, for a block's copies are served in order.
constexpr int kEarlyBytes = 64 * 1024;

constexpr int kWideK = 256;  // k a step: 128 bytes of codes and 16 of scales a row of W

// Activations of a step, four tiles of 64 k, 128 bytes a token each.
template <int TOKENS> constexpr int kActivations = TOKENS * kWideK * 2;

// Tokens of each of `places` tiles, a multiple of EACH: a tile map is of so many, for a copy takes some 4 ns for a row past the end of its matrix.
template <int EACH> int even_tokens(int M, int places) { return (M + places * EACH - 1) / (places * EACH) * EACH; }

// By `threads` threads, those that multiply: rows `tokens` to TOKENS - 1 of so many tiles of 128 bytes a token, which no copy writes.
template <int TOKENS> __device__ __forceinline__ void clear_other_tokens(uint8_t* ring, int tiles, int tokens, int threads) {
  const int each = (TOKENS - tokens) * 8;
  for (int i = threadIdx.x; i < tiles * each; i += threads) *(uint4*)(ring + i / each * (TOKENS * 128) + tokens * 128 + i % each * 16) = uint4{};
  named_barrier_sync(1, threads);
  fence_proxy_async();
}

constexpr int kFlags = 160;  // of blocks that share sums through global memory: one a block, and of whole warps

template <int COUNT> __global__ void __launch_bounds__(COUNT) clear_flags(int* __restrict__ flags) {
  pdl_trigger_in_call();
  if (!FP4_FAULT(CLEAR_FLAGS_BEFORE_PDL_WAIT)) griddepcontrol_wait();  // it may use the same memory
  flags[threadIdx.x] = 0;
}

// launch(); where blocks share sums, behind a kernel that clears their flags.
template <typename... P, typename... A>
cudaError_t launch_sharing(bool share, int* flags, void (*kernel)(P...), dim3 blocks, int threads, int shared_bytes, int cluster, Stream stream, A... arguments) {
  if (!share) return launch(kernel, blocks, threads, shared_bytes, cluster, stream, arguments...);
  const cudaError_t status = launch(clear_flags<kFlags>, dim3(1), kFlags, 0, 1, stream, flags);
  return status == cudaSuccess ? launch_second(kernel, blocks, threads, shared_bytes, cluster, stream, arguments...) : status;
}

// Sums of tokens 8 FROM .. 8 TO - 1, to and from another block through global memory; each of THREADS has its own place there.
template <int FROM, int TO, int THREADS, int TILES> __device__ __forceinline__ void put_sums(float4* to, const float (&acc)[TILES][4]) {
#pragma unroll
  for (int i = FROM; i < TO; ++i) __stcg(to + i * THREADS, make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]));
}
template <int FROM, int TO, int THREADS, int TILES> __device__ __forceinline__ void add_sums(const float4* from, float (&acc)[TILES][4]) {
#pragma unroll
  for (int i = FROM; i < TO; ++i) {
    const float4 v = __ldcg(from + i * THREADS);
    acc[i][0] += v.x, acc[i][1] += v.y, acc[i][2] += v.z, acc[i][3] += v.w;
  }
}

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
  named_barrier_sync(1, kThreads);  // nobody reads the rings any more
#pragma unroll
  for (int i = 0; i < TOKENS / 8; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[(k_group * TOKENS + 8 * i + 2 * t + (c & 1)) * kPitch + local + g + 8 * (c >> 1)] = acc[i][c];
  const int first = rank * (TOKENS / splits);
  if (splits > 1)
    cluster_sync();
  else
    named_barrier_sync(1, kThreads);
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
            const float* from = (kSplits > 1 ? map_to_rank(sums, b) : sums) + (kg * TOKENS + m) * kPitch + n + p * kColumns;
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
  if (splits > 1) cluster_sync();  // nobody leaves while its sums are being read
}

}  // namespace fp4
