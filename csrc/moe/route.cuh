// What an MoE layer does besides its products: pairs of token and choice sorted by expert, activations arranged as wgmma takes them (each token's once, or
// those of every pair gathered), and each token's weighted sum. Nothing is read back by the host, and nothing depends on the order in which threads run.
#pragma once
#include "../gemm/wide.cuh"
#include "layer.cuh"

namespace fp4 {

constexpr int kRouteThreads = 512, kRouteBlocks = 8;

// A call's scratch memory, from which arrays are taken one behind the other, each from a multiple of 16 bytes on. `at` may be null: only `bytes`, how many are
// taken, counts then.
struct Scratch {
  uint8_t* at;
  int64_t bytes = 0;

  template <typename A> A* take(int64_t count) {
    A* const array = (A*)((uintptr_t)at + bytes);
    bytes += (count * (int64_t)sizeof(A) + 15) / 16 * 16;
    return array;
  }
};

// What route() writes to global memory.
struct Routed {
  int *order, *place;  // [P] pairs in the order of their experts; its inverse, -1 for a pair without one
  int4* tiles;         // [total] {expert, place of its first pair, its pairs, its first tile}
  int* total;

  static Routed of(Scratch& scratch, int64_t tiles, int64_t pairs) {
    Routed r;
    r.tiles = scratch.take<int4>(tiles), r.order = scratch.take<int>(pairs), r.place = scratch.take<int>(pairs), r.total = scratch.take<int>(1);
    return r;
  }
};

// Activations as wgmma takes them: [M / TOKENS][steps] of kActivations bytes, zeros beyond M and K. A step is four tiles of 64 k, 128 bytes a
// token each. Lane t of a quad decodes k = 64 t .. 64 t + 63 of a step, eight words of eight codes; a tile holds two words of all four lanes.
//
// Of a step of a token's row of K, the eight k from 8 * word on of each lane of a quad: four of the 16-byte chunks that the step's tiles, at `to`, hold of the token.
// NEIGHBOURS: in the pairs of decode_by_table(), else in those of decode().
template <typename T, int TOKENS, bool NEIGHBOURS>
__device__ __forceinline__ void arrange_word(const T* row, bool live, int K, int step, int word, int token, uint8_t* to) {
  uint32_t p[4][4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int k = step * kWideK + 64 * t + 8 * word;
    const uint4 v = live && k < K ? *(const uint4*)(row + k) : make_uint4(0, 0, 0, 0);
    if (NEIGHBOURS && !FP4_FAULT(X_IN_DECODE_ORDER))
      p[t][0] = v.x, p[t][1] = v.y, p[t][2] = v.z, p[t][3] = v.w;
    else
      pair_up(v, p[t]);
  }
  to += word / 2 * (TOKENS * 128) + token * 128;
  // Pair c of the four lanes makes 16 bytes: lane t's first pair of a k-block of 16 is k 2t, 2t + 1 of it, its second pair those + 8.
#pragma unroll
  for (int c = 0; c < 4; ++c) *(uint4*)(to + ((word % 2 * 4 + c) ^ (token & 7)) * 16) = make_uint4(p[0][c], p[1][c], p[2][c], p[3][c]);
}

// x [M, K], each token's steps one behind the other as a tile of one token (kActivations) holds them: product()'s GATHERED takes them from there.
template <typename T, bool NEIGHBOURS> __device__ __forceinline__ void arrange_tokens(const T* x, uint8_t* to, int M, int K, int first, int threads) {
  const int steps = (K + kWideK - 1) / kWideK, words = M * steps * 8;
#pragma unroll 2
  for (int i = first; i < words; i += threads) {
    const int word = i % 8, unit = i / 8, step = unit % steps, m = unit / steps;
    arrange_word<T, 1, NEIGHBOURS>(x + (size_t)m * K, true, K, step, word, 0, to + (size_t)unit * kActivations<1>);
  }
}

// Up to kFewPairs pairs, by one block. A pair's place is the number of pairs with a smaller key: the number of its expert, then its own.
constexpr int kFewPairs = 256;
__device__ __forceinline__ void route_few(const Ids& ids, const Ids& map, int map_size, const Routed& to, int P, int E, int tokens) {
  constexpr uint32_t kNone = ~0u;
  constexpr int kWarps = kFewPairs / 32;
  uint32_t *keys = (uint32_t*)dynamic_shared(), *sorted = keys + kFewPairs;
  int *ends = (int*)(sorted + kFewPairs), *sums = ends + kWarps;
  const int pair = threadIdx.x / 2, half = threadIdx.x % 2, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int expert = pair < P ? expert_of(ids, map, map_size, pair, E) : -1;
  const uint32_t key = expert < 0 ? kNone : (uint32_t)(expert << 16 | pair);
  if (half == 0) keys[pair] = key, sorted[pair] = kNone;
  __syncthreads();
  int place = 0;
#pragma unroll 4
  for (int i = half; i < (P + 3) / 4; i += 2) {
    const uint4 other = ((const uint4*)keys)[i];
    place += (other.x < key) + (other.y < key) + (other.z < key) + (other.w < key);
  }
  place += __float_as_int(shuffle_xor(__int_as_float(place), 1));
  if (half == 0 && pair < P) {
    to.place[pair] = expert < 0 ? -1 : place;
    if (expert >= 0) sorted[place] = key, to.order[place] = pair;
  }
  if (!FP4_FAULT(SKIP_BARRIER_BEFORE_SORTED)) __syncthreads();

  // A thread has a place. Where an expert begins, or nothing more comes, the expert before ends.
  const int at = threadIdx.x;
  const uint32_t mine = at < kFewPairs ? sorted[at] : kNone;
  const bool begins = mine != kNone && (at == 0 || sorted[at - 1] >> 16 != mine >> 16);
  const uint32_t bounds = lanes_where(begins || mine == kNone), above = bounds & (FP4_FAULT(AN_EXPERT_OF_ONE) ? ~0u : ~0u << lane << 1);
  if (lane == 0 && warp < kWarps) ends[warp] = bounds ? 32 * warp + __ffs(bounds) - 1 : kFewPairs;
  __syncthreads();
  int end = above ? 32 * warp + __ffs(above) - 1 : kFewPairs;
  if (!above)
    for (int w = kWarps - 1; w > warp; --w) end = min(end, ends[w]);
  const int pairs = begins ? end - at : 0, tiles = (pairs + tokens - 1) / tokens;
  int before = tiles;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int other = shuffle_up(before, by);
    if (lane >= by) before += other;
  }
  if (lane == 31 && warp < kWarps) sums[warp] = before;
  __syncthreads();
  if (warp >= kWarps) return;
  for (int w = 0; w < warp; ++w) before += sums[w];
  if (at == kFewPairs - 1) *to.total = before;
  const int4 entry = make_int4((int)(mine >> 16), at, pairs, before - tiles);
  for (int i = 0; i < tiles; ++i) to.tiles[entry.w + i] = entry;
}

