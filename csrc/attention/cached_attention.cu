// One decode step of fp4.cached_attention over a cache in 8 or 4 bits, in one launch: norm and rotation of query and key, rounding and append of the new
// tokens, attention to all of them, combination. Memory is what it is to be bound by: codes go from global memory to registers and from there to tensor cores.
//
// A block has the rows of one KV head and a part of the rounded tokens; its warps take tiles of 16 tokens in turn. The next keys are requested when the present
// ones are multiplied, the next values when the present ones are. The last part appends the new tokens and attends to them behind a barrier, and to the exact
// tokens of nvfp4. No part reads what another one writes.
//
// Each warp has a softmax of its own; they meet in shared memory. A part then writes its peak, sum and output to scratch memory and counts itself; the last one
// to arrive reads all of them in the order of their numbers, so that results are the same from run to run, and sets the counter back.
//
// PDL: the call's `early` says that the kernel before writes nothing of the cache and not the counter; the first tiles are then requested before the wait.
#include "append.cuh"
#include "attend.cuh"
#include "combine.cuh"

namespace {

using namespace fp4;
using namespace fp4::attention;

// What all warps know of the rows of the query.
template <typename F> struct alignas(16) Facts {
  float up[16], factor[16], shift[16], mean[F::D];
  int last;
};

// Shared memory: Facts, and behind them the query and its fragments, later the warps' results.
template <typename F> struct Memory {
  static constexpr int kRows = F::ROWS * F::D * 4, kNew = F::kWarps * F::D * 4;  // the query; a row of each warp
  static constexpr int kBytes = sizeof(Facts<F>) + most_of(kRows + kNew + Query<F>::kBytes, Results<F>::kBytes);
};

template <typename T> __device__ __forceinline__ const T* row_of(const void* x, const int64_t (&strides)[3], int sequence, int head, int query) {
  return (const T*)x + sequence * strides[0] + head * strides[1] + query * strides[2];
}

// Rows that warps prepare, in turn: those of the query, then those of new keys, then those of new values.
template <typename F> struct Jobs {
  using T = typename F::T;
  static constexpr int D = F::D, E = Lanes<D>::kEach;
  const AttentionParams& p;
  int sequence, kv_head, group, rows;

  __device__ __forceinline__ int count() const { return rows + 2 * p.queries; }
  __device__ __forceinline__ NewRow<T> row(int job) const {
    if (job < rows) {
      const int query = job / group;
      return {row_of<T>(p.query, p.query_strides, sequence, kv_head * group + job % group, query), p.q_norm, p.cos, p.sin, angles(query)};
    }
    if (job < rows + p.queries) return {row_of<T>(p.key, p.key_strides, sequence, kv_head, job - rows), p.k_norm, p.cos, p.sin, angles(job - rows)};
    return {row_of<T>(p.value, p.value_strides, sequence, kv_head, job - rows - p.queries), nullptr, nullptr, nullptr, 0};
  }
  __device__ __forceinline__ int64_t angles(int query) const { return sequence * p.angle_strides[0] + query * p.angle_strides[1]; }

  // Of the query: its row in `query`, and what makes fragments of it.
  __device__ __forceinline__ void finish_query(int job, const NewRow<T>& row, const Requested<D>& requested, float* query, Facts<F>& s) const {
    const Lanes<D> x = prepared<T, D>(p, row, requested, query + job * D);
    float amax = 0, bad = 0, shift = 0;
#pragma unroll
    for (int i = 0; i < E; ++i) {
      amax = fmaxf(amax, fabsf(x.v[i])), bad = is_finite(x.v[i]) ? bad : 1.f;
      shift += x.v[i] * s.mean[threadIdx.x % 32 * E + i];
    }
    amax = warp_max(amax), shift = warp_sum(shift);
    const bool finite = warp_max(bad) == 0;
    float factor;
    const float up = Query<F>::scale_of(amax, finite, factor);
    if (threadIdx.x % 32 == 0) s.up[job] = up, s.factor[job] = factor * p.scale, s.shift[job] = compares() ? shift * p.scale : 0.f;
  }
  // q . (k + mean) = q . k + q . mean: the second term is the same for all rounded tokens, and matters where something else is compared with their scores.
  __device__ __forceinline__ bool compares() const { return F::kExact || p.softcap > 0 || p.sinks; }

  // Of the new tokens: rounded, and written to the cache.
  __device__ __forceinline__ void finish_new(int job, const NewRow<T>& row, const Requested<D>& requested, int held, const Rows& keys, const Rows& values,
                                             float* buffer, const Facts<F>& s) const {
    const bool is_key = job < rows + p.queries;
    const int at = held + job - rows - (is_key ? 0 : p.queries), slot = slot_of(p, at);
    Lanes<D> x = prepared<T, D>(p, row, requested, buffer);
    if constexpr (F::kExact) {
      T* to = (T*)(is_key ? keys.exact : values.exact) + (int64_t)exact_slot(p, at) * D + threadIdx.x % 32 * E;
#pragma unroll
      for (int i = 0; i < E; ++i) to[i] = from_float<T>(x.v[i]);
    }
    if (is_key) {
#pragma unroll
      for (int i = 0; i < E; ++i) x.v[i] -= s.mean[threadIdx.x % 32 * E + i];
      Rounded<F::kKeys, D>(x).store(keys, slot);
    } else {
      Rounded<F::kValues, D>(x).store(values, slot);
    }
  }

  // The mean of the first keys of a sequence, by warp 0, in one order.
  __device__ __forceinline__ void find_mean(float* buffer, float* key_mean, Facts<F>& s) const {
    float sum[E] = {}, count[E] = {};
    for (int query = 0; query < p.queries; ++query) {
      const NewRow<T> key = row(rows + query);
      Requested<D> requested;
      requested.load(p, key);
      const Lanes<D> x = prepared<T, D>(p, key, requested, buffer);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < E; ++i)
        if (is_finite(x.v[i])) sum[i] += x.v[i], count[i] += 1;
    }
#pragma unroll
    for (int i = 0; i < E; ++i) key_mean[threadIdx.x % 32 * E + i] = s.mean[threadIdx.x % 32 * E + i] = sum[i] / fmaxf(count[i], 1.f);
  }
};

