// fp4.linear for 1 to 32 rows on sm_90: y[M, N] = x[M, K] @ W[N, K]^T (+ bias), W row-major canonical NVFP4.
//
// Bandwidth-bound: what has to be few are instructions a weight. Codes become pairs of numbers by a table in shared memory (nvfp4.cuh), a byte at
// a time; codes, scales and activations come as tiles through one ring, fetched by a warp of their own. A warp owns 16 * R rows of W and every
// k_groups-th step of K; activations lie as they lie in memory, swizzled, and the lanes of a quad take the words of their 64 k in different
// orders, so that they read different banks. Where blocks have few rows a stage holds SUBSTEPS steps, each another warp's: as many bytes in fewer copies.
#include "multiply_table.cuh"

namespace {

using namespace fp4;

constexpr int kMostTokens = 32, kRootBytes = kRms == kReadsSquares ? 4 * kMostTokens : 0;

// How the rows of a block, 16 * sets, and K are shared by its warps, SUBSTEPS of the k_groups for the same stage, and the ring's sizes.
template <int SUBSTEPS> struct Layout {
  int sets, sets_a_warp, k_groups, stages, x_rows, early;  // early: stages of weights that go ahead of the first activations

  __host__ __device__ int rows() const { return 16 * sets; }
  __host__ __device__ int row_warps() const { return sets / sets_a_warp; }
  __host__ __device__ int warps() const { return row_warps() * k_groups; }
  __host__ __device__ int x_bytes() const { return SUBSTEPS * x_rows * kWideK * 2; }
  __host__ __device__ int stage() const { return x_bytes() + SUBSTEPS * rows() * 128; }  // activations and codes; scales have a ring of their own behind these
  __host__ __device__ int scale_bytes() const { return SUBSTEPS * rows() * 16; }
  __host__ __device__ int scales() const { return kPairTable + stages * stage(); }
  __host__ __device__ int mbarriers() const { return scales() + stages * scale_bytes(); }
  __host__ __device__ int roots() const { return mbarriers() + 16 * stages; }  // of the rows of x, where a library reads their squares
  int bytes() const { return roots() + kRootBytes; }
};

template <typename T, int SUBSTEPS> struct Dense {
  static constexpr int kSharers = SUBSTEPS, kStepK = SUBSTEPS * kWideK, kPlanes = 4 * SUBSTEPS, kParts = Result<T>::kParts;
  static constexpr int kScales = 16 * SUBSTEPS;  // bytes of a row
  static_assert(kParts == 1 || SUBSTEPS == 1);  // the rows of a step lie one behind the other

  struct Source {
    const TensorMap &codes, &scales;
    int N;
  };
  struct Rings {
    Shared first, scales;
  };
  __device__ __forceinline__ static Rings rings(const Layout<SUBSTEPS>& layout, uint8_t* shared) {
    return {shared_address(shared + kPairTable), shared_address(shared + layout.scales())};
  }
  __device__ __forceinline__ static int first_column(const Source&, int rows) { return blockIdx.x * (rows / kParts); }
  __device__ __forceinline__ static int first_stored(int, int) { return 0; }
  __device__ __forceinline__ static void prefetch(const Source& from) { prefetch_tensor_map(from.codes), prefetch_tensor_map(from.scales); }
  __device__ __forceinline__ static void fetch(const Source& from, const Layout<SUBSTEPS>& layout, const Rings& rings, int rows, int n0, int k, int at,
                                               Shared full) {
    const Shared to = rings.first + at * layout.stage(), mbarrier = full + 8 * at;
    mbarrier_arrive_expect_tx(mbarrier, layout.stage() + SUBSTEPS * rows * 16);
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const int row = n0 + p * (from.N / 2), local = p * (rows / 2);
      if constexpr (SUBSTEPS == 1)  // as a plane of one, and SUBSTEPS a variable, it took up to a tenth longer
        tma_load_2d(to + layout.x_bytes() + local * 128, from.codes, k * 128, row, mbarrier);
      else
        tma_load_3d(to + layout.x_bytes(), from.codes, 0, row, k * SUBSTEPS, mbarrier);
      tma_load_2d(rings.scales + (at * rows + local) * kScales, from.scales, k * kScales, row, mbarrier);
    }
  }