// The first cluster; blocks behind it, if there are any, arrange tokens. A warp owns a stretch of pairs and counts its experts in an array of its own; sums
// over warps, blocks and experts say where each begins.
//
// PDL: the kernel behind it in the call, which reads nothing before its own wait, may begin before this one waits.
template <typename T, bool NEIGHBOURS = false>
__global__ void __launch_bounds__(kRouteThreads)
    route(const Ids ids, const Ids map, int map_size, const Routed to, int P, int E, int tokens, const T* __restrict__ x, uint8_t* __restrict__ arranged, int M, int K) {
  pdl_trigger_in_call();
  griddepcontrol_wait();
  const int blocks = cluster_size(), rank = cluster_rank();
  if (blockIdx.z >= blocks)
    return arrange_tokens<T, NEIGHBOURS>(x, arranged, M, K, (blockIdx.z - blocks) * kRouteThreads + threadIdx.x, (gridDim.z - blocks) * kRouteThreads);
  if (P <= kFewPairs) return route_few(ids, map, map_size, to, P, E, tokens);
  constexpr int kWarps = kRouteThreads / 32, kAhead = 8;
  int* counts = (int*)dynamic_shared();  // [kWarps][E]
  int *totals = counts + kWarps * E, *starts = totals + E, *sums = starts + 4 * E;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warp_of_all = rank * kWarps + warp;
  int* mine = counts + warp * E;
  for (int e = lane; e < E; e += 32) mine[e] = 0;
  __syncwarp();
  const int stretch = ((P + 31) / 32 + blocks * kWarps - 1) / (blocks * kWarps) * 32, first = warp_of_all * stretch, last = min(first + stretch, P);
  for (int i = first + lane; i - lane < last; i += 32 * kAhead) {
    int e[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) e[j] = i + 32 * j < last ? expert_of(ids, map, map_size, i + 32 * j, E) : -1;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (i - lane + 32 * j >= last) break;
      const uint32_t same = match_any(e[j]);
      const int before = __popc(same & ((1u << lane) - 1)), at = e[j] >= 0 ? mine[e[j]] : 0;
      __syncwarp();
      if (e[j] >= 0 && before == 0) mine[e[j]] = at + __popc(same);
      if (i + 32 * j < last) to.place[i + 32 * j] = e[j] < 0 ? -1 : e[j] << 16 | (at + before);  // among the warp's pairs of this expert: at most 2^13
      __syncwarp();
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < E; e += kRouteThreads) {
    int n[kWarps], sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) n[w] = counts[w * E + e];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) counts[w * E + e] = sum, sum += n[w];
    totals[e] = sum;
  }
  if (!FP4_FAULT(SKIP_CLUSTER_BARRIER_BEFORE_SUMS)) cluster_sync();
  // A thread has two neighbouring experts: of each, pairs, those of blocks before this one, and tiles.
  int pairs[2] = {}, before[2] = {}, tiles[2] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int e = 2 * threadIdx.x + h;
    if (e >= E) continue;
    int n[kRouteBlocks];
