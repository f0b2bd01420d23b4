// fp4.linear for a few to a few hundred rows on sm_90: y[M, N] = x[M, K] @ W[N, K]^T (+ bias), W row-major canonical NVFP4.
//
// Two kernels a call: arrange() writes the activations as wgmma takes them (wide.cuh); linear_wide() streams weights as tiles and activations
// as they were arranged through two rings. Warpgroups lie side by side in rows and in K; blocks of a cluster share K, too, or blocks take
// equal shares of all tiles' steps (STREAM) and sum through global memory what they share. Every sum has a fixed order.
#include "wide.cuh"

namespace {

using namespace fp4;

constexpr int kMostBlocks = 132;  // that stream: there is scratch memory for so many

// ROWS of W and TOKENS a block; KGROUPS warpgroups for each 64 rows, which take steps of K in turn.
template <int ROWS, int TOKENS, int KGROUPS> struct Shape {
  static constexpr int kGroups = ROWS / 64 * KGROUPS, kConsumers = 128 * kGroups, kThreads = kConsumers + 128;
  static constexpr int kCodes = ROWS * 128, kWeights = kCodes + ROWS * 16, kHalf = kActivations<TOKENS> / 2;
  // Stages of activations and of weights: deep where there is room, and multiples of KGROUPS, so that a warpgroup meets every phase of the counters it waits for.
  static constexpr int kTable = kByTable<ROWS, TOKENS> ? kPairTable : 0, kRoom = 226 * 1024 - kTable;
  static constexpr int kXStages = TOKENS == 128 ? 2 : KGROUPS == 4 ? 8 : ROWS <= 128 ? 4 : 3;
  static constexpr int kWStages = at_most(8, (kRoom - kXStages * kActivations<TOKENS>) / kWeights) / KGROUPS * KGROUPS;
  static constexpr int kEarly = at_most(kWStages, at_least(1, kEarlyBytes / kWeights));  // stages of weights that go ahead of the first activations
  static constexpr int kSums = kWideSums<ROWS, TOKENS, KGROUPS>;  // in the rings' place, at the end
  static constexpr int kRings = at_least(kWStages * kWeights + kXStages * kActivations<TOKENS>, kSums), kBytes = kTable + kRings + 16 * kWStages + 32 * kXStages;
  static constexpr int kBatch = kGroups == 4 ? 1 : 2, kRegisters = kGroups <= 2 ? 232 : kGroups == 3 ? 152 : 112;
  static constexpr int kFetching = kGroups == 4 ? 32 : 40;  // registers of the threads that fetch
  static_assert(kBytes <= 227 * 1024 && kWStages >= at_least(2, KGROUPS) && kXStages % KGROUPS == 0, "does not fit shared memory");
};

// What a block does, tile by tile: steps k .. k + count() - 1 of a tile, then the tile before it from its first step on. Blocks that stream share tiles
// so that a later block has the earlier steps, comes to them last, and finds what it has to add ready.
struct Work {
  int tile, k, left, steps;

