// fp4.linear for 1 to 16 rows on sm_90: y[M, N] = x[M, K] @ W[N, K]^T (+ bias), W row-major canonical NVFP4.
//
// Bandwidth-bound: what has to be few are instructions a weight. Codes become pairs of numbers by a table in shared memory (nvfp4.cuh), a byte at
// a time; codes, scales and activations come as tiles through one ring, fetched by a warp of their own. A warp owns 16 * R rows of W and every
// k_groups-th step of K; activations lie as they lie in memory, swizzled, and the lanes of a quad take the words of their 64 k in different
// orders, so that they read different banks.
#include "table.cuh"

namespace {

using namespace fp4;

// How the rows of a block, 16 * sets, and K are shared by its warps, and the ring's sizes.
struct Layout {
  int sets, sets_a_warp, k_groups, stages, x_rows, early;  // early: stages of weights that go ahead of the first activations

  __host__ __device__ int rows() const { return 16 * sets; }
  __host__ __device__ int row_warps() const { return sets / sets_a_warp; }
  __host__ __device__ int warps() const { return row_warps() * k_groups; }
  __host__ __device__ int x_bytes() const { return x_rows * kWideK * 2; }
  __host__ __device__ int stage() const { return x_bytes() + rows() * 128; }  // activations and codes; scales have a ring of their own behind these
  __host__ __device__ int scales() const { return kPairTable + stages * stage(); }
  __host__ __device__ int counters() const { return scales() + stages * rows() * 16; }
  int bytes() const { return counters() + 16 * stages; }
};

template <typename T, int TOKENS, int R>
__global__ void __launch_bounds__(32 * (kMostWarps + 1), 1)
    linear_table(const __grid_constant__ TileMap codes, const __grid_constant__ TileMap scales, const __grid_constant__ TileMap activations, const Layout layout,
                 const float* __restrict__ global_scale, const T* __restrict__ bias, T* __restrict__ y, int M, int N, int K, const Epilogue<T> then) {
  constexpr int kTiles = TOKENS / 8, kParts = Result<T>::kParts;
  uint8_t* shared = dynamic_shared();
  const int warp = uniform(threadIdx.x >> 5), lane = threadIdx.x & 31, steps = K / kWideK, rows = layout.rows(), n0 = blockIdx.x * (rows / kParts);
  const Shared full = shared_address(shared + layout.counters()), free = full + 8 * layout.stages;

  if (threadIdx.x == 32 * layout.warps()) {
    init_ring(full, free, layout.stages, layout.row_warps());
    prefetch_tile_map(codes);
    prefetch_tile_map(scales);
    prefetch_tile_map(activations);
  }
  __syncthreads();

  if (warp == layout.warps()) {
    if (lane == 0) {
      const Shared ring = shared_address(shared + kPairTable), scale_ring = shared_address(shared + layout.scales());
      auto fetch_weights = [&](int k, int at) {
        const Shared to = ring + at * layout.stage(), counter = full + 8 * at;
        counter_promise(counter, layout.stage() + rows * 16);
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          const int row = n0 + p * (N / 2), local = p * (rows / 2);
          copy_tile(to + layout.x_bytes() + local * 128, codes, k * 128, row, counter);
          copy_tile(scale_ring + (at * rows + local) * 16, scales, k * 16, row, counter);
        }
      };
      fetch_steps(steps, layout.stages, layout.early, free, fetch_weights,
                  [&](int k, int at) { copy_planes(ring + at * layout.stage(), activations, 0, 0, k * 4, full + 8 * at); });
    }
    return;
  }

  const int threads = 32 * layout.warps();
  fill_pairs<T, true>(shared, threadIdx.x, threads);
  barrier(1, threads);
  const int g = lane >> 2, t = lane & 3, row_warp = warp % layout.row_warps(), k_group = warp / layout.row_warps();
  const int local = row_warp * (16 * R);  // the warp's first row
  const int x_row = t * layout.x_rows + (g & layout.x_rows - 1);  // of all rows of the step's planes, by whose number chunks are swizzled
  const Shared table = shared_address(shared);
  float acc[R][kTiles][4] = {};
  wait_for_previous();  // it may still read y, and may have written what the epilogue reads
  let_next_begin();
  take_turns(steps, layout.stages, layout.k_groups, k_group, full, free, lane, layout.sets_a_warp - R, [&](int stage) {
    const uint8_t* from = shared + kPairTable + stage * layout.stage();
    const uint8_t* my_codes = from + layout.x_bytes() + (local + g) * 128;
    const uint8_t* my_scales = shared + layout.scales() + (stage * rows + local + g) * 16 + 4 * t;
    multiply_by_table<T, 16>(acc, table, my_codes, [&](int r, int h) { return my_scales + (16 * r + 8 * h) * 16; }, 8, from + x_row * 128, x_row & 7, lane);
    return bits_of(acc);
  });

