// fp4.moe for a few tokens on sm_90: y[T, N] = sum over choices of weight * Down[e] (act(gate) * up of GateUp[e] x), weights row-major canonical NVFP4, dense or
// 2:4-sparse, bfloat16 activations. Two kernels for every eight tokens; down begins to read weights while gate_up's last blocks run. Every sum has a fixed order.
#include "decode_table.cuh"

#include <type_traits>

namespace {

using namespace fp4;

// Of either product. splits: blocks of a cluster that share K, of down.
struct Tile {
  int sets, sets_a_warp, k_groups, splits;
};

// One product [E, rows, K] of up to 8 tokens.
struct Product {
  const uint8_t *codes, *meta, *scale;
  int E, rows, K;
  bool interleaved;
};

struct Maps {
  TensorMap codes, meta, scales;  // meta of a dense weight is not read
};

// Maps of a product's tiles of so many rows. Gates and ups of an expert are two planes; where they alternate in memory, all experts' gates are one plane, and their ups
// the other.
template <bool SPARSE, bool SHIFTED, bool UP> cudaError_t maps_of(Maps& maps, const Product& p, int rows) {
  using P = Parts<SPARSE, SHIFTED>;
  const int half = UP ? 2 : 1;
  auto map = [&](TensorMap* to, const uint8_t* from, int64_t bytes, int tile_bytes, bool four) {
    const int64_t each = four ? 4 : 1, outputs = p.rows / half;
    if (UP && p.interleaved && four) return tensor_map_3d(to, from, {4 * bytes, p.E * p.rows / 4, 1, 4 * bytes, 16}, 1, rows / 4, tile_bytes);
    if (UP && p.interleaved) return tensor_map_3d(to, from, {bytes, p.E * outputs, 2, 2 * bytes, bytes}, 2, rows / 2, tile_bytes);
    return tensor_map_3d(to, from, {each * bytes, outputs / each, (int64_t)p.E * half, each * bytes, outputs * bytes}, half, rows / half / each, tile_bytes);
  };
  const cudaError_t status = map(&maps.codes, p.codes, SPARSE ? p.K / 4 : p.K / 2, P::kCodes, false);
  maps.meta = maps.codes;
  return first_error({status, SPARSE ? map(&maps.meta, p.meta, p.K / 8, 32, false) : cudaSuccess, map(&maps.scales, p.scale, p.K / 16, P::kScales, SHIFTED)});
}

// Up to 8 tokens of a call.
struct Chunk {
  const Layer& l;
  Routing routing;
  const __nv_bfloat16* x;
  __nv_bfloat16* y;
  uint8_t* h;
  cudaStream_t stream;
};

// As many stages as there is room for; false if there is none for a tile and so many tokens.
template <bool UP, bool SPARSE, bool SHIFTED> bool lay_out(TableLayout<SPARSE, SHIFTED>& layout, const Layer& l, int tokens, const Tile& tile) {
  if (tile.sets < 1 || tile.sets > 8 || tile.sets_a_warp < 1 || tile.sets_a_warp > 2 || tile.sets % tile.sets_a_warp || tile.k_groups < 1 || (SHIFTED && tile.sets % 2)) return false;
  layout = {};
  layout.sets = tile.sets, layout.sets_a_warp = tile.sets_a_warp, layout.k_groups = tile.k_groups;
  layout.held = tokens == 1 ? 1 : tokens <= 4 ? 4 : 8, layout.tokens = tokens, layout.pairs = tokens * l.top_k;
  const int threads = 32 * layout.warps();
  if (UP ? l.I % (8 * tile.sets) || 32 * kFinishers % (4 * tile.sets)
         : layout.rows() > l.N || tile.splits < 1 || tile.splits > 8 || layout.rows() % (2 * tile.splits) || layout.rows() / (2 * tile.splits) * tokens > threads)
    return false;
  if (UP) layout.x_bytes = (l.K + kWideK - 1) / kWideK * layout.x_step();
  const int stage = layout.rows() * layout.kBytes + 16 + (UP ? 0 : tokens * 512);
  layout.stages = at_most(kTableStages, at_least(226 * 1024 - layout.bytes(UP), 0) / stage) / tile.k_groups * tile.k_groups;
  if (!UP) layout.x_bytes = (layout.stages * tokens * 512 + 1023) / 1024 * 1024;
  layout.fetchers = layout.stages % 2 ? 1 : UP || layout.stages % 4 ? 2 : 4;
  layout.early = at_most(layout.stages, at_least(1, kEarlyBytes / (layout.rows() * layout.kBytes)));
  return layout.warps() <= kMostWarps && layout.stages > 0;
}

// f(SPARSE, SHIFTED), of which a product of this K is.
template <typename F> auto by_kind(bool sparse, int K, F f) {
  using Yes = std::true_type;
  using No = std::false_type;
  return sparse ? f(Yes(), No()) : K % kWideK ? f(No(), Yes()) : f(No(), No());
}

template <bool UP> bool fits(const Layer& l, bool sparse, int tokens, const Tile& tile) {
  return by_kind(sparse, UP ? l.K : l.I, [&](auto is_sparse, auto is_shifted) {
    TableLayout<is_sparse, is_shifted> layout;
    return lay_out<UP, is_sparse, is_shifted>(layout, l, tokens, tile);
  });
}

template <bool UP, int R> cudaError_t run(const Chunk& c, const uint8_t* meta, const Tile& tile) {
  const Layer& l = c.l;
  const Product p{l.codes[!UP], meta, l.scale[!UP], l.E, UP ? 2 * l.I : l.N, UP ? l.K : l.I, UP && l.between.interleaved};
  return by_kind(meta, p.K, [&](auto is_sparse, auto is_shifted) -> cudaError_t {
    constexpr bool kSparse = is_sparse, kShifted = is_shifted;
    TableLayout<kSparse, kShifted> layout;
    const int tokens = c.routing.tokens;
    if (!lay_out<UP, kSparse, kShifted>(layout, l, tokens, tile)) return cudaErrorInvalidConfiguration;
    Maps maps;
    TensorMap activations;
    cudaError_t status = maps_of<kSparse, kShifted, UP>(maps, p, layout.rows());
    if (UP && status == cudaSuccess) status = tensor_map_3d(&activations, c.x, {128, tokens, l.K / 64, (int64_t)l.K * 2, 128}, 4, layout.held, 128);
    if (status != cudaSuccess) return status;
    const int threads = 32 * (layout.warps() + kHelpers);
    if constexpr (UP)
      return launch(table_up<kSparse, kShifted, R>, dim3(multiprocessors()), threads, layout.bytes(true), 1, c.stream, maps.codes, maps.meta, maps.scales, activations, layout, c.routing,
                    l.global_scale[0], l.global_scale[1], c.h, l.I, l.K, l.between);
    else
      return launch_second(table_down<kSparse, kShifted, R>, dim3((l.N + layout.rows() - 1) / layout.rows(), 1, tile.splits), threads, layout.bytes(false), tile.splits, c.stream,
                           maps.codes, maps.meta, maps.scales, layout, c.routing, c.h, l.between.down_bias, c.y, l.N, l.I);
  });
}

template <bool UP> cudaError_t run(const Chunk& c, const uint8_t* meta, const Tile& tile) {
  return tile.sets_a_warp == 1 ? run<UP, 1>(c, meta, tile) : run<UP, 2>(c, meta, tile);
}

// Measured on an H200 (benchmarks/NOTES.md), Mixtral's and gpt-oss's sizes; the first that fits, or none.
Tile best_up(const Layer& l, bool sparse, int tokens) {
  const bool few = tokens <= 2 && !sparse && l.K % kWideK == 0;
  for (const Tile& tile : {Tile{4, 2, 4, 1}, Tile{2, 2, 8, 1}, Tile{2, 2, 4, 1}})
    if ((!few || tile.sets == 2) && fits<true>(l, sparse, tokens, tile)) return tile;
  return {};
}

// As few rows for an SM as can be; of tiles with as many, the smallest for one token or two, else the largest in clusters of at most two.
Tile best_down(const Layer& l, bool sparse, int tokens) {
  Tile found = fits<false>(l, sparse, tokens, {1, 1, 8, 1}) ? Tile{1, 1, 8, 1} : Tile{};
  int least = INT32_MAX;
  for (int sets = 2; sets <= 6; sets += 2)
    for (int splits = 1; splits <= 4; splits *= 2) {
      const Tile tile{sets, 2, sets == 2 ? 8 : 4, splits};
      const int blocks = (l.N + 16 * sets - 1) / (16 * sets) * splits, rows = (blocks + 131) / 132 * sets * 4 / splits;
      if ((splits > 1 && blocks > 132) || rows > least || (rows == least && (tokens <= 2 || splits > 2)) || !fits<false>(l, sparse, tokens, tile)) continue;
      least = rows, found = tile;
    }
  return found;
}

// What lies between the products, of the most tokens at a time and as many distinct experts as they can have.
int64_t between_bytes(const Layer& l) {
  const int64_t most = at_most(l.tokens, kTableTokens);
  return most * most * l.top_k * ((l.I + kWideK - 1) / kWideK) * 512;
}

cudaError_t layer(const Layer& l, const uint8_t* up_meta, const uint8_t* down_meta, Tile up, Tile down, void* workspace, int64_t bytes, cudaStream_t stream) {
  if (bytes < between_bytes(l)) return cudaErrorInvalidValue;
  int most = at_most(l.tokens, kTableTokens);
  const bool own_up = !up.sets, own_down = !down.sets;
  auto choose = [&](int tokens) {  // x of all tokens lies in shared memory
    if (own_up) up = best_up(l, up_meta, tokens);
    if (own_down) down = best_down(l, down_meta, tokens);
    return up.sets && down.sets;
  };
  while (!choose(most) && most > 1) most /= 2;
  for (int first = 0; first < l.tokens; first += most) {
    const int tokens = at_most(l.tokens - first, most), skip = first * l.top_k;
    choose(tokens);
    auto behind = [&](const void* at, int size) { return (const void*)((const uint8_t*)at + (int64_t)skip * size); };
    const Chunk c{l,
                  {{behind(l.ids.at, l.ids.wide ? 8 : 4), l.ids.wide}, l.map, {behind(l.weights.at, l.weights.type == 2 ? 4 : 2), l.weights.type}, l.map_size, tokens, l.top_k, l.E},
                  l.x + (int64_t)first * l.K,
                  l.y + (int64_t)first * l.N,
                  (uint8_t*)workspace,
                  stream};
    cudaError_t status = run<true>(c, up_meta, up);
    if (status == cudaSuccess) status = run<false>(c, down_meta, down);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace

extern "C" int64_t fp4_decode_table_scratch(const MoeParams* call) {
  if (!is_call(call)) return 0;
  const Layer l = Layer::of(*call);
  return l.fits() ? between_bytes(l) : 0;
}

// Returns a cudaError_t. x, y, and biases, which may be null, are bfloat16; map may be null, and metadata where a weight is dense. K % 64 == 0, I % 64 == 0, %
// 256 where sparse, N % 8 == 0, E <= 1024; x, codes, metadata, scales, y and scratch 16-byte aligned. tile: (sets, sets_a_warp, k_groups) of gate_up, then
// these and splits of down: see Tile; all 0 of a product for best.
extern "C" int fp4_decode_table(const MoeParams* call) {
  if (!is_call(call)) return cudaErrorInvalidValue;
  const Layer l = Layer::of(*call);
  const uint8_t *up_meta = (const uint8_t*)call->gate_up.meta, *down_meta = (const uint8_t*)call->down.meta;
  if (!l.fits() || (up_meta && l.K % kWideK) || (down_meta && l.I % kWideK)) return cudaErrorInvalidValue;
  const int(&t)[7] = call->tile;
  return layer(l, up_meta, down_meta, {t[0], t[1], t[2], 1}, {t[3], t[4], t[5], t[6]}, call->scratch, call->scratch_bytes, (cudaStream_t)call->stream);
}