  __device__ __forceinline__ Work(bool stream, int units, int steps) : steps(steps) {
    if (stream) {
      const int last = end(units, blockIdx.x) - 1;
      tile = last / steps, k = steps - 1 - last % steps, left = last + 1 - end(units, (int)blockIdx.x - 1);
    } else {
      const int splits = cluster_size(), rank = cluster_rank();
      tile = blockIdx.y * gridDim.x + blockIdx.x, k = steps * rank / splits, left = steps * (rank + 1) / splits - k;
    }
  }
  __device__ __forceinline__ static int end(int units, int block) { return (int)((int64_t)units * (block + 1) / gridDim.x); }
  __device__ __forceinline__ int count() const { return min(steps - k, left); }
  __device__ __forceinline__ void next() { left -= count(), --tile, k = 0; }
};

template <typename T, int ROWS, int TOKENS, int KGROUPS, bool STREAM, bool MAPPED>
__global__ void __launch_bounds__(Shape<ROWS, TOKENS, KGROUPS>::kThreads, 1)
    linear_wide(const __grid_constant__ TileMap codes, const __grid_constant__ TileMap scales, const uint8_t* __restrict__ tiles, float4* __restrict__ partial,
                int* __restrict__ flags, int units, FP4_LINEAR_PARAMETERS) {
  static_assert(!STREAM || (KGROUPS == 1 && kFinish == kPlain));
  using S = Shape<ROWS, TOKENS, KGROUPS>;
  constexpr int kParts = Result<T>::kParts, kColumns = kBlockColumns<T, ROWS>;
  uint8_t* shared = dynamic_shared() + S::kTable;
  const Shared weights = shared_address(shared), activations = weights + S::kWStages * S::kWeights;
  // Stages that have arrived and that are free; activations count by halves.
  const Shared w_full = shared_address(shared + S::kRings), w_free = w_full + 8 * S::kWStages, x_full = w_free + 8 * S::kWStages, x_free = x_full + 16 * S::kXStages;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row_tiles = (N / kParts + kColumns - 1) / kColumns;
  Work work(STREAM, units, (K + kWideK - 1) / kWideK);

  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kWStages; ++i) counter_init(w_full + 8 * i, 1), counter_init(w_free + 8 * i, ROWS / 16);
    for (int i = 0; i < 2 * S::kXStages; ++i) counter_init(x_full + 8 * i, 1), counter_init(x_free + 8 * i, ROWS / 16);
    publish_counters();
  }
  if (threadIdx.x == S::kConsumers) {
    prefetch_tile_map(codes);
    if (MAPPED) prefetch_tile_map(scales);
  }
  __syncthreads();

  if (warp >= 4 * S::kGroups) {
    fewer_registers<S::kFetching>();
    if (warp == 4 * S::kGroups && lane == 0) {
      Place<S::kWStages> at;
      for (int early = S::kEarly; work.left > 0; work.next())
        for (int k = work.k; k < work.k + work.count(); ++k) {
          if (early-- == 0) wait_for_first();  // copies of one block are served in order: activations are not to wait for a full ring
          counter_wait(w_free + 8 * at.i, at.parity ^ 1);
          const Shared to = weights + at.i * S::kWeights, full = w_full + 8 * at.i;
          counter_promise(full, MAPPED ? S::kWeights : S::kCodes);
#pragma unroll
          for (int p = 0; p < kParts; ++p) {
            const int row = work.tile % row_tiles * kColumns + p * (N / 2);
            copy_tile(to + p * (kColumns * 128), codes, k * 128, row, full);
            if (MAPPED) copy_tile(to + S::kCodes + p * (kColumns * 16), scales, k * 16, row, full);
          }
          at.next();
        }
    } else if (warp == 4 * S::kGroups + 1 && lane == 0) {
      Place<S::kXStages> at;
      wait_for_first();
      for (; work.left > 0; work.next()) {
        const uint8_t* from = tiles + ((size_t)(work.tile / row_tiles) * work.steps + work.k) * kActivations<TOKENS>;
        for (int i = 0; i < work.count(); ++i, at.next())
          for (int h = 0; h < 2; ++h, from += S::kHalf) {
            const Shared full = x_full + 16 * at.i + 8 * h;
            counter_wait(x_free + 16 * at.i + 8 * h, at.parity ^ 1);
            counter_promise(full, S::kHalf);
            copy_bulk(activations + at.i * kActivations<TOKENS> + h * S::kHalf, from, S::kHalf, full);
          }
      }
    }
    __syncwarp();
    if (!STREAM && cluster_size() > 1) cluster_barrier(), cluster_barrier();  // with those of the sums
    return;
  }

  more_registers<S::kRegisters>();
  if constexpr (kByTable<ROWS, TOKENS>) {
    fill_pairs<T>(dynamic_shared(), threadIdx.x, S::kConsumers);
    barrier(1, S::kConsumers);
  }
  wait_for_first();  // results go where kernels before may still read; mul and residual may be theirs
  const Shared table = shared_address(dynamic_shared());
  const int g = lane >> 2, t = lane & 3, group = uniform(warp >> 2), row_group = group % (ROWS / 64), k_group = group / (ROWS / 64);
  const int local = row_group * 64 + (warp & 3) * 16;  // the warp's first row
  const uint8_t* my_codes = shared + (local + g) * 128;
  const uint8_t* my_scales = shared + S::kCodes + (local + g) * 16 + 4 * t;
  const Result<T> out{y, global_scale, bias, M, N, then, *global_scale * kWeightUnit};
  Place<S::kWStages> w;
  Place<S::kXStages> x_at;
  w.next(k_group), x_at.next(k_group);
  bool frees = false;  // this lane gives back the half that was multiplied last
  Shared last_half = x_free;

  for (; work.left > 0; work.next()) {
    float acc[TOKENS / 8][4] = {};
    const int n0 = work.tile % row_tiles * kColumns, m0 = work.tile / row_tiles * TOKENS, last = work.k + work.count();
    uint32_t ahead[2];  // scales of the next step, where they are loaded
    auto load_scales = [&](int k) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = min(first_row<T, ROWS>(n0, local, N) + g + 8 * h, N - 1);
        ahead[h] = __ldg((const uint32_t*)(scale + (size_t)row * (K / 16) + min(k * 16 + 4 * t, K / 16 - 4)));
      }
    };
    if (!MAPPED && work.k + k_group < last) load_scales(work.k + k_group);