#pragma unroll
    for (int r = 0; r < kRouteBlocks; ++r) n[r] = r < blocks ? *map_to_rank(totals + e, r) : 0;
#pragma unroll
    for (int r = 0; r < kRouteBlocks; ++r) pairs[h] += n[r], before[h] += r < rank ? n[r] : 0;
    tiles[h] = (pairs[h] + tokens - 1) / tokens;
  }
  int all_pairs = pairs[0] + pairs[1], all_tiles = tiles[0] + tiles[1];
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int p = shuffle_up(all_pairs, by), t = shuffle_up(all_tiles, by);
    if (lane >= by) all_pairs += p, all_tiles += t;
  }
  if (lane == 31) sums[warp] = all_pairs, sums[kWarps + warp] = all_tiles;
  __syncthreads();
  for (int w = 0; w < warp; ++w) all_pairs += sums[w], all_tiles += sums[kWarps + w];
  all_pairs -= pairs[0] + pairs[1], all_tiles -= tiles[0] + tiles[1];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int e = 2 * threadIdx.x + h;
    if (e < E) starts[e] = all_pairs + (FP4_FAULT(PAIRS_BEGIN_ELSEWHERE) ? e > 1 : FP4_FAULT(BLOCKS_BEGIN_ALIKE) ? 0 : before[h]), starts[E + e] = all_pairs, starts[2 * E + e] = pairs[h], starts[3 * E + e] = all_tiles;
    all_pairs += pairs[h], all_tiles += tiles[h];
  }
  if (rank == 0 && threadIdx.x == kRouteThreads - 1) *to.total = all_tiles;
  __syncthreads();
  for (int e = warp_of_all; e < E; e += blocks * kWarps) {
    const int4 entry = make_int4(e, starts[E + e], starts[2 * E + e], starts[3 * E + e]);
    for (int i = lane; i < (entry.z + tokens - 1) / tokens; i += 32) to.tiles[entry.w + i] = entry;
  }
  for (int i = first + lane; i < last; i += 32 * kAhead) {
    int v[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) v[j] = i + 32 * j < last ? to.place[i + 32 * j] : -1;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (v[j] < 0) continue;
      const int e = v[j] >> 16, at = starts[e] + (FP4_FAULT(WARPS_BEGIN_ALIKE) ? 0 : mine[e]) + (v[j] & 0xFFFF);
      to.place[i + 32 * j] = at;
      to.order[at] = i + 32 * j;
    }
  }
  cluster_sync();  // others may still read this block's sums
}

