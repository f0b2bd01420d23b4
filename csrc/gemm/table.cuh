// The loops of kernels that decode by table (multiply_table.cuh, moe/decode_table.cuh): a ring of stages fetched by a warp of its own, the turns of the warps
// that share K at its steps, and their sums.
#pragma once
#include "wide.cuh"

namespace fp4 {

constexpr int kTableRoom = 227 * 1024 - kPairTable - 256;  // bytes for stages
constexpr int kMostWarps = 16, kMostStages = 16;

// A block for nearly every SM: the rows of one, in sixteens.
inline int sets_a_block(int N) {
  const int total = (N + 15) / 16, waves = (total + 132 * 16 - 1) / (132 * 16);
  return (total + 132 * waves - 1) / (132 * waves);
}

// Rows of x that are fetched, a power of two from `least` on. The products' columns behind them take the same rows again, and are not stored.
inline int rows_of_x(int M, int least) { return M <= least ? least : rows_of_x(M, 2 * least); }

// A ring's stages, so many that warps find theirs at the same places again where it has two or more for each of `turns` (take_turns).
inline int whole_turns(int stages, int turns) { return stages < 2 * turns ? stages : stages - stages % turns; }

// Of tiles of BYTES a row, 16-byte chunk c of row r (tma_load_2d).
template <int BYTES> __device__ __forceinline__ int place_of(int c, int r) {
  return BYTES == 128 ? c ^ (r & 7) : BYTES == 64 ? c ^ (r >> 1 & 3) : BYTES == 32 ? c ^ (r >> 2 & 1) : c;
}

// By one thread: `full` are completed by what is fetched, `free` by `readers` warps a step.
__device__ __forceinline__ void init_ring(Shared full, Shared free, int stages, int readers) {
  Ring<>{full, free}.init(stages, 1, readers);
  fence_mbarrier_init();
}

// By one thread of `stride`, each with its own `first`, of whose number the stages are a multiple: weights(k, at) promises the bytes of step k and fetches weights to
// stage `at`, activations(k, at) the rest. early: stages of weights that go ahead of the first activations.
template <typename Weights, typename Activations>
__device__ __forceinline__ void fetch_steps(int steps, int stages, int early, Shared free, Weights weights, Activations activations, int first = 0, int stride = 1) {
  early = min(steps, early);
  for (int k = first; k < early; k += stride) weights(k, k);
  if (!FP4_FAULT(FETCH_BEFORE_PDL_WAIT)) griddepcontrol_wait();  // it may have written x; it does not write weights
  for (int k = first, at = first, parity = 1; k < steps; k += stride) {
    if (k >= early) {
      if (!FP4_FAULT(SKIP_FREE_WAIT)) mbarrier_wait_parity(free + 8 * at, parity);
      weights(k, at);
    }
    activations(k, at);
    if ((at += stride) == stages + first) at = first, parity ^= 1;
  }
}

// Bits of each of a warp's sums: not known before everything that they are made of has been loaded.
template <int R, int TILES> __device__ __forceinline__ uint32_t bits_of(const float (&acc)[R][TILES][4]) {
  uint32_t bits = 0;
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int j = 0; j < TILES; ++j) bits |= __float_as_uint(acc[r][j][0]);
  return bits;
}

// By a warp, which has used what lies in the stage of this mbarrier. `sums`: bits_of() what it made of it: giving the stage back has to wait for these, for it would
// overtake loads; zero: 0, which the compiler does not know.
__device__ __forceinline__ void give_back(Shared free, uint32_t sums, int zero, int lane) {
  const int behind = (int)sums & zero;
  __syncwarp();
  if (lane == 0) mbarrier_arrive(free + behind);
}

// One step, 256 k, of a warp's 16 * R rows by 8 * TILES tokens: the lane's rows of codes lie NEXT * r + high * h rows behind its first one, at `codes`, and scales(r, h)
// are where their scales lie. x: the lane's token's plane t of 64 k; that of the next eight tokens lies 1024 bytes further on. token: the number of the lane's row in tiles of x, by which
// its chunks are swizzled.
template <typename T, int NEXT, int R, int TILES, typename Scales>
__device__ __forceinline__ void multiply_by_table(float (&acc)[R][TILES][4], Shared table, const uint8_t* codes, Scales scales, int high, const uint8_t* x, int token,
                                                  int lane) {
  const int g = lane >> 2, t = lane & 3;
  const uint32_t lane4 = 4 * lane, order = 0x3210 ^ t * 0x1111;
  uint2 q[R][2][4];
  uint32_t even[R][2], odd[R][2];
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < 4; ++i) q[r][h][i] = *(const uint2*)(codes + (NEXT * r + high * h) * 128 + ((2 * t + ((i ^ t) >> 1)) ^ g) * 16 + ((i ^ t) & 1) * 8);
      Numbers<T>::place_scales(__byte_perm(*(const uint32_t*)scales(r, h), 0, order), even[r][h], odd[r][h]);
    }
