// fp4.linear for a few to a few hundred rows on sm_90: y[M, N] = x[M, K] @ W[N, K]^T (+ bias), W row-major canonical NVFP4.
//
// Weights and activations come as tiles, as they lie in memory, through two rings. An MMA covers 16 k, a block of scales: of each eight of them, a word of
// codes, lane t of a quad decodes byte t, so that a quad reads the same words. Warpgroups lie side by side in rows and in K; blocks of a cluster share K, too
// (kSplit), or two of them, of neighbouring rows, the activations (kShare), or blocks take equal shares of all tiles' steps (kStream) and sum through global
// memory what they share. Every sum has a fixed order.
#include "wide.cuh"

namespace {

using namespace fp4;

constexpr int kMostBlocks = 132;  // that stream: there is scratch memory for so many

enum class Blocks { kSplit, kShare, kStream };

// Codes are decoded by table where there is room for it beside the activations, and where rings need not be deep: with four warpgroups for the same 64 rows they do.
template <int ROWS, int TOKENS> constexpr bool kByTable = TOKENS <= 32 && ROWS > 64;

// ROWS of W and TOKENS a block; KGROUPS warpgroups for each 64 rows, which take steps of K in turn.
template <int ROWS, int TOKENS, int KGROUPS> struct Shape {
  static constexpr int kGroups = ROWS / 64 * KGROUPS, kConsumers = 128 * kGroups, kThreads = kConsumers + 128;
  static constexpr int kCodes = ROWS * 128, kWeights = kCodes + ROWS * 16, kTile = TOKENS * 128, kHalf = 2 * kTile;
  // Stages of activations and of weights: deep where there is room, and multiples of KGROUPS, so that a warpgroup meets every phase of the mbarriers it waits for.
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
template <Blocks BLOCKS> struct Work {
  int tile, k, left, steps;

  __device__ __forceinline__ Work(int units, int steps) : steps(steps) {
    if (BLOCKS == Blocks::kStream) {
      const int last = end(units, blockIdx.x) - 1;
      tile = last / steps, k = steps - 1 - last % steps, left = last + 1 - end(units, (int)blockIdx.x - 1);
    } else {
      constexpr bool share = BLOCKS == Blocks::kShare;
      const int splits = share ? 1 : cluster_size(), rank = share ? 0 : cluster_rank(), column = blockIdx.y * gridDim.x + blockIdx.x;
      tile = share ? 2 * column + cluster_rank() : column, k = steps * rank / splits, left = steps * (rank + 1) / splits - k;
    }
  }
  __device__ __forceinline__ static int end(int units, int block) { return (int)((int64_t)units * (block + 1) / gridDim.x); }
  __device__ __forceinline__ int count() const { return BLOCKS == Blocks::kStream ? min(steps - k, left) : left; }
  __device__ __forceinline__ void next() {
    if (BLOCKS == Blocks::kStream)
      left -= count(), --tile, k = 0;
    else
      left = 0;
  }
};

// One step of a warp's 16 rows: codes(h, c) loads 16 bytes, of rows g + 8 h and k 32 c onwards, scales[h] are E4M3 bytes 4 t onwards. `held`: the step's
// activations; own: selects a quad's byte t of a word, lane4: as of decode_by_table(); arrived(j) waits for half j of the activations, done(j) is called when the
// products of the half before are complete.
template <typename T, int TOKENS, int BATCH, bool BY_TABLE, typename Codes, typename Arrived, typename Done>
__device__ __forceinline__ void multiply_step(float (&acc)[TOKENS / 8][4], Codes codes, const uint32_t (&scales)[2], Shared held, Shared table, uint32_t own,
                                              uint32_t lane4, Arrived arrived, Done done) {
  constexpr int kAhead = 2 * BATCH;  // of eight times 32 k, so many are loaded before they are decoded
  uint32_t even[2], odd[2];
  uint4 q[kAhead][2];
#pragma unroll
  for (int c = 0; c < kAhead; ++c)
#pragma unroll
    for (int h = 0; h < 2; ++h) q[c][h] = codes(h, c);
#pragma unroll
  for (int h = 0; h < 2; ++h) Numbers<T>::four_scales(scales[h], even[h], odd[h]);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    uint32_t by[2][2];  // scales of blocks (0, 2), (1, 3) of 64 k
#pragma unroll
    for (int b = 0; b < 4; b += BATCH) {  // the codes of 2 BATCH MMAs are decoded while the products of those before are worked on
      uint32_t a[BATCH][2][4];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int c = b + i;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (c % 2 == 0) by[0][h] = shuffle_in_quad(even[h], 2 * j + c / 2), by[1][h] = shuffle_in_quad(odd[h], 2 * j + c / 2);
          uint4& v = q[c % kAhead][h];
          const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const uint32_t pair = BY_TABLE ? load_table(table + pick_bytes(words[w], lane4, own)) : place_own_byte<T>(words[w], own);
            a[i][w / 2][h + w % 2 * 2] = Numbers<T>::mul_by_half(pair, by[w / 2][h], c % 2);
          }
          if (4 * j + c + kAhead < 8) v = codes(h, 4 * j + c + kAhead);
        }
      }
      if (b == 0) arrived(j);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
#pragma unroll
        for (int z = 0; z < 2; ++z) {
          const int at = (2 * j + (b + i) / 2) * (TOKENS * 128) + (b + i) % 2 * 64 + z * 32;
          wgmma<T>(acc, a[i][z][0], a[i][z][1], a[i][z][2], a[i][z][3], wgmma_descriptor(held, at));
        }
      wgmma_commit_group();
      if (!FP4_FAULT(SKIP_WGMMA_WAIT)) wgmma_wait<1>();
      if (b == 0) done(j);
    }
  }
}

