// fp4.linear for a few to a few hundred rows on sm_90: y[M, N] = x[M, K] @ W[N, K]^T (+ bias), W row-major canonical NVFP4.
//
// multiply_wide.cuh has the mainloop; here is how a dense weight takes part. Weights and activations come as tiles, as they lie in memory. An MMA covers 16
// k, a block of scales: of each eight of them, a word of codes, lane t of a quad decodes byte t, so that a quad reads the same words. Blocks that stream sum
// through global memory what they share.
#include "multiply_wide.cuh"

namespace {

using namespace fp4;

constexpr int kMostBlocks = 132;  // that stream: there is scratch memory for so many

// Codes and scales of a step of K, 128 and 16 bytes a row, in a stage. MAPPED: a tile map takes the scales; else the threads that multiply load them.
template <typename T, int ROWS, int TOKENS, int KGROUPS, bool MAPPED> struct Dense {
  using Tile = WideTile<T, ROWS, TOKENS, KGROUPS>;
  static constexpr int kParts = Result<T>::kParts, kColumns = kBlockColumns<T, ROWS>, kCodes = ROWS * 128, kRowBytes = 128 + 16, kSteps = 1;
  static constexpr int kMostStages = 8, kTokenStages = TOKENS == 128 ? 2 : KGROUPS == 4 ? 8 : ROWS <= 128 ? 4 : 3;
  // Codes are decoded by table if there is room for it beside the activations and rings need not be deep. With four warpgroups for the same 64 rows they must
  // be.
  static constexpr bool kByTable = TOKENS <= 32 && ROWS > 64;
  static constexpr int kTable = kByTable ? kPairTable : 0, kBatch = Tile::kGroups == 4 ? 1 : 2;

  struct Source {
    const TensorMap &codes, &scales;
    const uint8_t* scale;
    int M, N, K;
  };
  // Bytes that the TMA copies of a step bring.
  __device__ __forceinline__ static int bytes() { return MAPPED && !FP4_FAULT(EXPECT_CODES_ONLY) ? ROWS * kRowBytes : kCodes; }
  __device__ __forceinline__ static void prefetch(const Source& from) {
    prefetch_tensor_map(from.codes);
    if (MAPPED) prefetch_tensor_map(from.scales);
  }
  __device__ __forceinline__ static void fetch(Shared to, const Source& from, int k, int n0, Shared full) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const int row = n0 + p * (from.N / 2);
      tma_load_2d(to + p * (kColumns * 128), from.codes, k * 128, row, full);
      if (MAPPED) tma_load_2d(to + kCodes + p * (kColumns * 16), from.scales, k * 16, row, full);
    }
  }
  __device__ __forceinline__ static void fill_table() {
    if constexpr (kByTable) {
      fill_pairs<T>(dynamic_shared(), threadIdx.x, Tile::kConsumers);
      named_barrier_sync(1, Tile::kConsumers);
    }
  }

  const Source from;
  const uint8_t* shared;
  int local, g, t, codes, scales;  // codes, scales: the lane's first ones in a stage
  Shared table;
  uint32_t own, ahead[2];  // own: selects the quad's byte t of a word; ahead: scales of the next step, if they are loaded
  __device__ __forceinline__ Dense(const Source& from, const uint8_t* shared, int local, int g, int t, int, int)
      : from(from), shared(shared), local(local), g(g), t(t), table(shared_address(dynamic_shared())) {
    codes = kept((local + g) * 128 + g * 16), scales = kept(kCodes + (local + g) * 16 + 4 * t);
    own = kept(kByTable ? 0x5504 | t << 4 : own_byte<T>(t));
  }

  // Scales of step k, which no tile map takes, are loaded a step ahead. A function of values: as a body of the member, their addresses take branches.
  __device__ __forceinline__ void load_ahead(int n0, int k) {
    if (!MAPPED) load_scales(ahead, from.scale, n0, local, g, t, k, from.N, from.K);
  }
  __device__ __forceinline__ static void load_scales(uint32_t (&ahead)[2], const uint8_t* scale, int n0, int local, int g, int t, int k, int N, int K) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(first_row<T, ROWS>(n0, local, N) + g + 8 * h, N - 1);
      ahead[h] = __ldg((const uint32_t*)(scale + (size_t)row * (K / 16) + min(k * 16 + 4 * t, K / 16 - 4)));
    }
  }

  // What a step loads before it waits for its activations: scales[h], four E4M3 bytes of row g + 8 h.
  struct Loaded {
    uint32_t scales[2];
  };
  __device__ __forceinline__ void load(Loaded& l, int stage, int) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) l.scales[h] = MAPPED ? *(const uint32_t*)(shared + scales + stage + h * 128) : ahead[h];
  }

  // arrived(j) waits for half j of the activations, done(j) is called when the products of the half before are complete.
  template <typename Arrived, typename Done>
  __device__ __forceinline__ void multiply(float (&acc)[TOKENS / 8][4], const Loaded& l, int stage, const Shared& held, Arrived arrived, Done done) const {
    constexpr int kAhead = 2 * kBatch;  // of eight times 32 k, so many are loaded before they are decoded
    auto load = [&](int h, int c) { return *(const uint4*)(shared + (codes + stage ^ c * 16) + h * 1024); };  // 16 bytes of row g + 8 h
    const uint32_t lane = threadIdx.x & 31;
    uint32_t even[2], odd[2];
    uint4 q[kAhead][2];
#pragma unroll
    for (int c = 0; c < kAhead; ++c)
#pragma unroll
      for (int h = 0; h < 2; ++h) q[c][h] = load(h, c);
#pragma unroll
    for (int h = 0; h < 2; ++h) Numbers<T>::four_scales(l.scales[h], even[h], odd[h]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t by[2][2];  // scales of blocks (0, 2), (1, 3) of 64 k
#pragma unroll
      for (int b = 0; b < 4; b += kBatch) {  // the codes of 2 kBatch MMAs are decoded while the products of those before are worked on
        uint32_t a[kBatch][2][4];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int c = b + i;
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (c % 2 == 0) by[0][h] = shuffle_in_quad(even[h], 2 * j + c / 2), by[1][h] = shuffle_in_quad(odd[h], 2 * j + c / 2);
            uint4& v = q[c % kAhead][h];
            const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
              const uint32_t pair = kByTable ? load_table(table + pick_bytes(words[w], 4 * lane, own)) : place_own_byte<T>(words[w], own);
              a[i][w / 2][h + w % 2 * 2] = Numbers<T>::mul_by_half(pair, by[w / 2][h], c % 2);
            }
            if (4 * j + c + kAhead < 8) v = load(h, 4 * j + c + kAhead);
          }
        }
        if (b == 0) arrived(j);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
