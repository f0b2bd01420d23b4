// fp4.linear for a few to a few hundred rows on sm_90: y[M, N] = x[M, K] @ W[N, K]^T (+ bias), W row-major canonical NVFP4.
//
// The weight, decoded in registers, is wgmma's A operand; 8 to 128 tokens in shared memory are B, so that a weight is decoded once
// for all of them. Two kernels a call: arrange() writes the activations as tiles that wgmma takes, paired the way decode() pairs
// codes; linear_wide() streams them, one copy a tile, while each warp streams its own 16 rows of W through its own ring (weights.cuh)
// and decodes the next codes while the tensor cores work on the last ones. No barrier stops all warps: a tile is free when every
// warp has said so. A cluster splits K.
#include "../common/wgmma.cuh"
#include "weights.cuh"

namespace {

using namespace fp4;

template <int TILES> constexpr int kTile = 8 * TILES * kStepK * 2;  // bytes of a step's activations: two halves of 64 k

// tiles: [M / (8 * TILES)][K / 128] of kTile bytes, zeros beyond M and K. A block arranges one tile, four threads a token.
template <typename T, int TILES> __global__ void __launch_bounds__(32 * TILES) arrange(const T* __restrict__ x, uint8_t* __restrict__ tiles, int M, int K) {
  let_second_begin();
  const int step = blockIdx.x, token = threadIdx.x / 4, word = threadIdx.x % 4, m = blockIdx.y * 8 * TILES + token;
  // Lane t of a quad decodes k = 32 t + 8 word .. + 7: these 8 k of all four lanes, for one word of one token.
  uint32_t p[4][4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int k = step * kStepK + 32 * t + 8 * word;
    pair_up(m < M && k < K ? load_read_only(x + (size_t)m * K + k) : make_uint4(0, 0, 0, 0), p[t]);
  }
  // The pairs of decode() make two k-blocks of 16 of a word: pairs 0 and 1 the first, 2 and 3 the second; in a block, lane t's
  // first pair is k 2t, 2t + 1 and its second pair those + 8.
  uint8_t* to = tiles + ((size_t)blockIdx.y * gridDim.x + step) * kTile<TILES> + (word / 2) * (kTile<TILES> / 2) + token * 128;
#pragma unroll
  for (int c = 0; c < 4; ++c) *(uint4*)(to + ((word % 2 * 4 + c) ^ (token & 7)) * 16) = make_uint4(p[0][c], p[1][c], p[2][c], p[3][c]);
}

// Tiles and the warps' rings, or the sums at the end.
template <int ROWS, int TILES, int RING, int DEPTH>
constexpr int kBuffers = DEPTH * kTile<TILES> + ROWS / 16 * RING > kGroupSumBytes<TILES, ROWS> ? DEPTH * kTile<TILES> + ROWS / 16 * RING : kGroupSumBytes<TILES, ROWS>;

// DEPTH: steps of weights and tiles of activations in shared memory.
template <typename T, int ROWS, int TILES, int DEPTH>
__global__ void __launch_bounds__(2 * ROWS, 256 / ROWS) linear_wide(const uint8_t* __restrict__ tiles, FP4_LINEAR_PARAMETERS) {
  using Stream = WeightStream<T, 1, DEPTH, false>;
  uint8_t* shared = dynamic_shared();  // the tiles come first: they lie at multiples of 1024 bytes
  const int splits = cluster_size(), rank = cluster_rank(), warp = threadIdx.x >> 5, lane = threadIdx.x & 31, m0 = blockIdx.y * 8 * TILES;
  const int steps = (K + kStepK - 1) / kStepK;
  const Shared held = shared_address(shared), arrived = shared_address(shared + kBuffers<ROWS, TILES, Stream::kBytes, DEPTH>), freed = arrived + 8 * DEPTH;
  uint8_t* ring = shared + DEPTH * kTile<TILES> + warp * Stream::kBytes;
  const Stream weights{ring, shared_address(ring), q, scale, first_row<T, ROWS>(blockIdx.x * kBlockColumns<T, ROWS>, warp * 16, N), N, K, lane};
  const bool brings = threadIdx.x == 0;  // one thread brings the tiles
  auto bring = [&](int step, int place) {
    counter_promise(arrived + 8 * place, kTile<TILES>);
    copy_bulk(held + place * kTile<TILES>, tiles + ((size_t)blockIdx.y * steps + step) * kTile<TILES>, kTile<TILES>, arrived + 8 * place);
  };

#pragma unroll
  for (int i = 0; i < DEPTH - 1; ++i) {
    if (rank + i * splits < steps) weights.fetch(rank + i * splits, i);
    copy_async_commit();
  }
  if (brings) {
    for (int i = 0; i < DEPTH; ++i) {
      counter_init(arrived + 8 * i, 1);
      counter_init(freed + 8 * i, ROWS / 16);
    }
    publish_counters();
    wait_for_first();
    for (int i = 0; i < DEPTH - 1; ++i)
      if (rank + i * splits < steps) bring(rank + i * splits, i);
  }
  __syncthreads();

  float acc[1][TILES][4] = {};
  int place = 0, parity = 0;  // of this step, in both rings
  for (int step = rank; step < steps; step += splits) {
    const int ahead = step + (DEPTH - 1) * splits, before = place == 0 ? DEPTH - 1 : place - 1;
    if (ahead < steps) weights.fetch(ahead, before);
    copy_async_commit();
    copy_async_wait<DEPTH - 1>();
    __syncwarp();  // scales were copied by other lanes
    counter_wait(arrived + 8 * place, parity);
    const Shared tile = held + place * kTile<TILES>;
    weights.multiply(step, place, [&](int, int word, const uint32_t (&lo)[4], const uint32_t (&hi)[4]) {
      const int at = word / 2 * (kTile<TILES> / 2) + word % 2 * 64;  // 32 bytes for 16 k
      wgmma_fence();
      wgmma<T>(acc[0], lo[0], hi[0], lo[1], hi[1], tile_of(tile, at));
      wgmma<T>(acc[0], lo[2], hi[2], lo[3], hi[3], tile_of(tile, at + 32));
      wgmma_commit();
      wgmma_wait<1>();
      if (word == 0 && lane == 0 && step != rank) counter_arrive(freed + 8 * before);  // the products of the step before are done
    });
    if (brings && ahead < steps) {
      if (step != rank) counter_wait(freed + 8 * before, parity ^ (place == 0));
      bring(ahead, before);
    }
    __syncwarp();  // every lane has read its codes before they are overwritten
    place = place + 1 == DEPTH ? 0 : place + 1;
    parity ^= place == 0;
  }

  wgmma_wait<0>();
  copy_async_wait<0>();
  __syncthreads();
  sum_groups_and_store<T, 1, TILES, 1, ROWS>(acc, shared, 0, warp, splits, rank, blockIdx.x * kBlockColumns<T, ROWS>, m0,
                                            {y, global_scale, bias, M, N, then, *global_scale * kWeightUnit});
}

template <typename T, int ROWS, int TILES, int DEPTH> cudaError_t run(int splits, const Linear<T>& p, uint8_t* tiles, cudaStream_t stream) {
  constexpr int bytes = kBuffers<ROWS, TILES, WeightStream<T, 1, DEPTH, false>::kBytes, DEPTH> + 16 * DEPTH;
  static_assert(bytes <= 227 * ROWS / 256 * 1024, "does not fit shared memory");
  const unsigned steps = (p.K + kStepK - 1) / kStepK, places = (p.M + 8 * TILES - 1) / (8 * TILES);
  const cudaError_t status = launch(arrange<T, TILES>, dim3(steps, places), 32 * TILES, 0, 1, stream, p.x, tiles, p.M, p.K);
  if (status != cudaSuccess) return status;
  const dim3 blocks((p.columns() + kBlockColumns<T, ROWS> - 1) / kBlockColumns<T, ROWS>, places, splits);
  // Blocks that begin while arrange() still runs are crowded onto free SMs; if there is one for each, two do not fit it.
  const int alone = (int64_t)blocks.x * blocks.y * blocks.z <= 132 && bytes < 116 * 1024 ? 116 * 1024 : bytes;
  return launch_second(linear_wide<T, ROWS, TILES, DEPTH>, blocks, 2 * ROWS, alone, splits, stream, (const uint8_t*)tiles, p.x, p.q, p.scale,
                       p.global_scale, p.bias, p.y, p.M, p.N, p.K, p.then);
}

template <int ROWS, int TOKENS> constexpr int kDepth = TOKENS <= 32 ? 6 : TOKENS == 64 && ROWS == 256 ? 5 : 4;  // what fits

struct Tile {
  int rows, tokens, splits;
};

// Measured on an H200 (benchmarks/results/dense.csv). A cluster has at most two blocks where nearly every SM has one: those of more do not
// fit every group of SMs, and the rest would wait for a second round.
Tile best(int M, int N, int K) {
  const int tokens = M <= 8 ? 8 : M <= 16 ? 16 : M <= 32 ? 32 : M <= 64 ? 64 : 128;
  if (tokens <= 64 && N > 4224 && N <= 8448) return {128, tokens, 2};
  Tile t{256, tokens, 1};
  const int64_t blocks = (int64_t)((N + 255) / 256) * ((M + tokens - 1) / tokens);
  while (t.splits < 8 && blocks * t.splits * 2 <= (t.splits < 4 ? 112 : 64) && K / kStepK >= 4 * t.splits) t.splits *= 2;
  return t;
}

template <typename T> cudaError_t by_tile(Tile tile, const Linear<T>& p, void* tiles, cudaStream_t stream) {
#define TILE(r, m) \
  if (tile.rows == r && tile.tokens == m) return run<T, r, m / 8, kDepth<r, m>>(tile.splits, p, (uint8_t*)tiles, stream);
  TILE(256, 8) TILE(256, 16) TILE(256, 32) TILE(256, 64) TILE(256, 128)
  TILE(128, 8) TILE(128, 16) TILE(128, 32) TILE(128, 64)
#undef TILE
  return cudaErrorInvalidConfiguration;
}

}  // namespace

