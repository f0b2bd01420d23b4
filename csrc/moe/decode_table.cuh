// The two products of an MoE layer for up to eight tokens on sm_90, dense or 2:4-sparse, by the steps of gemm/table.cuh and sparse/table.cuh.
//
// The eight columns of an MMA are the tokens of the call, whether they are routed to the expert or not. So no token is gathered, and the weights of an expert
// are decoded once. Each block makes its own list of the distinct experts of the call.
//
// The turns of the warps that fetch and of those that share K are those of gemm/table.cuh. The kernels are not multiply_table(): a dense product has one tile a
// block and K alone to walk along, here the first product has items and a double buffer of sums between them, the second one walks along all experts' K.
#pragma once
#include "../sparse/table.cuh"
#include "layer.cuh"

namespace fp4 {

// kHelpers: warps that do not multiply. A thread that fetches needs more time for a step than the other warps need to multiply it, whatever the step's size. So
// in the first kernel two warps take turns at fetching, while kFinishers others finish the sums; in the second kernel up to four take turns.
constexpr int kTableTokens = 8, kTableStages = 32, kHelpers = 4, kFinishers = 2;

// Bytes that a step brings of a row of W.
//
// SHIFTED: a row of scales is no multiple of 16 bytes, as a tensor map asks for, but four rows are. The map takes four rows of scales for one. Of each of the
// four a copy brings the two chunks of 16 bytes in which its 16 scales lie; in a stage, rows with the same place among four lie one behind the other. Beyond K
// a copy brings scales of the next row, which are multiplied by codes that are zeros.
template <bool SPARSE, bool SHIFTED> struct Parts {
  static constexpr int kCodes = SPARSE ? 64 : 128, kMeta = SPARSE ? 32 : 0, kScales = SHIFTED ? 32 : 16, kBytes = kCodes + kMeta + kScales;
};

// How the rows of a block, 16 * sets, and K are shared by its warps, and what lies where in shared memory.
template <bool SPARSE, bool SHIFTED> struct TableLayout : Parts<SPARSE, SHIFTED> {
  using P = Parts<SPARSE, SHIFTED>;
  int sets, sets_a_warp, k_groups, stages, fetchers, early;  // early: stages of weights that are fetched before the first activations
  int held;  // up: rows of a tile of x, 64 k of 1, 4 or 8 tokens
  int x_bytes, tokens, pairs;

  __host__ __device__ int x_step() const { return held == 1 ? 1024 : held * 512; }  // a tile of 128 bytes a row begins at a multiple of 1024
  __host__ __device__ int rows() const { return 16 * sets; }
  __host__ __device__ int row_warps() const { return sets / sets_a_warp; }
  __host__ __device__ int warps() const { return row_warps() * k_groups; }
  __host__ __device__ int codes() const { return kPairTable + x_bytes; }
  __host__ __device__ int meta() const { return codes() + stages * rows() * P::kCodes; }
  __host__ __device__ int scales() const { return meta() + stages * rows() * P::kMeta; }
  __host__ __device__ int zeros() const { return scales() + stages * rows() * P::kScales; }
  __host__ __device__ int mbarriers() const { return zeros() + 512; }
  __host__ __device__ int routed() const { return mbarriers() + 16 * stages + 48; }
  __host__ __device__ int factors() const { return routed() + 16 * ((pairs * 12 + 4 + 15) / 16); }
  __host__ __device__ int sums() const { return factors() + 16 * ((pairs * (kTableTokens + kUnits) * 4 + 15) / 16); }  // up
  __host__ __device__ int sums_bytes() const { return k_groups * tokens * (rows() + 4) * 4; }
  int bytes(bool up) const { return up ? sums() + 2 * sums_bytes() : factors(); }
};

// list: the distinct experts of a call, in the order of their first assignments, each with a mask of its tokens. expert: that of each (token, expert)
// assignment, or -1.
struct Distinct {
  int2* list;  // [pairs]
  int *expert, *count;