#pragma unroll
          for (int z = 0; z < 2; ++z) {
            const int at = (2 * j + (b + i) / 2) * (TOKENS * 128) + (b + i) % 2 * 64 + z * 32;
            wgmma<T>(acc, a[i][z][0], a[i][z][1], a[i][z][2], a[i][z][3], wgmma_descriptor(held, at));
          }
        wgmma_commit_group();
        if (!FP4_FAULT(SKIP_WGMMA_WAIT)) wgmma_wait<1>();
        if (b == 0) done(j);
      }
    }
  }
};

// What a block does, tile by tile: steps k .. last() - 1 of a tile, then the tile before it from its first step on. Blocks that stream share tiles so that a
// later block has the earlier steps, comes to them last, and finds what it has to add ready.
template <typename W, Blocks BLOCKS> struct Work {
  static constexpr bool kOneTile = false, kStreams = BLOCKS == Blocks::kStream, kShares = BLOCKS == Blocks::kShare;
  int rank, row_tiles, steps, tile_tokens, units, tile, k, left;
  float4* partial;
  int* flags;

  __device__ __forceinline__ Work(int units, int N, int K, int tile_tokens, float4* partial, int* flags)
      : rank(cluster_rank()),
        row_tiles(kStreams ? (N / W::kParts + W::kColumns - 1) / W::kColumns : kShares ? 2 * gridDim.x : gridDim.x),
        steps((K + kWideK - 1) / kWideK), tile_tokens(tile_tokens), units(units), partial(partial), flags(flags) {
    if (kStreams) {
      const int last = end(blockIdx.x) - 1;
      tile = last / steps, k = steps - 1 - last % steps, left = last + 1 - end((int)blockIdx.x - 1);
    } else {
      const int splits = kShares ? 1 : cluster_size(), part = kShares ? 0 : cluster_rank(), column = blockIdx.y * gridDim.x + blockIdx.x;
      tile = kShares ? 2 * column + cluster_rank() : column, k = steps * part / splits, left = steps * (part + 1) / splits - k;
    }
  }
  // One behind the last step of a block, all tiles' steps numbered one behind the other.
  __device__ __forceinline__ int end(int block) const { return (int)((int64_t)units * (block + 1) / gridDim.x); }
  __device__ __forceinline__ int row() const { return tile % row_tiles * W::kColumns; }
  __device__ __forceinline__ int token() const { return tile / row_tiles * tile_tokens; }
  __device__ __forceinline__ int count() const { return kStreams ? min(steps - k, left) : left; }
  __device__ __forceinline__ int splits() const { return kShares ? 1 : cluster_size(); }
  __device__ __forceinline__ int last() const { return k + count(); }
  __device__ __forceinline__ void next() {
    if (kStreams)
      left -= count(), --tile, k = 0;
    else
      left = 0;
  }

  // The sums of a block that does not store this tile, to scratch memory; then those of block b, from there, once they are complete.
  static constexpr int kConsumers = W::Tile::kConsumers;
  template <int TILES> __device__ __forceinline__ void put(const float (&acc)[TILES][4]) const {
    put_sums<0, TILES, kConsumers>(partial + (size_t)blockIdx.x * (TILES * kConsumers) + threadIdx.x, acc);
    __threadfence();
    named_barrier_sync(1, kConsumers);
    if (threadIdx.x == 0) flag_set(flags + blockIdx.x);
  }
  template <int TILES> __device__ __forceinline__ void add(float (&acc)[TILES][4], int b) const {
    while (!flag_get(flags + b)) {}
    add_sums<0, TILES, kConsumers>(partial + (size_t)b * (TILES * kConsumers) + threadIdx.x, acc);
  }
};