  barrier(1, threads);  // nobody reads the ring any more
  sum_turns_and_store<T, R, kTiles>(acc, (float*)(shared + kPairTable), rows, local + g, k_group, layout.k_groups, threads, n0, 0,
                                    {y, global_scale, bias, M, N, then, *global_scale * kWeightUnit});
}

// sets: rows of a block in sixteens; k_groups: warps for the same rows, which share K.
struct Tile {
  int sets, sets_a_warp, k_groups;
};

// Measured on an H200 (benchmarks/results/candidates.csv). A block for nearly every SM, for any M in the same order of summation.
Tile best(int N, int K) {
  int sets = sets_a_block(N);
  if (sets % 2 && (sets >= 7 || N >= 9216 && sets == 5 || kFinish == kGlu)) ++sets;  // two sets a warp save more than a sixth of the blocks, while 96 are left
  const int sets_a_warp = sets % 2 ? 1 : 2, row_warps = sets / sets_a_warp;
  return {sets, sets_a_warp, at_most(at_most(8, kMostWarps / row_warps), K / kWideK)};
}

template <typename T, int TOKENS, int R> cudaError_t run(Tile tile, const Linear<T>& p, Stream stream) {
  constexpr int kParts = Result<T>::kParts;
  Layout layout{tile.sets, R, tile.k_groups, 1, rows_of_x(p.M, 4), 0};  // of two rows the lanes of a quad would read the same banks
  if (tile.sets < 1 || tile.sets > 16 || tile.sets % R || tile.sets % kParts || tile.k_groups < 1 || layout.warps() > kMostWarps) return cudaErrorInvalidConfiguration;
  layout.stages = at_most(kMostStages, kTableRoom / (TOKENS * kWideK * 2 + layout.rows() * (128 + 16)));  // no more where fewer rows of x leave room: NOTES
  layout.k_groups = at_most(layout.k_groups, layout.stages);
  layout.early = stream.early ? at_most(layout.stages, at_least(1, kEarlyBytes / layout.stage())) : 0;
  TileMap codes, scales, activations;
  cudaError_t status = tile_map(&codes, p.q, p.N, p.K / 2, layout.rows() / kParts, 128);
  if (status == cudaSuccess) status = tile_map(&scales, p.scale, p.N, p.K / 16, layout.rows() / kParts, 16);
  if (status == cudaSuccess) status = plane_map(&activations, p.x, {128, p.M, p.K / 64, (int64_t)p.K * 2, 128}, 4, layout.x_rows, 128);
  if (status != cudaSuccess) return status;
  const int columns = layout.rows() / kParts;
  return fp4::launch(linear_table<T, TOKENS, R>, dim3((p.columns() + columns - 1) / columns), 32 * (layout.warps() + 1), layout.bytes(), 1, stream, codes, scales,
                     activations, layout, p.global_scale, p.bias, p.y, p.M, p.N, p.K, p.then);
}

template <typename T, int TOKENS> cudaError_t by_tile(Tile tile, const Linear<T>& p, Stream stream) {
  switch (tile.sets_a_warp) {
    case 1: return run<T, TOKENS, 1>(tile, p, stream);
    case 2: return run<T, TOKENS, 2>(tile, p, stream);
    default: return cudaErrorInvalidConfiguration;
  }
}

}  // namespace

// Returns a cudaError_t. dtype 0: bfloat16, 1: float16. (sets, sets_a_warp, k_groups): at most 16 sets, a multiple of
// sets_a_warp in {1, 2}, in at most 16 warps, sets / sets_a_warp * k_groups; all 0 for best(). 1 <= M <= 16, K % 256 == 0; x, q and scale 16-byte
// aligned; bias, mul and residual may be null. early: it may begin, and fetch its first weights, while the kernel before it in its stream is still running;
// that one must not write the weight.
extern "C" int fp4_linear_table(const void* x, const void* q, const void* s, const void* g, const void* bias, const void* mul, const void* residual, void* y,
                                int M, int N, int K, int dtype, int second, int third, int act, int early, int sets, int sets_a_warp, int k_groups, void* stream) {
  if (M < 1 || M > 16 || N < 1 || K < kWideK || K % kWideK) return cudaErrorInvalidValue;
  const Tile tile = sets ? Tile{sets, sets_a_warp, k_groups} : best(N, K);
  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Linear<T> p{(const T*)x, (const uint8_t*)q, (const uint8_t*)s, (const float*)g, (const T*)bias, (T*)y, M, N, K,
                      Epilogue<T>::of(mul, residual, second, third, act)};
    return !p.fits() ? cudaErrorInvalidValue : M <= 8 ? by_tile<T, 8>(tile, p, {(cudaStream_t)stream, early != 0}) : by_tile<T, 16>(tile, p, {(cudaStream_t)stream, early != 0});
  };
  return dtype == 0 ? run(__nv_bfloat16()) : run(__half());
}