#pragma unroll 1
    for (int k = work.k + k_group; k < last; k += KGROUPS) {
      counter_wait(w_full + 8 * w.i, w.parity);
      uint4 q[2][2];
      uint32_t s[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int j = 0; j < 2; ++j) q[h][j] = *(const uint4*)(my_codes + w.i * S::kWeights + h * 1024 + ((2 * t + j) ^ g) * 16);
        s[h] = MAPPED ? *(const uint32_t*)(my_scales + w.i * S::kWeights + h * 128) : ahead[h];
      }
      if (!MAPPED && k + KGROUPS < last) load_scales(k + KGROUPS);
      const Shared half = x_full + 16 * x_at.i;
      multiply_step<T, TOKENS, S::kBatch, kByTable<ROWS, TOKENS>>(
          acc, q, s, activations + x_at.i * kActivations<TOKENS>, table, 4 * lane, [&](int j) { counter_wait(half + 8 * j, x_at.parity); },
          [&](int j) {
            if (frees) counter_arrive(last_half);
            frees = lane == 0;
            last_half = x_free + 16 * x_at.i + 8 * j;
          });
      __syncwarp();
      if (lane == 0) counter_arrive(w_free + 8 * w.i);
      w.next(KGROUPS), x_at.next(KGROUPS);
    }
    wgmma_wait<0>();
    wgmma_sums(acc);

    if constexpr (STREAM) {
      constexpr int kMine = TOKENS / 8 * S::kConsumers;
      if (work.k > 0) {  // a later block has the tile's first steps, and stores it
        float4* to = partial + (size_t)blockIdx.x * kMine + threadIdx.x;
#pragma unroll
        for (int i = 0; i < TOKENS / 8; ++i) __stcg(to + i * S::kConsumers, make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]));
        __threadfence();
        barrier(1, S::kConsumers);
        if (threadIdx.x == 0) flag_set(flags + blockIdx.x);
        continue;
      }
      for (int b = (int)blockIdx.x - 1; last < work.steps && b >= 0 && Work::end(units, b) > work.tile * work.steps; --b) {
        while (!flag_get(flags + b)) {}
        const float4* from = partial + (size_t)b * kMine + threadIdx.x;
#pragma unroll
        for (int i = 0; i < TOKENS / 8; ++i) {
          const float4 v = __ldcg(from + i * S::kConsumers);
          acc[i][0] += v.x, acc[i][1] += v.y, acc[i][2] += v.z, acc[i][3] += v.w;
        }
      }
