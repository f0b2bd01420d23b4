// fp4.sparse_linear for 1 to 32 rows: y[M, N] = x[M, K] @ W[N, K]^T (+ bias), W row-major canonical 2:4-sparse NVFP4.
//
// As gemm/linear_small: a warp owns 16 * R rows of W and takes turns at the steps (128 k) of K with the block's other warps
// (and, in a cluster, with other blocks); everything streams through its own ring of STAGES buffers filled by cp.async. The
// weight is the sparse operand of mma.sp, so only kept codes are decoded, half of the dense work. An MMA covers 32 k as
// they lie in memory: the metadata word of 8 groups is what the instruction eats, lane t of a quad decodes groups t and
// t + 4 of the eight, and ldmatrix brings the activations in the same order.
#include "call.cuh"

namespace {

using namespace fp4;

constexpr int kStepK = 128;
// Values, metadata and scales of a row, a step. ANY_K: K is only a multiple of 32, so that a row of scales begins at any even byte, and
// the 12 aligned bytes around its 8 are brought; else K is a multiple of 64.
template <bool ANY_K> constexpr int kRowBytes = 32 + 16 + (ANY_K ? 12 : 8);
constexpr int kTokenBytes = 2 * kStepK;

template <typename T, int MT, int R, int WARPS, int STAGES, bool ANY_K>
__global__ void __launch_bounds__(32 * WARPS, 1)
    sparse_linear_small(const T* __restrict__ x, const uint8_t* __restrict__ values, const uint8_t* __restrict__ meta, const uint8_t* __restrict__ scale,
                        const float* __restrict__ global_scale, const T* __restrict__ bias, T* __restrict__ y, int M, int N, int K,
                        int second, int third) {
  constexpr int kRows = 16 * R, kMeta = kRows * 32, kScale = kRows * 48, kTokens = kRows * kRowBytes<ANY_K>, kStage = kTokens + 8 * MT * kTokenBytes;
  uint8_t* shared = dynamic_shared();
  const int splits = cluster_size();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int n0 = blockIdx.x * kRows;
  const int first = cluster_rank() * WARPS + warp, stride = splits * WARPS;
  const uint8_t* ring = shared + warp * (STAGES * kStage);
  const Shared address = shared_address(shared + warp * (STAGES * kStage));

  // Rows past N and k past K are read from the last legal place (legal metadata, too); their products are never stored, or meet zeros.
  auto fetch = [&](int step, int slot) {
    const Shared to = address + slot * kStage;
    if constexpr (ANY_K) {
      const int k = min(step * kStepK + (lane & 3) * 32, K - 32);  // four lanes a row
#pragma unroll
      for (int i = 0; i < 2 * R; ++i) {
        const int row = 8 * i + (lane >> 2);
        const size_t n = min(n0 + row, N - 1);
        cp_async<8>(to + row * 32 + (lane & 3) * 8, values + n * (K / 4) + k / 4);
        cp_async<4>(to + kMeta + row * 16 + (lane & 3) * 4, meta + n * (K / 8) + k / 8);
      }
      const size_t total = (size_t)N * (K / 16);  // none past the last scale is read
#pragma unroll 1
      for (int i = lane; i < kRows * 3; i += 32) {
        const size_t start = (size_t)min(n0 + i / 3, N - 1) * (K / 16) + step * 8, at = (start & ~(size_t)3) + i % 3 * 4;
        cp_async_src_size<4>(to + kScale + i * 4, scale + (at < total ? at : 0), FP4_FAULT(READ_SCALES_PAST_END) ? 4 : at < total ? (int)min(total - at, (size_t)4) : 0);
      }
    } else {
      const int k = min(step * kStepK + (lane & 1) * 64, K - 64);  // two lanes a row
#pragma unroll
      for (int i = 0; i < R; ++i) {
        const int row = 16 * i + (lane >> 1);
        const size_t n = min(n0 + row, N - 1);
        cp_async<16>(to + row * 32 + (lane & 1) * 16, values + n * (K / 4) + k / 4);
        cp_async<8>(to + kMeta + row * 16 + (lane & 1) * 8, meta + n * (K / 8) + (FP4_FAULT(READ_METADATA_PAST_K) ? step * kStepK + (lane & 1) * 64 : k) / 8);
        cp_async<4>(to + kScale + row * 8 + (lane & 1) * 4, scale + n * (K / 16) + k / 16);
      }
    }
    // Chunks of 8 activations, rotated so that the eight rows of a matrix lie in different banks.
#pragma unroll
    for (int i = 0; i < 4 * MT; ++i) {
      const int m = 2 * i + (lane >> 4), c = lane & 15, kx = step * kStepK + c * 8;
      const bool live = m < M && kx < K;
      cp_async_zfill<16>(to + kTokens + m * kTokenBytes + (c ^ (m & 7)) * 16, x + (live ? (size_t)m * K + kx : 0), live);
    }
  };

  auto scales = [&](const uint8_t* from, int row) {
    if constexpr (!ANY_K) return *(const uint2*)(from + row * 8);
    const uint32_t* words = (const uint32_t*)(from + row * 12);
    const uint32_t pick = (size_t)min(n0 + row, N - 1) * (K / 16) & 2 && !FP4_FAULT(SCALES_OF_EVEN_ROWS) ? 0x5432 : 0x3210;
    return make_uint2(__byte_perm(words[0], words[1], pick), __byte_perm(words[1], words[2], pick));
  };
  float acc[R][MT][4] = {};
  const uint32_t own_byte = 0x4440 + t, own_half = (t & 1) != FP4_FAULT(EXCHANGE_METADATA_HALVES) ? 0x7632 : 0x5410;
  auto compute = [&](int slot) {
    const uint8_t* from = ring + slot * kStage;
    const Shared tokens = address + slot * kStage + kTokens + (lane & 7) * kTokenBytes;
    uint32_t b[4][MT][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < MT; ++j) ldmatrix_x4(b[i][j], tokens + j * 8 * kTokenBytes + ((4 * i + (lane >> 3)) ^ (FP4_FAULT(SKIP_SWIZZLE) ? 0 : lane & 7)) * 16);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      uint32_t v[2][8], e[2][4], even[2][2], odd[2][2];  // of rows g and g + 8; scale blocks (0, 2), (1, 3) of 64 k
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = 16 * r + 8 * h + g;
        const uint4 low = *(const uint4*)(from + row * 32), high = *(const uint4*)(from + row * 32 + 16), m = *(const uint4*)(from + kMeta + row * 16);
        const uint2 s = scales(from + kScale, row);
        v[h][0] = low.x, v[h][1] = low.y, v[h][2] = low.z, v[h][3] = low.w, v[h][4] = high.x, v[h][5] = high.y, v[h][6] = high.z, v[h][7] = high.w;
        e[h][0] = m.x, e[h][1] = m.y, e[h][2] = m.z, e[h][3] = m.w;
        Numbers<T>::four_scales(s.x, even[h][0], odd[h][0]);
        Numbers<T>::four_scales(s.y, even[h][1], odd[h][1]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t a[4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          a[h] = decode_byte<T>(__byte_perm(v[h][2 * i], 0, own_byte), even[h][i / 2], i & 1);
          a[h + 2] = decode_byte<T>(__byte_perm(v[h][2 * i + 1], 0, own_byte), odd[h][i / 2], i & 1);
        }
        const uint32_t word = __byte_perm(e[0][i], e[1][i], own_half);
#pragma unroll
        for (int j = 0; j < MT; ++j) mma_sp_m16n8k32<T>(acc[r][j], a[0], a[1], a[2], a[3], b[i][j][0], b[i][j][1], b[i][j][2], b[i][j][3], word);
      }
    }
  };

#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if ((first + i * stride) * kStepK < K) fetch(first + i * stride, i);
    cp_async_commit_group();
  }
  int slot = 0;
  for (int step = first; step * kStepK < K; step += stride) {
    const int next = step + (STAGES - 1) * stride;
    if (next * kStepK < K) fetch(next, slot == 0 ? STAGES - 1 : slot - 1);
    cp_async_commit_group();
    if (!FP4_FAULT(SKIP_COPY_WAIT)) cp_async_wait_group<STAGES - 1>();
    __syncwarp();  // what other lanes copied
    compute(slot);
    if (!FP4_FAULT(SKIP_SYNC_BEFORE_REFILL)) __syncwarp();  // every lane has read this slot before it is filled again
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }
  cp_async_wait_group<0>();
  __syncthreads();
  sum_and_store<T, R, MT, WARPS>(acc, shared, splits, n0, {y, global_scale, bias, M, N, Epilogue<T>::scales(second, third), *global_scale * kWeightUnit});
}