  __device__ __forceinline__ Distinct(uint8_t* at, int pairs) : list((int2*)at), expert((int*)at + 2 * pairs), count(expert + pairs) {}

  // By one warp.
  __device__ __forceinline__ void find(const Ids& ids, const Ids& map, int map_size, int tokens, int top_k, int E) const {
    const int lane = threadIdx.x & 31, pairs = tokens * top_k;
    int found = 0;
    for (int first = 0; first < pairs; first += 32) {
      const int i = first + lane, e = i < pairs ? expert_of(ids, map, map_size, i, E) : -1;
      if (i < pairs) expert[i] = e;
      const uint32_t same = match_any(e);
      int of = 0, at = -1;
      for (int m = first / top_k; m < tokens && m * top_k < first + 32; ++m) {
        const int begin = max(m * top_k - first, 0), count = min((m + 1) * top_k - first, 32) - begin;
        if (same & ((count < 32 ? 1u << count : 0u) - 1) << begin) of |= 1 << m;
      }
      for (int j = 0; j < found; ++j)
        if (list[j].x == e) at = j;
      const uint32_t before = (1u << lane) - 1;
      const bool speaks = e >= 0 && !(same & before), adds = speaks && at < 0;
      const uint32_t alike = match_any(adds), adding = adds ? alike : ~alike;
      __syncwarp();
      if (adds)
        list[found + __popc(adding & before)] = make_int2(e, of);
      else if (speaks)
        list[at].y |= FP4_FAULT(EARLIER_EXPERT_NOT_FOUND) ? 0 : of;
      found += __popc(adding);
      __syncwarp();
    }
    if (lane == 0) *count = found;
    __syncwarp();
  }
};

// What both kernels are given of the routing.
struct Routing {
  Ids ids, map;
  Factors weights;
  int map_size, tokens, top_k, E;
};

// How a warp multiplies its part of a step. The lane's rows are row + kNext * r + high * h of the stage. interleaved: scales lie in the order of W, where gate
// and up alternate.
template <bool SPARSE, bool SHIFTED, bool UP, int R> struct Step {
  using P = Parts<SPARSE, SHIFTED>;
  static constexpr int kNext = UP ? 8 : 16;
  int row, high, rows, codes, meta, scales[2], next_scales;

  __device__ __forceinline__ Step(const TableLayout<SPARSE, SHIFTED>& layout, int row_warp, int lane, int scale_row, bool interleaved)
      : row(row_warp * (kNext * R) + lane / 4), high(UP ? 8 * layout.sets : 8), rows(layout.rows()), next_scales(SHIFTED && UP && !interleaved ? 64 : SHIFTED ? 128 : 16 * kNext) {
    if (SPARSE) row ^= (row & 2) << 1;  // half a warp has rows 0, 1, 6, 7 or 2 to 5 of eight, whose chunks, and those four further on, lie in different banks
    const int p = lane >> 1 & 1;
    codes = layout.codes() + row * P::kCodes + (SPARSE ? place_of<64>(2 * p, row & 7) * 16 : 0);
    meta = layout.meta() + row * 32 + place_of<32>(0, row & 7) * 16 + 8 * p;
    for (int h = 0; h < 2; ++h) {
      const int at = interleaved ? 2 * row + h : row + h * high;
      const int shifted = at % 4 * rows * 8 + at / 4 * 32 + (FP4_FAULT(SCALES_BEGIN_ALIGNED) ? 0 : at % 4 * scale_row % 16) + 4 * (lane & 3);
      scales[h] = layout.scales() + (SHIFTED ? shifted : at * 16 + (SPARSE ? 8 * p : 4 * (lane & 3)));
    }
  }
  // x: where the activations lie. Dense: the 64 k of the lane's token, whose chunks are swizzled by `token`; sparse: as multiply_sparse_by_table() takes them.
  __device__ __forceinline__ void operator()(float (&acc)[R][1][4], uint8_t* shared, int stage, int x, int token, int next, int flip, int lane) const {
    const int behind = stage * rows;
    if constexpr (SPARSE) {
      multiply_sparse_by_table<__nv_bfloat16, 2, kNext>(acc, shared, codes + behind * P::kCodes, meta + behind * P::kMeta, shared + scales[0] + behind * P::kScales, high, x,
                                                        next, flip, lane);
    } else {
      auto scales_of = [&](int r, int h) {  // chunk c of four rows i lies at place c ^ i / 4 % 2
        const int at = scales[h] + behind * P::kScales + next_scales * r;
        return shared + (SHIFTED && !FP4_FAULT(SKIP_SCALES_SWIZZLE) ? at ^ (at >> 3 & 16) : at);
      };
      multiply_by_table<__nv_bfloat16, kNext>(acc, shared_address(shared), shared + codes + behind * P::kCodes, scales_of, high, shared + x, token, lane);
    }
  }
};

// One thread calls it: fetches the weights of step k to stage `at`.
template <bool SPARSE, bool SHIFTED>
__device__ __forceinline__ void fetch_weights(const TableLayout<SPARSE, SHIFTED>& layout, uint8_t* shared, const TensorMap& codes, const TensorMap& metadata, const TensorMap& scales,
                                              int k, int row, int plane, int scales_row, int scales_plane, int scale_row, int at, Shared mbarrier) {
  using P = Parts<SPARSE, SHIFTED>;
  const Shared base = shared_address(shared);
  const int of_stage = at * layout.rows();
  tma_load_3d(base + layout.codes() + of_stage * P::kCodes, codes, k * P::kCodes, row, plane, mbarrier);
  if (SPARSE) tma_load_3d(base + layout.meta() + of_stage * P::kMeta, metadata, k * P::kMeta, row, plane, mbarrier);
  const Shared to = base + layout.scales() + of_stage * P::kScales;
#pragma unroll
  for (int i = 0; i < (SHIFTED ? 4 : 1); ++i)
    tma_load_3d(to + i * layout.rows() * 8, scales, SHIFTED ? k * 16 + i * scale_row / 16 * 16 : k * 16, scales_row, scales_plane, mbarrier);
}

// The first product. It writes h = act(gate) * up, times the router's weight and the global scale of down, for the tokens of each listed expert.
//
// h lies as the second kernel takes it: [place in the list][token][step] of 512 bytes. A step is four tiles of 64 k, in which the 16-byte chunk c lies at c ^
// token; beyond I it is zero. A block works on items, 8 * sets outputs of one expert; a lane's two rows are gate and up of the same output.
template <bool SPARSE, bool SHIFTED, int R>
__global__ void __launch_bounds__(32 * (kMostWarps + kHelpers), 1)
    table_up(const __grid_constant__ TensorMap codes, const __grid_constant__ TensorMap metadata, const __grid_constant__ TensorMap scales, const __grid_constant__ TensorMap activations,
             const TableLayout<SPARSE, SHIFTED> layout, const Routing routing, const float* __restrict__ global_scale, const float* __restrict__ down_scale,
             uint8_t* __restrict__ h, int I, int K, const Between between) {
  using T = __nv_bfloat16;
  uint8_t* shared = dynamic_shared();
  const int warp = uniform(threadIdx.x >> 5), lane = threadIdx.x & 31, threads = 32 * layout.warps(), steps = (K + kWideK - 1) / kWideK, outputs = 8 * layout.sets,
            groups = I / outputs, tokens = layout.tokens, top_k = routing.top_k;
  const Shared full = shared_address(shared + layout.mbarriers()), free = full + 8 * layout.stages;
  const Shared sums_full = free + 8 * layout.stages, sums_free = sums_full + 16, x_full = sums_free + 16;
  const Distinct distinct(shared + layout.routed(), layout.pairs);

  pdl_trigger_in_call();
  if (warp == layout.warps()) {
    if (lane == 0) {
      for (int i = 0; i < 2; ++i) mbarrier_init(sums_full + 8 * i, layout.warps()), mbarrier_init(sums_free + 8 * i, kFinishers);
      mbarrier_init(x_full, 1);
      init_ring(full, free, layout.stages, layout.row_warps());
      prefetch_tensor_map(codes);
      prefetch_tensor_map(scales);
      if (SPARSE) prefetch_tensor_map(metadata);
      prefetch_tensor_map(activations);
    }
    distinct.find(routing.ids, routing.map, routing.map_size, tokens, top_k, routing.E);
  } else if (warp < layout.warps()) {
    fill_pairs<T, true>(shared, threadIdx.x, threads);
  }
  __syncthreads();
  const int count = *distinct.count, items = count * groups, pitch = layout.rows() + 4, pairs = outputs / 2;
  float* sums = (float*)(shared + layout.sums());  // two of [k_groups][tokens][pitch]

  if (warp >= layout.warps() && warp < layout.warps() + layout.fetchers) {
    const int fetcher = warp - layout.warps();
    if (lane == 0) {
      int item = blockIdx.x, k = fetcher, row = 0, expert = 0, known = -1;
      const int mine = (max(items - item, 0) + gridDim.x - 1) / gridDim.x;
      fetch_steps(
          mine * steps, layout.stages, 0, free,
          [&](int, int at) {
            for (; k >= steps; k -= steps) item += gridDim.x;
            if (item != known) expert = distinct.list[item / groups].x, row = item % groups * outputs, known = item;
            const Shared mbarrier = full + 8 * at;
            mbarrier_arrive_expect_tx(mbarrier, layout.rows() * layout.kBytes);
            const bool turns = between.interleaved;
            const int n = turns ? expert * I + row : row, plane = turns ? 0 : 2 * expert;
            fetch_weights(layout, shared, codes, metadata, scales, k, n, plane, !SHIFTED ? n : turns ? n / 2 : n / 4, plane, K / 16, at, mbarrier);
            k += layout.fetchers;
          },
          [](int, int) {}, fetcher, layout.fetchers);
    }
    return;
  }

  if (warp >= layout.warps() + layout.fetchers) {
    const int thread = threadIdx.x - threads - 32 * layout.fetchers, steps_down = (I + kWideK - 1) / kWideK;
    if (thread >= 32 * kFinishers) return;
    if (thread == 0 && (int)blockIdx.x < items) {
      mbarrier_arrive_expect_tx(x_full, steps * layout.held * 512);
      for (int k = 0; k < steps; ++k) tma_load_3d(shared_address(shared + kPairTable) + k * layout.x_step(), activations, 0, 0, k * 4, x_full);
    }
    float *factors = (float*)(shared + layout.factors()), *units = factors + layout.pairs * kTableTokens;  // factors: [expert of the list][token]; units: global scales of gate_up
    for (int i = thread; i < count * kTableTokens; i += 32 * kFinishers) {
      const int m = i % kTableTokens;
      const int2 of = distinct.list[i / kTableTokens];
      if (m == 0 || (kSeveralScales && m == 1)) units[i / kTableTokens * kUnits + m] = load_float(global_scale + of.x * kUnits + m) * kWeightUnit;
      if (!(of.y >> m & 1)) continue;
      float sum = 0.f;
      for (int j = 0; j < top_k; ++j)
        if (distinct.expert[m * top_k + j] == of.x) {
          float weight[1];
          routing.weights.take(weight, m * top_k + j, 1);
          sum += weight[0];
        }
      factors[i] = sum * (load_float(down_scale + of.x) * kWeightUnit);
    }
    named_barrier_sync(1, 32 * kFinishers);
    int buffer = 0, parity = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const int slot = item / groups, n0 = item % groups * outputs, column = thread % pairs * 2, n = n0 + column;
      const int2 of = distinct.list[slot];
      float bias[2][2] = {};  // of outputs n and n + 1; loaded while the sums are computed
      if (between.bias)
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) bias[i][half] = __bfloat162float(between.bias[(size_t)of.x * (2 * I) + between.row(n + i, half, I)]);
      if (!FP4_FAULT(SKIP_SUMS_WAIT)) mbarrier_wait_parity(sums_full + 8 * buffer, parity);
      const float* from_all = sums + buffer * (layout.sums_bytes() / 4) + column;
      for (int j = thread / pairs; j < __popc(of.y); j += 32 * kFinishers / pairs) {
        int rest = of.y;
        for (int i = 0; i < j; ++i) rest &= rest - 1;
        const int m = __ffs(rest) - 1;
        float2 gate{0.f, 0.f}, up{0.f, 0.f};
#pragma unroll 4
        for (int kg = 0; kg < layout.k_groups; ++kg) {
          const float* from = from_all + (kg * tokens + m) * pitch;
          const float2 a = *(const float2*)from, b = *(const float2*)(from + outputs);
          gate.x += a.x, gate.y += a.y, up.x += b.x, up.y += b.y;
        }
        const float unit = units[slot * kUnits], up_unit = kSeveralScales ? units[slot * kUnits + kUnits - 1] : unit, factor = factors[slot * kTableTokens + m];
        uint8_t* to = h + (size_t)(slot * tokens + m) * steps_down * 512;
        auto place = [&](int n) { return to + n / kWideK * 512 + n / 64 % 4 * 128 + ((n / 8 % 8) ^ m) * 16 + n % 8 * 2; };
        *(__nv_bfloat162*)place(n) = __floats2bfloat162_rn(between(fmaf(gate.x, unit, bias[0][0]), fmaf(up.x, up_unit, bias[0][1])) * factor,
                                                           between(fmaf(gate.y, unit, bias[1][0]), fmaf(up.y, up_unit, bias[1][1])) * factor);
        if (n0 + outputs == I && !FP4_FAULT(H_PAST_I_NOT_CLEARED))
          for (int behind = I + column / 2 * 8; behind < steps_down * kWideK; behind += pairs * 8) *(uint4*)place(behind) = uint4{};
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(sums_free + 8 * buffer);
      buffer ^= 1;
      if (buffer == 0) parity ^= 1;
    }
    return;
  }

