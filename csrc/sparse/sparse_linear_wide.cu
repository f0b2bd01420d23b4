// fp4.sparse_linear for a few to a hundred rows on sm_90: y[M, N] = x[M, K] @ W[N, K]^T (+ bias), W row-major canonical 2:4-sparse NVFP4.
//
// As gemm/linear_wide, with the sparse form of wgmma: half the codes to decode and half the products. An MMA covers 32 k as they lie in memory (as in
// sparse_linear_small: the metadata word of 8 groups is what it takes, lane t of a quad decodes groups t and t + 4), so activations are tiles of x itself:
// there is no second kernel. gemm/multiply_wide.cuh has the mainloop, here is how a sparse weight takes part.
#include "../gemm/multiply_wide.cuh"
#include "call.cuh"

namespace {

using namespace fp4;

struct Maps {
  TensorMap x, values, meta, scales;
};

// Values, metadata and scales of two steps of K, 128, 64 and 32 bytes a row, in a stage. Two warpgroups take one of the steps each, or one takes both.
template <typename T, int ROWS, int TOKENS, int KGROUPS> struct Sparse {
  using Tile = WideTile<T, ROWS, TOKENS, KGROUPS>;
  static constexpr int kMeta = ROWS * 128, kScales = ROWS * 192, kRowBytes = 128 + 64 + 32, kSteps = 2;
  static constexpr int kMostStages = 6, kTokenStages = TOKENS == 128 ? 2 : TOKENS == 64 ? 4 : 8, kTable = 0, kBatch = 2;

  struct Source {
    const Maps& maps;
    int M, N;
  };
  __device__ __forceinline__ static int bytes() { return ROWS * kRowBytes; }
  __device__ __forceinline__ static void prefetch(const Source& from) {
    prefetch_tensor_map(from.maps.values), prefetch_tensor_map(from.maps.meta), prefetch_tensor_map(from.maps.scales);
  }
  __device__ __forceinline__ static void fetch(Shared to, const Source& from, int k, int n0, Shared full) {
    tma_load_2d(to, from.maps.values, k * 64, n0, full);
    tma_load_2d(to + kMeta, from.maps.meta, k * 32, n0, full);
    tma_load_2d(to + kScales, from.maps.scales, k * 16, n0, full);
  }
  __device__ __forceinline__ static void fill_table() {}

  // Places of the lane's in a stage. Lanes 0 and 1 of a quad hold the metadata of a step's first half, lanes 2 and 3 of its second.
  const uint8_t* shared;
  int values, meta, scales;
  uint32_t own_byte, own_half, legal;
  __device__ __forceinline__ Sparse(const Source& from, const uint8_t* shared, int local, int g, int t, int k_group, int n0) : shared(shared) {
    const int second = KGROUPS > 1 ? k_group & 1 : 0;  // of the two steps of a stage
    values = kept((local + g) * 128 + (4 * second ^ (FP4_FAULT(SKIP_SWIZZLE) ? 0 : g)) * 16);
    meta = kept(kMeta + (local + g) * 64 + (2 * second ^ (FP4_FAULT(METADATA_OF_OTHER_HALF) ? 0 : t / 2) ^ g / 2) * 16);
    scales = kept(kScales + (local + g) * 32 + (second ^ g / 4) * 16);
    own_byte = kept(0x4440 + t), own_half = kept((t & 1) != FP4_FAULT(EXCHANGE_METADATA_HALVES) ? 0x7632 : 0x5410);
    // Rows past N come as zeros, which are no metadata: 0 and 1 are kept there.
    legal = kept((n0 + local + g < from.N || FP4_FAULT(ZERO_METADATA_PAST_N) ? 0 : 0x4444) | (n0 + local + g + 8 < from.N ? 0 : 0x44440000));
  }
  __device__ __forceinline__ void load_ahead(int, int) {}

  // What a step loads before it waits for its activations. second: of the two steps of a stage, if one warpgroup takes both.
  struct Loaded {
    uint4 v[2][4], e[2], s[2];  // values, metadata and scales of rows g and g + 8; e in load() would order the sums' registers otherwise
    uint32_t meta[4];
  };
  __device__ __forceinline__ void load(Loaded& l, int stage, int second) const {
    wgmma_wait<0>();  // it reads metadata, too, while it runs, which ptxas does not know: registers of the last step's would be written here
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int c = 0; c < 4; ++c) l.v[h][c] = *(const uint4*)(shared + (values + stage ^ (4 * second + c) * 16) + h * 1024);
      l.e[h] = *(const uint4*)(shared + (meta + stage ^ 32 * second) + h * 512);
      l.s[h] = *(const uint4*)(shared + (scales + stage ^ 16 * second) + h * 256);
    }
    l.meta[0] = __byte_perm(l.e[0].x, l.e[1].x, own_half) | legal, l.meta[1] = __byte_perm(l.e[0].y, l.e[1].y, own_half) | legal;
    l.meta[2] = __byte_perm(l.e[0].z, l.e[1].z, own_half) | legal, l.meta[3] = __byte_perm(l.e[0].w, l.e[1].w, own_half) | legal;
  }

  template <typename Arrived, typename Done>
  __device__ __forceinline__ void multiply(float (&acc)[TOKENS / 8][4], const Loaded& l, int, const Shared& held, Arrived arrived, Done done) const {
    auto multiply_half = [&](auto which) {
      constexpr int j = decltype(which)::value;
        uint32_t even[2][2], odd[2][2];  // scale blocks (0, 2), (1, 3) of 64 k
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          Numbers<T>::four_scales(j ? l.s[h].z : l.s[h].x, even[h][0], odd[h][0]);
          Numbers<T>::four_scales(j ? l.s[h].w : l.s[h].y, even[h][1], odd[h][1]);
        }
        arrived(j);
#pragma unroll
        for (int b = 0; b < 4; b += kBatch) {  // so many MMAs' codes are decoded while the products of those before are worked on
          uint32_t a[kBatch][4];
#pragma unroll
          for (int i = 0; i < kBatch; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int m = b + i;
              const uint4& c = l.v[h][2 * j + m / 2];
              a[i][h] = decode_byte<T>(__byte_perm(m % 2 ? c.z : c.x, 0, own_byte), even[h][m / 2], m % 2);
              a[i][h + 2] = decode_byte<T>(__byte_perm(m % 2 ? c.w : c.y, 0, own_byte), odd[h][m / 2], m % 2);
            }
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const int m = b + i;
            const Shared tokens = wgmma_descriptor(held, (2 * j + m / 2) * (TOKENS * 128) + m % 2 * 64);
            wgmma_sparse<T, j>(acc, a[i][0], a[i][1], a[i][2], a[i][3], tokens, l.meta[m]);
          }
          wgmma_commit_group();
          wgmma_wait<1>();
          if (b == 0) done(j);
        }
    };
    multiply_half(std::integral_constant<int, 0>());
    multiply_half(std::integral_constant<int, 1>());
  }
};