template <typename T, int ROWS, int TOKENS, int KGROUPS, Blocks BLOCKS, bool MAPPED>
__global__ void __launch_bounds__(WideTile<T, ROWS, TOKENS, KGROUPS>::kThreads, 1)
    linear_wide(const __grid_constant__ TensorMap codes, const __grid_constant__ TensorMap scales, const __grid_constant__ TensorMap tokens,
                const uint8_t* __restrict__ scale, const float* __restrict__ global_scale, const T* __restrict__ bias, T* __restrict__ y,
                float4* __restrict__ partial, int* __restrict__ flags, int units, int tile_tokens, int M, int N, int K, const Epilogue<T> then) {
  static_assert(BLOCKS != Blocks::kStream || (KGROUPS == 1 && kFinish == kPlain));
  using W = Dense<T, ROWS, TOKENS, KGROUPS, MAPPED>;
  multiply_wide<W, BLOCKS>({codes, scales, scale, M, N, K}, tokens, tile_tokens,
                           [&] { return Work<W, BLOCKS>(units, N, K, tile_tokens, partial, flags); },
                           [&](int M) { return Result<T>{y, global_scale, bias, M, N, then, *global_scale * kWeightUnit}; });
}

constexpr int kShared = -1;

// splits: blocks of a cluster that share K; 0: blocks stream; kShared: two blocks share activations.
struct Tile {
  int rows, tokens, k_groups, splits;
};