// Blocks that share the routing of P pairs, and bytes of shared memory of each.
constexpr int route_blocks(int P) { return P > 1024 ? kRouteBlocks : 1; }
constexpr int route_bytes(int E) { return at_least(((kRouteThreads / 32 + 5) * E + 2 * (kRouteThreads / 32)) * 4, 2 * 4 * kFewPairs + 2 * 4 * (kFewPairs / 32)); }

// x [., K] of the pairs of each tile, as kActivations says, zeros beyond its pairs and K.
template <typename T, int TOKENS, bool NEIGHBOURS>
__global__ void __launch_bounds__(256) gather(const T* __restrict__ x, uint8_t* __restrict__ to, const Routed routed, int top_k, int K) {
  pdl_trigger_in_call();
  pdl_wait_in_call();
  const int steps = (K + kWideK - 1) / kWideK, words = __ldcg(routed.total) * steps * (TOKENS * 8);
#pragma unroll 2
  for (int i = blockIdx.x * 256 + threadIdx.x; i < words; i += gridDim.x * 256) {
    const int word = i % 8, token = i / 8 % TOKENS, unit = i / (TOKENS * 8), step = unit % steps, tile = unit / steps;
    const int4 of = __ldcg(routed.tiles + tile);
    const int row = (tile - of.w) * TOKENS + token;
    const bool live = row < of.z;
    const T* from = x + (size_t)(live ? __ldcg(routed.order + of.y + row) / top_k : 0) * K;
    arrange_word<T, TOKENS, NEIGHBOURS>(from, live, K, step, word, token, to + (size_t)unit * kActivations<TOKENS>);
  }
}

// y[token, n] = sum over its choices, in order, of weight * out[place]. A thread has eight n, and loads of so many choices on their way; N is a multiple of 8.
__global__ void __launch_bounds__(128, 8) combine(const __nv_bfloat16* __restrict__ out, const int* __restrict__ place, const Factors weights,
                                               __nv_bfloat16* __restrict__ y, int top_k, int N) {
  constexpr int kAhead = 8;
  const int n = (blockIdx.y * 128 + threadIdx.x) * 8, token = blockIdx.x;
  float sum[8] = {};
#pragma unroll 1
  for (int first = 0; first < top_k; first += kAhead) {
    const int pair = token * top_k + first, count = min(kAhead, top_k - FP4_FAULT(LEAVE_OUT_A_CHOICE) - first);
    int at[kAhead];
    float weight[kAhead];
    uint4 v[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) at[j] = j < count ? __ldcg(place + pair + j) : -1;
    weights.take(weight, pair, count);
    if (first == 0) pdl_wait_in_call();  // the routing is done when the kernel before this one begins
#pragma unroll
    for (int j = 0; j < kAhead; ++j) v[j] = load_or_zero(out + (size_t)max(at[j], 0) * N + n, at[j] >= 0 && n < N);
    __syncwarp();  // ptxas would have one load at a time in flight
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const uint32_t words[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
      const float by = at[j] >= 0 ? weight[j] : 0.f;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 two = *(const __nv_bfloat162*)&words[i];
        sum[2 * i] += by * __bfloat162float(two.x), sum[2 * i + 1] += by * __bfloat162float(two.y);
      }
    }
  }
  __nv_bfloat162 v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
  if (n < N) *(uint4*)(y + (size_t)token * N + n) = *(const uint4*)v;
}

inline cudaError_t launch_combine(const Layer& l, const __nv_bfloat16* out, const Routed& routed, cudaStream_t stream) {
  return launch_second(combine, dim3(l.tokens, (l.N + 1023) / 1024), 128, 0, 1, stream, out, routed.place, l.weights, l.y, l.top_k, l.N);
}

}  // namespace fp4
