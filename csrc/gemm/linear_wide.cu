// fp4.linear for 33 to a few hundred rows on sm_90: y[M, N] = x[M, K] @ W[N, K]^T (+ bias), W row-major canonical NVFP4.
//
// As linear_mid, but with wgmma, whose rate mma.sync does not reach: the weight, decoded in registers, is its A operand, and
// 64, 128 or 256 tokens in shared memory are B, so that a weight is decoded once for all of them. GROUPS pairs of warpgroups
// take turns at the steps (128 k) of K; each warp streams its own 16 rows (weights.cuh); a cluster may split K again.
#include "../common/wgmma.cuh"
#include "weights.cuh"

namespace {

using namespace fp4;

constexpr int kRowWarps = kBlockRows / 16, kGroupThreads = 32 * kRowWarps;

template <int TILES> constexpr int kTile = 8 * TILES * kStepK * 2;  // bytes of a step's activations: two halves of 64 k

template <typename T, int TILES, int GROUPS, int STAGES> __global__ void __launch_bounds__(kGroupThreads* GROUPS, 1) linear_wide(FP4_LINEAR_PARAMETERS) {
  using Stream = WeightStream<T, 1, STAGES, false>;
  constexpr int kTokens = 8 * TILES, kQuads = kTokens * 4 / kGroupThreads;  // 4 chunks of 8 k a thread, kQuads times a step
  uint8_t* shared = dynamic_shared();
  const int splits = cluster_size(), rank = cluster_rank();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int group = warp / kRowWarps, row_warp = warp % kRowWarps, thread = threadIdx.x % kGroupThreads;
  const int m0 = blockIdx.y * kTokens;
  const int steps = (K + kStepK - 1) / kStepK, first = rank * GROUPS + group, stride = splits * GROUPS;
  uint8_t* tiles = shared + group * 2 * kTile<TILES>;  // first: they have to lie at multiples of 1024 bytes
  uint8_t* ring = shared + GROUPS * 2 * kTile<TILES> + warp * Stream::kBytes;
  const Stream weights{ring, shared_address(ring), q, scale, first_row<T>(blockIdx.x * kBlockColumns<T>, row_warp * 16, N), N, K, lane};

  // Lane t of a quad decodes k = 32 t + 8 word .. + 7; a thread brings these 8 k of all four lanes, for one word of one token.
  uint4 next[kQuads][4];
  auto load_x = [&](int step) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int m = m0 + (thread + kGroupThreads * i) / 4, word = thread % 4;
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const int k = step * kStepK + 32 * t + 8 * word;
        next[i][t] = m < M && k < K ? load_read_only(x + (size_t)m * K + k) : make_uint4(0, 0, 0, 0);
      }
    }
  };
  // The pairs of decode() make two k-blocks of 16 of a word: pairs 0 and 1 the first, 2 and 3 the second; in a block, lane t's
  // first pair is k 2t, 2t + 1 and its second pair those + 8.
  auto store_x = [&](uint8_t* tile) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int token = (thread + kGroupThreads * i) / 4, word = thread % 4;
      uint32_t p[4][4];
#pragma unroll
      for (int t = 0; t < 4; ++t) pair_up(next[i][t], p[t]);
      uint8_t* to = tile + (word / 2) * (kTile<TILES> / 2) + token * 128;
#pragma unroll
      for (int c = 0; c < 4; ++c) *(uint4*)(to + ((word % 2 * 4 + c) ^ (token & 7)) * 16) = make_uint4(p[0][c], p[1][c], p[2][c], p[3][c]);
    }
  };

  float acc[1][TILES][4] = {};
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (first + i * stride < steps) weights.fetch(first + i * stride, i);
    copy_async_commit();
  }
  wait_for_previous();  // it may have written x, and may still read y; it does not write weights
  let_next_begin();
  if (first < steps) {
    load_x(first);
    store_x(tiles);
  }
  publish_tile();
  barrier(group + 1, kGroupThreads);
  int slot = 0, buffer = 0;
  for (int step = first; step < steps; step += stride) {
    const int ahead = step + (STAGES - 1) * stride;
    if (ahead < steps) weights.fetch(ahead, slot == 0 ? STAGES - 1 : slot - 1);
    copy_async_commit();
    if (step + stride < steps) load_x(step + stride);
    copy_async_wait<STAGES - 1>();
    __syncwarp();  // scales were copied by other lanes

    const Shared tile = shared_address(tiles + buffer * kTile<TILES>);
    weights.multiply(step, slot, [&](int, int word, const uint32_t (&lo)[4], const uint32_t (&hi)[4]) {
      const Shared half = tile + (word / 2) * (kTile<TILES> / 2);
      wgmma_fence();
      wgmma<T>(acc[0], lo[0], hi[0], lo[1], hi[1], tile_of(half, word % 2 * 2));
      wgmma<T>(acc[0], lo[2], hi[2], lo[3], hi[3], tile_of(half, word % 2 * 2 + 1));
    });
    wgmma_commit();
    if (step + stride < steps) store_x(tiles + (buffer ^ 1) * kTile<TILES>);
    publish_tile();
    wgmma_wait();
    barrier(group + 1, kGroupThreads);  // the next tile is whole, and nobody reads this one and this slot any more
    buffer ^= 1;
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }

  copy_async_wait<0>();
  __syncthreads();
  sum_groups_and_store<T, 1, TILES, GROUPS, kBlockRows>(acc, shared, group, row_warp, splits, rank, blockIdx.x * kBlockColumns<T>, m0, {y, global_scale, bias, M, N, then, *global_scale * kWeightUnit});
}