// The only tile of a block, and its share of K.
struct OneTile {
  static constexpr bool kOneTile = true;
  int n0, m0, k, end, blocks, rank, left;

  __device__ __forceinline__ int row() const { return n0; }
  __device__ __forceinline__ int token() const { return m0; }
  __device__ __forceinline__ int last() const { return end; }
  __device__ __forceinline__ int splits() const { return blocks; }
  __device__ __forceinline__ void next() { left = 0; }
};

template <typename T, int ROWS, int TOKENS, int KGROUPS, bool SHARES>
__global__ void __launch_bounds__(WideTile<T, ROWS, TOKENS, KGROUPS>::kThreads, 1)
    sparse_linear_wide(const __grid_constant__ Maps maps, const float* __restrict__ global_scale, const T* __restrict__ bias, T* __restrict__ y,
                       int tile_tokens, int M, int N, int K, int second_scale, int third_scale) {
  multiply_wide<Sparse<T, ROWS, TOKENS, KGROUPS>, SHARES ? Blocks::kShare : Blocks::kSplit>(
      {maps, M, N}, maps.x, tile_tokens,
      [&]() -> OneTile {
        const int steps = K / kWideK, rank = cluster_rank(), splits = SHARES ? 1 : cluster_size();
        const int n0 = (SHARES ? 2 * blockIdx.x + rank : blockIdx.x) * ROWS, m0 = blockIdx.y * tile_tokens;
        const int begin = SHARES ? 0 : steps * rank / splits, end = SHARES ? steps : steps * (rank + 1) / splits;
        return {n0, m0, begin, end, splits, rank, 1};
      },
      [&](int M) { return Result<T>{y, global_scale, bias, M, N, Epilogue<T>::scales(second_scale, third_scale), *global_scale * kWeightUnit}; });
}