template <typename T, int ROWS, int TOKENS, int KGROUPS, Blocks BLOCKS, bool MAPPED>
cudaError_t run(int cluster, const Linear<T>& p, void* scratch, Stream stream) {
  using S = Shape<Dense<T, ROWS, TOKENS, KGROUPS, MAPPED>>;
  constexpr int kParts = Result<T>::kParts, kColumns = kBlockColumns<T, ROWS>;
  constexpr bool kStreams = BLOCKS == Blocks::kStream, kShares = BLOCKS == Blocks::kShare;
  const int steps = (p.K + kWideK - 1) / kWideK, places = (p.M + TOKENS - 1) / TOKENS, row_tiles = (p.columns() + kColumns - 1) / kColumns;
  const int tile_tokens = even_tokens<8>(p.M, places);
  if (!kShares && (cluster > steps || cluster == 3 || cluster > 4)) return cudaErrorInvalidConfiguration;
  TensorMap codes, scales, tokens;
  cudaError_t status = tensor_map_2d(&codes, p.q, p.N, p.K / 2, ROWS / kParts, 128);
  if (status == cudaSuccess) status = tensor_map_2d(&tokens, p.x, p.M, (int64_t)p.K * 2, tile_tokens, 128);
  if (status != cudaSuccess) return status;
  scales = codes;
  if (MAPPED) status = tensor_map_2d(&scales, p.scale, p.N, p.K / 16, ROWS / kParts, 16);
  if (status != cudaSuccess) return status;
  const int units = steps * places * row_tiles, streaming = kStreams ? at_most(units, at_most(multiprocessors(), kMostBlocks)) : 0;
  float4* partial = (float4*)scratch;
  int* flags = (int*)(partial + (size_t)streaming * (TOKENS / 8 * S::kConsumers));
  const dim3 blocks = kStreams ? dim3(streaming) : dim3(kShares ? (row_tiles + 1) / 2 : row_tiles, places, cluster);
  return launch_sharing(kStreams, flags, linear_wide<T, ROWS, TOKENS, KGROUPS, BLOCKS, MAPPED>, blocks, S::kThreads, S::kBytes, cluster, stream, codes, scales,
                        tokens, p.scale, p.global_scale, p.bias, p.y, partial, flags, units, tile_tokens, p.M, p.N, p.K, p.then);
}

// Measured on an H200 for five shapes (benchmarks/NOTES.md). Nearly every SM has a block, two of a cluster share K where rows alone make too few (those of
// four fit 120 SMs only); where blocks would not come out even they stream. Sharing activations pays for 32 tokens only: 17.8 us for 18.3 at N = K = 8192.
Tile best(int M, int N, int K, bool mapped) {
  const int tokens = M <= 32 ? 32 : M <= 64 ? 64 : 128, places = (M + tokens - 1) / tokens, steps = (K + kWideK - 1) / kWideK;
  const int64_t of_64 = (int64_t)((N + 63) / 64) * places, of_128 = (int64_t)((N + 127) / 128) * places;
  auto splits = [&](int64_t blocks) { return blocks <= 30 && steps >= 4 ? 4 : blocks <= 66 && steps >= 2 ? 2 : 1; };
  const bool streams = mapped && kFinish == kPlain;
  const Tile wide{128, tokens, tokens == 128 ? 1 : 2, splits(of_128)};
  if (!mapped) return wide;
  if (tokens == 128) {
    if (of_64 <= 66) return K >= 8192 && streams ? Tile{128, 128, 1, 0} : Tile{64, 128, 2, splits(of_64)};
    return of_128 <= 66 || (of_128 >= 100 && of_128 <= 132) || !streams ? wide : Tile{128, 128, 1, 0};
  }
  if (of_64 <= 132) return {64, tokens, tokens == 64 ? 2 : 4, tokens == 32 && of_64 >= 100 ? kShared : splits(of_64)};
  if ((of_128 >= 100 && of_128 <= 132) || !streams) return wide;
  return {tokens == 64 ? 192 : 256, tokens, 1, 0};
}

