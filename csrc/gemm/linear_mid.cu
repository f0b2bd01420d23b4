// fp4.linear for 17 to a few hundred rows: y[M, N] = x[M, K] @ W[N, K]^T (+ bias), W row-major canonical NVFP4.
//
// A block owns 128 rows of W and 8 * TILES tokens; warps of 16 * R rows share one tile of activations in shared memory,
// already paired the way decode() pairs codes. GROUPS such groups of warps take turns at the steps (128 k) of K, and a
// cluster of blocks splits K again where N alone would not fill the chip. Weights stream through each warp's own ring
// (weights.cuh), as in linear_small. Partial sums meet in shared memory, first of the block, then of the cluster: no
// atomics, fixed order. A larger R reads the activations from shared memory less often, and takes registers.
#include "weights.cuh"

namespace {

using namespace fp4;

constexpr int kBlockRows = 128;
constexpr int kPitch = kStepK * 2 + 64;  // bytes of one token's activations of a step; 64 more keep quads off each other's banks

template <int R, int TILES, int GROUPS> struct Shape {
  static constexpr int kRowWarps = kBlockRows / (16 * R), kGroupThreads = 32 * kRowWarps, kThreads = kGroupThreads * GROUPS;
  static constexpr int kTokens = 8 * TILES, kTile = kTokens * kPitch;
  static constexpr int kChunks = kTokens * 16 / kGroupThreads;  // 16 bytes of activations a thread brings, a step
};

template <typename T, int R, int TILES, int GROUPS, int STAGES, bool ANY_K>
__global__ void __launch_bounds__(Shape<R, TILES, GROUPS>::kThreads, 1) linear_mid(FP4_LINEAR_PARAMETERS) {
  using Stream = WeightStream<T, R, STAGES, ANY_K>;
  using S = Shape<R, TILES, GROUPS>;
  uint8_t* shared = dynamic_shared();
  const int splits = cluster_size(), rank = cluster_rank();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int group = warp / S::kRowWarps, row_warp = warp % S::kRowWarps, thread = threadIdx.x % S::kGroupThreads;
  const int m0 = blockIdx.y * S::kTokens;
  const int steps = (K + kStepK - 1) / kStepK, first = rank * GROUPS + group, stride = splits * GROUPS;
  uint8_t* ring = shared + warp * Stream::kBytes;
  const Stream weights{ring, shared_address(ring), q, scale, first_row<T, kBlockRows>(blockIdx.x * kBlockColumns<T, kBlockRows>, row_warp * 16 * R, N), N, K, lane};
  uint8_t* tiles = shared + S::kRowWarps * GROUPS * Stream::kBytes + group * 2 * S::kTile;

  uint4 next[S::kChunks];
  auto load_x = [&](int step) {
#pragma unroll
    for (int i = 0; i < S::kChunks; ++i) {
      const int chunk = thread + S::kGroupThreads * i, m = m0 + chunk / 16, k = step * kStepK + (chunk % 16) * 8;
      next[i] = m < M && k < K ? load_read_only(x + (size_t)m * K + k) : make_uint4(0, 0, 0, 0);
    }
  };
  // Chunk c of a token, 8 k, is word c % 4 of lane c / 4 of a quad.
  auto store_x = [&](uint8_t* tile) {
#pragma unroll
    for (int i = 0; i < S::kChunks; ++i) {
      const int chunk = thread + S::kGroupThreads * i, c = chunk % 16;
      uint32_t p[4];
      pair_up(next[i], p);
      *(uint4*)(tile + (chunk / 16) * kPitch + (c & 3) * 64 + (c >> 2) * 16) = make_uint4(p[0], p[1], p[2], p[3]);
    }
  };

  float acc[R][TILES][4] = {};
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (first + i * stride < steps) weights.fetch(first + i * stride, i);
    copy_async_commit();
  }
  if (first < steps) {
    load_x(first);
    store_x(tiles);
  }
  barrier(group + 1, S::kGroupThreads);
  int slot = 0, buffer = 0;
  for (int step = first; step < steps; step += stride) {
    const int ahead = step + (STAGES - 1) * stride;
    if (ahead < steps) weights.fetch(ahead, slot == 0 ? STAGES - 1 : slot - 1);
    copy_async_commit();
    if (step + stride < steps) load_x(step + stride);
    copy_async_wait<STAGES - 1>();
    __syncwarp();  // scales were copied by other lanes

    const uint8_t* tile = tiles + buffer * S::kTile + g * kPitch + t * 16;
    weights.multiply(step, slot, [&](int r, int word, const uint32_t (&lo)[4], const uint32_t (&hi)[4]) {
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        const uint4 p = *(const uint4*)(tile + i * 8 * kPitch + word * 64);
        mma16816<T>(acc[r][i], lo[0], hi[0], lo[1], hi[1], p.x, p.y);
        mma16816<T>(acc[r][i], lo[2], hi[2], lo[3], hi[3], p.z, p.w);
      }
    });
    if (step + stride < steps) store_x(tiles + (buffer ^ 1) * S::kTile);
    barrier(group + 1, S::kGroupThreads);  // the next tile is whole, and nobody reads this one and this slot any more
    buffer ^= 1;
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }

  copy_async_wait<0>();
  __syncthreads();
  sum_groups_and_store<T, R, TILES, GROUPS, kBlockRows>(acc, shared, group, row_warp, splits, rank, blockIdx.x * kBlockColumns<T, kBlockRows>, m0,
                                                       {y, global_scale, bias, M, N, then, *global_scale * kWeightUnit});
}