// splits: blocks of a cluster that share K; 0: two blocks share activations.
struct Tile {
  int rows, tokens, k_groups, splits;
};

template <typename T, int ROWS, int TOKENS, int KGROUPS, bool SHARES> cudaError_t run(int splits, const SparseLinear<T>& c) {
  using S = Shape<Sparse<T, ROWS, TOKENS, KGROUPS>>;
  const int places = (c.M + TOKENS - 1) / TOKENS, row_tiles = (c.N + ROWS - 1) / ROWS, tile_tokens = even_tokens<8>(c.M, places);
  if (splits > c.K / kWideK || splits == 3 || splits > 4) return cudaErrorInvalidConfiguration;
  Maps maps;
  const cudaError_t status = first_error({tensor_map_2d(&maps.x, c.x, c.M, (int64_t)c.K * 2, tile_tokens, 128),
                                          tensor_map_2d(&maps.values, c.values, c.N, c.K / 4, ROWS, 128),
                                          tensor_map_2d(&maps.meta, c.meta, c.N, c.K / 8, ROWS, 64),
                                          tensor_map_2d(&maps.scales, c.scale, c.N, c.K / 16, ROWS, 32)});
  if (status != cudaSuccess) return status;
  const int cluster = SHARES ? 2 : splits;
  return launch(sparse_linear_wide<T, ROWS, TOKENS, KGROUPS, SHARES>, dim3(SHARES ? (row_tiles + 1) / 2 : row_tiles, places, cluster), S::kThreads, S::kBytes,
                cluster, c.stream, maps, c.global_scale, c.bias, c.y, tile_tokens, c.M, c.N, c.K, c.second, c.third);
}

// Measured on an H200 for five shapes, M = 16 to 128: nearly every SM has a block, two of a cluster share K where rows alone make too few, and activations
// where rows are enough.
Tile best(int M, int N, int K) {
  const int tokens = M <= 16 ? 16 : M <= 32 ? 32 : M <= 64 ? 64 : 128, places = (M + tokens - 1) / tokens, steps = K / kWideK;
  const int64_t of_64 = (int64_t)((N + 63) / 64) * places, of_128 = (int64_t)((N + 127) / 128) * places;
  auto splits = [&](int64_t blocks) { return blocks <= 30 && steps >= 4 ? 4 : blocks <= 66 && steps >= 2 ? 2 : blocks >= 100 ? 0 : 1; };
  if (tokens == 128) return of_64 <= 66 && K < 8192 ? Tile{64, 128, 2, splits(of_64)} : Tile{128, 128, 1, of_128 <= 66 ? 2 : splits(of_128)};
  if (tokens > 16 && of_128 > 50 && of_128 <= 66 && steps >= 2) return {128, tokens, 2, 2};
  if (of_64 <= 132) return {64, tokens, tokens == 64 ? 2 : 4, splits(of_64)};
  return {128, tokens, 2, splits(of_128)};
}

template <typename T> cudaError_t by_tile(Tile tile, const SparseLinear<T>& c) {
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
  return by_dtype(p->dtype, [&](auto zero) { return by_tile(tile, SparseLinear<decltype(zero)>::of(*p)); });
}