#pragma unroll
      for (int i = 0; i < TOKENS / 8; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {  // lanes of rows g and g ^ 1 swap one token's sums: each stores two neighbouring columns of the other
          const bool odd = g & 1;
          const float even_token = acc[i][2 * h], odd_token = acc[i][2 * h + 1], got = shuffle_xor(odd ? even_token : odd_token, 4);
          const float pair[2][kParts] = {{odd ? got : even_token}, {odd ? odd_token : got}};
          out.template store_run<2>(m0 + 8 * i + 2 * t + odd, n0 + local + (g & 6) + 8 * h, pair);
        }
    } else {
      sum_k_groups_and_store<T, ROWS, TOKENS, KGROUPS>(acc, (float*)shared, k_group, local, cluster_size(), cluster_rank(), n0, m0, out);
    }
  }
}

// splits: blocks of a cluster that share K; 0: blocks stream.
struct Tile {
  int rows, tokens, k_groups, splits;
};

template <typename T, int ROWS, int TOKENS, int KGROUPS, bool STREAM, bool MAPPED>
cudaError_t run(int splits, const Linear<T>& p, uint8_t* scratch, Stream stream) {
  using S = Shape<ROWS, TOKENS, KGROUPS>;
  constexpr int kParts = Result<T>::kParts, kColumns = kBlockColumns<T, ROWS>;
  const int steps = (p.K + kWideK - 1) / kWideK, places = (p.M + TOKENS - 1) / TOKENS, row_tiles = (p.columns() + kColumns - 1) / kColumns;
  if (splits > steps || splits == 3 || splits > 4) return cudaErrorInvalidConfiguration;
  TileMap codes, scales;
  cudaError_t status = tile_map(&codes, p.q, p.N, p.K / 2, ROWS / kParts, 128);
  if (status != cudaSuccess) return status;
  scales = codes;
  if (MAPPED) status = tile_map(&scales, p.scale, p.N, p.K / 16, ROWS / kParts, 16);
  if (status != cudaSuccess) return status;
  const int units = steps * places * row_tiles, blocks = STREAM ? at_most(units, at_most(multiprocessors(), kMostBlocks)) : 0;
  float4* partial = (float4*)(scratch + (size_t)places * steps * kActivations<TOKENS>);
  int* flags = (int*)(partial + (size_t)blocks * (TOKENS / 8 * S::kConsumers));
  status = launch(arrange<T, TOKENS, kByTable<ROWS, TOKENS>>, dim3(steps, places * (TOKENS * 8 / kArranging<TOKENS>)), kArranging<TOKENS>, 0, 1, stream, p.x,
                  scratch, p.M, p.K, flags, blocks);
  if (status != cudaSuccess) return status;
  return launch_second(linear_wide<T, ROWS, TOKENS, KGROUPS, STREAM, MAPPED>, STREAM ? dim3(blocks) : dim3(row_tiles, places, splits), S::kThreads, S::kBytes,
                       STREAM ? 1 : splits, stream, codes, scales, (const uint8_t*)scratch, partial, flags, units, p.x, p.q, p.scale, p.global_scale, p.bias, p.y,
                       p.M, p.N, p.K, p.then);
}

// Measured on an H200 (benchmarks/results/candidates.csv). Nearly every SM has a block, two of a cluster share K where rows alone make too few (those of four
// fit 120 SMs only), and where blocks would not come out even they stream.
Tile best(int M, int N, int K, bool mapped) {
  const int tokens = M <= 32 ? 32 : M <= 64 ? 64 : 128, places = (M + tokens - 1) / tokens, steps = (K + kWideK - 1) / kWideK;
  const int64_t of_64 = (int64_t)((N + 63) / 64) * places, of_128 = (int64_t)((N + 127) / 128) * places;
  auto splits = [&](int64_t blocks) { return blocks <= 30 && steps >= 4 ? 4 : blocks <= 66 && steps >= 2 ? 2 : 1; };
  const bool streams = mapped && kFinish == kPlain;
  const Tile wide{128, tokens, tokens == 128 ? 1 : 2, splits(of_128)};
  if (!mapped) return wide;
  if (tokens == 128) {
    if (of_64 <= 66) return K >= 8192 && streams ? Tile{128, 128, 1, 0} : Tile{64, 128, 2, splits(of_64)};
    return of_128 <= 66 || (of_128 >= 100 && of_128 <= 132) || !streams ? wide : Tile{128, 128, 1, 0};
  }
  if (of_64 <= 132) return {64, tokens, tokens == 64 ? 2 : 4, splits(of_64)};
  if ((of_128 >= 100 && of_128 <= 132) || !streams) return wide;
  return {tokens == 64 ? 192 : 256, tokens, 1, 0};
}

