// fp4.sparse_linear for a few to a hundred rows on sm_90: y[M, N] = x[M, K] @ W[N, K]^T (+ bias), W row-major canonical 2:4-sparse NVFP4.
//
// As gemm/linear_wide, with the sparse form of wgmma: half the codes to decode and half the products. An MMA covers 32 k as they lie in memory (as in
// sparse_linear_small: the metadata word of 8 groups is what it takes, lane t of a quad decodes groups t and t + 4), so activations are tiles of x itself:
// there is no second kernel. Warpgroups lie side by side in rows and in K; blocks of a cluster share K, or (SHARES) two of them, of neighbouring rows, the
// activations. Every sum has a fixed order.
#include "../gemm/wide.cuh"

namespace {

using namespace fp4;

// ROWS of W and TOKENS a block; KGROUPS warpgroups for each 64 rows, which take steps of K in turn.
template <int ROWS, int TOKENS, int KGROUPS> struct Shape {
  static constexpr int kGroups = ROWS / 64 * KGROUPS, kConsumers = 128 * kGroups, kThreads = kConsumers + 128;
  // A stage of weights: values, metadata and scales of two steps, 128, 64 and 32 bytes a row. Two warpgroups take one of them each, or one takes both.
  static constexpr int kMeta = ROWS * 128, kScales = ROWS * 192, kWeights = ROWS * 224, kTile = TOKENS * 128, kHalf = 2 * kTile;
  static constexpr int kReaders = ROWS / 16 * at_most(KGROUPS, 2), kTurn = at_least(KGROUPS / 2, 1);  // warps that free a stage; stages a turn
  // Stages are such that a warpgroup meets every phase of the mbarriers it waits for.
  static constexpr int kXStages = TOKENS == 128 ? 2 : TOKENS == 64 ? 4 : 8, kRoom = 226 * 1024;
  static constexpr int kWStages = at_most(6, (kRoom - kXStages * kActivations<TOKENS>) / kWeights) / kTurn * kTurn;
  static constexpr int kEarly = at_most(kWStages, at_least(1, kEarlyBytes / kWeights));  // stages of weights that go ahead of the first activations
  static constexpr int kRings = at_least(kWStages * kWeights + kXStages * kActivations<TOKENS>, kWideSums<ROWS, TOKENS, KGROUPS>);
  static constexpr int kBytes = kRings + 16 * kWStages + 32 * kXStages;
  static constexpr int kBatch = 2, kRegisters = kGroups <= 2 ? 232 : kGroups == 3 ? 152 : 112;
  static constexpr int kFetching = kGroups == 4 ? 32 : 40;  // registers of the threads that fetch
  static_assert(kBytes <= 227 * 1024 && kWStages >= 2 && kXStages % KGROUPS == 0, "does not fit shared memory");
};

struct Maps {
  TensorMap x, values, meta, scales;
};

template <typename T, int ROWS, int TOKENS, int KGROUPS, bool SHARES>
__global__ void __launch_bounds__(Shape<ROWS, TOKENS, KGROUPS>::kThreads, 1)
    sparse_linear_wide(const __grid_constant__ Maps maps, const float* __restrict__ global_scale, const T* __restrict__ bias, T* __restrict__ y, int tile_tokens, int M, int N, int K,
                       int second_scale, int third_scale) {
  using S = Shape<ROWS, TOKENS, KGROUPS>;
  uint8_t* shared = dynamic_shared();
  const Shared weights = shared_address(shared), activations = weights + S::kWStages * S::kWeights;
  // Half a stage of activations is copied, waited for and freed by itself.
  const auto w_ring = Ring<>::at(shared_address(shared + S::kRings), S::kWStages);
  const auto x_ring = Ring<2>::at(w_ring.end(S::kWStages), S::kXStages);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, steps = K / kWideK, rank = cluster_rank(), splits = SHARES ? 1 : cluster_size();
  const int n0 = (SHARES ? 2 * blockIdx.x + rank : blockIdx.x) * ROWS, m0 = blockIdx.y * tile_tokens;
  const int begin = SHARES ? 0 : steps * rank / splits, end = SHARES ? steps : steps * (rank + 1) / splits;

  if (threadIdx.x == 0) {
    w_ring.init(S::kWStages, 1, S::kReaders);
    x_ring.init(S::kXStages, 1, ROWS / 16 * (SHARES && !FP4_FAULT(OTHER_READERS_NOT_COUNTED) ? 2 : 1));
    fence_mbarrier_init();
  }
  if (threadIdx.x == S::kConsumers) prefetch_tensor_map(maps.values), prefetch_tensor_map(maps.meta), prefetch_tensor_map(maps.scales);
  if (threadIdx.x == S::kConsumers + 32) prefetch_tensor_map(maps.x);
  if (SHARES && !FP4_FAULT(BARRIERS_UNKNOWN_TO_CLUSTER))
    cluster_sync();  // the other block arrives at them, too
  else
    __syncthreads();

  if (warp >= 4 * S::kGroups) {
    setmaxnreg_dec<S::kFetching>();
    if (warp == 4 * S::kGroups && lane == 0) {
      Place<S::kWStages> at;
      int early = S::kEarly;
      for (int k = begin; k < end; k += 2, at.next()) {
        if (early-- == 0) griddepcontrol_wait();  // copies of one block are served in order: activations are not to wait for a full ring
        w_ring.acquire(at);
        const Shared to = weights + at.i * S::kWeights, full = w_ring.of(at);
        mbarrier_arrive_expect_tx(full, S::kWeights);
        tma_load_2d(to, maps.values, k * 64, n0, full);
        tma_load_2d(to + S::kMeta, maps.meta, k * 32, n0, full);
        tma_load_2d(to + S::kScales, maps.scales, k * 16, n0, full);
      }
    } else if (warp == 4 * S::kGroups + 1 && lane == 0) {
      Place<S::kXStages> at;
      if (!FP4_FAULT(FETCH_BEFORE_PDL_WAIT)) griddepcontrol_wait();  // it may have written x
      for (int k = begin; k < end; ++k, at.next())
        for (int h = 0; h < 2; ++h) {
          const Shared to = activations + at.i * kActivations<TOKENS> + h * S::kHalf, full = x_ring.of(at, h);
          x_ring.acquire(at, h);
          mbarrier_arrive_expect_tx(full, tile_tokens * 256);
          const int byte = k * (2 * kWideK) + h * kWideK;
          if constexpr (SHARES) {  // each of the two copies one of the half's two tiles
            tma_load_2d_multicast(to + rank * S::kTile, maps.x, byte + rank * 128, m0, full, FP4_FAULT(COPY_TO_OWN_BLOCK_ONLY) ? 1 << rank : 3);
          } else {
            tma_load_2d(to, maps.x, byte, m0, full);
            tma_load_2d(to + S::kTile, maps.x, byte + 128, m0, full);
          }
        }
    }
    __syncwarp();
    if (SHARES && !FP4_FAULT(BLOCK_ENDS_EARLY)) cluster_sync();
    if (splits > 1) cluster_sync(), cluster_sync();  // with those of the sums
    return;
  }

  setmaxnreg_inc<S::kRegisters>();
  if (tile_tokens < TOKENS) clear_other_tokens<TOKENS>(shared + S::kWStages * S::kWeights, 4 * S::kXStages, tile_tokens, S::kConsumers);
  pdl_wait_then_trigger();  // the kernel before may still read y
  const int g = lane >> 2, t = lane & 3, group = uniform(warp >> 2), row_group = group % (ROWS / 64), k_group = group / (ROWS / 64);
  const int local = row_group * 64 + (warp & 3) * 16;  // the warp's first row
  const int second = KGROUPS > 1 ? k_group & 1 : 0;  // of the two steps of a stage
  // Places in a stage. Lanes 0 and 1 of a quad hold the metadata of a step's first half, lanes 2 and 3 of its second.
  const int my_values = kept((local + g) * 128 + (4 * second ^ (FP4_FAULT(SKIP_SWIZZLE) ? 0 : g)) * 16), my_meta = kept(S::kMeta + (local + g) * 64 + (2 * second ^ (FP4_FAULT(METADATA_OF_OTHER_HALF) ? 0 : t / 2) ^ g / 2) * 16),
            my_scales = kept(S::kScales + (local + g) * 32 + (second ^ g / 4) * 16);
  const uint32_t own_byte = kept(0x4440 + t), own_half = kept((t & 1) != FP4_FAULT(EXCHANGE_METADATA_HALVES) ? 0x7632 : 0x5410);
  // Rows past N come as zeros, which are no metadata: 0 and 1 are kept there.
  const uint32_t legal = kept((n0 + local + g < N || FP4_FAULT(ZERO_METADATA_PAST_N) ? 0 : 0x4444) | (n0 + local + g + 8 < N ? 0 : 0x44440000));
  Place<S::kWStages> w;
  Place<S::kXStages> x_at;
  w.next(k_group / 2), x_at.next(k_group);
  bool frees = false;  // this lane gives back the half that was multiplied last
  Shared last_half = x_ring.free;
  float acc[TOKENS / 8][4] = {};

#pragma unroll 1
  for (int k = begin + k_group; k < end; k += KGROUPS) {
    if (!FP4_FAULT(SKIP_WEIGHTS_WAIT)) w_ring.wait(w);
    if (FP4_FAULT(FREE_WEIGHTS_EARLY) && lane == 0) w_ring.release(w);
    wgmma_wait<0>();  // it reads metadata, too, while it runs, which ptxas does not know: registers of the last step's would be written here
    const int stage = w.i * S::kWeights, other = KGROUPS > 1 ? 0 : (k - begin) & 1;
    uint4 v[2][4], e[2], s[2];  // of rows g and g + 8
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int c = 0; c < 4; ++c) v[h][c] = *(const uint4*)(shared + (my_values + stage ^ (4 * other + c) * 16) + h * 1024);
      e[h] = *(const uint4*)(shared + (my_meta + stage ^ 32 * other) + h * 512);
      s[h] = *(const uint4*)(shared + (my_scales + stage ^ 16 * other) + h * 256);
    }
    const uint32_t meta[4] = {__byte_perm(e[0].x, e[1].x, own_half) | legal, __byte_perm(e[0].y, e[1].y, own_half) | legal,
                              __byte_perm(e[0].z, e[1].z, own_half) | legal, __byte_perm(e[0].w, e[1].w, own_half) | legal};
    const Shared held = activations + x_at.i * kActivations<TOKENS>, half = x_ring.of(x_at);
    auto multiply_half = [&](auto which) {
      constexpr int j = decltype(which)::value;
      uint32_t even[2][2], odd[2][2];  // scale blocks (0, 2), (1, 3) of 64 k
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Numbers<T>::four_scales(j ? s[h].z : s[h].x, even[h][0], odd[h][0]);
        Numbers<T>::four_scales(j ? s[h].w : s[h].y, even[h][1], odd[h][1]);
      }
      if (!FP4_FAULT(SKIP_TOKENS_WAIT)) mbarrier_wait_parity(half + 8 * j, x_at.parity);
#pragma unroll
      for (int b = 0; b < 4; b += S::kBatch) {  // so many MMAs' codes are decoded while the products of those before are worked on
        uint32_t a[S::kBatch][4];
#pragma unroll
        for (int i = 0; i < S::kBatch; ++i)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int m = b + i;
            const uint4& c = v[h][2 * j + m / 2];
            a[i][h] = decode_byte<T>(__byte_perm(m % 2 ? c.z : c.x, 0, own_byte), even[h][m / 2], m % 2);
            a[i][h + 2] = decode_byte<T>(__byte_perm(m % 2 ? c.w : c.y, 0, own_byte), odd[h][m / 2], m % 2);
          }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < S::kBatch; ++i) {
          const int m = b + i;
          wgmma_sparse<T, j>(acc, a[i][0], a[i][1], a[i][2], a[i][3], wgmma_descriptor(held, j * S::kHalf + m / 2 * S::kTile + m % 2 * 64), meta[m]);
        }
        wgmma_commit_group();
        wgmma_wait<1>();
        if (b == 0) {
          if (frees) {
            mbarrier_arrive(last_half);
            if (SHARES && !FP4_FAULT(OTHER_BLOCK_NOT_TOLD)) mbarrier_arrive_remote(last_half, rank ^ 1);
          }
          frees = lane == 0;
          last_half = x_ring.free_of(x_at, j);
        }
      }
    };
    multiply_half(std::integral_constant<int, 0>());
    multiply_half(std::integral_constant<int, 1>());
    __syncwarp();
    if (lane == 0 && (KGROUPS > 1 || other)) w_ring.release(w);
    if (KGROUPS > 1 || other) w.next(S::kTurn);
    x_at.next(KGROUPS);
  }
  wgmma_wait<0>();
  wgmma_fence_operand(acc);
  if (SHARES && !FP4_FAULT(BLOCK_ENDS_EARLY)) cluster_sync();  // nobody leaves while the other arrives at its mbarriers
  sum_k_groups_and_store<T, ROWS, TOKENS, KGROUPS>(acc, (float*)shared, k_group, local, splits, SHARES ? 0 : rank, n0, m0,
                                                   Result<T>{y, global_scale, bias, min(M, m0 + tile_tokens), N, Epilogue<T>::scales(second_scale, third_scale), *global_scale * kWeightUnit});
}

