// fp4.linear for a few to a few hundred rows on sm_90: y[M, N] = x[M, K] @ W[N, K]^T (+ bias), W row-major canonical NVFP4.
//
// The weight, decoded in registers, is wgmma's A operand; 8 to 128 tokens in shared memory are B, so that a weight is decoded once
// for all of them. A block owns ROWS rows of W, each warp 16 of them, which it streams through its own ring (weights.cuh); all warps
// share three tiles of activations: one is multiplied, the next one is written, and the last one may still be read by products
// that nobody has waited for. While the tensor cores work on one word of codes the warp decodes the next. A cluster splits K.
#include "../common/wgmma.cuh"
#include "weights.cuh"

namespace {

using namespace fp4;

template <int TILES> constexpr int kTile = 8 * TILES * kStepK * 2;  // bytes of a step's activations: two halves of 64 k
constexpr int kTilesHeld = 3;

template <typename T, int ROWS, int TILES, int STAGES> __global__ void __launch_bounds__(2 * ROWS, 256 / ROWS) linear_wide(FP4_LINEAR_PARAMETERS) {
  using Stream = WeightStream<T, 1, STAGES, false>;
  constexpr int kThreads = 2 * ROWS, kTokens = 8 * TILES, kQuads = (kTokens * 4 + kThreads - 1) / kThreads;
  uint8_t* shared = dynamic_shared();
  const int splits = cluster_size(), rank = cluster_rank();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, thread = threadIdx.x;
  const int m0 = blockIdx.y * kTokens;
  const int steps = (K + kStepK - 1) / kStepK;
  uint8_t* ring = shared + kTilesHeld * kTile<TILES> + warp * Stream::kBytes;  // the tiles come first: they have to lie at multiples of 1024 bytes
  const Stream weights{ring, shared_address(ring), q, scale, first_row<T, ROWS>(blockIdx.x * kBlockColumns<T, ROWS>, warp * 16, N), N, K, lane};

  // Lane t of a quad decodes k = 32 t + 8 word .. + 7; a thread brings these 8 k of all four lanes, for one word of one token.
  uint4 next[kQuads][4];
  auto load_x = [&](int step) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int m = m0 + (thread + kThreads * i) / 4, word = thread % 4;
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const int k = step * kStepK + 32 * t + 8 * word;
        next[i][t] = m < min(M, m0 + kTokens) && k < K ? load_read_only(x + (size_t)m * K + k) : make_uint4(0, 0, 0, 0);
      }
    }
  };
  // The pairs of decode() make two k-blocks of 16 of a word: pairs 0 and 1 the first, 2 and 3 the second; in a block, lane t's
  // first pair is k 2t, 2t + 1 and its second pair those + 8.
  auto store_x = [&](int buffer) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int token = (thread + kThreads * i) / 4, word = thread % 4;
      if (kTokens * 4 % kThreads && token >= kTokens) break;
      uint32_t p[4][4];
#pragma unroll
      for (int t = 0; t < 4; ++t) pair_up(next[i][t], p[t]);
      uint8_t* to = shared + buffer * kTile<TILES> + (word / 2) * (kTile<TILES> / 2) + token * 128;
#pragma unroll
      for (int c = 0; c < 4; ++c) *(uint4*)(to + ((word % 2 * 4 + c) ^ (token & 7)) * 16) = make_uint4(p[0][c], p[1][c], p[2][c], p[3][c]);
    }
  };

  float acc[1][TILES][4] = {};
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (rank + i * splits < steps) weights.fetch(rank + i * splits, i);
    copy_async_commit();
  }
  wait_for_previous();  // it may have written x, and may still read y; it does not write weights
  let_next_begin();
  if (rank < steps) {
    load_x(rank);
    store_x(0);
  }
  publish_tile();
  if (rank + splits < steps) load_x(rank + splits);
  __syncthreads();
  int slot = 0, buffer = 0;
  for (int step = rank; step < steps; step += splits) {
    const int ahead = step + (STAGES - 1) * splits;
    if (ahead < steps) weights.fetch(ahead, slot == 0 ? STAGES - 1 : slot - 1);
    copy_async_commit();
    const int after = buffer == kTilesHeld - 1 ? 0 : buffer + 1;  // products of two steps ago, which read it, are done everywhere
    if (step + splits < steps) store_x(after);
    publish_tile();  // before anything is loaded: it waits for loads, too
    if (step + 2 * splits < steps) load_x(step + 2 * splits);
    copy_async_wait<STAGES - 1>();
    __syncwarp();  // scales were copied by other lanes

    const Shared tile = shared_address(shared + buffer * kTile<TILES>);
    weights.multiply(step, slot, [&](int, int word, const uint32_t (&lo)[4], const uint32_t (&hi)[4]) {
      const int at = word / 2 * (kTile<TILES> / 2) + word % 2 * 64;  // 32 bytes for 16 k
      wgmma_fence();
      wgmma<T>(acc[0], lo[0], hi[0], lo[1], hi[1], tile_of(tile, at));
      wgmma<T>(acc[0], lo[2], hi[2], lo[3], hi[3], tile_of(tile, at + 32));
      wgmma_commit();
      wgmma_wait<1>();
    });
    __syncthreads();  // the next tile is whole
    buffer = after;
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }

  wgmma_wait<0>();
  copy_async_wait<0>();
  __syncthreads();
  sum_groups_and_store<T, 1, TILES, 1, ROWS>(acc, shared, 0, warp, splits, rank, blockIdx.x * kBlockColumns<T, ROWS>, m0, {y, global_scale, bias, M, N, then, *global_scale * kWeightUnit});
}

