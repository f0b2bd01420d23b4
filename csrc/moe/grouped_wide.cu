// fp4.moe for a few to a few hundred pairs an expert on sm_90: y[T, N] = sum over choices of weight * Down[e] (act(gate) * up of GateUp[e] x), weights row-major
// canonical NVFP4, bfloat16 activations.
//
// Four or five kernels a call: route() sorts pairs by expert and arranges tokens as wgmma takes them, or gather() arranges those of every pair; product() is gate_up
// with the activation in its registers and then down, which begins to read weights while gate_up's last blocks run; combine() sums. Every sum has a fixed order.
#include "grouped_wide.cuh"

#include <algorithm>

namespace {

using namespace fp4;
using T = __nv_bfloat16;

// What a call writes besides y, for tiles of so many tokens; gathers: x once a token, else once for each pair.
struct Workspace {
  uint8_t *x, *h;
  T* out;
  Routed routed;
  int64_t bytes;

  Workspace(Scratch scratch, const Layer& l, int tokens, bool gathers) {
    const int64_t P = l.pairs(), tiles = l.tiles_of(tokens);
    x = scratch.take<uint8_t>((gathers ? l.tokens : tiles * tokens) * 512 * ((l.K + kWideK - 1) / kWideK));
    h = scratch.take<uint8_t>(tiles * tokens * 512 * ((l.I + kWideK - 1) / kWideK));
    routed = Routed::of(scratch, tiles, P);
    out = scratch.take<T>(P * l.N);
    bytes = scratch.bytes;
  }
};

// Of a product: warpgroups of a block, sets of rows a warpgroup, stages of weights and of activations, MMAs that are decoded at a time, blocks or teams an SM.
struct Sizes {
  int groups, sets, w_stages, x_stages, batch, blocks;
};
struct Compiled {
  int tokens;
  bool gathers_only;  // compiled only in the form whose first product gathers tokens itself; else also in the form for which gather() has arranged them
  Sizes up, down;
};

// Measured on an H200 (benchmarks/NOTES.md): for so many tokens the best tiles of both products.
constexpr Compiled kTiles[] = {
    // tokens, gathers_only, up and down: {groups, sets, w_stages, x_stages, batch, blocks}
    {8, false, {1, 2, 3, 4, 1, 2}, {1, 2, 3, 4, 1, 2}},
    {16, false, {1, 2, 2, 4, 1, 2}, {1, 2, 2, 4, 1, 2}},
    {32, false, {1, 2, 4, 2, 1, 2}, {1, 2, 4, 2, 1, 2}},
    {48, false, {2, 2, 4, 2, 1, 1}, {2, 2, 4, 2, 1, 1}},
    {80, true, {2, 2, 3, 2, 1, 1}, {2, 2, 3, 2, 1, 1}},
    {96, false, {2, 1, 6, 2, 1, 1}, {2, 2, 3, 2, 1, 1}},
    {128, false, {2, 1, 4, 2, 1, 1}, {2, 1, 4, 2, 1, 1}},
};

// What a call asks for: a number of tokens of kTiles, and whether the first product gathers them itself.
struct Tile {
  int tokens;
  bool gathers;