template <typename T> cudaError_t by_tile(Tile tile, bool mapped, const Linear<T>& p, void* scratch, Stream stream) {
#define IS(r, m, k) (tile.rows == r && tile.tokens == m && tile.k_groups == k)
#define TILE(r, m, k) \
  if (mapped && tile.splits && IS(r, m, k)) return run<T, r, m, k, false, true>(tile.splits, p, (uint8_t*)scratch, stream);
#define ANY_K(r, m, k) \
  if (!mapped && tile.splits && IS(r, m, k)) return run<T, r, m, k, false, false>(tile.splits, p, (uint8_t*)scratch, stream);
#define STREAMED(r, m) \
  if (mapped && !tile.splits && IS(r, m, 1)) return run<T, r, m, 1, true, true>(0, p, (uint8_t*)scratch, stream);
  TILE(64, 32, 4) TILE(64, 64, 2) TILE(64, 128, 2)
  TILE(128, 32, 2) TILE(128, 64, 2) TILE(128, 128, 1)
  ANY_K(128, 32, 2) ANY_K(128, 64, 2) ANY_K(128, 128, 1)
  if constexpr (kFinish == kPlain) { STREAMED(256, 32) STREAMED(192, 64) STREAMED(128, 128) }
#undef STREAMED
#undef ANY_K
#undef TILE
#undef IS
  return cudaErrorInvalidConfiguration;
}

}  // namespace

// Returns a cudaError_t. dtype 0: bfloat16, 1: float16. (rows, tokens, k_groups): one of by_tile's, splits in {1, 2, 4}: blocks that share K, or 0:
// blocks stream; all 0 for best(). 1 <= M <= 2^20, K % 64 == 0; x, q and scratch 16-byte aligned, scale 4-byte aligned; bias may be null. scratch: 2
// bytes for each activation, M and K rounded up to multiples of 256, and 8.7 MB. early: it may begin, and fetch its first weights, while the kernel
// before it in its stream is still running; that one must not write the weight.
extern "C" int fp4_linear_wide(const void* x, const void* q, const void* s, const void* g, const void* bias, const void* mul, const void* residual, void* y,
                               int M, int N, int K, int dtype, int second, int third, int act, int early, int rows, int tokens, int k_groups, int splits,
                               void* scratch, void* stream) {
  if (M < 1 || M > 1 << 20 || N < 1 || K < 64 || K % 64) return cudaErrorInvalidValue;
  const bool mapped = K % kWideK == 0 && (uintptr_t)s % 16 == 0;  // a tile map takes rows of 16 bytes
  const Tile tile = tokens ? Tile{rows, tokens, k_groups, splits} : best(M, N, K, mapped);
  if (tile.splits < 0) return cudaErrorInvalidConfiguration;
  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Linear<T> p{(const T*)x, (const uint8_t*)q, (const uint8_t*)s, (const float*)g, (const T*)bias, (T*)y, M, N, K,
                      Epilogue<T>::of(mul, residual, second, third, act)};
    return p.fits() ? by_tile<T>(tile, mapped, p, scratch, {(cudaStream_t)stream, early != 0}) : cudaErrorInvalidValue;
  };
  return dtype == 0 ? run(__nv_bfloat16()) : run(__half());
}