template <typename T, int ROWS, int TILES, int STAGES> cudaError_t run(int splits, const Linear<T>& p, cudaStream_t stream) {
  constexpr int buffers = kTilesHeld * kTile<TILES> + ROWS / 16 * WeightStream<T, 1, STAGES, false>::kBytes, sums = kGroupSumBytes<TILES, ROWS>;
  constexpr int bytes = buffers > sums ? buffers : sums;
  static_assert(bytes <= 227 * ROWS / 256 * 1024, "does not fit shared memory");
  const dim3 blocks((p.columns() + kBlockColumns<T, ROWS> - 1) / kBlockColumns<T, ROWS>, (p.M + 8 * TILES - 1) / (8 * TILES), splits);
  return launch(linear_wide<T, ROWS, TILES, STAGES>, blocks, 2 * ROWS, bytes, splits, p, stream);
}

struct Tile {
  int rows, tokens, stages, splits;
};

// By reasoning, not by measurement; as in linear_mid.
Tile best(int M, int N, int K) {
  Tile t = M <= 8 ? Tile{256, 8, 6, 1} : M <= 16 ? Tile{256, 16, 6, 1} : M <= 32 ? Tile{256, 32, 6, 1} : M <= 64 ? Tile{256, 64, 4, 1} : Tile{256, 128, 4, 1};
  const int64_t blocks = (int64_t)((N + t.rows - 1) / t.rows) * ((M + t.tokens - 1) / t.tokens);
  while (t.splits < 8 && blocks * t.splits <= 66 && K / kStepK >= 4 * t.splits) t.splits *= 2;
  return t;
}

template <typename T> cudaError_t by_tile(Tile tile, const Linear<T>& p, cudaStream_t stream) {
#define TILE(r, m, st) \
  if (tile.rows == r && tile.tokens == m && tile.stages == st) return run<T, r, m / 8, st>(tile.splits, p, stream);
  TILE(256, 8, 6) TILE(256, 16, 6) TILE(256, 32, 6) TILE(256, 64, 4) TILE(256, 128, 4)
  TILE(128, 8, 6) TILE(128, 16, 6) TILE(128, 32, 4) TILE(128, 64, 3)
#undef TILE
  return cudaErrorInvalidConfiguration;
}

}  // namespace

// Returns a cudaError_t. dtype 0: bfloat16, 1: float16. (rows, tokens, stages): one of by_tile's, splits in {1, 2, 4, 8}: blocks
// that share K; all 0 for best(). 1 <= M <= 2^20, K % 64 == 0; x and q 16-byte aligned, scale 4-byte aligned; bias may be null.
extern "C" int fp4_linear_wide(const void* x, const void* q, const void* s, const void* g, const void* bias, const void* mul, const void* residual, void* y,
                               int M, int N, int K, int dtype, int second, int third, int act, int rows, int tokens, int stages, int splits, void* stream) {
  if (M < 1 || M > 1 << 20 || N < 1 || K < 64 || K % 64) return cudaErrorInvalidValue;
  const Tile tile = tokens ? Tile{rows, tokens, stages, splits} : best(M, N, K);
  if (tile.splits < 1 || tile.splits > 8 || (tile.splits & (tile.splits - 1))) return cudaErrorInvalidConfiguration;
  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Linear<T> p{(const T*)x, (const uint8_t*)q, (const uint8_t*)s, (const float*)g, (const T*)bias, (T*)y, M, N, K,
                      Epilogue<T>::of(mul, residual, second, third, act)};
    return p.fits() ? by_tile<T>(tile, p, (cudaStream_t)stream) : cudaErrorInvalidValue;
  };
  return dtype == 0 ? run(__nv_bfloat16()) : run(__half());
}