// Returns a cudaError_t. dtype 0: bfloat16, 1: float16. (rows, tokens): one of by_tile's, splits in {1, 2, 4, 8}: blocks that share K;
// all 0 for best(). 1 <= M <= 2^20, K % 64 == 0; x, q and scratch 16-byte aligned, scale 4-byte aligned; bias may be null. scratch: 2 bytes
// for each activation, M and K rounded up to multiples of 128.
extern "C" int fp4_linear_wide(const void* x, const void* q, const void* s, const void* g, const void* bias, const void* mul, const void* residual, void* y,
                               int M, int N, int K, int dtype, int second, int third, int act, int rows, int tokens, int splits, void* scratch, void* stream) {
  if (M < 1 || M > 1 << 20 || N < 1 || K < 64 || K % 64) return cudaErrorInvalidValue;
  const Tile tile = tokens ? Tile{rows, tokens, splits} : best(M, N, K);
  if (tile.splits < 1 || tile.splits > 8 || (tile.splits & (tile.splits - 1))) return cudaErrorInvalidConfiguration;
  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Linear<T> p{(const T*)x, (const uint8_t*)q, (const uint8_t*)s, (const float*)g, (const T*)bias, (T*)y, M, N, K,
                      Epilogue<T>::of(mul, residual, second, third, act)};
    return p.fits() ? by_tile<T>(tile, p, scratch, (cudaStream_t)stream) : cudaErrorInvalidValue;
  };
  return dtype == 0 ? run(__nv_bfloat16()) : run(__half());
}
