// fp4.sparse_linear for 1 to 16 rows on sm_90: y[M, N] = x[M, K] @ W[N, K]^T (+ bias), W row-major canonical 2:4-sparse NVFP4.
//
// As gemm/linear_table: values, metadata, scales and activations come as tiles through one ring, and a byte of values, the two kept codes of a group of four,
// becomes a pair of numbers by the table. The weight is the sparse operand of mma.sp, whose k may be in any order as long as metadata and activations follow
// it. A step of K is 2 * SUBSTEPS chunks of 64 k: pair p of the lanes of a quad decodes chunk SUBSTEPS * p + s in substep s, the lanes of a pair taking turns
// at its bytes. So lanes read 16 bytes at a time, no two pairs the same ones, and a byte of metadata remains one in the word that the instruction eats. A
// warp takes two substeps, whose metadata one pair gives each. Four a step are two warps' work: rows of tiles are longer, and as little is in hand.
#include "../gemm/multiply_table.cuh"
#include "call.cuh"
#include "table.cuh"

namespace {

using namespace fp4;

// How the rows of a block, 16 * sets, and K are shared by its warps, substeps / 2 of the k_groups for the same step, and the ring's sizes.
struct Layout {
  int sets, sets_a_warp, k_groups, substeps, stages, x_rows, early;  // early: stages of weights that go ahead of the first activations