  const int row_warp = warp % layout.row_warps(), k_group = warp / layout.row_warps(), t = lane & 3, held = layout.held, zero = layout.sets_a_warp - R;
  const Step<SPARSE, SHIFTED, true, R> multiply(layout, row_warp, lane, K / 16, SHIFTED && between.interleaved);
  // The lane's row of x for the first 64 k of a step: its token's in the tile of lane t of a quad, or the row that ldmatrix_x4() asks for.
  const int x_row = SPARSE ? 2 * (lane >> 3 & 1) * held + min(lane & 7, held - 1) : t * held + min(lane >> 2, held - 1);
  int step = k_group, at = k_group, parity = 0, buffer = 0, filled = 0;
  if ((int)blockIdx.x < items && !FP4_FAULT(SKIP_TOKENS_WAIT)) mbarrier_wait_parity(x_full, 0);
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    float acc[R][1][4] = {};
    for (; step < steps; step += layout.k_groups) {
      if (!FP4_FAULT(SKIP_FULL_WAIT)) mbarrier_wait_parity(full + 8 * at, parity);
      const int row = x_row + step * (layout.x_step() / 128);
      if constexpr (SPARSE)
        multiply(acc, shared, at, kPairTable + row * 128 + ((lane >> 4 ^ row) & 7) * 16, 0, held * 128, (held & 7) * 16, lane);
      else
        multiply(acc, shared, at, kPairTable + row * 128, row & 7, 0, 0, lane);
      give_back(free + 8 * at, bits_of(acc), zero, lane);
      at += layout.k_groups;
      if (at >= layout.stages) at -= layout.stages, parity ^= 1;
    }
    step -= steps;
    if (!FP4_FAULT(SKIP_SUMS_FREE_WAIT)) mbarrier_wait_parity(sums_free + 8 * buffer, filled ^ 1);
    float* mine = sums + buffer * (layout.sums_bytes() / 4) + k_group * tokens * pitch + multiply.row;
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (2 * t + (c & 1) < tokens) mine[(2 * t + (c & 1)) * pitch + 8 * r + outputs * (c >> 1)] = acc[r][0][c];
    __syncwarp();
    if (lane == 0) mbarrier_arrive(sums_full + 8 * buffer);
    buffer ^= 1;
    if (buffer == 0) filled ^= 1;
  }
}