constexpr int kMostOwnParts = 32;

template <typename F>
__global__ void __launch_bounds__(F::kThreads, F::ROWS == 8 && F::D <= 128 ? 2 : 1)
    cached_attention(const __grid_constant__ AttentionParams p, const Parts split) {
  using T = typename F::T;
  constexpr int D = F::D;
  Facts<F>& s = *(Facts<F>*)dynamic_shared();
  uint8_t* memory = dynamic_shared() + sizeof(Facts<F>);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = p.heads / p.kv_heads, rows = group * p.queries;
  bool waits = FP4_ARCH >= 90;
  if (waits && !p.early) pdl_wait_then_trigger(), waits = false;

  // What does not depend on the counter is requested with it.
  float *query = (float*)memory, *buffer = query + F::ROWS * D + warp * D;
  const int of_all = blockIdx.x % (p.batch * p.kv_heads);
  const Jobs<F> jobs{p, of_all / p.kv_heads, of_all % p.kv_heads, group, rows};
  NewRow<T> row = jobs.row(least_of(warp, jobs.count() - 1));
  Requested<D> requested;
  const int64_t position = *(const int64_t*)p.position;
  if (!waits) requested.load(p, row);
  const bool room = position >= 0 && (p.window || position + p.queries <= p.slots);
  const Place at = place_of<F::kExact>(p, split, room ? (int)position : 0);
  if (at.part >= at.parts) return;
  const Rows keys = Rows::of<F::kKeys, D, T>(p.keys, of_all, p.slots, p.exact_slots);
  const Rows values = Rows::of<F::kValues, D, T>(p.values, of_all, p.slots, p.exact_slots);
  const uint8_t* mask = p.mask ? (const uint8_t*)p.mask + at.sequence * p.mask_strides[0] : nullptr;

  constexpr int kStride = kTokens * F::kWarps;
  int next = at.begin + kTokens * warp;
  Keys<F> k;
  Values<F> v;
  if (room && next < at.end) {
    const Tokens tokens = tokens_of(p, next, at.end);
    load(k, keys, tokens), load(v, values, tokens);
  }
  if (waits) pdl_wait_then_trigger(), requested.load(p, row);
  if (!room) {  // nothing is written to the cache
    const float nan = __uint_as_float(0x7FC00000);
    for (int i = threadIdx.x; i < rows * (D / 2); i += F::kThreads) store_pair<T, D>(p, at, i / (D / 2), i % (D / 2), nan, nan);
    return;
  }

  float* key_mean = (float*)p.key_mean + (int64_t)of_all * D;
  if (at.held == 0) {
    if (warp == 0) jobs.find_mean(buffer, key_mean, s);
  } else {
    for (int i = threadIdx.x; i < D; i += F::kThreads) s.mean[i] = key_mean[i];
  }
  for (int i = threadIdx.x; i < (F::ROWS - rows) * D; i += F::kThreads) query[rows * D + i] = 0;
  if (threadIdx.x >= rows && threadIdx.x < F::ROWS) s.up[threadIdx.x] = s.factor[threadIdx.x] = s.shift[threadIdx.x] = 0;
  __syncthreads();
  for (int job = warp; job < (at.last ? jobs.count() : rows); job += F::kWarps) {
    if (job != warp) row = jobs.row(job), requested.load(p, row);
    if (job < rows)
      jobs.finish_query(job, row, requested, query, s);
    else
      jobs.finish_new(job, row, requested, at.held, keys, values, buffer, s);
    __syncwarp();
  }
  if (!FP4_FAULT(FRAGMENTS_BEFORE_THE_QUERY)) __syncthreads();
  uint8_t* fragments = memory + Memory<F>::kRows + Memory<F>::kNew;
  Query<F>::fill(fragments, query, s.up);
  __syncthreads();
  Rest<F> rest;
#pragma unroll
  for (int tile = 0; tile < F::kTiles; ++tile) {
    const int of = 8 * tile + lane / 4;
    rest.factor[tile] = s.factor[of], rest.shift[tile] = s.shift[of], rest.position[tile] = at.held + of / group;
  }

  auto fragment = [&](int i) { return ((const uint4*)fragments)[i * 32 + lane]; };
  State<F> state;
  state.reset();
  float weights[F::kTiles][4];
  while (next < at.end) {
    const int now = next;
    next += kStride;
    const Tokens tokens = tokens_of(p, next, at.end);
    score<F>(weights, k, fragment);
    const Shrink<F::kTiles> shrink = attends_to_all<F>(p, at, mask, now, at.end) ? weigh<F, true>(state, weights, k, v.scale, p, rest, mask, now, at.end)
                                                                                 : weigh<F, false>(state, weights, k, v.scale, p, rest, mask, now, at.end);
    state.apply(shrink);
    if (next < at.end) load(k, keys, tokens);
    state.add_values(v, weights);
    if (next < at.end) load(v, values, tokens);
  }
  if (at.last) {
    const int turn = F::kWarps - 1 - warp;  // the last warps have the fewest tiles
    if constexpr (F::kExact) {
      for (int first = kTokens * turn; first < kFirst + kLast + p.queries - 1; first += kStride)
        attend_exact<F>(state, p, at, keys, values, fragments, rest, mask, first);
    } else if (turn == 0) {  // the new tokens, at most 16
      const int end = at.held + p.queries;
      const Tokens tokens = tokens_of(p, at.held, end);
      load(k, keys, tokens), load(v, values, tokens);
      score<F>(weights, k, fragment);
      state.apply(weigh<F, false>(state, weights, k, v.scale, p, rest, mask, at.held, end));
      state.add_values(v, weights);
    }
  }

  // The warps' results meet, in place of the query.
  if (!FP4_FAULT(RESULTS_OVER_THE_QUERY)) __syncthreads();
  const Results<F> results{(float*)memory};
  results.put(state);
  __syncthreads();
  const Scratch<F> scratch = Scratch<F>::of(p, split.most);
  merge_warps<F>(p, at, results, scratch);
  if (at.parts == 1) return;

  // The last part to arrive reads all of them.
  __syncthreads();
  if (threadIdx.x == 0) s.last = count_arrival((int*)p.arrivals + at.of_all) == at.parts - 1;
  __syncthreads();
  if (!s.last) return;
  combine_parts<F>(p, at, scratch);
  if (threadIdx.x == 0 && !FP4_FAULT(COUNTER_NOT_SET_BACK)) ((int*)p.arrivals)[at.of_all] = 0;
}