// MAPPED: a tile map takes the scales; else they are loaded.
template <typename T, int ROWS, int TOKENS, int KGROUPS, Blocks BLOCKS, bool MAPPED>
__global__ void __launch_bounds__(Shape<ROWS, TOKENS, KGROUPS>::kThreads, 1)
    linear_wide(const __grid_constant__ TensorMap codes, const __grid_constant__ TensorMap scales, const __grid_constant__ TensorMap tokens,
                const uint8_t* __restrict__ scale, const float* __restrict__ global_scale, const T* __restrict__ bias, T* __restrict__ y,
                float4* __restrict__ partial, int* __restrict__ flags, int units, int tile_tokens, int M, int N, int K, const Epilogue<T> then) {
  static_assert(BLOCKS != Blocks::kStream || (KGROUPS == 1 && kFinish == kPlain));
  using S = Shape<ROWS, TOKENS, KGROUPS>;
  constexpr int kParts = Result<T>::kParts, kColumns = kBlockColumns<T, ROWS>;
  constexpr bool kShares = BLOCKS == Blocks::kShare;
  uint8_t* shared = dynamic_shared() + S::kTable;
  const Shared weights = shared_address(shared), activations = weights + S::kWStages * S::kWeights;
  // Half a stage of activations is copied, waited for and freed by itself.
  const auto w_ring = Ring<>::at(shared_address(shared + S::kRings), S::kWStages);
  const auto x_ring = Ring<2>::at(w_ring.end(S::kWStages), S::kXStages);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rank = cluster_rank();
  const int row_tiles = BLOCKS == Blocks::kStream ? (N / kParts + kColumns - 1) / kColumns : kShares ? 2 * gridDim.x : gridDim.x;
  Work<BLOCKS> work(units, (K + kWideK - 1) / kWideK);

  if (threadIdx.x == 0) {
    w_ring.init(S::kWStages, 1, ROWS / 16);
    x_ring.init(S::kXStages, 1, ROWS / 16 * (kShares ? 2 : 1));
    fence_mbarrier_init();
  }
  if (threadIdx.x == S::kConsumers) {
    prefetch_tensor_map(codes);
    if (MAPPED) prefetch_tensor_map(scales);
  }
  if (threadIdx.x == S::kConsumers + 32) prefetch_tensor_map(tokens);
  if (kShares)
    cluster_sync();  // the other block arrives at them, too
  else
    __syncthreads();

  if (warp >= 4 * S::kGroups) {
    setmaxnreg_dec<S::kFetching>();
    if (warp == 4 * S::kGroups && lane == 0) {
      Place<S::kWStages> at;
      for (int early = S::kEarly; work.left > 0; work.next())
        for (int k = work.k; k < work.k + work.count(); ++k) {
          if (early-- == 0) griddepcontrol_wait();  // copies of one block are served in order: activations are not to wait for a full ring
          w_ring.acquire(at);
          const Shared to = weights + at.i * S::kWeights, full = w_ring.of(at);
          mbarrier_arrive_expect_tx(full, MAPPED && !FP4_FAULT(EXPECT_CODES_ONLY) ? S::kWeights : S::kCodes);
#pragma unroll
          for (int p = 0; p < kParts; ++p) {
            const int row = work.tile % row_tiles * kColumns + p * (N / 2);
            tma_load_2d(to + p * (kColumns * 128), codes, k * 128, row, full);
            if (MAPPED) tma_load_2d(to + S::kCodes + p * (kColumns * 16), scales, k * 16, row, full);
          }
          at.next();
        }
    } else if (warp == 4 * S::kGroups + 1 && lane == 0) {
      Place<S::kXStages> at;
      if (!FP4_FAULT(FETCH_BEFORE_PDL_WAIT)) griddepcontrol_wait();  // it may have written x
      for (; work.left > 0; work.next()) {
        const int m0 = work.tile / row_tiles * tile_tokens;
        for (int k = work.k; k < work.k + work.count(); ++k, at.next())
          for (int h = 0; h < 2; ++h) {
            const Shared to = activations + at.i * kActivations<TOKENS> + h * S::kHalf, full = x_ring.of(at, h);
            if (!FP4_FAULT(SKIP_TOKENS_FREE_WAIT)) x_ring.acquire(at, h);
            mbarrier_arrive_expect_tx(full, tile_tokens * 256);
            const int byte = k * (2 * kWideK) + h * kWideK;
            if constexpr (kShares) {  // each of the two copies one of the half's two tiles
              tma_load_2d_multicast(to + rank * S::kTile, tokens, byte + rank * 128, m0, full, 3);
            } else {
              tma_load_2d(to, tokens, byte, m0, full);
              tma_load_2d(to + S::kTile, tokens, byte + 128, m0, full);
            }
          }
      }
    }
    __syncwarp();
    if (kShares)
      cluster_sync();
    else if (BLOCKS == Blocks::kSplit && cluster_size() > 1)
      cluster_sync(), cluster_sync();  // with those of the sums
    return;
  }

  setmaxnreg_inc<S::kRegisters>();
  if (tile_tokens < TOKENS) clear_other_tokens<TOKENS>(shared + S::kWStages * S::kWeights, 4 * S::kXStages, tile_tokens, S::kConsumers);
  if constexpr (kByTable<ROWS, TOKENS>) {
    fill_pairs<T>(dynamic_shared(), threadIdx.x, S::kConsumers);
    named_barrier_sync(1, S::kConsumers);
  }
  pdl_wait_then_trigger();  // the kernel before may still read y, and may have written what the epilogue reads
  const Shared table = shared_address(dynamic_shared());
  const int g = lane >> 2, t = lane & 3, group = uniform(warp >> 2), row_group = group % (ROWS / 64), k_group = group / (ROWS / 64);
  const int local = row_group * 64 + (warp & 3) * 16;  // the warp's first row
  const int my_codes = kept((local + g) * 128 + g * 16), my_scales = kept(S::kCodes + (local + g) * 16 + 4 * t);  // in a stage
  const uint32_t own = kept(kByTable<ROWS, TOKENS> ? 0x5504 | t << 4 : own_byte<T>(t));
  Result<T> out{y, global_scale, bias, M, N, then, *global_scale * kWeightUnit};
  Place<S::kWStages> w;
  Place<S::kXStages> x_at;
  w.next(k_group), x_at.next(k_group);
  bool frees = false;  // this lane gives back the half that was multiplied last
  Shared last_half = x_ring.free;

  for (; work.left > 0; work.next()) {
    float acc[TOKENS / 8][4] = {};
    const int n0 = work.tile % row_tiles * kColumns, m0 = work.tile / row_tiles * tile_tokens, last = work.k + work.count();
    out.M = min(M, m0 + tile_tokens);
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
      if (!FP4_FAULT(SKIP_WEIGHTS_WAIT)) w_ring.wait(w);
      if (FP4_FAULT(FREE_WEIGHTS_EARLY) && lane == 0) w_ring.release(w);
      const int stage = w.i * S::kWeights;
      uint32_t s[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) s[h] = MAPPED ? *(const uint32_t*)(shared + my_scales + stage + h * 128) : ahead[h];
      if (!MAPPED && k + KGROUPS < last) load_scales(k + KGROUPS);
      const Shared half = x_ring.of(x_at);
      multiply_step<T, TOKENS, S::kBatch, kByTable<ROWS, TOKENS>>(
          acc, [&](int h, int c) { return *(const uint4*)(shared + (my_codes + stage ^ c * 16) + h * 1024); }, s,
          activations + x_at.i * kActivations<TOKENS>, table, own, 4 * lane, [&](int j) { if (!FP4_FAULT(SKIP_TOKENS_WAIT)) mbarrier_wait_parity(half + 8 * j, x_at.parity); },
          [&](int j) {
            if (frees && (!FP4_FAULT(ONE_WARP_KEEPS_TOKENS) || warp)) {
              mbarrier_arrive(last_half);
              if constexpr (kShares) mbarrier_arrive_remote(last_half, rank ^ 1);
            }
            frees = lane == 0;
            last_half = x_ring.free_of(x_at, j);
          });
      __syncwarp();
      if (lane == 0) w_ring.release(w);
      w.next(KGROUPS), x_at.next(KGROUPS);
    }
    wgmma_wait<0>();
    wgmma_fence_operand(acc);

    if constexpr (BLOCKS == Blocks::kStream) {
      constexpr int kMine = TOKENS / 8 * S::kConsumers;
      if (work.k > 0) {  // a later block has the tile's first steps, and stores it
        float4* to = partial + (size_t)blockIdx.x * kMine + threadIdx.x;
#pragma unroll
        for (int i = 0; i < TOKENS / 8; ++i) __stcg(to + i * S::kConsumers, make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]));
        __threadfence();
        named_barrier_sync(1, S::kConsumers);
        if (threadIdx.x == 0) flag_set(flags + blockIdx.x);
        continue;
      }
      for (int b = (int)blockIdx.x - 1; last < work.steps && b >= 0 && Work<BLOCKS>::end(units, b) > work.tile * work.steps; --b) {
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
      if (kShares) cluster_sync();  // nobody leaves while the other arrives at its mbarriers
      sum_k_groups_and_store<T, ROWS, TOKENS, KGROUPS>(acc, (float*)shared, k_group, local, kShares ? 1 : cluster_size(), kShares ? 0 : rank, n0, m0, out);
    }
  }
}