struct Call {
  const void *x, *values, *meta, *scale, *global_scale, *bias;
  void* y;
  int M, N, K, second, third;
  Stream stream;
};

// splits: blocks of a cluster that share K; 0: two blocks share activations.
struct Tile {
  int rows, tokens, k_groups, splits;
};

template <typename T, int ROWS, int TOKENS, int KGROUPS, bool SHARES> cudaError_t run(int splits, const Call& c) {
  using S = Shape<ROWS, TOKENS, KGROUPS>;
  const int places = (c.M + TOKENS - 1) / TOKENS, row_tiles = (c.N + ROWS - 1) / ROWS, tile_tokens = even_tokens<8>(c.M, places);
  if (splits > c.K / kWideK || splits == 3 || splits > 4) return cudaErrorInvalidConfiguration;
  Maps maps;
  cudaError_t status = tensor_map_2d(&maps.x, c.x, c.M, (int64_t)c.K * 2, tile_tokens, 128);
  if (status == cudaSuccess) status = tensor_map_2d(&maps.values, c.values, c.N, c.K / 4, ROWS, 128);
  if (status == cudaSuccess) status = tensor_map_2d(&maps.meta, c.meta, c.N, c.K / 8, ROWS, 64);
  if (status == cudaSuccess) status = tensor_map_2d(&maps.scales, c.scale, c.N, c.K / 16, ROWS, 32);
  if (status != cudaSuccess) return status;
  const int cluster = SHARES ? 2 : splits;
  return launch(sparse_linear_wide<T, ROWS, TOKENS, KGROUPS, SHARES>, dim3(SHARES ? (row_tiles + 1) / 2 : row_tiles, places, cluster), S::kThreads, S::kBytes,
                cluster, c.stream, maps, (const float*)c.global_scale, (const T*)c.bias, (T*)c.y, tile_tokens, c.M, c.N, c.K, c.second, c.third);
}