template <typename T, int MT, int R, int WARPS, int STAGES, bool ANY_K = false> cudaError_t run(const SparseLinear<T>& c, int splits) {
  constexpr int ring = WARPS * STAGES * (16 * R * kRowBytes<ANY_K> + 8 * MT * kTokenBytes), sums = kSumBytes<R, MT, WARPS>;
  constexpr int bytes = ring > sums ? ring : sums;
  static_assert(bytes <= 227 * 1024, "does not fit shared memory");
  return launch(sparse_linear_small<T, MT, R, WARPS, STAGES, ANY_K>, dim3((c.N + 16 * R - 1) / (16 * R), 1, splits), 32 * WARPS, bytes, splits, c.stream.at,
                c.x, c.values, c.meta, c.scale, c.global_scale, c.bias, c.y, c.M, c.N, c.K, c.second, c.third);
}

struct Tile {
  int rows_16, warps, stages, splits;
};

// Measured on an H200 for N = K = 4096 and 8192: M <= 8 wants 16 warps where the blocks are fewer than the 132 SMs, else two blocks of 8
// (6.3 and 16.1 us); above, 64 rows a block where there are enough of them (18.4 us at M = 16). Splitting K lost there; for fewer blocks it is
// by reasoning: enough of them as long as every warp keeps a step of K.
Tile best(int M, int N, int K) {
  Tile t = M > 16 || !kLargeSharedMemory ? Tile{2, 8, 2, 1} : M <= 8 ? Tile{2, N >= 8192 ? 8 : 16, 2, 1} : N >= 8192 ? Tile{4, 8, 2, 1} : Tile{2, 8, 3, 1};
  const int blocks = (N + 16 * t.rows_16 - 1) / (16 * t.rows_16);
  while (FP4_ARCH >= 90 && t.splits < 8 && blocks * t.splits <= 66 && K / kStepK >= 2 * t.splits * t.warps) t.splits *= 2;
  return t;
}