constexpr int kShared = -1;

// splits: blocks of a cluster that share K; 0: blocks stream; kShared: two blocks share activations.
struct Tile {
  int rows, tokens, k_groups, splits;
};

template <typename T, int ROWS, int TOKENS, int KGROUPS, Blocks BLOCKS, bool MAPPED>
cudaError_t run(int cluster, const Linear<T>& p, void* scratch, Stream stream) {
  using S = Shape<ROWS, TOKENS, KGROUPS>;
  constexpr int kParts = Result<T>::kParts, kColumns = kBlockColumns<T, ROWS>;
  constexpr bool kStreams = BLOCKS == Blocks::kStream, kShares = BLOCKS == Blocks::kShare;
  const int steps = (p.K + kWideK - 1) / kWideK, places = (p.M + TOKENS - 1) / TOKENS, row_tiles = (p.columns() + kColumns - 1) / kColumns;
  const int tile_tokens = even_tokens<8>(p.M, places);
  if (!kShares && (cluster > steps || cluster == 3 || cluster > 4)) return cudaErrorInvalidConfiguration;
  TensorMap codes, scales, tokens;
  cudaError_t status = tensor_map_2d(&codes, p.q, p.N, p.K / 2, ROWS / kParts, 128);
  if (status == cudaSuccess) status = tensor_map_2d(&tokens, p.x, p.M, (int64_t)p.K * 2, tile_tokens, 128);
  if (status != cudaSuccess) return status;
  scales = codes;
  if (MAPPED) status = tensor_map_2d(&scales, p.scale, p.N, p.K / 16, ROWS / kParts, 16);
  if (status != cudaSuccess) return status;
  const int units = steps * places * row_tiles, streaming = kStreams ? at_most(units, at_most(multiprocessors(), kMostBlocks)) : 0;
  float4* partial = (float4*)scratch;
  int* flags = (int*)(partial + (size_t)streaming * (TOKENS / 8 * S::kConsumers));
  const dim3 blocks = kStreams ? dim3(streaming) : dim3(kShares ? (row_tiles + 1) / 2 : row_tiles, places, cluster);
  return launch_sharing(kStreams, flags, linear_wide<T, ROWS, TOKENS, KGROUPS, BLOCKS, MAPPED>, blocks, S::kThreads, S::kBytes, cluster, stream, codes, scales, tokens,
                        p.scale, p.global_scale, p.bias, p.y, partial, flags, units, tile_tokens, p.M, p.N, p.K, p.then);
}

