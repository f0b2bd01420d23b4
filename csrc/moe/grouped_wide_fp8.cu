// fp4.moe from some dozens of pairs an expert on, on sm_90, by FP8 tensor cores: as grouped_wide.cu, activations rounded to E4M3 with a scale a row, and
// weights to E4M3 in registers, bit for bit the codes of fp4.dequantize_fp8, which writes them to memory.
//
// Six kernels a call: route() sorts pairs by expert; round_rows() rounds tokens, once each, to the rows of their pairs; product_fp8() is gate_up with the
// activation behind its sums; round_rows() rounds its result; product_fp8() is down; combine() sums. Every sum has a fixed order.
#include "grouped_wide_fp8.cuh"

namespace {

using namespace fp4;
using T = __nv_bfloat16;

// What a call writes besides y, for tiles of up to so many tokens.
struct Workspace {
  uint8_t* rows;  // of both products, one after the other
  float* scale;
  T *h, *out;
  Routed routed;
  int64_t bytes;

  Workspace(Scratch scratch, const Layer& l, int tokens) {
    const int64_t P = l.pairs();
    rows = scratch.take<uint8_t>(P * row_bytes(l.K > l.I ? l.K : l.I));
    scale = scratch.take<float>(P);
    h = scratch.take<T>(P * l.I);
    routed = Routed::of(scratch, l.tiles_of(tokens), P);
    out = scratch.take<T>(P * l.N);
    bytes = scratch.bytes;
  }
};

template <bool SORTED> cudaError_t round_rows_of(const T* x, const Workspace& space, int rows, int K, int top_k, cudaStream_t stream) {
  const int chunks = row_bytes(K) / 16, count = (chunks + 255) / 256, each = ((chunks + count - 1) / count + 31) / 32 * 32, at_once = 256 / each;
  auto run = [&](auto kernel) {
    return launch_second(kernel, dim3((rows + at_once - 1) / at_once), at_once * each, 32, 1, stream, x, space.rows, space.scale, space.routed.place, rows, K, top_k, each);
  };
  return count == 1 ? run(round_rows<SORTED, 1>) : count == 2 ? run(round_rows<SORTED, 2>) : count <= 4 ? run(round_rows<SORTED, 4>) : run(round_rows<SORTED, 8>);
}

template <int... N> cudaError_t token_maps(TokenMaps<sizeof...(N)>& maps, const uint8_t* rows, int64_t P, int K, Sizes<N...>) {
  cudaError_t status = cudaSuccess;
  int i = 0;
  for (int tokens : {N...})
    if (status == cudaSuccess) status = tensor_map_2d(&maps.of[i++], rows, P, row_bytes(K), tokens / 2, 128);
  return status;
}

template <bool UP, bool MAPPED, int W_STAGES, int X_STAGES, typename SIZES> cudaError_t run(const Layer& l, const Workspace& space, cudaStream_t stream) {
  using S = StagesFP8<SIZES::kMost, W_STAGES, X_STAGES>;
  const int64_t N = UP ? l.I : l.N, columns = (UP ? S::kRows / 2 : S::kRows) * S::kBlocks;
  const int K = UP ? l.K : l.I, groups = (int)((N + columns - 1) / columns);
  TensorMap maps[4];
  TokenMaps<SIZES::kCount> tokens;
  cudaError_t status = token_maps(tokens, space.rows, l.pairs(), K, SIZES());
  for (int i = 0; i < (MAPPED ? 4 : 2) && status == cudaSuccess; ++i) {
    const int64_t bytes = i < 2 ? K / 2 : K / 16;
    const uint8_t* from = (i < 2 ? l.codes : l.scale)[!UP] + (UP ? i % 2 * (l.between.interleaved ? 1 : N) * bytes : 0);
    const int64_t pitch = UP && l.between.interleaved ? 2 * bytes : bytes;  // the other rows are skipped
    status = tensor_map_3d(&maps[i], from, {bytes, N, l.E, pitch, (UP ? 2 : 1) * N * bytes}, 1, UP ? S::kRows / 2 : S::kRows, i < 2 ? 128 : 16);
  }
  if (status != cudaSuccess) return status;
  if (!MAPPED) maps[2] = maps[0], maps[3] = maps[1];
  return launch_second(product_fp8<UP, MAPPED, W_STAGES, X_STAGES, SIZES>, dim3(multiprocessors() / S::kBlocks, 1, S::kBlocks), S::kThreads, S::kBytes, S::kBlocks, stream,
                       maps[0], maps[1], maps[2], maps[3], tokens, l.scale[!UP], space.scale, space.routed, l.global_scale[!UP], UP ? space.h : space.out, (int)N, K,
                       groups, l.between);
}

template <bool UP, int W_STAGES, int X_STAGES, typename SIZES> cudaError_t run(const Layer& l, const Workspace& space, cudaStream_t stream) {
  const bool mapped = (UP ? l.K : l.I) % kWideK == 0 && (uintptr_t)l.scale[!UP] % 16 == 0;
  return mapped ? run<UP, true, W_STAGES, X_STAGES, SIZES>(l, space, stream)
                : run<UP, false, W_STAGES, X_STAGES, SIZES>(l, space, stream);
}

// Stages of weights and of half steps of activations; numbers of tokens.
template <int W_STAGES, int X_STAGES, int... N> cudaError_t layer(const Layer& l, void* workspace, int64_t bytes, cudaStream_t stream) {
  using SIZES = Sizes<N...>;
  const Workspace space({(uint8_t*)workspace}, l, SIZES::kMost);
  if (space.bytes > bytes) return cudaErrorInvalidValue;
  const int routing = route_blocks(l.pairs());
  cudaError_t status = launch(route<T>, dim3(1, 1, routing), kRouteThreads, route_bytes(l.E), routing, stream, l.ids, l.map, l.map_size, space.routed, l.pairs(), l.E,
                              SIZES::kMost, nullptr, nullptr, 0, 0);
  if (status == cudaSuccess) status = round_rows_of<false>(l.x, space, l.tokens, l.K, l.top_k, stream);
  if (status == cudaSuccess) status = run<true, W_STAGES, X_STAGES, SIZES>(l, space, stream);
  if (status == cudaSuccess) status = round_rows_of<true>(space.h, space, l.pairs(), l.I, l.top_k, stream);
  if (status == cudaSuccess) status = run<false, W_STAGES, X_STAGES, SIZES>(l, space, stream);
  if (status != cudaSuccess) return status;
  return launch_combine(l, space.out, space.routed, stream);
}

cudaError_t by_tile(int tile, const Layer& l, void* workspace, int64_t bytes, cudaStream_t stream) {
// The most tokens of a tile; stages of weights, and of half steps of activations; smaller numbers of tokens that a tile may have.
#define TILE(most, ...) \
  if (tile == most) return layer<__VA_ARGS__, most>(l, workspace, bytes, stream);
  TILE(64, 6, 8, 32)
  TILE(96, 6, 8, 64, 80)
  TILE(128, 4, 8, 64, 80, 96)
  TILE(192, 3, 6, 96, 128, 144, 160)
  TILE(256, 4, 4, 128, 192)
#undef TILE
  return cudaErrorInvalidConfiguration;
}

}  // namespace

extern "C" int64_t fp4_grouped_wide_fp8_scratch(const MoeParams* call) {
  if (!is_call(call) || call->tile[0] < 1) return 0;
  const Layer l = Layer::of(*call);
  return l.fits() ? Workspace({nullptr}, l, call->tile[0]).bytes : 0;
}

// As fp4_grouped_wide (grouped_wide.cu), whose limits are these, too. tile: one of by_tile's, the most pairs of an expert that are multiplied at a time.
extern "C" int fp4_grouped_wide_fp8(const MoeParams* call) {
  if (!is_call(call)) return cudaErrorInvalidValue;
  const Layer l = Layer::of(*call);
  return l.fits() ? by_tile(call->tile[0], l, call->scratch, call->scratch_bytes, (cudaStream_t)call->stream) : cudaErrorInvalidValue;
}