// --- host ---------------------------------------------------------------------------------------------------------------------------------------------------

// One block a multiprocessor until parts have three tiles for every warp, then up to two: fewer and longer parts prepare fewer queries and have less to combine
// (sweep on an H100, batch 1 and 8, 520 to 32768 positions). Blocks without a part are not free, so a cache that never needs the second ones does not get them:
// 11.9 for 13.4 us at 4096 positions.
Parts parts_of(const AttentionParams& p) {
  const int tile = kTokens * (p.D > 128 ? 4 : 8), enough = 3 * tile;
  if (p.tile[0] > 0) return {p.tile[0], p.tile[0], tile, enough};
  const int length = p.window ? p.window : p.slots, programs = p.batch * p.kv_heads, longest = (length + tile - 1) / tile;
  auto blocks_each = [&](int n) { return most_of(1, least_of(least_of(n * multiprocessors() / programs, longest), kMostOwnParts)); };
  const Parts parts{blocks_each(2), blocks_each(1), tile, enough};
  return parts.tokens(length, parts.alone) <= enough ? Parts{parts.alone, parts.alone, tile, enough} : parts;
}

template <typename F> cudaError_t run(const AttentionParams& p) {
  const Parts parts = parts_of(p);
  const cudaError_t status = prefer_shared_memory(cached_attention<F>);  // else blocks of the products around this kernel would not begin beside it
  if (status != cudaSuccess) return status;
  const Stream stream((cudaStream_t)p.stream, FP4_ARCH >= 90);
  return fp4::launch(cached_attention<F>, dim3(p.batch * p.kv_heads * parts.most), F::kThreads, Memory<F>::kBytes, 1, stream, p, parts);
}

