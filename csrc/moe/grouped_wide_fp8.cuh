// The two products of an MoE layer by FP8 tensor cores over pairs sorted by expert (route.cuh), on sm_90: items of grouped_wide.cuh, the mainloop of
// gemm/wide_fp8.cuh. A cluster's two blocks own 128 rows of W each and share the tile of pairs, which is copied to both at once. multiply_fp8.cuh has the same
// mainloop in another frame: there the host knows the tiles and shares them among clusters, here the device does, and an item has a size of its own.
#pragma once
#include <algorithm>

#include "../gemm/wide_fp8.cuh"
#include "grouped_wide.cuh"

namespace fp4 {

// A row's bytes in the order of wide_fp8.cuh: a multiple of 256, zeros behind K.
__host__ __device__ constexpr int row_bytes(int K) { return (K + kWideK - 1) / kWideK * kWideK; }

// x [rows, K] rounded to E4M3 with a scale a row; SORTED: as they come, else each token's row to the places of its pairs. A row has `each` threads, a multiple
// of 32, and they CHUNKS times 16 numbers each at most.
template <bool SORTED, int CHUNKS>
__global__ void __launch_bounds__(256) round_rows(const __nv_bfloat16* __restrict__ x, uint8_t* __restrict__ to, float* __restrict__ scale, const int* __restrict__ place,
                                                  int rows, int K, int top_k, int each) {
  pdl_trigger_in_call();
  const int row = blockIdx.x * (blockDim.x / each) + threadIdx.x / each, first = threadIdx.x % each, pitch = row_bytes(K);
  if (SORTED) pdl_wait_in_call();
  float v[CHUNKS][4][4], peak = 0.f;  // without a NaN, which is one among the codes
#pragma unroll
  for (int u = 0; u < CHUNKS; ++u) {
    const int chunk = first + u * each, k = FP4_FAULT(ROUND_ROWS_IN_ORDER) ? chunk * 4 : chunk / 16 * kWideK + chunk % 16 * 4;
    uint2 words[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) words[t] = __ldcg((const uint2*)(x + (row < rows && k + 64 * t < K ? (size_t)row * K + k + 64 * t : 0)));
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t two = e < 2 ? words[t].x : words[t].y;
        v[u][t][e] = k + 64 * t < K ? __bfloat162float(((const __nv_bfloat16*)&two)[e % 2]) : 0.f;
        peak = fmaxf(peak, fabsf(v[u][t][e]));
      }
  }
#pragma unroll
  for (int by = 16; by; by /= 2) peak = fmaxf(peak, shuffle_xor(peak, by));
  float* peaks = (float*)dynamic_shared();
  if (threadIdx.x % 32 == 0) peaks[threadIdx.x / 32] = peak;
  __syncthreads();
  for (int w = 0; w < each / 32 && !FP4_FAULT(MAXIMUM_OF_A_WARP); ++w) peak = fmaxf(peak, peaks[threadIdx.x / each * (each / 32) + w]);
  const float unit = peak > 0.f ? fmaxf(peak / 448.f, 1.17549435e-38f) : 1.f, inverse = 1.f / unit;
  if (row >= rows) return;
  uint4 codes[CHUNKS];
#pragma unroll
  for (int u = 0; u < CHUNKS; ++u) {
    auto four = [&](const float(&w)[4]) { return round_e4m3(w[0] * inverse, w[1] * inverse, w[2] * inverse, w[3] * inverse); };
    codes[u] = make_uint4(four(v[u][0]), four(v[u][1]), four(v[u][2]), four(v[u][3]));
  }
  auto put = [&](int at) {
    if (first == 0) scale[at] = unit;
#pragma unroll
    for (int u = 0; u < CHUNKS; ++u)
      if ((first + u * each) * 16 < pitch) *(uint4*)(to + (size_t)at * pitch + (first + u * each) * 16) = codes[u];
  };
  if (SORTED) return put(row);
  pdl_wait_in_call();
  int next = __ldcg(place + row * top_k);
  for (int j = 1; j <= top_k; ++j) {
    const int at = next;
    if (j < top_k) next = __ldcg(place + row * top_k + j);
    if (at >= 0) put(at);
  }
}

