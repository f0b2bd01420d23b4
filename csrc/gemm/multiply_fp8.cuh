// The frame of the FP8 products, dense and 2:4-sparse: y[M, N] = x8[M, K] @ W8[N, K]^T * x_scale (+ bias) by FP8 tensor cores, x8 E4M3 with a scale per
// token, W8 rounded to E4M3 in registers by a `Weight`, which says how a step of it is fetched and multiplied.
//
// Weights and activations come as tiles through two rings. The two blocks of a cluster own 128 rows of W each and share the activations, which are copied to
// both at once. Clusters take whole tiles, or equal shares of all tiles' steps, or tiles are split among 2 or 4 clusters in K; what clusters share is summed
// through global memory, in a fixed order.
#pragma once
#include <type_traits>

#include "wide_fp8.cuh"

namespace fp4 {

constexpr int kRows = 128, kBlocks = 2, kConsumers = 256;  // rows a block, blocks a cluster, threads that multiply
constexpr int kMostClusters = 66;                          // there is scratch memory for the sums of so many

// --- sums --------------------------------------------------------------------------------------------------------------

// What a cluster does: steps k .. k + count() - 1 of a tile, then next(). SPLITS > 1: each tile's K among so many clusters. 1: the first `streamed`
// tiles in shares of equal length, a share's last tile first, so that an earlier cluster has the later steps of what two share, comes to them
// first, and waits for nobody; then whole tiles.
template <int SPLITS> struct Work {
  int tile, k, left, whole, tiles, steps;

  __device__ __forceinline__ Work(int tiles, int streamed, int steps) : tile(0), k(0), left(0), tiles(tiles), steps(steps) {
    const int cluster = blockIdx.x;
    if constexpr (SPLITS > 1) {
      const int part = cluster % SPLITS;
      tile = cluster / SPLITS, k = steps * part / SPLITS, left = steps * (part + 1) / SPLITS - k, whole = tiles;
    } else {
      whole = streamed + cluster;
      if (streamed) {
        const int last = end(streamed * steps, cluster) - 1;
        tile = last / steps, k = steps - 1 - last % steps, left = last + 1 - end(streamed * steps, cluster - 1);
      }
      take_whole();
    }
  }
  __device__ __forceinline__ static int end(int units, int cluster) { return (int)((int64_t)units * (cluster + 1) / gridDim.x); }
  __device__ __forceinline__ int count() const { return SPLITS > 1 ? left : min(steps - k, left); }
  __device__ __forceinline__ void next(int count) {
    left -= count, --tile, k = 0;
    if (SPLITS == 1) take_whole();
  }

 private:
  __device__ __forceinline__ void take_whole() {
    if (left == 0 && whole < tiles) tile = whole, whole += gridDim.x, left = steps, k = 0;
  }
};

template <int SPLITS, int PART = 0, typename F> __device__ __forceinline__ void each_part(F f) {
  if constexpr (PART < SPLITS) {
    f(std::integral_constant<int, PART>());
    each_part<SPLITS, PART + 1>(f);
  }
}

struct Out {
  __nv_bfloat16* y;
  const float* global_scale;
  const __nv_bfloat16* bias;
  int M, N, second, third;

  __device__ __forceinline__ float unit(int row) const { return load_float(global_scale + (row >= second) + (row >= third)) * (1.f / kFactor); }
  __device__ __forceinline__ float added(int row) const { return bias && row < N ? __bfloat162float(bias[row]) : 0.f; }