template <typename T, Kind KEYS, Kind VALUES> cudaError_t by_shape(const AttentionParams& p) {
  const bool few = p.heads / p.kv_heads * p.queries <= 8;
#define SHAPE(d) \
  if (p.D == d) return few ? run<Form<T, KEYS, VALUES, d, 8>>(p) : run<Form<T, KEYS, VALUES, d, 16>>(p);
  SHAPE(64) SHAPE(128) SHAPE(256)
#undef SHAPE
  return cudaErrorInvalidValue;
}

bool fits(const AttentionParams& p) {
  if (!is_call(&p) || p.batch < 1 || p.kv_heads < 1 || p.heads < p.kv_heads || p.heads % p.kv_heads || p.queries < 1 || p.slots < 1) return false;
  if (p.heads / p.kv_heads * p.queries > kMostRows || p.tile[0] < 0 || p.tile[0] > kMostParts || (int64_t)p.slots * p.D >= (int64_t)1 << 31) return false;
  if (scratch_rows(p, kMostParts) >= (int64_t)1 << 31) return false;
  return p.format >= 0 && p.format <= 2 && (p.format != 2 || p.exact_slots > kFirst) && (!p.rotary || (p.angles > 0 && p.rotary <= p.D && p.rotary % 2 == 0));
}

}  // namespace

extern "C" int64_t fp4_cached_attention_scratch(const AttentionParams* call) {
  if (!call || !fits(*call)) return 0;
  const int parts = parts_of(*call).most;
  return parts > 1 ? scratch_rows(*call, parts) * (call->D + 2) * 4 : 0;
}

// Returns a cudaError_t. D is 64, 128 or 256; heads / kv_heads * queries at most 16; codes, scales and exact tokens contiguous and 16-byte aligned; a ring
// (window > 0) keeps, besides the new tokens, those of the window of the first of them, and exact_slots the last 63 before it.
extern "C" int fp4_cached_attention(const AttentionParams* call) {
  if (!call || !fits(*call)) return cudaErrorInvalidValue;
  const int parts = parts_of(*call).most;
  if (parts > 1 && (!call->arrivals || call->scratch_bytes < scratch_rows(*call, parts) * (call->D + 2) * 4)) return cudaErrorInvalidValue;
  return by_dtype(call->dtype, [&](auto zero) {
    using T = decltype(zero);
    return call->format == 0 ? by_shape<T, kFP8, kFP8>(*call) : call->format == 1 ? by_shape<T, kINT8, kNVFP4>(*call) : by_shape<T, kNVFP4, kNVFP4>(*call);
  });
}