  __host__ __device__ int rows() const { return 16 * sets; }
  __host__ __device__ int row_warps() const { return sets / sets_a_warp; }
  __host__ __device__ int warps() const { return row_warps() * k_groups; }
  __host__ __device__ int x_bytes() const { return x_rows * substeps * 256; }
  __host__ __device__ int stage() const { return x_bytes() + rows() * 32 * substeps; }  // activations and values; metadata and scales have rings of their own behind these
  __host__ __device__ int meta_bytes() const { return rows() * 16 * substeps; }
  __host__ __device__ int scale_bytes() const { return rows() * 8 * substeps; }
  __host__ __device__ int step() const { return stage() + meta_bytes() + scale_bytes(); }
  __host__ __device__ int meta() const { return kPairTable + stages * stage(); }
  __host__ __device__ int scales() const { return meta() + stages * meta_bytes(); }
  __host__ __device__ int mbarriers() const { return scales() + stages * scale_bytes(); }
  int bytes() const { return mbarriers() + 16 * stages; }
};

template <typename T, int SUBSTEPS> struct Sparse {
  static constexpr int kSharers = SUBSTEPS / 2, kStepK = 128 * SUBSTEPS, kPlanes = 2 * SUBSTEPS;
  static constexpr int kValues = 32 * SUBSTEPS, kMeta = 16 * SUBSTEPS, kScales = 8 * SUBSTEPS;  // bytes of a row

  struct Source {
    const TensorMap &values, &metadata, &scales;
    int N;
  };
  struct Rings {
    Shared first, meta, scales;
  };
  __device__ __forceinline__ static Rings rings(const Layout& layout, uint8_t* shared) {
    return {shared_address(shared + kPairTable), shared_address(shared + layout.meta()), shared_address(shared + layout.scales())};
  }
  // The last block begins earlier instead of reading past N, where metadata would be zeros, which are illegal; what it shares with its neighbour is not stored,
  // but for one column, with the same bits, where N is odd.
  __device__ __forceinline__ static int first_column(const Source& from, int rows) {
    return FP4_FAULT(READ_ROWS_PAST_N) ? blockIdx.x * rows : min((int)blockIdx.x * rows, from.N - rows);
  }
  __device__ __forceinline__ static int first_stored(int rows, int n0) { return ((int)blockIdx.x * rows - n0) & ~1; }
  __device__ __forceinline__ static void prefetch(const Source& from) {
    prefetch_tensor_map(from.values), prefetch_tensor_map(from.metadata), prefetch_tensor_map(from.scales);
  }
  __device__ __forceinline__ static void fetch(const Source& from, const Layout& layout, const Rings& rings, int, int n0, int k, int at, Shared full) {
    const Shared mbarrier = full + 8 * at;
    mbarrier_arrive_expect_tx(mbarrier, layout.step() - (FP4_FAULT(EXPECT_NO_METADATA) ? layout.meta_bytes() : 0));
    tma_load_2d(rings.first + at * layout.stage() + layout.x_bytes(), from.values, k * kValues, n0, mbarrier);
    tma_load_2d(rings.meta + at * layout.meta_bytes(), from.metadata, k * kMeta, n0, mbarrier);
    tma_load_2d(rings.scales + at * layout.scale_bytes(), from.scales, k * kScales, n0, mbarrier);
  }

  // Of the warp's first substep and product; the others' chunks lie where some bits of the address differ.
  int my_row, value_at, meta_at, scale_at, x_rows, x_at;
  __device__ __forceinline__ Sparse(const Layout& layout, uint8_t*, int local, int sharer, int g, int, int lane) {
    const int p = lane >> 1 & 1, first = FP4_FAULT(BOTH_TAKE_FIRST_HALF) ? 0 : sharer * 2;
    // The lanes of half a warp have rows 0, 1, 6, 7 or 2 to 5 of eight, whose chunks, and those four further on, lie in different banks.
    my_row = local + (g ^ (g & 2) << 1);
    const int swizzle = FP4_FAULT(SWIZZLE_OF_ANOTHER_ROW) ? g : my_row & 7, scale_from = 4 * (SUBSTEPS * p + first);
    value_at = kPairTable + layout.x_bytes() + my_row * kValues + place_of<kValues>(SUBSTEPS * p + first, swizzle) * 16;
    meta_at = layout.meta() + my_row * kMeta + place_of<kMeta>(first / 2, swizzle) * 16 + 8 * p;
    scale_at = layout.scales() + my_row * kScales + place_of<kScales>(scale_from / 16, swizzle) * 16 + scale_from % 16;
    // Four matrices of 8 tokens by 8 k: of both pairs' chunks, then what follows in them. Planes of 64 k have fewer than eight rows where M is small: tiles of
    // 128 bytes are swizzled by the number of a row among all.
    x_rows = layout.x_rows;
    const int x_row = (SUBSTEPS * (lane >> 3 & 1) + first) * x_rows + (lane & 7 & x_rows - 1);
    x_at = kPairTable + x_row * 128 + (lane >> 4 ^ (FP4_FAULT(SKIP_SWIZZLE) ? 0 : x_row & 7)) * 16;
  }
  __device__ __forceinline__ int row(int) const { return my_row; }
  template <int R, int TILES>
  __device__ __forceinline__ void multiply(float (&acc)[R][TILES][4], const Layout& layout, uint8_t* shared, int, int stage, int, int, int lane) const {
    const int values_from = value_at + stage * layout.stage(), meta_from = meta_at + stage * layout.meta_bytes(), x_from = x_at + stage * layout.stage();
    multiply_sparse_by_table<T, SUBSTEPS, 16>(acc, shared, values_from, meta_from, shared + scale_at + stage * layout.scale_bytes(), 8, x_from, x_rows * 128,
                                              FP4_FAULT(SWIZZLE_OF_ANOTHER_PLANE) ? 0 : (x_rows & 7) * 16, lane);
  }
};

// The rows of W at which the second and the third global scale begin.
template <typename T> struct Starts {
  int second, third;
  __device__ __forceinline__ operator Epilogue<T>() const { return Epilogue<T>::scales(second, third); }
};

// A warp needs the registers of two where it has four sets of rows.
template <int R> constexpr int kWarps = R > 2 ? kMostWarps / 2 : kMostWarps;

template <typename T, int TOKENS, int R, int SUBSTEPS>
__global__ void __launch_bounds__(32 * (kWarps<R> + 1), 1)
    sparse_linear_table(const __grid_constant__ TensorMap values, const __grid_constant__ TensorMap metadata, const __grid_constant__ TensorMap scales,
                        const __grid_constant__ TensorMap activations, const Layout layout, const float* __restrict__ global_scale, const T* __restrict__ bias,
                        T* __restrict__ y, int M, int N, int K, int second, int third) {
  multiply_table<Sparse<T, SUBSTEPS>, R, TOKENS / 8>(
      {values, metadata, scales, N}, activations, layout, global_scale, bias, y, M, N, K, Starts<T>{second, third});
}

// sets: rows of a block in sixteens; k_groups: warps for the same rows, which share K, a multiple of substeps / 2; substeps: of 128 k, a step.
struct Tile {
  int sets, sets_a_warp, k_groups, substeps;
};

// Measured on an H200 (benchmarks/NOTES.md): a block for nearly every SM, of at most 128 rows, in steps of 512 k, whose tiles have rows twice as long; no
// more steps in hand than leave 40 KB under way; for 128 rows half as many warps, which load each activation for twice as many rows.
Tile best(int N, int K) {
  const bool long_steps = K % 512 == 0;
  int sets = sets_a_block(N);
  if (sets % 2 && sets >= 7) ++sets;
  if (long_steps) sets = at_most(sets, 8);
  const int sets_a_warp = sets % 2 ? 1 : long_steps && sets == 8 ? 4 : 2, row_warps = sets / sets_a_warp;
  return {sets, sets_a_warp, at_most(at_most(row_warps == 1 ? 8 : 4, kMostWarps / row_warps & ~1), K / 256), long_steps ? 4 : 2};
}

template <typename T, int TOKENS, int R, int SUBSTEPS> cudaError_t run(Tile tile, const SparseLinear<T>& c) {
  const int x_rows = rows_of_x(c.M, 4 / SUBSTEPS);  // tiles begin at multiples of 1024 bytes
  Layout layout{tile.sets, R, tile.k_groups, SUBSTEPS, 1, x_rows, 0};
  if (tile.sets < 1 || tile.sets > 16 || tile.sets % R || tile.k_groups < 1 || tile.k_groups % (SUBSTEPS / 2) || layout.warps() > kWarps<R> || layout.rows() > c.N || c.K % (128 * SUBSTEPS))
    return cudaErrorInvalidConfiguration;
  layout.stages = whole_turns(at_most(kMostStages, kTableRoom / layout.step()), tile.k_groups / (SUBSTEPS / 2));
  layout.k_groups = at_most(layout.k_groups, layout.stages * (SUBSTEPS / 2));
  layout.early = c.stream.early ? at_most(layout.stages, at_least(1, kEarlyBytes / (layout.step() - layout.x_bytes()))) : 0;
  TensorMap values, metadata, scales, activations;
  const cudaError_t status = first_error({tensor_map_2d(&values, c.values, c.N, c.K / 4, layout.rows(), 32 * SUBSTEPS),
                                          tensor_map_2d(&metadata, c.meta, c.N, c.K / 8, layout.rows(), 16 * SUBSTEPS),
                                          tensor_map_2d(&scales, c.scale, c.N, c.K / 16, layout.rows(), 8 * SUBSTEPS),
                                          tensor_map_3d(&activations, c.x, {128, c.M, c.K / 64, (int64_t)c.K * 2, 128}, 2 * SUBSTEPS, x_rows, 128)});
  if (status != cudaSuccess) return status;
  return launch(sparse_linear_table<T, TOKENS, R, SUBSTEPS>, dim3((c.N + layout.rows() - 1) / layout.rows()), 32 * (layout.warps() + 1), layout.bytes(), 1, c.stream,
                values, metadata, scales, activations, layout, c.global_scale, c.bias, c.y, c.M, c.N, c.K, c.second, c.third);
}

template <typename T, int TOKENS> cudaError_t by_tile(Tile tile, const SparseLinear<T>& c) {
#define TILE(r, s) /* sets_a_warp, substeps */ \
  if (tile.sets_a_warp == r && tile.substeps == s) return run<T, TOKENS, r, s>(tile, c);
  TILE(1, 2) TILE(2, 2) TILE(4, 2) TILE(1, 4) TILE(2, 4) TILE(4, 4)
#undef TILE
  return cudaErrorInvalidConfiguration;
}

}  // namespace

