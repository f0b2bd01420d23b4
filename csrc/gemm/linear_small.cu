// fp4.linear for 1 to 32 rows: y[M, N] = x[M, K] @ W[N, K]^T (+ bias), W row-major canonical NVFP4.
//
// Bandwidth-bound: every weight byte is read once. The weight is the MMA's A operand: a warp owns 16 * R rows of W and every
// WARPS-th step (128 k) of K, and streams them through its own ring (weights.cuh). Activations are the B operand, 8 tokens
// a tile, read from L2 (one warp of the block uses them, so shared memory would not save a byte). The warps' partial sums
// meet in shared memory at the end: no atomics, fixed order.
#include "weights.cuh"

namespace {

using namespace fp4;

// Left to itself ptxas caps the registers for occupancy, which is what measured best on sm_90 and spills elsewhere.
#if FP4_ARCH == 90
#define FP4_BOUNDS(threads) __launch_bounds__(threads, ANY_K ? 1 : 0)
#else
#define FP4_BOUNDS(threads) __launch_bounds__(threads, 1)
#endif

template <typename T, int R> constexpr int kColumns = 16 * R / Result<T>::kParts;  // of y, a block

template <typename T, int MT, int R, int WARPS, int STAGES, bool ANY_K> __global__ void FP4_BOUNDS(32 * WARPS) linear_small(FP4_LINEAR_PARAMETERS) {
  using Stream = WeightStream<T, R, STAGES, ANY_K, kFinish == kGlu>;
  constexpr int kAhead = MT == 1 ? 2 : 1;
  uint8_t* shared = dynamic_shared();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int n0 = blockIdx.x * kColumns<T, R>;
  uint8_t* ring = shared + warp * Stream::kBytes;
  const Stream weights{ring, shared_address(ring), q, scale, n0, N, K, lane};

  // With 32 tokens there is no register left for the number of steps.
  const int steps = (K + kStepK - 1) / kStepK;
  auto exists = [&](int step) { return MT < 4 ? step < steps : step * kStepK < K; };
  auto fetch_x = [&](int step, uint4 (&to)[MT][4]) {
    const int k = step * kStepK + t * 32;
#pragma unroll
    for (int j = 0; j < MT; ++j) {
      const int m = 8 * j + g;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool live = m < M && k + (ANY_K ? 8 * i : 0) < K;  // K in multiples of 32: all of a lane's 32 k or none
        to[j][i] = live ? load_read_only(x + (size_t)m * K + k + 8 * i) : make_uint4(0, 0, 0, 0);
      }
    }
  };

  float acc[R][MT][4] = {};
  auto compute = [&](int step, int slot, const uint4 (&xs)[MT][4]) {
    uint32_t xp[MT][4][4];
#pragma unroll
    for (int j = 0; j < MT; ++j)
#pragma unroll
      for (int word = 0; word < 4; ++word) pair_up(xs[j][word], xp[j][word]);
    weights.multiply(step, slot, [&](int r, int word, const uint32_t (&lo)[4], const uint32_t (&hi)[4]) {
#pragma unroll
      for (int j = 0; j < MT; ++j) {
        mma_m16n8k16<T>(acc[r][j], lo[0], hi[0], lo[1], hi[1], xp[j][word][0], xp[j][word][1]);
        mma_m16n8k16<T>(acc[r][j], lo[2], hi[2], lo[3], hi[3], xp[j][word][2], xp[j][word][3]);
      }
    });
  };

  uint4 xs[kAhead][MT][4];
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (exists(warp + i * WARPS)) weights.fetch(warp + i * WARPS, i);
    cp_async_commit_group();
  }
  if (kAhead == 2 && exists(warp)) fetch_x(warp, xs[0]);
  int slot = 0;
  for (int step = warp; exists(step); step += WARPS) {
    const int next = step + (STAGES - 1) * WARPS;
    if (exists(next)) weights.fetch(next, slot == 0 ? STAGES - 1 : slot - 1);
    cp_async_commit_group();
    fetch_x(kAhead == 2 ? step + WARPS : step, xs[kAhead - 1]);
    if (FP4_FAULT(WAIT_FOR_ONE_GROUP_TOO_FEW)) cp_async_wait_group<STAGES>();
    if (!FP4_FAULT(WAIT_FOR_ONE_GROUP_TOO_FEW) && !FP4_FAULT(SKIP_COPY_WAIT)) cp_async_wait_group<STAGES - 1>();
    if (!FP4_FAULT(SKIP_SYNC_AFTER_COPY)) __syncwarp();  // scales were copied by other lanes
    compute(step, slot, xs[0]);
    if (!FP4_FAULT(SKIP_SYNC_BEFORE_REFILL)) __syncwarp();  // every lane has read this slot before it is filled again
    if (kAhead == 2)
#pragma unroll
      for (int i = 0; i < 4; ++i) xs[0][0][i] = xs[kAhead - 1][0][i];
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }

  cp_async_wait_group<0>();
  __syncthreads();
  sum_and_store<T, R, MT, WARPS>(acc, shared, 1, n0, {y, global_scale, bias, M, N, then, *global_scale * kWeightUnit});
}