template <typename T, int R, int TILES, int GROUPS, int STAGES, bool ANY_K = false> cudaError_t run(int splits, const Linear<T>& p, cudaStream_t stream) {
  using S = Shape<R, TILES, GROUPS>;
  constexpr int bytes = S::kRowWarps * GROUPS * WeightStream<T, R, STAGES, ANY_K>::kBytes + GROUPS * 2 * S::kTile;
  static_assert(kGroupSumBytes<TILES, kBlockRows> <= bytes, "partial sums reuse the buffers");
  static_assert(bytes <= 227 * 1024, "does not fit shared memory");
  const dim3 blocks((p.columns() + kBlockColumns<T, kBlockRows> - 1) / kBlockColumns<T, kBlockRows>, (p.M + S::kTokens - 1) / S::kTokens, splits);
  return launch(linear_mid<T, R, TILES, GROUPS, STAGES, ANY_K>, blocks, S::kThreads, bytes, splits, p, stream);
}

struct Tile {
  int rows_16, tokens, groups, stages, splits;
};

// By reasoning, not by measurement: the widest tile that M fills, and enough blocks for the 132 SMs of an H200 as long as every
// group of warps keeps some steps of K.
Tile best(int M, int N, int K) {
  Tile t = FP4_ARCH == 90 && M <= 16 ? Tile{2, 16, 4, 3, 1} : FP4_ARCH == 90 && M <= 32 ? Tile{2, 32, 4, 3, 1} : Tile{2, 64, 2, 4, 1};
  const int64_t blocks = (int64_t)((N + kBlockRows - 1) / kBlockRows) * ((M + t.tokens - 1) / t.tokens);
  while (FP4_ARCH >= 90 && t.splits < 8 && blocks * t.splits <= 66 && K / kStepK >= 4 * t.splits * t.groups) t.splits *= 2;
  return t;
}

template <typename T> cudaError_t by_tile(Tile tile, const Linear<T>& p, cudaStream_t stream) {
  if (p.K % 64) return run<T, 1, 4, 2, 3, true>(tile.splits, p, stream);
#define TILE(r, m, gr, st) \
  if (tile.rows_16 == r && tile.tokens == m && tile.groups == gr && tile.stages == st) return run<T, r, m / 8, gr, st>(tile.splits, p, stream);
  TILE(2, 64, 2, 4)
#if FP4_ARCH == 90  // 512 threads: other assemblers spill
  TILE(1, 64, 2, 4) TILE(2, 32, 4, 3) TILE(2, 16, 4, 3) TILE(4, 32, 4, 2)
#endif
#undef TILE
  return cudaErrorInvalidConfiguration;
}

}  // namespace

// Returns a cudaError_t. dtype 0: bfloat16, 1: float16. (rows_16, tokens, groups, stages): one of by_tile's, splits in {1, 2, 4, 8}:
// blocks that share K, 1 below sm_90; all 0 for best(). K % 64 != 0 has one tile of its own. 1 <= M <= 2^20, K % 16 == 0; x and q 16-byte
// aligned, scale 4-byte aligned; bias may be null.
extern "C" int fp4_linear_mid(const void* x, const void* q, const void* s, const void* g, const void* bias, const void* mul, const void* residual, void* y, int M, int N, int K, int dtype, int second, int third, int act,
                              int rows_16, int tokens, int groups, int stages, int splits, void* stream) {
  if (M < 1 || M > 1 << 20 || N < 1 || K < 16 || K % 16) return cudaErrorInvalidValue;
  const Tile tile = rows_16 ? Tile{rows_16, tokens, groups, stages, splits} : best(M, N, K);
  if (tile.splits < 1 || tile.splits > (FP4_ARCH >= 90 ? 8 : 1) || (tile.splits & (tile.splits - 1))) return cudaErrorInvalidConfiguration;
  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Linear<T> p{(const T*)x, (const uint8_t*)q, (const uint8_t*)s, (const float*)g, (const T*)bias, (T*)y, M, N, K,
                      Epilogue<T>::of(mul, residual, second, third, act)};
    return p.fits() ? by_tile<T>(tile, p, (cudaStream_t)stream) : cudaErrorInvalidValue;
  };
  return dtype == 0 ? run(__nv_bfloat16()) : run(__half());
}