  static Tile of(const MoeParams& p) { return {p.tile[0], p.tile[1] != 0}; }
};

template <bool UP, bool SHIFTED, bool GATHERED, int TILE> cudaError_t run(const Layer& l, const Workspace& space, cudaStream_t stream) {
  constexpr int kTokens = kTiles[TILE].tokens;
  constexpr Sizes kSizes = UP ? kTiles[TILE].up : kTiles[TILE].down;
  using S = Stages<UP, SHIFTED, kTokens, kSizes.groups, kSizes.sets, kSizes.w_stages, kSizes.x_stages, kSizes.blocks>;
  static_assert(S::kBlocks * (S::kBytes + 1024) <= 228 * 1024 && S::kBytes <= 227 * 1024 && S::kWStages > 1);
  const int N = UP ? l.I : l.N, K = UP ? l.K : l.I, groups = UP ? (N + 255) / 256 * S::kOfBlock : (N + S::kRows - 1) / S::kRows;
  const int64_t rows = (int64_t)l.E * (UP ? 2 : 1) * N;
  TensorMap maps[4];
  for (int i = 0; i < 4; ++i) {
    const bool four = SHIFTED && i >= 2;  // rows of W are a row of the map
    const int64_t each = four ? 4 : 1, bytes = each * (i < 2 ? K / 2 : K / 16), up = i % 2;
    const uint8_t* from = i < 2 ? l.codes[!UP] : l.scale[!UP];
    const int tile_bytes = i < 2 ? 128 : four ? 32 : 16;
    cudaError_t status = cudaSuccess;
    if (!UP)
      status = tensor_map_2d(&maps[i], from, rows / each, bytes, S::kRows / each, tile_bytes);
    else if (l.between.interleaved)  // the other rows are skipped, or not read of both
      status = tensor_map_3d(&maps[i], from + (four ? 0 : up * bytes), {four ? 2 * bytes : bytes, 64 / each, rows / 128, 2 * bytes, 128 / each * bytes}, 4, 8 * S::kSets / each, tile_bytes);
    else
      status = tensor_map_3d(&maps[i], from + up * N / each * bytes, {bytes, 64 / each, (rows - up * N) / 64, bytes, 64 / each * bytes}, 4, 8 * S::kSets / each, tile_bytes);
    if (status != cudaSuccess) return status;
  }
  constexpr auto kProduct = product<T, UP, SHIFTED, GATHERED, kTokens, kSizes.groups, kSizes.sets, kSizes.w_stages, kSizes.x_stages, kSizes.batch, kSizes.blocks>;
  return launch_second(kProduct, dim3(multiprocessors() * S::kBlocks),
                       S::kTeams * S::kThreads, S::kBytes, 1, stream, maps[0], maps[1], maps[2], maps[3], (const uint8_t*)(UP ? space.x : space.h), space.routed,
                       l.global_scale[!UP], space.h, space.out, N, K, groups, l.top_k, l.between);
}

template <bool UP, bool GATHERED, int TILE> cudaError_t run(const Layer& l, const Workspace& space, cudaStream_t stream) {
  return (UP ? l.K : l.I) % kWideK ? run<UP, true, GATHERED, TILE>(l, space, stream) : run<UP, false, GATHERED, TILE>(l, space, stream);
}

template <int TILE, bool GATHERED> cudaError_t layer(const Layer& l, void* workspace, int64_t bytes, cudaStream_t stream) {
  constexpr int TOKENS = kTiles[TILE].tokens;
  const Workspace space({(uint8_t*)workspace}, l, TOKENS, GATHERED);
  if (space.bytes > bytes) return cudaErrorInvalidValue;
  const int64_t words = (int64_t)l.tokens * ((l.K + kWideK - 1) / kWideK) * 8;
  const int routing = route_blocks(l.pairs()), arranging = GATHERED ? (int)std::min<int64_t>((words + kRouteThreads - 1) / kRouteThreads, 2 * multiprocessors()) : 0;
  const dim3 blocks(1, 1, (1 + (arranging + routing - 1) / routing) * routing);
  cudaError_t status = launch(route<T, kByWarp<TOKENS>>, blocks, kRouteThreads, route_bytes(l.E), routing, {stream, true}, l.ids, l.map, l.map_size, space.routed,
                              l.pairs(), l.E, TOKENS, l.x, space.x, l.tokens, l.K);
  if constexpr (!GATHERED)
    if (status == cudaSuccess)
      status = launch_second(gather<T, TOKENS, kByWarp<TOKENS>>, dim3(4 * multiprocessors()), 256, 0, 1, stream, l.x, space.x, space.routed, l.top_k, l.K);
  if (status == cudaSuccess) status = run<true, GATHERED, TILE>(l, space, stream);
  if (status == cudaSuccess) status = run<false, false, TILE>(l, space, stream);
  if (status != cudaSuccess) return status;
  return launch_combine(l, space.out, space.routed, stream);
}

template <int TILE = 0> cudaError_t by_tile(Tile tile, const Layer& l, void* workspace, int64_t bytes, cudaStream_t stream) {
  if constexpr (TILE < sizeof(kTiles) / sizeof(Compiled)) {
    if (tile.tokens == kTiles[TILE].tokens && tile.gathers) return layer<TILE, true>(l, workspace, bytes, stream);
    if constexpr (!kTiles[TILE].gathers_only)
      if (tile.tokens == kTiles[TILE].tokens) return layer<TILE, false>(l, workspace, bytes, stream);
    return by_tile<TILE + 1>(tile, l, workspace, bytes, stream);
  }
  return cudaErrorInvalidConfiguration;
}

}  // namespace

extern "C" int64_t fp4_grouped_wide_scratch(const MoeParams* call) {
  if (!is_call(call) || call->tile[0] < 8) return 0;
  const Layer l = Layer::of(*call);
  const Tile tile = Tile::of(*call);
  return l.fits() ? Workspace({nullptr}, l, tile.tokens, tile.gathers).bytes : 0;
}

// Returns a cudaError_t. x, y, and biases, which may be null, are bfloat16; map may be null. K % 64 == 0, I % 64 == 0, N % 8 == 0, E <= 1024, tokens * top_k <=
// 2^20, K and I at most 2^15; codes, scales, x, y and scratch 16-byte aligned. tile: (tokens, gathers), one of kTiles. No metadata.
extern "C" int fp4_grouped_wide(const MoeParams* call) {
  if (!is_call(call)) return cudaErrorInvalidValue;
  const Layer l = Layer::of(*call);
  return l.fits() ? by_tile(Tile::of(*call), l, call->scratch, call->scratch_bytes, (cudaStream_t)call->stream) : cudaErrorInvalidValue;
}