template <typename T, int MT, int R, int WARPS, int STAGES, bool ANY_K = false> cudaError_t run(const Linear<T>& p, cudaStream_t stream) {
  constexpr int ring = WARPS * WeightStream<T, R, STAGES, ANY_K>::kBytes, sums = kSumBytes<R, MT, WARPS>;
  constexpr int bytes = ring > sums ? ring : sums;
  static_assert(bytes <= 227 * 1024, "does not fit shared memory");
  return launch(linear_small<T, MT, R, WARPS, STAGES, ANY_K>, dim3((p.columns() + kColumns<T, R> - 1) / kColumns<T, R>), 32 * WARPS, bytes, 1, p, stream);
}

struct Tile {
  int rows_16, warps, stages;
};

// Enough blocks and warps to fill the chip without splitting K over blocks; measured on an H200 (benchmarks/results/dense.csv).
Tile best(int M, int N, int K) {
  if (N < 8192) return M > 16 && K < 8192 ? Tile{2, 8, 4} : Tile{2, 16, 2};
  if (N <= 8448) return M <= 8 && kLargeSharedMemory ? Tile{4, 8, 3} : Tile{4, 8, 2};
  return M <= 16 ? Tile{4, 8, 2} : Tile{4, 4, 3};
}

template <typename T, int MT> cudaError_t by_tile(Tile tile, const Linear<T>& p, cudaStream_t stream) {
#define TILE(r, w, st) /* rows_16, warps, stages */ \
  if (tile.rows_16 == r && tile.warps == w && tile.stages == st) return run<T, MT, r, w, st>(p, stream);
  if (p.K % 64) return run<T, MT, 2, 8, 2, true>(p, stream);
  TILE(4, 8, 2)
  TILE(2, 16, 2)
  if constexpr (MT == 1) { TILE(4, 8, 3) }
  if constexpr (MT == 4) { TILE(2, 8, 4) TILE(4, 4, 3) }
#undef TILE
  return cudaErrorInvalidConfiguration;
}

template <typename T> cudaError_t by_tokens(Tile tile, const Linear<T>& p, cudaStream_t stream) {
  if (p.M <= 8) return by_tile<T, 1>(tile, p, stream);
  if (p.M <= 16) return by_tile<T, 2>(tile, p, stream);
#if FP4_ARCH == 90  // 32 tokens a block fit the registers on sm_90 only; the dispatch rows say the same
  if (p.M <= 32) return by_tile<T, 4>(tile, p, stream);
#endif
  return cudaErrorInvalidValue;
}

}  // namespace

// Returns a cudaError_t. Takes x, codes [N, K/2], scale E4M3 [N, K/16], global_scale, bias, second, third; act (epilogue.cuh), mul and residual [M, N] where
// the library has such an epilogue. tile: (rows_16, warps, stages), one of by_tile's, or 0 for best(); K % 64 != 0 has one tile of its own. 1 <= M <= 32 on
// sm_90, 16 elsewhere, K % 16 == 0; x and codes 16-byte aligned, scale 4-byte aligned; bias, mul and residual may be null.
extern "C" int fp4_linear_small(const LinearParams* call) {
  if (!is_call(call) || call->M < 1 || call->N < 1 || call->K < 16 || call->K % 16) return cudaErrorInvalidValue;
  const int(&t)[4] = call->tile;
  const Tile tile = t[0] ? Tile{t[0], t[1], t[2]} : best(call->M, call->N, call->K);
  return by_dtype(call->dtype, [&](auto zero) {
    using T = decltype(zero);
    const Linear<T> p = Linear<T>::of(*call);
    return p.fits() ? by_tokens<T>(tile, p, (cudaStream_t)call->stream) : cudaErrorInvalidValue;
  });
}