  // Tokens 8 FROM .. 8 TO - 1 of a warp's rows n0 .. n0 + 15.
  template <int FROM, int TO, int TILES>
  __device__ __forceinline__ void store(const float (&acc)[TILES][4], const float* token_scales, uint8_t* staging, int m0, int n0) const {
    const int g = threadIdx.x >> 2 & 7;
    const float units[2] = {unit(n0 + g), unit(n0 + g + 8)}, more[2] = {added(n0 + g), added(n0 + g + 8)};
    store_tokens<FROM, TO>(acc, units, more, token_scales, staging, y, m0, M, n0, N);
  }
};

// --- the kernel --------------------------------------------------------------------------------------------------------

// Stages of the rings: of steps, of half steps.
template <typename Weight, int TOKENS> struct Shape {
  static constexpr int kTiles = TOKENS / 8, kThreads = kConsumers + 128;
  static constexpr int kWeights = kRows * Weight::kRowBytes, kHalf = TOKENS * 128;
  static constexpr int kWStages = Weight::weight_stages(TOKENS), kXStages = Weight::token_stages(TOKENS);
  static constexpr int kStaging = kWStages * kWeights + kXStages * kHalf, kScales = kStaging + kConsumers / 32 * 2048, kMbarriers = kScales + TOKENS * 4;
  static constexpr int kBytes = kMbarriers + 16 * kWStages + 16 * kXStages, kSums = kTiles * kConsumers;  // float4s of a block's sums
  static_assert(kBytes <= 227 * 1024, "does not fit shared memory");
};

template <typename Weight, int TOKENS, int SPLITS>
__global__ void __launch_bounds__(Shape<Weight, TOKENS>::kThreads, 1)
    multiply_fp8(const __grid_constant__ typename Weight::Maps weight, const __grid_constant__ TensorMap tokens, const float* x_scale,
                 const float* __restrict__ global_scale, const __nv_bfloat16* __restrict__ bias, __nv_bfloat16* __restrict__ y, float4* __restrict__ partial,
                 int* __restrict__ flags, int M, int N, int K, int second, int third, int places, int tile_tokens, int count_tiles, int streamed) {
  using S = Shape<Weight, TOKENS>;
  constexpr int kTiles = S::kTiles;
  uint8_t* shared = dynamic_shared();
  const Shared weights = shared_address(shared), activations = weights + S::kWStages * S::kWeights;
  // A stage of activations is free when the consumers of both blocks of the cluster have left it.
  const auto w_ring = Ring<>::at(weights + S::kMbarriers, S::kWStages);
  const auto x_ring = Ring<>::at(w_ring.end(S::kWStages), S::kXStages);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rank = cluster_rank(), steps = K / kWideK;
  Work<SPLITS> work(count_tiles, streamed, steps);

  if (threadIdx.x == 0) {
    w_ring.init(S::kWStages, 1, FP4_FAULT(ONE_WARP_FREES_WEIGHTS) ? 1 : kConsumers / 32);
    x_ring.init(S::kXStages, 1, kBlocks * kConsumers / 32);
    fence_mbarrier_init();
  }
  if (threadIdx.x == kConsumers) Weight::prefetch(weight);
  if (threadIdx.x == kConsumers + 32) prefetch_tensor_map(tokens);
  __syncthreads();
  cluster_sync();

  if (warp >= kConsumers / 32) {
    setmaxnreg_dec<40>();
    if (warp == kConsumers / 32 && lane == 0) {
      Place<S::kWStages> at;
      while (work.left > 0) {
        const int count = work.count(), row = (work.tile / places * kBlocks + rank) * kRows;
        for (int k = work.k; k < work.k + count; ++k, at.next()) {
          const Shared to = weights + at.i * S::kWeights, full = w_ring.of(at);
          w_ring.acquire(at);
          mbarrier_arrive_expect_tx(full, S::kWeights);
          Weight::fetch(to, weight, k, row, full);
        }
        work.next(count);
      }
    } else if (warp == kConsumers / 32 + 1 && lane == 0) {
      const int mine = tile_tokens / kBlocks;
      Place<S::kXStages> at;
      griddepcontrol_wait();  // it may have written x; it does not write weights
      while (work.left > 0) {
        const int count = work.count(), m = work.tile % places * tile_tokens + rank * mine;
        for (int half = 2 * work.k; half < 2 * (work.k + count); ++half, at.next()) {
          if (!FP4_FAULT(SKIP_TOKENS_FREE_WAIT)) x_ring.acquire(at);
          mbarrier_arrive_expect_tx(x_ring.of(at), tile_tokens * 128);
          tma_load_2d_multicast(activations + at.i * S::kHalf + rank * mine * 128, tokens, half * 128, m, x_ring.of(at), (1 << kBlocks) - 1);
        }
        work.next(count);
      }
    }
    __syncwarp();
    cluster_sync();
    return;
  }

  setmaxnreg_inc<232>();
  if (tile_tokens < TOKENS) clear_other_tokens<TOKENS>(shared + S::kWStages * S::kWeights, S::kXStages, tile_tokens, kConsumers);
  griddepcontrol_wait();  // it may still read y, and may have written the activations' scales
  griddepcontrol_launch_dependents();
  const int local = uniform(warp >> 2) * 64 + (warp & 3) * 16;  // the warp's first row
  Weight rows(shared, local, lane);
  float* token_scales = (float*)(shared + S::kScales);
  uint8_t* staging = shared + S::kStaging + warp * 2048;
  Out out{y, global_scale, bias, M, N, second, third};
  Place<S::kWStages> w;
  Place<S::kXStages> x;

  while (work.left > 0) {
    const int count = work.count(), k = work.k, tile = work.tile, m0 = tile % places * tile_tokens, n0 = (tile / places * kBlocks + rank) * kRows;
    out.M = min(M, m0 + tile_tokens);
    float mine = 0.f;
    if ((int)threadIdx.x < TOKENS && m0 + (int)threadIdx.x < M) mine = x_scale[m0 + threadIdx.x];
    float acc[kTiles][4] = {};
    multiply_steps_fp8<kBlocks, S::kWeights, S::kHalf>(acc, count, w_ring, w, x_ring, x, activations,
                                                       [&](int stage, auto arrived, auto done) { rows.multiply(acc, stage, N - n0 - local, arrived, done); });
    work.next(count);

    auto sums = [&](int cluster) { return partial + (size_t)(cluster * kBlocks + rank) * S::kSums + threadIdx.x; };
    auto set_mine = [&] {
      __threadfence();
      named_barrier_sync(1, kConsumers);
      if (threadIdx.x == 0 && !FP4_FAULT(FLAG_NOT_SET)) flag_set(flags + blockIdx.x * kBlocks + rank);
    };
    auto wait_for = [&](int cluster) {
      while (!FP4_FAULT(SKIP_FLAG_WAIT) && !flag_get(flags + cluster * kBlocks + rank)) {}
    };
    if (SPLITS == 1 && k > 0) {  // a later cluster has the tile's first steps, and stores it
      put_sums<0, kTiles, kConsumers>(sums(blockIdx.x), acc);
      set_mine();
      continue;
    }
    named_barrier_sync(1, kConsumers);  // nobody reads the scales of the tile before any more
    if ((int)threadIdx.x < TOKENS) token_scales[threadIdx.x] = mine;
    if constexpr (SPLITS == 1) {
      for (int c = (int)blockIdx.x - 1; count < steps && c >= 0 && Work<1>::end(streamed * steps, c) > tile * steps; --c) {
        wait_for(c);
        add_sums<0, kTiles, kConsumers>(sums(c), acc);
      }
      if (!FP4_FAULT(SKIP_TOKEN_SCALES_WAIT)) named_barrier_sync(1, kConsumers);
      out.store<0, kTiles>(acc, token_scales, staging, m0, n0 + local);
    } else {  // each of the tile's clusters stores a part of its tokens
      const int part = blockIdx.x % SPLITS;
      each_part<SPLITS>([&](auto p) {
        constexpr int kFrom = decltype(p)::value * kTiles / SPLITS;
        if (part != decltype(p)::value) put_sums<kFrom, kFrom + kTiles / SPLITS, kConsumers>(sums(blockIdx.x), acc);
      });
      set_mine();
      each_part<SPLITS>([&](auto p) {
        constexpr int kFrom = decltype(p)::value * kTiles / SPLITS, kTo = kFrom + kTiles / SPLITS;
        if (part != decltype(p)::value) return;
#pragma unroll 1
        for (int i = 1; i < SPLITS; ++i) {
          const int other = (int)blockIdx.x - part + (part + i) % SPLITS;
          wait_for(other);
          add_sums<kFrom, kTo, kConsumers>(sums(other), acc);
        }
        out.store<kFrom, kTo>(acc, token_scales, staging, m0, n0 + local);
      });
    }
  }
  __syncwarp();
  if (!FP4_FAULT(BLOCK_ENDS_EARLY)) cluster_sync();  // nobody leaves while others may still write to its shared memory
}

// --- host --------------------------------------------------------------------------------------------------------------

// splits: clusters that share a tile's K; 0: clusters take equal shares of the tiles that do not fill all of them.
struct Tile {
  int tokens, splits;
};

template <typename Weight> struct Call {
  const uint8_t* x8;
  const float* x_scale;
  typename Weight::Parts w;
  const float* g;
  const __nv_bfloat16* bias;
  __nv_bfloat16* y;
  int M, N, K, second, third;

  static Call of(const LinearParams& p, typename Weight::Parts w) {
    return {(const uint8_t*)p.x, (const float*)p.x_scale, w, (const float*)p.global_scale, (const __nv_bfloat16*)p.bias, (__nv_bfloat16*)p.y, p.M, p.N, p.K,
            p.second ? p.second : INT32_MAX, p.third ? p.third : INT32_MAX};
  }
};

// Does it multiply so? E4M3 activations have bfloat16 results.
inline bool fits(const LinearParams& p) {
  return p.M >= 1 && p.M <= 1 << 20 && p.N >= 1 && p.K >= kWideK && p.K % kWideK == 0 && p.dtype == 0 &&
         Epilogue<__nv_bfloat16>::of(nullptr, nullptr, p.second, p.third, 0).fits(kPlain, p.N);
}

// Sums of the clusters that share tiles, and their flags. Which tile the kernel chooses depends on the device, so that its own choice takes as much as any.
inline int64_t scratch_bytes(const LinearParams& p) {
  const int tokens = p.tile[0] ? p.tile[0] : 256, splits = p.tile[1];
  return !fits(p) || splits == 1 ? 0 : (int64_t)kMostClusters * kBlocks * kRows * tokens * sizeof(float) + kFlags * sizeof(int);
}

inline int places_of(int M, int tokens) { return (M + tokens - 1) / tokens; }
inline int most_clusters() { return at_most(multiprocessors() / kBlocks, kMostClusters); }
inline int row_tiles_of(int N) { return (N + kBlocks * kRows - 1) / (kBlocks * kRows); }

template <typename Weight, int TOKENS, int SPLITS> cudaError_t run(bool stream_k, const Call<Weight>& p, void* scratch, Stream stream) {
  using S = Shape<Weight, TOKENS>;
  static_assert(S::kTiles % (2 * SPLITS) == 0, "parts of whole pairs of tiles");
  const int steps = p.K / kWideK, places = places_of(p.M, TOKENS), count = places * row_tiles_of(p.N), tile_tokens = even_tokens<8 * kBlocks>(p.M, places);
  const int most = most_clusters(), remainder = count % most;
  const int streamed = !stream_k ? 0 : count < most ? count : remainder ? remainder + most : 0;
  const int clusters = SPLITS > 1 ? count * SPLITS : at_most(streamed ? count * steps : count, most);
  // Clusters that split K wait for each other: all must be able to run at once, and nothing may keep the last of them out for good (grids of a
  // stream of higher priority that wait in turn for SMs of this one).
  if (clusters > most || steps < SPLITS) return cudaErrorInvalidConfiguration;
  typename Weight::Maps weight;
  TensorMap tokens;
  cudaError_t status = Weight::map(&weight, p.w, p.N, p.K);
  if (status == cudaSuccess) status = tensor_map_2d(&tokens, p.x8, p.M, p.K, tile_tokens / kBlocks, 128);
  if (status != cudaSuccess) return status;
  float4* partial = (float4*)scratch;
  int* flags = (int*)(partial + (size_t)clusters * kBlocks * S::kSums);
  return launch_sharing(SPLITS > 1 || streamed, flags, multiply_fp8<Weight, TOKENS, SPLITS>, dim3(clusters, 1, kBlocks), S::kThreads, S::kBytes, kBlocks, stream, weight,
                        tokens, p.x_scale, p.g, p.bias, p.y, partial, flags, p.M, p.N, p.K, p.second, p.third, places, tile_tokens, count, streamed);
}

// What a tile costs, in microseconds: `step` of 64, 128, 192 and 256 tokens for 256 k of 256 rows of W; what is added where two or four clusters share a
// tile's K, and where clusters take equal shares. Fitted to times of five shapes and nine M (benchmarks/results/wide_fp8.csv).
struct Costs {
  float step[4], two, four, stream;
};

// The cheapest tile. Clusters that split K must all run at once. Equal shares: no cluster is idle in the last wave.
inline Tile best_tile(int M, int N, int K, const Costs& costs) {
  const int steps = K / kWideK, rows = row_tiles_of(N), most = most_clusters();
  Tile best{};
  float least = 0;
  auto offer = [&](int tokens, int splits, float cost) {
    if (!best.tokens || cost < least) best = {tokens, splits}, least = cost;
  };
  for (int i = 0; i < 4; ++i) {
    const int tokens = 64 * (i + 1), count = places_of(M, tokens) * rows;
    const float step = costs.step[i];
    offer(tokens, 1, (float)((count + most - 1) / most) * steps * step);
    if (count % most) offer(tokens, 0, (float)count / most * steps * step + costs.stream);
    if (2 * count <= most && steps >= 2) offer(tokens, 2, (steps + 1) / 2 * step + costs.two);
    if (4 * count <= most && steps >= 4) offer(tokens, 4, (steps + 3) / 4 * step + costs.four);
  }
  return best;
}

template <typename Weight> cudaError_t by_tile(Tile tile, const Call<Weight>& p, void* scratch, Stream stream) {
#define TILE(t, s) \
  if (tile.tokens == t && tile.splits == s) return run<Weight, t, s>(false, p, scratch, stream);
#define STREAMED(t) \
  if (tile.tokens == t && tile.splits == 0) return run<Weight, t, 1>(true, p, scratch, stream);
  TILE(64, 1) TILE(64, 2) TILE(64, 4) TILE(128, 1) TILE(128, 2) TILE(128, 4) TILE(192, 1) TILE(192, 2) TILE(192, 4) TILE(256, 1) TILE(256, 2) TILE(256, 4)
  STREAMED(64) STREAMED(128) STREAMED(192) STREAMED(256)
#undef STREAMED
#undef TILE
  return cudaErrorInvalidConfiguration;
}

// Returns a cudaError_t. Takes x [M, K] E4M3 in the order of wide_fp8.cuh, x_scale [M], the weight whose parts() the call has, global_scale, bias, second,
// third, early, and scratch. tile: (tokens, splits), one of by_tile's, splits 0: equal shares; or 0 for best_tile(). dtype 0, 1 <= M <= 2^20, K % 256 == 0; x,
// weight, y and scratch 16-byte aligned; bias may be null.
template <typename Weight, typename Parts> cudaError_t serve(const LinearParams* call, const Costs& costs, Parts parts) {
  if (!is_call(call) || !fits(*call) || call->scratch_bytes < scratch_bytes(*call)) return cudaErrorInvalidValue;
  const Tile tile = call->tile[0] ? Tile{call->tile[0], call->tile[1]} : best_tile(call->M, call->N, call->K, costs);
  return by_tile(tile, Call<Weight>::of(*call, parts()), call->scratch, stream_of(*call));
}

}  // namespace fp4