template <typename T> cudaError_t by_tile(Tile tile, bool mapped, const Linear<T>& p, void* scratch, Stream stream) {
#define IS(r, m, k) (tile.rows == r && tile.tokens == m && tile.k_groups == k)
#define TILE(r, m, k) \
  if (mapped && tile.splits > 0 && IS(r, m, k)) return run<T, r, m, k, Blocks::kSplit, true>(tile.splits, p, scratch, stream);
#define SHARED(r, m, k) \
  if (mapped && tile.splits == kShared && IS(r, m, k)) return run<T, r, m, k, Blocks::kShare, true>(2, p, scratch, stream);
#define ANY_K(r, m, k) \
  if (!mapped && tile.splits > 0 && IS(r, m, k)) return run<T, r, m, k, Blocks::kSplit, false>(tile.splits, p, scratch, stream);
#define STREAMED(r, m) \
  if (mapped && !tile.splits && IS(r, m, 1)) return run<T, r, m, 1, Blocks::kStream, true>(1, p, scratch, stream);
  TILE(64, 32, 4) TILE(64, 64, 2) TILE(64, 128, 2) SHARED(64, 32, 4)
  TILE(128, 32, 2) TILE(128, 64, 2) TILE(128, 128, 1)
  ANY_K(128, 32, 2) ANY_K(128, 64, 2) ANY_K(128, 128, 1)
  if constexpr (kFinish == kPlain) { STREAMED(256, 32) STREAMED(192, 64) STREAMED(128, 128) }
#undef STREAMED
#undef SHARED
#undef ANY_K
#undef TILE
#undef IS
  return cudaErrorInvalidConfiguration;
}

bool fits(const LinearParams& p) { return p.M >= 1 && p.M <= 1 << 20 && p.N >= 1 && p.K >= 64 && p.K % 64 == 0; }
bool has_map(const LinearParams& p) { return p.K % kWideK == 0 && (uintptr_t)p.scale % 16 == 0; }  // a tile map takes rows of 16 bytes
Tile tile_of(const LinearParams& p) {
  const auto [rows, tokens, k_groups, splits] = p.tile;
  return tokens ? Tile{rows, tokens, k_groups, splits} : best(p.M, p.N, p.K, has_map(p));
}

}  // namespace

// Sums of every block that streams, and a flag each.
extern "C" int64_t fp4_linear_wide_scratch(const LinearParams* call) {
  if (!is_call(call) || !fits(*call)) return 0;
  const Tile tile = tile_of(*call);
  return tile.splits ? 0 : (int64_t)kMostBlocks * tile.rows * tile.tokens * sizeof(float) + kFlags * sizeof(int);
}

// Returns a cudaError_t. Takes what linear_small does, early, and scratch. tile: (rows, tokens, k_groups), one of by_tile's, and splits in {1, 2, 4}: blocks
// that share K, 0: blocks stream, -1: two blocks share activations. 1 <= M <= 2^20, K % 64 == 0; x, codes and scratch 16-byte aligned, scale 4-byte aligned.
extern "C" int fp4_linear_wide(const LinearParams* call) {
  if (!is_call(call) || !fits(*call) || call->scratch_bytes < fp4_linear_wide_scratch(call)) return cudaErrorInvalidValue;
  return by_dtype(call->dtype, [&](auto zero) {
    using T = decltype(zero);
    const Linear<T> p = Linear<T>::of(*call);
    return p.fits() ? by_tile<T>(tile_of(*call), has_map(*call), p, call->scratch, stream_of(*call)) : cudaErrorInvalidValue;
  });
}