// Measured on an H200 for five shapes, M = 16 to 128: nearly every SM has a block, two of a cluster share K where rows alone make too few, and activations where
// rows are enough.
Tile best(int M, int N, int K) {
  const int tokens = M <= 16 ? 16 : M <= 32 ? 32 : M <= 64 ? 64 : 128, places = (M + tokens - 1) / tokens, steps = K / kWideK;
  const int64_t of_64 = (int64_t)((N + 63) / 64) * places, of_128 = (int64_t)((N + 127) / 128) * places;
  auto splits = [&](int64_t blocks) { return blocks <= 30 && steps >= 4 ? 4 : blocks <= 66 && steps >= 2 ? 2 : blocks >= 100 ? 0 : 1; };
  if (tokens == 128) return of_64 <= 66 && K < 8192 ? Tile{64, 128, 2, splits(of_64)} : Tile{128, 128, 1, of_128 <= 66 ? 2 : splits(of_128)};
  if (tokens > 16 && of_128 > 50 && of_128 <= 66 && steps >= 2) return {128, tokens, 2, 2};
  if (of_64 <= 132) return {64, tokens, tokens == 64 ? 2 : 4, splits(of_64)};
  return {128, tokens, 2, splits(of_128)};
}

template <typename T> cudaError_t by_tile(Tile tile, const Call& c) {
#define TILE(r, m, k) \
  if (tile.rows == r && tile.tokens == m && tile.k_groups == k) return tile.splits ? run<T, r, m, k, false>(tile.splits, c) : run<T, r, m, k, true>(0, c);
  TILE(64, 16, 4) TILE(64, 32, 4) TILE(64, 64, 2) TILE(64, 128, 2)
  TILE(128, 16, 2) TILE(128, 32, 2) TILE(128, 64, 2) TILE(128, 128, 1)
#undef TILE
  return cudaErrorInvalidConfiguration;
}

}  // namespace

// Returns a cudaError_t. Takes what sparse_linear_small does, and early. tile: (rows, tokens, k_groups), one of by_tile's, and splits in {1, 2, 4}: blocks that
// share K, or 0: two blocks share activations; or 0 for best(). M >= 1, K % 256 == 0; all but bias, which may be null, 16-byte aligned.
extern "C" int fp4_sparse_linear_wide(const LinearParams* p) {
  if (!is_call(p) || p->M < 1 || p->M > 1 << 20 || p->N < 1 || p->K < kWideK || p->K % kWideK || !starts_fit(p->second, p->third)) return cudaErrorInvalidValue;
  const auto [rows, tokens, k_groups, splits] = p->tile;
  const Tile tile = tokens ? Tile{rows, tokens, k_groups, splits} : best(p->M, p->N, p->K);
  if (tile.splits < 0) return cudaErrorInvalidConfiguration;
  const Call call{p->x, p->codes, p->meta, p->scale, p->global_scale, p->bias, p->y, p->M, p->N, p->K, p->second, p->third, stream_of(*p)};
  return p->dtype == 0 ? by_tile<__nv_bfloat16>(tile, call) : by_tile<__half>(tile, call);
}