  int local, substep, x_row;  // x_row: of all rows of the step's planes, by whose number chunks are swizzled
  Shared table;
  __device__ __forceinline__ Dense(const Layout<SUBSTEPS>& layout, uint8_t* shared, int local, int substep, int g, int t, int)
      : local(local), substep(substep), x_row((substep * 4 + t) * layout.x_rows + (g & layout.x_rows - 1)), table(shared_address(shared)) {}
  __device__ __forceinline__ int row(int g) const { return local + g; }
  template <int R, int TILES>
  __device__ __forceinline__ void multiply(float (&acc)[R][TILES][4], const Layout<SUBSTEPS>& layout, uint8_t* shared, int rows, int stage, int g, int t,
                                           int lane) const {
    const uint8_t* from = shared + kPairTable + stage * layout.stage();
    const uint8_t* my_codes = from + layout.x_bytes() + (substep * rows + local + g) * 128;
    const uint8_t* my_scales = shared + layout.scales() + (stage * rows + local + g) * kScales + place_of<kScales>(substep, g) * 16 + 4 * t;
    auto scales = [&](int r, int h) { return my_scales + (16 * r + 8 * h) * kScales; };
    multiply_by_table<T, 16>(acc, table, my_codes, scales, 8, from + x_row * 128, x_row & 7, lane);
  }
};

// That multiply. With the one that fetches, 17 warps have 96 registers a thread, in which three tiles of eight tokens by two sets fit;
// 16 have 128, for a fourth tile.
constexpr int most_warps(int tokens) { return tokens <= 24 ? kMostWarps : kMostWarps - 1; }

template <typename T, int TOKENS, int R, int SUBSTEPS>
__global__ void __launch_bounds__(32 * (most_warps(TOKENS) + 1), 1)
    linear_table(const __grid_constant__ TensorMap codes, const __grid_constant__ TensorMap scales, const __grid_constant__ TensorMap activations,
                 const Layout<SUBSTEPS> layout, const float* __restrict__ global_scale, const T* __restrict__ bias, T* __restrict__ y, int M, int N, int K,
                 const Epilogue<T> then) {
  multiply_table<Dense<T, SUBSTEPS>, R, TOKENS / 8>({codes, scales, N}, activations, layout, global_scale, bias, y, M, N, K, then);
}

// sets: rows of a block in sixteens; k_groups: warps for the same rows, which share K, a multiple of substeps; substeps: of 256 k, a stage.
struct Tile {
  int sets, sets_a_warp, k_groups, substeps;
};

// Measured on an H200 (benchmarks/NOTES.md). A block for nearly every SM, up to 16 rows of x in the same order of summation. For 32 rows of W a copy brings
// 1024 k of them, which takes an eighth less time at K = 14336; with more rows or tokens rings of such stages are too short.
// Above 24 tokens about twelve warps are best, and one set a warp of two: on an H100 8.1 us for 8.8 at N = K = 4096.
Tile best(int M, int N, int K) {
  int sets = sets_a_block(N);
  if (sets % 2 && (sets >= 7 || N >= 9216 && sets == 5 || kFinish == kGlu)) ++sets;  // two sets a warp save more than a sixth of the blocks, while 96 are left
  const int sets_a_warp = sets % 2 || (M > 24 && sets == 2) ? 1 : 2, row_warps = sets / sets_a_warp;
  const int k_groups = M <= 24 ? at_most(8, most_warps(M) / row_warps) : at_most(most_warps(M) / row_warps, at_least(1, (12 + row_warps / 2) / row_warps));
  return {sets, sets_a_warp, at_most(k_groups, K / kWideK), kFinish != kGlu && sets == 2 && K % (4 * kWideK) == 0 && M <= 16 ? 4 : 1};
}

