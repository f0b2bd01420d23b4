// What linear_table and sparse_linear_table share: a ring of stages fetched by a warp of its own, the turns of the warps that share K at its steps, and
// their sums.
#pragma once
#include "wide.cuh"

namespace fp4 {

constexpr int kTableRoom = 227 * 1024 - kPairTable - 256;  // bytes for stages
constexpr int kMostWarps = 16, kMostStages = 16;

// A block for nearly every SM: the rows of one, in sixteens.
inline int sets_a_block(int N) {
  const int total = (N + 15) / 16, waves = (total + 132 * 16 - 1) / (132 * 16);
  return (total + 132 * waves - 1) / (132 * waves);
}

// By one thread: `full` are completed by what is fetched, `free` by `readers` warps a step.
__device__ __forceinline__ void init_ring(Shared full, Shared free, int stages, int readers) {
  for (int i = 0; i < stages; ++i) counter_init(full + 8 * i, 1), counter_init(free + 8 * i, readers);
  publish_counters();
}

// By one thread: weights(k, at) promises the bytes of step k and fetches weights to stage `at`, activations(k, at) the rest. early: stages of weights that go
// ahead of the first activations.
template <typename Weights, typename Activations>
__device__ __forceinline__ void fetch_steps(int steps, int stages, int early, Shared free, Weights weights, Activations activations) {
  early = min(steps, early);
  for (int k = 0; k < early; ++k) weights(k, k);
  wait_for_previous();  // it may have written x; it does not write weights
  for (int k = 0, at = 0, parity = 1; k < steps; ++k) {
    if (k >= early) {
      counter_wait(free + 8 * at, parity);
      weights(k, at);
    }
    activations(k, at);
    if (++at == stages) at = 0, parity ^= 1;
  }
}

// Bits of each of a warp's sums: not known before everything that they are made of has been loaded.
template <int R, int TILES> __device__ __forceinline__ uint32_t bits_of(const float (&acc)[R][TILES][4]) {
  uint32_t bits = 0;
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int j = 0; j < TILES; ++j) bits |= __float_as_uint(acc[r][j][0]);
  return bits;
}

// By a warp, one of those that share K in k_groups: use(stage) for each of its steps, every k_groups-th, which returns bits_of() its sums. Giving the stage back
// has to wait for these, for it would overtake loads; zero: 0, which the compiler does not know.
template <typename Use>
__device__ __forceinline__ void take_turns(int steps, int stages, int k_groups, int k_group, Shared full, Shared free, int lane, int zero, Use use) {
  // A warp has to meet every phase of a counter that it waits for: the one behind an incomplete one would look complete. So it goes to its own steps only
  // where these always lie in the same stages, else it waits for each step and works on every k_groups-th.
  const int stride = stages % k_groups ? 1 : k_groups;
  int at = stride == 1 ? 0 : k_group, parity = 0, turn = stride == 1 ? k_group : 0;
  for (int k = at; k < steps; k += stride) {
    counter_wait(full + 8 * at, parity);
    const int stage = at;
    at += stride;
    if (at >= stages) at -= stages, parity ^= 1;
    if (turn) {
      --turn;
      continue;
    }
    turn = stride == 1 ? k_groups - 1 : 0;
    const int behind = (int)use(stage) & zero;
    __syncwarp();
    if (lane == 0) counter_arrive(free + 8 * stage + behind);
  }
}

// acc: a warp's sums of 16 * R rows of the block's `rows`, row + 16 r and that + 8 for its lanes, by 8 * TILES tokens, over its share of K. What lies at `sums` is no
// longer read. Columns from n0 + first on, an even one, are stored.
template <typename T, int R, int TILES>
__device__ __forceinline__ void sum_turns_and_store(const float (&acc)[R][TILES][4], float* sums, int rows, int row, int k_group, int k_groups, int threads, int n0,
                                                    int first, const Result<T>& out) {
  constexpr int kParts = Result<T>::kParts, kTokens = 8 * TILES;
  const int t = threadIdx.x & 3, pitch = rows + 4, columns = rows / kParts;  // [k_groups][kTokens][pitch]
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[(k_group * kTokens + 8 * j + 2 * t + (c & 1)) * pitch + row + 16 * r + 8 * (c >> 1)] = acc[r][j][c];
  barrier(1, threads);
  const int pairs = (columns - first) / 2;
  for (int i = threadIdx.x; i < pairs * out.M; i += threads) {
    const int m = i / pairs, n = first + i % pairs * 2;
    float all[2][kParts] = {};
#pragma unroll 4
    for (int kg = 0; kg < k_groups; ++kg)
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const float2 v = *(const float2*)(sums + (kg * kTokens + m) * pitch + n + p * columns);
        all[0][p] += v.x, all[1][p] += v.y;
      }
    out.template store_run<2>(m, n0 + n, all);
  }
}

}  // namespace fp4