template <typename T, int TILES, int GROUPS, int STAGES> cudaError_t run(int splits, const Linear<T>& p, cudaStream_t stream) {
  constexpr int bytes = GROUPS * (2 * kTile<TILES> + kRowWarps * WeightStream<T, 1, STAGES, false>::kBytes);
  static_assert(kGroupSumBytes<TILES, kBlockRows> <= bytes, "partial sums reuse the buffers");
  static_assert(bytes <= 227 * 1024, "does not fit shared memory");
  const dim3 blocks((p.columns() + kBlockColumns<T> - 1) / kBlockColumns<T>, (p.M + 8 * TILES - 1) / (8 * TILES), splits);
  return launch(linear_wide<T, TILES, GROUPS, STAGES>, blocks, kGroupThreads * GROUPS, bytes, splits, p, stream);
}

struct Tile {
  int tokens, groups, stages, splits;
};

// By reasoning, not by measurement; as in linear_mid.
Tile best(int M, int N, int K) {
  Tile t = M <= 64 ? Tile{64, 2, 4, 1} : M <= 128 ? Tile{128, 1, 4, 1} : Tile{256, 1, 4, 1};
  const int64_t blocks = (int64_t)((N + kBlockRows - 1) / kBlockRows) * ((M + t.tokens - 1) / t.tokens);
  while (t.splits < 8 && blocks * t.splits <= 66 && K / kStepK >= 4 * t.splits * t.groups) t.splits *= 2;
  return t;
}

template <typename T> cudaError_t by_tile(Tile tile, const Linear<T>& p, cudaStream_t stream) {
#define TILE(m, gr, st) \
  if (tile.tokens == m && tile.groups == gr && tile.stages == st) return run<T, m / 8, gr, st>(tile.splits, p, stream);
  TILE(64, 2, 4) TILE(128, 1, 4) TILE(256, 1, 4)
#undef TILE
  return cudaErrorInvalidConfiguration;
}

}  // namespace

// Returns a cudaError_t. dtype 0: bfloat16, 1: float16. (tokens, groups, stages): one of by_tile's, splits in {1, 2, 4, 8}: blocks
// that share K; all 0 for best(). 1 <= M <= 2^20, K % 64 == 0; x and q 16-byte aligned, scale 4-byte aligned; bias may be null.
extern "C" int fp4_linear_wide(const void* x, const void* q, const void* s, const void* g, const void* bias, const void* mul, const void* residual, void* y, int M, int N, int K, int dtype, int second, int third, int act, int tokens,
                               int groups, int stages, int splits, void* stream) {
  if (M < 1 || M > 1 << 20 || N < 1 || K < 64 || K % 64) return cudaErrorInvalidValue;
  const Tile tile = tokens ? Tile{tokens, groups, stages, splits} : best(M, N, K);
  if (tile.splits < 1 || tile.splits > 8 || (tile.splits & (tile.splits - 1))) return cudaErrorInvalidConfiguration;
  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Linear<T> p{(const T*)x, (const uint8_t*)q, (const uint8_t*)s, (const float*)g, (const T*)bias, (T*)y, M, N, K,
                      Epilogue<T>::of(mul, residual, second, third, act)};
    return p.fits() ? by_tile<T>(tile, p, (cudaStream_t)stream) : cudaErrorInvalidValue;
  };
  return dtype == 0 ? run(__nv_bfloat16()) : run(__half());
}