template <typename T, int TOKENS, int R, int SUBSTEPS> cudaError_t run(Tile tile, const Linear<T>& p, Stream stream) {
  constexpr int kParts = Result<T>::kParts;
  Layout<SUBSTEPS> layout{tile.sets, R, tile.k_groups, 1, at_most(TOKENS, rows_of_x(p.M, 4)), 0};  // of two rows the lanes of a quad would read the same banks
  if (tile.sets < 1 || tile.sets > 16 || tile.sets % R || tile.sets % kParts || tile.k_groups < 1 || tile.k_groups % SUBSTEPS || layout.warps() > most_warps(TOKENS) || p.K % (SUBSTEPS * kWideK))
    return cudaErrorInvalidConfiguration;
  layout.stages = at_most(kMostStages, (kTableRoom - kRootBytes) / (SUBSTEPS * (TOKENS * kWideK * 2 + layout.rows() * (128 + 16))));  // no more where fewer rows of x leave room: NOTES
  layout.k_groups = at_most(layout.k_groups, layout.stages * SUBSTEPS);
  layout.early = stream.early ? at_most(layout.stages, at_least(1, kEarlyBytes / layout.stage())) : 0;
  TensorMap codes, scales, activations;
  const cudaError_t status = first_error({SUBSTEPS == 1 ? tensor_map_2d(&codes, p.q, p.N, p.K / 2, layout.rows() / kParts, 128)
                                                        : tensor_map_3d(&codes, p.q, {128, p.N, p.K / kWideK, p.K / 2, 128}, SUBSTEPS, layout.rows(), 128),
                                          tensor_map_2d(&scales, p.scale, p.N, p.K / 16, layout.rows() / kParts, 16 * SUBSTEPS),
                                          tensor_map_3d(&activations, p.x, {128, p.M, p.K / 64, (int64_t)p.K * 2, 128}, 4 * SUBSTEPS, layout.x_rows, 128)});
  if (status != cudaSuccess) return status;
  const int columns = layout.rows() / kParts;
  return fp4::launch(linear_table<T, TOKENS, R, SUBSTEPS>, dim3((p.columns() + columns - 1) / columns), 32 * (layout.warps() + 1), layout.bytes(), 1, stream, codes, scales,
                     activations, layout, p.global_scale, p.bias, p.y, p.M, p.N, p.K, p.then);
}

template <typename T, int TOKENS> cudaError_t by_tile(Tile tile, const Linear<T>& p, Stream stream) {
#define TILE(r, s) /* sets_a_warp, substeps */ \
  if (tile.sets_a_warp == r && tile.substeps == s) return run<T, TOKENS, r, s>(tile, p, stream);
  TILE(1, 1) TILE(2, 1)
  if constexpr (kFinish != kGlu && TOKENS <= 16) {
    TILE(2, 4)
  }
#undef TILE
  return cudaErrorInvalidConfiguration;
}

}  // namespace

// Returns a cudaError_t. Takes what linear_small does, and early. tile: (sets, sets_a_warp, k_groups, substeps): at most 16 sets, a multiple of
// sets_a_warp in {1, 2}, in at most 16 warps, sets / sets_a_warp * k_groups; substeps 1, or 4 of two sets a warp, where M <= 16, K % 1024 == 0 and
// k_groups % 4 == 0; 15 warps above M = 24. 1 <= M <= 32, K % 256 == 0; x, codes and scale 16-byte aligned.
extern "C" int fp4_linear_table(const LinearParams* call) {
  if (!is_call(call, kRms == kWritesSquares, kRms != kNoRms)) return cudaErrorInvalidValue;
  const int M = call->M, N = call->N, K = call->K;
  if (M < 1 || M > kMostTokens || N < 1 || K < kWideK || K % kWideK) return cudaErrorInvalidValue;
  const auto [sets, sets_a_warp, k_groups, substeps] = call->tile;
  const Tile tile = sets ? Tile{sets, sets_a_warp, k_groups, substeps} : best(M, N, K);
  return by_dtype(call->dtype, [&](auto zero) {
    using T = decltype(zero);
    const Linear<T> p = Linear<T>::of(*call);
    const Stream at = stream_of(*call);
    return !p.fits() ? cudaErrorInvalidValue : M <= 8 ? by_tile<T, 8>(tile, p, at) : M <= 16 ? by_tile<T, 16>(tile, p, at) : M <= 24 ? by_tile<T, 24>(tile, p, at) : by_tile<T, 32>(tile, p, at);
  });
}
