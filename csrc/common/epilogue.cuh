// What happens to sums: the warps of a block, and the blocks of a cluster, meet in shared memory in a fixed order, without
// atomics; then scale, bias and one rounding.
#pragma once
#include "nvfp4.cuh"

namespace fp4 {

// y[M, N]; bias may be null.
template <typename T> struct Output {
  T* y;
  const T* bias;
  int M, N;

  __device__ __forceinline__ void store(int m, int n, float value) const {
    if (m < M && n < N) y[(size_t)m * N + n] = Numbers<T>::from_float(value + (bias ? Numbers<T>::to_float(bias[n]) : 0.f));
  }
};

// Bytes of shared memory that sum_and_store needs.
template <int R, int MT, int WARPS> constexpr int kSumBytes = WARPS * 8 * MT * (16 * R + 1) * (int)sizeof(float);

// acc: each warp's share of the same 16 * R rows by 8 * MT tokens, as mma16816 leaves it. `shared` is free for use by all
// warps; row n0 and token 0 come first; `splits` blocks of the cluster hold shares of the same sums.
template <typename T, int R, int MT, int WARPS>
__device__ __forceinline__ void sum_and_store(const float (&acc)[R][MT][4], uint8_t* shared, int splits, int n0, float unit, const Output<T>& out) {
  constexpr int kRows = 16 * R, kTokens = 8 * MT;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  float* partial = (float*)shared;  // [WARPS][kTokens][kRows + 1]
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int j = 0; j < MT; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        partial[(warp * kTokens + 8 * j + 2 * t + (c & 1)) * (kRows + 1) + 16 * r + g + 8 * (c >> 1)] = acc[r][j][c];
  __syncthreads();
  auto over_warps = [&](int row, int m) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += partial[(w * kTokens + m) * (kRows + 1) + row];
    return sum;
  };
  if (splits == 1) {
    for (int i = threadIdx.x; i < kRows * kTokens; i += 32 * WARPS) out.store(i / kRows, n0 + i % kRows, over_warps(i % kRows, i / kRows) * unit);
    return;
  }
  for (int i = threadIdx.x; i < kRows * kTokens; i += 32 * WARPS) partial[i / kRows * (kRows + 1) + i % kRows] = over_warps(i % kRows, i / kRows);
  cluster_barrier();
  const int slice = kRows / splits, first = cluster_rank() * slice;
  for (int i = threadIdx.x; i < slice * kTokens; i += 32 * WARPS) {
    const int row = first + i % slice, m = i / slice;
    float sum = 0.f;
    for (int r = 0; r < splits; ++r) sum += of_block(partial, r)[m * (kRows + 1) + row];
    out.store(m, n0 + row, sum * unit);
  }
  cluster_barrier();  // nobody leaves while its sums are being read
}

// Bytes of shared memory that sum_groups_and_store needs.
template <int TILES, int ROWS> constexpr int kGroupSumBytes = 8 * TILES * (ROWS + 4) * (int)sizeof(float);

// The same for GROUPS groups of warps that each hold ROWS rows by 8 * TILES tokens between them, warp `row_warp` of `group` 16 * R rows.
template <typename T, int R, int TILES, int GROUPS, int ROWS>
__device__ __forceinline__ void sum_groups_and_store(const float (&acc)[R][TILES][4], uint8_t* shared, int group, int row_warp, int splits, int rank, int n0,
                                                     int m0, float unit, const Output<T>& out) {
  constexpr int kPitch = ROWS + 4, kTokens = 8 * TILES;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float* sums = (float*)shared;  // [kTokens][kPitch]
  for (int turn = GROUPS - 1; turn >= 0; --turn) {
    if (group == turn)
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            float* at = sums + (8 * i + 2 * t + (c & 1)) * kPitch + (row_warp * R + r) * 16 + g + 8 * (c >> 1);
            *at = turn == GROUPS - 1 ? acc[r][i][c] : *at + acc[r][i][c];
          }
    __syncthreads();
  }
  if (splits > 1) cluster_barrier();
  const int slice = ROWS / splits;
  for (int i = threadIdx.x; i < slice * kTokens; i += 32 * GROUPS * ROWS / (16 * R)) {
    const int row = rank * slice + i % slice, m = i / slice;
    float sum = 0.f;
    for (int r = 0; r < splits; ++r) sum += (splits > 1 ? of_block(sums, r) : sums)[m * kPitch + row];
    out.store(m0 + m, n0 + row, sum * unit);
  }
  if (splits > 1) cluster_barrier();  // nobody leaves while its sums are being read
}

}  // namespace fp4