#pragma unroll
  for (int i = 0; i < 8; ++i) {  // word i ^ 2 t of the lane's eight
    uint4 b[TILES];
#pragma unroll
    for (int j = 0; j < TILES; ++j) b[j] = *(const uint4*)(x + j * 1024 + ((i ^ 2 * t) ^ token) * 16);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      uint32_t a[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t word = i % 2 ? q[r][h][i / 2].y : q[r][h][i / 2].x, by = i / 2 % 2 ? odd[r][h] : even[r][h];
        decode_by_table<T>(word, table, lane4, by, i / 4, a[h]);
      }
#pragma unroll
      for (int j = 0; j < TILES; ++j) {
        mma_m16n8k16<T>(acc[r][j], a[0][0], a[1][0], a[0][1], a[1][1], b[j].x, b[j].y);
        mma_m16n8k16<T>(acc[r][j], a[0][2], a[1][2], a[0][3], a[1][3], b[j].z, b[j].w);
      }
    }
  }
}

// By a warp, one of those that share K in k_groups: use(stage) for each of its steps, every k_groups-th, which returns bits_of() its sums; zero: of
// give_back().
template <typename Use>
__device__ __forceinline__ void take_turns(int steps, int stages, int k_groups, int k_group, Shared full, Shared free, int lane, int zero, Use use) {
  // A warp has to meet every phase of an mbarrier that it waits for: the one behind an incomplete one would look complete. So it goes to its own steps only
  // where these always lie in the same stages, else it waits for each step and works on every k_groups-th. All warps have to begin at once: one that begins when
  // the others have used the stages before its own, and these are full again, would wait for a phase that is over.
  const int stride = stages % k_groups ? 1 : k_groups;
  int at = stride == 1 ? 0 : k_group, parity = 0, turn = stride == 1 ? k_group : 0;
  for (int k = at; k < steps; k += stride) {
    if (!FP4_FAULT(SKIP_FULL_WAIT)) mbarrier_wait_parity(full + 8 * at, parity);
    const int stage = at;
    at += stride;
    if (at >= stages) at -= stages, parity ^= 1;
    if (turn) {
      --turn;
      continue;
    }
    turn = stride == 1 ? k_groups - 1 : 0;
    give_back(free + 8 * stage, use(stage), zero, lane);
  }
}

// acc: a warp's sums of 16 * R rows of the block's `rows`, row + 16 r and that + 8 for its lanes, by 8 * TILES tokens, over its share of K. What lies at `sums` is no
// longer read. Columns from n0 + first on, an even one, are stored.
template <typename T, int R, int TILES>
__device__ __forceinline__ void sum_turns_and_store(const float (&acc)[R][TILES][4], float* sums, int rows, int row, int k_group, int k_groups, int threads, int n0,
                                                    int first, const Result<T>& out) {
  constexpr int kParts = Result<T>::kParts, kTokens = 8 * TILES;
  const int t = threadIdx.x & 3, pitch = rows + 4, columns = rows / kParts;  // [k_groups][kTokens][pitch]
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[(k_group * kTokens + 8 * j + 2 * t + (c & 1)) * pitch + row + 16 * r + 8 * (c >> 1)] = acc[r][j][c];
  named_barrier_sync(1, threads);
  const int pairs = (columns - first) / 2;
  for (int i = threadIdx.x; i < (kRms == kWritesSquares ? (pairs * out.M + 31) / 32 * 32 : pairs * out.M); i += threads) {
    const int m = kRms == kWritesSquares ? min(i / pairs, out.M - 1) : i / pairs, n = first + i % pairs * 2;
    float all[2][kParts] = {};
#pragma unroll 4
    for (int kg = 0; kg < k_groups; ++kg)
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const float2 v = *(const float2*)(sums + (kg * kTokens + m) * pitch + n + p * columns);
        all[0][p] += v.x, all[1][p] += v.y;
      }
#if FP4_RMS == 1
    out.store_squared(i < pairs * out.M && n0 + n < out.N, m, n0 + n, all);
#else
    out.template store_run<2>(m, n0 + n, all);
#endif
  }
}

// By all threads that multiply, of whole warps: of each row of x the inverse root of its mean square and eps, from the sums of its squares, [M, K / kSquared].
// Eight lanes take a row, so that all of its loads are in flight at once.
__device__ __forceinline__ void read_roots(float* roots, const float* squares, int M, int K, float eps, int threads) {
  const int parts = K / kSquared, lane = threadIdx.x & 7;  // parts: a multiple of 16
  for (int first = 0; first < M; first += threads / 8) {
    const int m = first + threadIdx.x / 8;
    const float4* from = (const float4*)(squares + (size_t)min(m, M - 1) * parts);
    float sum = 0.f;
#pragma unroll 8
    for (int i = lane; i < parts / 4; i += 8) {
      const float4 v = __ldcg(from + i);
      sum += (v.x + v.y) + (v.z + v.w);
    }
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) sum += shuffle_xor(sum, lanes);
    if (lane == 0 && m < M) roots[m] = rsqrtf(sum / K + (FP4_FAULT(WITHOUT_EPS) ? 0.f : eps));
  }
}

}  // namespace fp4