// Measured on an H200 for five shapes (benchmarks/NOTES.md). Nearly every SM has a block, two of a cluster share K where rows alone make too few (those of four fit
// 120 SMs only); where blocks would not come out even they stream. Sharing activations pays for 32 tokens only: 17.8 us for 18.3 at N = K = 8192.
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
  if (of_64 <= 132) return {64, tokens, tokens == 64 ? 2 : 4, tokens == 32 && of_64 >= 100 ? kShared : splits(of_64)};
  if ((of_128 >= 100 && of_128 <= 132) || !streams) return wide;
  return {tokens == 64 ? 192 : 256, tokens, 1, 0};
}

template <typename T> cudaError_t by_tile(Tile tile, bool mapped, const Linear<T>& p, void* scratch, Stream stream) {
#define IS(r, m, k) (tile.rows == r && tile.tokens == m && tile.k_groups == k)
#define TILE(r, m, k) \
  if (mapped && tile.splits > 0 && IS(r, m, k)) return run<T, r, m, k, Blocks::kSplit, true>(tile.splits, p, scratch, stream);
#define SHARED(r, m, k) \
  if (mapped && tile.splits == kShared && IS(r, m, k)) return run<T, r, m, k, Blocks::kShare, true>(2, p, scratch, stream);
#define ANY_K(r, m, k) \
  if (!mapped && tile.splits > 0 && IS(r, m, k)) return run<T, r, m, k, Blocks::kSplit, false>(tile.splits, p, scratch, stream);
#define STREAMED(r, m) \
  if (mapped && !tile.splits && IS(r, m, 1)) return run<T, r, m, 1, Blocks::kStream, true>(1, p, scratch, stream);
  TILE(64, 32, 4) TILE(64, 64, 2) TILE(64, 128, 2) SHARED(64, 32, 4)
  TILE(128, 32, 2) TILE(128, 64, 2) TILE(128, 128, 1)
  ANY_K(128, 32, 2) ANY_K(128, 64, 2) ANY_K(128, 128, 1)
  if constexpr (kFinish == kPlain) { STREAMED(256, 32) STREAMED(192, 64) STREAMED(128, 128) }
#undef STREAMED
#undef SHARED
#undef ANY_K
#undef TILE
#undef IS
  return cudaErrorInvalidConfiguration;
}