// Returns a cudaError_t. Takes what sparse_linear_small does, and early. tile: (sets, sets_a_warp, k_groups, substeps): at most 16 sets, of N rows or fewer, a
// multiple of sets_a_warp in {1, 2, 4}, in at most 16 warps, sets / sets_a_warp * k_groups, 8 where sets_a_warp is 4; substeps in {2, 4}, of 128 k, k_groups
// even where they are 4; or 0 for best(). 1 <= M <= 16, N >= 16, K % 256 == 0; x, codes, meta and scale 16-byte aligned.
extern "C" int fp4_sparse_linear_table(const LinearParams* p) {
  if (!is_call(p)) return cudaErrorInvalidValue;
  const int M = p->M, N = p->N, K = p->K;
  if (M < 1 || M > 16 || N < 16 || K < 256 || K % 256 || !starts_fit(p->second, p->third)) return cudaErrorInvalidValue;
  const auto [sets, sets_a_warp, k_groups, substeps] = p->tile;
  const Tile tile = sets ? Tile{sets, sets_a_warp, k_groups, substeps} : best(N, K);
  return by_dtype(p->dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto c = SparseLinear<T>::of(*p);
    return M <= 8 ? by_tile<T, 8>(tile, c) : by_tile<T, 16>(tile, c);
  });
}
