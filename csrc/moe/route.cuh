// What an MoE layer does besides its products: pairs of token and choice sorted by expert, their activations gathered as wgmma takes them,
// and each token's weighted sum. Nothing is read back by the host, and nothing depends on the order in which threads run.
#pragma once
#include "../gemm/wide.cuh"

namespace fp4 {

constexpr int kRouteThreads = 512, kMostExperts = 1024;

// [n] of int32 or int64.
struct Ids {
  const void* at;
  int wide;
  __device__ __forceinline__ int64_t operator[](int i) const { return wide ? __ldg((const long long*)at + i) : __ldg((const int*)at + i); }
};
// The router's weights: bfloat16, float16 or float32 (0, 1, 2).
struct Factors {
  const void* at;
  int type;
  __device__ __forceinline__ float operator[](int i) const {
    return type == 0 ? __bfloat162float(((const __nv_bfloat16*)at)[i]) : type == 1 ? __half2float(((const __half*)at)[i]) : __ldg((const float*)at + i);
  }
};

// Global memory that a call is given.
struct Routed {
  int *order, *place;  // [P] pairs in the order of their experts; its inverse, -1 for a pair without one
  int4* tiles;         // [total] {expert, place of its first pair, its pairs, its first tile}
  int* total;
};

// The local expert of pair i, or -1. `map`: global id -> local id, of map_size; none where it is null.
__device__ __forceinline__ int expert_of(const Ids& ids, const Ids& map, int map_size, int i, int E) {
  int64_t id = ids[i];
  if (map.at) id = id >= 0 && id < map_size ? map[(int)id] : -1;
  return id >= 0 && id < E ? (int)id : -1;
}

// One block. A warp owns a stretch of pairs and counts its experts in an array of its own; sums over warps and experts say where each begins.
__global__ void __launch_bounds__(kRouteThreads) route(const Ids ids, const Ids map, int map_size, const Routed to, int P, int E, int tokens) {
  let_second_begin();
  constexpr int kWarps = kRouteThreads / 32, kAhead = 4;
  int* counts = (int*)dynamic_shared();  // [kWarps][E]
  int *starts = counts + kWarps * E, *sums = starts + 3 * E;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  int* mine = counts + warp * E;
  for (int e = lane; e < E; e += 32) mine[e] = 0;
  __syncwarp();
  const int stretch = ((P + 31) / 32 + kWarps - 1) / kWarps * 32, first = warp * stretch, last = min(first + stretch, P);
  for (int i = first; i < last; i += 32 * kAhead) {
    int e[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) e[j] = i + 32 * j + lane < last ? expert_of(ids, map, map_size, i + 32 * j + lane, E) : -1;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const uint32_t same = lanes_with(e[j]);
      const int before = __popc(same & ((1u << lane) - 1)), at = e[j] >= 0 ? mine[e[j]] : 0;
      __syncwarp();
      if (e[j] >= 0 && before == 0) mine[e[j]] = at + __popc(same);
      if (i + 32 * j + lane < last) to.place[i + 32 * j + lane] = at + before;  // among the warp's pairs of this expert
      __syncwarp();
    }
  }
  __syncthreads();
  // A thread has two neighbouring experts: of each, pairs and tiles.
  int pairs[2] = {}, tiles[2] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int e = 2 * threadIdx.x + h;
    if (e < E)
      for (int w = 0; w < kWarps; ++w) {
        const int n = counts[w * E + e];
        counts[w * E + e] = pairs[h];
        pairs[h] += n;
      }
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
    if (e < E) starts[e] = all_pairs, starts[E + e] = pairs[h], starts[2 * E + e] = all_tiles;
    all_pairs += pairs[h], all_tiles += tiles[h];
  }
  if (threadIdx.x == kRouteThreads - 1) *to.total = all_tiles;
  __syncthreads();
  for (int e = warp; e < E; e += kWarps) {
    const int4 entry = make_int4(e, starts[e], starts[E + e], starts[2 * E + e]);
    for (int i = lane; i < (entry.z + tokens - 1) / tokens; i += 32) to.tiles[entry.w + i] = entry;
  }
#pragma unroll 4
  for (int i = first + lane; i < last; i += 32) {
    const int e = expert_of(ids, map, map_size, i, E), at = e < 0 ? -1 : starts[e] + mine[e] + to.place[i];
    to.place[i] = at;
    if (e >= 0) to.order[at] = i;
  }
}

// Bytes of route()'s shared memory.
constexpr int route_bytes(int E) { return ((kRouteThreads / 32 + 3) * E + 2 * (kRouteThreads / 32)) * 4; }

// x [., K] of the pairs of each tile, as kActivations says, zeros beyond its pairs and K.
template <typename T, int TOKENS>
__global__ void __launch_bounds__(256) gather(const T* __restrict__ x, uint8_t* __restrict__ to, const Routed routed, int top_k, int K) {
  let_second_begin();
  wait_for_first();
  const int steps = (K + kWideK - 1) / kWideK, words = __ldcg(routed.total) * steps * (TOKENS * 8);
#pragma unroll 2
  for (int i = blockIdx.x * 256 + threadIdx.x; i < words; i += gridDim.x * 256) {
    const int word = i % 8, token = i / 8 % TOKENS, unit = i / (TOKENS * 8), step = unit % steps, tile = unit / steps;
    const int4 of = __ldcg(routed.tiles + tile);
    const int row = (tile - of.w) * TOKENS + token;
    const bool live = row < of.z;
    const T* from = x + (size_t)(live ? __ldcg(routed.order + of.y + row) / top_k : 0) * K;
    uint32_t p[4][4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int k = step * kWideK + 64 * t + 8 * word;
      pair_up(live && k < K ? load_read_only(from + k) : make_uint4(0, 0, 0, 0), p[t]);
    }
    uint8_t* place = to + (size_t)unit * kActivations<TOKENS> + word / 2 * (TOKENS * 128) + token * 128;
#pragma unroll
    for (int c = 0; c < 4; ++c) *(uint4*)(place + ((word % 2 * 4 + c) ^ (token & 7)) * 16) = make_uint4(p[0][c], p[1][c], p[2][c], p[3][c]);
  }
}

// y[token, n] = sum over its choices, in order, of weight * out[place]. A thread has eight n; N is a multiple of 8.
__global__ void __launch_bounds__(128) combine(const __nv_bfloat16* __restrict__ out, const int* __restrict__ place, const Factors weights,
                                               __nv_bfloat16* __restrict__ y, int top_k, int N) {
  const int n = (blockIdx.y * 128 + threadIdx.x) * 8, token = blockIdx.x;
  float sum[8] = {};
  wait_for_first();
  if (n >= N) return;
#pragma unroll 4
  for (int j = 0; j < top_k; ++j) {
    const int pair = token * top_k + j, at = __ldcg(place + pair);
    if (at < 0) continue;
    const float weight = weights[pair];
    const uint4 v = __ldcg((const uint4*)(out + (size_t)at * N + n));
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 two = *(const __nv_bfloat162*)&words[i];
      sum[2 * i] += weight * __bfloat162float(two.x), sum[2 * i + 1] += weight * __bfloat162float(two.y);
    }
  }
  __nv_bfloat162 v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
  *(uint4*)(y + (size_t)token * N + n) = *(const uint4*)v;
}

}  // namespace fp4