// Numbers of tokens, rising, multiples of 16, that products are compiled for.
template <int... N> struct Sizes {
  static constexpr int kCount = sizeof...(N), kMost = std::max({N...});
  // f of the least that holds `count`, as a type.
  template <typename F> __device__ __forceinline__ static void fitting(int count, F f) { (void)(... || (count <= N && (f(std::integral_constant<int, N>()), true))); }
  __device__ __forceinline__ static int index(int count) { return (0 + ... + (int)(count > N)); }
  __device__ __forceinline__ static int size(int count) {
    int n = 0;
    fitting(count, [&](auto size) { n = decltype(size)::value; });
    return n;
  }
};
// Of each of the sizes, for half of its rows: what one block of the cluster copies.
template <int COUNT> struct TokenMaps {
  TensorMap of[COUNT];
};

template <int TOKENS, int W_STAGES, int X_STAGES> struct StagesFP8 {
  static constexpr int kRows = 128, kBlocks = 2, kConsumers = 256, kThreads = kConsumers + 128;
  static constexpr int kCodes = kRows * 128, kWeights = kCodes + kRows * 16, kHalf = TOKENS * 128;  // X_STAGES: of half steps
  static constexpr int kStaging = W_STAGES * kWeights + X_STAGES * kHalf, kScales = kStaging + kConsumers / 32 * 2048;
  static constexpr int kMbarriers = kScales + 2 * TOKENS * 4, kBytes = kMbarriers + 16 * W_STAGES + 16 * X_STAGES;
  static_assert(kBytes <= 227 * 1024, "does not fit shared memory");
};

// act(gate) * up of a warpgroup's 32 outputs n0 .. n0 + 31 of `count` tokens, the tile's first being row m0 of h [., N]; the caller's warp has eight of them, and
// a lane's rows g are gates, g + 8 ups. staging: 8192 bytes of the warpgroup's, barrier `id` its own.
template <int TILES>
__device__ __forceinline__ void store_activated(const float (&acc)[TILES][4], float unit, float up_unit, const float (&bias)[2], const float* token_scales, const Between& between,
                                                uint8_t* staging, int id, __nv_bfloat16* __restrict__ h, int m0, int count, int n0, int N) {
  const int lane = threadIdx.x & 31, t = lane & 3, quarter = threadIdx.x >> 5 & 3;
  // Rows of 64 bytes, a token each; chunk c of token m lies at c ^ m / 2 % 4, so that eight rows lie in different banks.
  const Shared to = shared_address(staging) + lane * 64 + (quarter ^ (lane >> 1 & 3)) * 16;
#pragma unroll
  for (int i0 = 0; i0 < TILES; i0 += 16) {
    constexpr int kAtOnce = TILES < 16 ? TILES : 16;
#pragma unroll
    for (int i = 0; i < kAtOnce; i += 4) {
      if (i0 + i >= TILES) break;
      uint32_t pairs[4] = {};
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const int tile = i0 + i + d;
        if (tile >= TILES) break;
        const float *s = token_scales + 8 * tile + 2 * t, *v = acc[tile];
        const float u0 = unit * s[0], u1 = unit * s[1], w0 = up_unit * s[0], w1 = up_unit * s[1];
        const __nv_bfloat162 two = __floats2bfloat162_rn(between(fmaf(v[0], u0, bias[0]), fmaf(v[2], w0, bias[1])), between(fmaf(v[1], u1, bias[0]), fmaf(v[3], w1, bias[1])));
        pairs[d] = *(const uint32_t*)&two;
      }
      stmatrix_x4_trans(to + i * 512, pairs);
    }
    named_barrier_sync(id, 128);
#pragma unroll
    for (int i = 0; i < (kAtOnce + 3) / 4; ++i) {
      const int v = i * 128 + (threadIdx.x & 127), m = v / 4, n = n0 + 8 * (v % 4);
      if (8 * i0 + m < count && n < N) *(uint4*)(h + (size_t)(m0 + 8 * i0 + m) * N + n) = *(const uint4*)(staging + m * 64 + (v % 4 ^ (m >> 1 & 3)) * 16);
    }
    if (i0 + 16 < TILES && !FP4_FAULT(STAGING_OVERWRITTEN)) named_barrier_sync(id, 128);  // staging is read before it is filled again
  }
}