template <typename T> cudaError_t by_tile(Tile tile, const SparseLinear<T>& c) {
  if (c.K % 64) {
    if (c.M <= 8) return run<T, 1, 2, 8, 2, true>(c, tile.splits);
    if (c.M <= 16) return run<T, 2, 2, 8, 2, true>(c, tile.splits);
    if constexpr (kLargeSharedMemory) return run<T, 4, 2, 8, 2, true>(c, tile.splits);
    return cudaErrorInvalidConfiguration;
  }
#define TILE(mt, r, w, st) /* tokens in eights, rows_16, warps, stages */ \
  if (c.M <= 8 * mt && tile.rows_16 == r && tile.warps == w && tile.stages == st) return run<T, mt, r, w, st>(c, tile.splits);
  TILE(1, 2, 8, 2) TILE(1, 2, 16, 2) TILE(1, 4, 8, 3) TILE(2, 2, 8, 2) TILE(2, 2, 8, 3) TILE(2, 4, 8, 2)
  if constexpr (kLargeSharedMemory) { TILE(4, 2, 8, 2) }
#undef TILE
  return cudaErrorInvalidConfiguration;
}

}  // namespace

// Returns a cudaError_t. Takes x, codes uint8 [N, K/4], meta uint8 [N, K/8], all legal metadata, scale E4M3 [N, K/16], global_scale, bias; second and third
// where the library has FP4_SEVERAL_SCALES. tile: (rows_16, warps, stages), one of by_tile's, and splits in {1, 2, 4, 8}: blocks that share K, 1 below sm_90;
// or 0 for best(); K % 64 != 0 has one tile of its own. 1 <= M <= 32 (16 where a block has 99 KB of shared memory), K % 32 == 0; x and codes 16-byte aligned,
// meta 8-byte, scale 4-byte aligned; bias may be null.
extern "C" int fp4_sparse_linear_small(const LinearParams* p) {
  if (!is_call(p) || p->M < 1 || p->M > 32 || p->N < 1 || p->K < 32 || p->K % 32 || !starts_fit(p->second, p->third)) return cudaErrorInvalidValue;
  const auto [rows_16, warps, stages, splits] = p->tile;
  const Tile tile = rows_16 ? Tile{rows_16, warps, stages, splits} : best(p->M, p->N, p->K);
  if (tile.splits < 1 || tile.splits > (FP4_ARCH >= 90 ? 8 : 1) || (tile.splits & (tile.splits - 1))) return cudaErrorInvalidConfiguration;
  return by_dtype(p->dtype, [&](auto zero) { return by_tile(tile, SparseLinear<decltype(zero)>::of(*p)); });
}