// The second product: y[token, n] = sum of h * W[expert] over the list, plus biases. All experts' steps are one long product, at which the `splits` blocks of a
// cluster take turns.
template <bool SPARSE, bool SHIFTED, int R>
__global__ void __launch_bounds__(32 * (kMostWarps + kHelpers), 1)
    table_down(const __grid_constant__ TensorMap codes, const __grid_constant__ TensorMap metadata, const __grid_constant__ TensorMap scales,
               const TableLayout<SPARSE, SHIFTED> layout, const Routing routing, const uint8_t* __restrict__ h, const __nv_bfloat16* __restrict__ biases,
               __nv_bfloat16* __restrict__ y, int N, int K) {
  using T = __nv_bfloat16;
  uint8_t* shared = dynamic_shared();
  const int warp = uniform(threadIdx.x >> 5), lane = threadIdx.x & 31, threads = 32 * layout.warps(), steps = (K + kWideK - 1) / kWideK, rows = layout.rows(),
            tokens = layout.tokens, top_k = routing.top_k, splits = cluster_size(), rank = cluster_rank();
  // The last block begins earlier, so that it does not read past N. It does not store the rows that it shares with the block before.
  const int n0 = min((int)blockIdx.x * rows, N - rows);
  const Shared full = shared_address(shared + layout.mbarriers()), free = full + 8 * layout.stages;
  const Distinct distinct(shared + layout.routed(), layout.pairs);

  if (warp == layout.warps()) {
    if (lane == 0) {
      init_ring(full, free, layout.stages, layout.row_warps());
      prefetch_tensor_map(codes);
      prefetch_tensor_map(scales);
      if (SPARSE) prefetch_tensor_map(metadata);
    }
    distinct.find(routing.ids, routing.map, routing.map_size, tokens, top_k, routing.E);
  } else if (warp < layout.warps()) {
    fill_pairs<T, true>(shared, threadIdx.x, threads);
    for (int i = threadIdx.x; i < 32; i += threads) *(uint4*)(shared + layout.zeros() + 16 * i) = uint4{};
  }
  __syncthreads();
  const int all = *distinct.count * steps, mine = (max(all - rank, 0) + splits - 1) / splits;

  struct Cursor {
    int place, step;
    __device__ __forceinline__ void advance(int by, int steps) {
      for (step += by; step >= steps; step -= steps) ++place;
    }
  };
  Cursor begin{0, 0};
  begin.advance(rank, steps);

  if (warp >= layout.warps()) {
    const int fetcher = warp - layout.warps(), stride = splits * layout.fetchers;
    if (lane == 0 && fetcher < layout.fetchers) {
      Cursor weights = begin;
      weights.advance(splits * fetcher, steps);
      Cursor tiles = weights;
      fetch_steps(
          mine, layout.stages, layout.early, free,
          [&](int, int at) {
            const Shared mbarrier = full + 8 * at;
            const int2 of = distinct.list[weights.place];
            mbarrier_arrive_expect_tx(mbarrier, rows * layout.kBytes + __popc(of.y) * 512);
            fetch_weights(layout, shared, codes, metadata, scales, weights.step, n0, of.x, SHIFTED ? n0 / 4 : n0, of.x, K / 16, at, mbarrier);
            weights.advance(stride, steps);
          },
          [&](int, int at) {
            const Shared to = shared_address(shared + kPairTable) + at * (tokens * 512);
            const uint8_t* from = h + ((size_t)tiles.place * tokens * steps + tiles.step) * 512;
            for (int rest = distinct.list[tiles.place].y; rest; rest &= rest - 1) {
              const int m = __ffs(rest) - 1;
              cp_async_bulk(to + m * 512, from + m * (steps * 512), 512, full + 8 * at);
            }
            tiles.advance(stride, steps);
          },
          fetcher, layout.fetchers);
    }
    if (splits > 1) {
      __syncwarp();
      cluster_sync();
      cluster_sync();
    }
    return;
  }

  const int row_warp = warp % layout.row_warps(), k_group = warp / layout.row_warps(), t = lane & 3, g = lane >> 2, token = SPARSE ? lane & 7 : g;
  // A thread stores two columns of a token. Their biases are loaded while the sums are computed.
  const int slice = rows / splits, m = (int)threadIdx.x / (slice / 2), column = rank * slice + (int)threadIdx.x % (slice / 2) * 2, n = n0 + column;
  const bool stores = m < tokens && n >= (int)blockIdx.x * rows;
  float bias[2] = {};
  if (stores && biases)
    for (int j = 0; j < top_k; ++j) {
      const int e = distinct.expert[m * top_k + j];
      if (e < 0) continue;
      float weight[1];
      routing.weights.take(weight, m * top_k + j, 1);
      const __nv_bfloat162 two = *(const __nv_bfloat162*)(biases + (size_t)e * N + n);
      bias[0] += weight[0] * __bfloat162float(two.x), bias[1] += weight[0] * __bfloat162float(two.y);
    }

  const Step<SPARSE, SHIFTED, false, R> multiply(layout, row_warp, lane, K / 16, false);
  const int x_at = SPARSE ? (lane >> 3 & 1) * 256 + ((lane >> 4) ^ token) * 16 : t * 128;
  float acc[R][1][4] = {};
  Cursor cursor = begin;
  cursor.advance(splits * k_group, steps);
  take_turns(mine, layout.stages, layout.k_groups, k_group, full, free, lane, layout.sets_a_warp - R, [&](int stage) {
    const bool routed = distinct.list[cursor.place].y >> token & 1;
    const int x = (routed || FP4_FAULT(EVERY_TOKEN_IS_ROUTED) ? kPairTable + (stage * tokens + token) * 512 : layout.zeros()) + x_at;
    multiply(acc, shared, stage, x, token, 128, 0, lane);
    cursor.advance(splits * layout.k_groups, steps);
    return bits_of(acc);
  });

  named_barrier_sync(1, threads);  // nobody reads the ring any more
  const int pitch = rows + 4;
  float* sums = (float*)(shared + kPairTable);  // [k_groups][tokens][pitch]
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (2 * t + (c & 1) < tokens) sums[(k_group * tokens + 2 * t + (c & 1)) * pitch + multiply.row + 16 * r + 8 * (c >> 1)] = acc[r][0][c];
  if (splits > 1)
    cluster_sync();
  else
    named_barrier_sync(1, threads);
  if (stores) {
    float v[2] = {bias[0], bias[1]};
    for (int b = 0; b < splits; ++b) {
      const float* from = (splits > 1 ? map_to_rank(sums, b) : sums) + m * pitch + column;
#pragma unroll 8
      for (int kg = 0; kg < layout.k_groups; ++kg) {
        const float2 part = *(const float2*)(from + kg * tokens * pitch);
        v[0] += part.x, v[1] += part.y;
      }
    }
    *(__nv_bfloat162*)(y + (size_t)m * N + n) = __floats2bfloat162_rn(v[0], v[1]);
  }
  if (splits > 1) cluster_sync();  // nobody leaves while its sums are being read
}

}  // namespace fp4