// Of weights [E, (UP: 2) N, K] and rows of E4M3 sorted by expert, row_bytes(K) each, with scales. out [., N]: UP: act(gate) * up, of 64 outputs a block: the maps
// are of gates and of ups. MAPPED: maps take the scales (K is a multiple of 256), too; else two warps copy them.
template <bool UP, bool MAPPED, int W_STAGES, int X_STAGES, typename SIZES>
__global__ void __launch_bounds__(384, 1)
    product_fp8(const __grid_constant__ TensorMap codes, const __grid_constant__ TensorMap codes_up, const __grid_constant__ TensorMap scales,
                const __grid_constant__ TensorMap scales_up, const __grid_constant__ TokenMaps<SIZES::kCount> tokens, const uint8_t* __restrict__ scale,
                const float* x_scale, const Routed routed, const float* __restrict__ global_scale, __nv_bfloat16* __restrict__ out, int N, int K, int groups,
                const Between between) {
  using S = StagesFP8<SIZES::kMost, W_STAGES, X_STAGES>;
  constexpr int kColumns = UP ? S::kRows / 2 : S::kRows, kHigh = UP ? S::kRows / 2 : 8;  // outputs of a block; rows between the two of a lane
  constexpr int kFewer = MAPPED ? 40 : 56;  // registers of those who fetch
  uint8_t* shared = dynamic_shared();
  const Shared weights = shared_address(shared), activations = weights + W_STAGES * S::kWeights;
  // A stage of activations is free when the consumers of both blocks of the cluster have left it.
  const auto w_ring = Ring<>::at(weights + S::kMbarriers, W_STAGES);
  const auto x_ring = Ring<>::at(w_ring.end(W_STAGES), X_STAGES);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rank = cluster_rank(), steps = (K + kWideK - 1) / kWideK;
  if (threadIdx.x == 0) {
    w_ring.init(W_STAGES, MAPPED ? 1 : 65, S::kConsumers / 32);
    x_ring.init(X_STAGES, 1, S::kBlocks * S::kConsumers / 32);
    fence_mbarrier_init();
  }
  if (threadIdx.x == S::kConsumers) prefetch_tensor_map(codes);
  __syncthreads();
  cluster_sync();
  if (UP) pdl_wait_in_call();  // the routing; it is done when the second product begins
  pdl_trigger_in_call();
  Items<SIZES::kMost, true> items(routed, groups);

  if (warp >= S::kConsumers / 32) {
    setmaxnreg_dec<kFewer>();
    Place<W_STAGES> w;
    if (warp == S::kConsumers / 32 && lane == 0) {  // weights
      while (items.advance()) {
        const int n = (items.group * S::kBlocks + rank) * kColumns;
        for (int k = 0; k < steps; ++k, w.next()) {
          const Shared to = weights + w.i * S::kWeights, full = w_ring.of(w);
          w_ring.acquire(w);
          mbarrier_arrive_expect_tx(full, MAPPED ? S::kWeights : S::kCodes);
          tma_load_3d(to, codes, k * 128, n, items.expert, full);
          if (UP) tma_load_3d(to + kHigh * 128, FP4_FAULT(UPS_ARE_GATES) ? codes : codes_up, k * 128, n, items.expert, full);
          if (MAPPED) tma_load_3d(to + S::kCodes, scales, k * 16, n, items.expert, full);
          if (MAPPED && UP) tma_load_3d(to + S::kCodes + kHigh * 16, scales_up, k * 16, n, items.expert, full);
        }
      }
    } else if (warp == S::kConsumers / 32 + 1 && lane == 0) {  // activations
      Place<X_STAGES> x;
      if (!UP) pdl_wait_in_call();
      while (items.advance()) {
        const int size = SIZES::size(items.count), mine = size / S::kBlocks * rank;
        const TensorMap& rows = tokens.of[SIZES::index(items.count)];
        for (int half = 0; half < 2 * steps; ++half, x.next()) {
          x_ring.acquire(x);
          mbarrier_arrive_expect_tx(x_ring.of(x), size * 128);
          tma_load_2d_multicast(activations + x.i * S::kHalf + mine * 128, rows, half * 128, items.first + mine, x_ring.of(x), (1 << S::kBlocks) - 1);
        }
      }
    } else if (!MAPPED && warp >= S::kConsumers / 32 + 2) {  // scales, four lanes a row
      const int c = threadIdx.x % 4, pitch = K / 16;
      while (items.advance()) {
        const int n0 = (items.group * S::kBlocks + rank) * kColumns;
        const uint8_t* from = scale + (size_t)items.expert * (UP ? 2 * N : N) * pitch;
        for (int k = 0; k < steps; ++k, w.next()) {
          const Shared to = weights + w.i * S::kWeights + S::kCodes;
          const int bytes = min(4, pitch - 16 * k - 4 * c);
          w_ring.acquire(w);
#pragma unroll 2
          for (int i = 0; i < S::kRows / 16; ++i) {
            const int r = threadIdx.x % 64 / 4 + 16 * i, n = n0 + r % kColumns;
            const bool live = (n < N || FP4_FAULT(READ_SCALES_PAST_END)) && bytes > 0;
            const int row = UP ? between.row(n, r / kColumns, N) : n;
            cp_async_src_size<4>(to + r * 16 + 4 * c, live ? from + (size_t)row * pitch + 16 * k + 4 * c : scale, live ? bytes : 0);
          }
          if (FP4_FAULT(ARRIVE_BEFORE_COPIES))
            mbarrier_arrive(w_ring.of(w));
          else
            cp_async_mbarrier_arrive(w_ring.of(w));
        }
      }
    }
    __syncwarp();
    cluster_sync();
    return;
  }

  setmaxnreg_inc<(504 - kFewer) / 2>();
  if (!UP) pdl_wait_in_call();
  const int g = lane >> 2, set = uniform(warp >> 2), local = (UP ? 8 : 16) * (4 * set + (warp & 3));  // the warp's first row
  const StageFP8<kHigh> rows(shared, S::kCodes, local, lane);
  float* token_scales = (float*)(shared + S::kScales) + set * SIZES::kMost;
  uint8_t* staging = shared + S::kStaging + (UP ? 4 * set : warp) * 2048;
  const __nv_bfloat16* biases = UP ? between.bias : between.down_bias;
  Place<W_STAGES> w;
  Place<X_STAGES> x;
  while (items.advance())
    SIZES::fitting(items.count, [&](auto size) {
      constexpr int kTokens = decltype(size)::value;
      const int first = items.first, count = items.count, n0 = (items.group * S::kBlocks + rank) * kColumns;
      // Scales and biases arrive while the sums are made.
      constexpr int kOwn = UP ? kUnits : 1;
      float units[kOwn], mine[(kTokens + 127) / 128], bias[2];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) units[i] = load_float(global_scale + items.expert * kOwn + i);
      const int thread = threadIdx.x & 127;
#pragma unroll
      for (int i = 0; i < (kTokens + 127) / 128; ++i) mine[i] = 128 * i + thread < count ? __ldcg(x_scale + first + 128 * i + thread) : 0.f;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int n = n0 + local + g + (UP ? 0 : 8 * h);
        bias[h] = biases && n < N ? __bfloat162float(biases[(size_t)items.expert * (UP ? 2 * N : N) + (UP ? between.row(n, h, N) : n)]) : 0.f;
      }
      float acc[kTokens / 8][4] = {};
      multiply_steps_fp8<S::kBlocks, S::kWeights, S::kHalf>(acc, steps, w_ring, w, x_ring, x, activations,
                                                            [&](int stage, auto arrived, auto done) { rows.multiply(acc, stage, arrived, done); });
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        needed(units[i]);
        units[i] *= 1.f / kFactor;
      }
      named_barrier_sync(1 + set, 128);  // nobody reads the scales of the item before any more
#pragma unroll
      for (int i = 0; i < (kTokens + 127) / 128; ++i)
        if (128 * i + thread < kTokens) token_scales[128 * i + thread] = mine[i];
      named_barrier_sync(1 + set, 128);
      if constexpr (UP) {
        store_activated(acc, units[0], units[kOwn - 1], bias, token_scales, between, staging, 1 + set, out, first, count, n0 + 32 * set, N);
      } else {
        const float both[2] = {units[0], units[0]};
        store_tokens<0, kTokens / 8>(acc, both, bias, token_scales, staging, out, first, first + (FP4_FAULT(STORE_ROWS_PAST_PAIRS) ? kTokens : count), n0 + local, N);
      }
    });
  __syncwarp();
  if (!FP4_FAULT(BLOCK_ENDS_EARLY)) cluster_sync();  // nobody leaves while others may still write to its shared memory
}

}  // namespace fp4