bool fits(const LinearParams& p) { return p.M >= 1 && p.M <= 1 << 20 && p.N >= 1 && p.K >= 64 && p.K % 64 == 0; }
bool has_map(const LinearParams& p) { return p.K % kWideK == 0 && (uintptr_t)p.scale % 16 == 0; }  // a tile map takes rows of 16 bytes
Tile tile_of(const LinearParams& p) {
  const auto [rows, tokens, k_groups, splits] = p.tile;
  return tokens ? Tile{rows, tokens, k_groups, splits} : best(p.M, p.N, p.K, has_map(p));
}

}  // namespace

// Sums of every block that streams, and a flag each.
extern "C" int64_t fp4_linear_wide_scratch(const LinearParams* call) {
  if (!is_call(call) || !fits(*call)) return 0;
  const Tile tile = tile_of(*call);
  return tile.splits ? 0 : (int64_t)kMostBlocks * tile.rows * tile.tokens * sizeof(float) + kFlags * sizeof(int);
}

// Returns a cudaError_t. Takes what linear_small does, early, and scratch. tile: (rows, tokens, k_groups), one of by_tile's, and splits in {1, 2, 4}: blocks
// that share K, 0: blocks stream, -1: two blocks share activations. 1 <= M <= 2^20, K % 64 == 0; x, codes and scratch 16-byte aligned, scale 4-byte aligned.
extern "C" int fp4_linear_wide(const LinearParams* call) {
  if (!is_call(call) || !fits(*call) || call->scratch_bytes < fp4_linear_wide_scratch(call)) return cudaErrorInvalidValue;
  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Linear<T> p = Linear<T>::of(*call);
    return p.fits() ? by_tile<T>(tile_of(*call), has_map(*call), p, call->scratch, stream_of(*call)) : cudaErrorInvalidValue;
  };
  return call->dtype == 0 ? run(__nv_bfloat16()) : run(__half());
}
