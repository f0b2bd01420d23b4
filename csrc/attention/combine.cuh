// Results of softmaxes over parts of the tokens become one: those of the warps of a block in shared memory, those of the blocks of a KV head in scratch memory.
//
// A result is a peak, a sum and an output for each row; the output is kept in pairs of channels, in the order in which lanes have them.
#pragma once
#include "attend.cuh"

namespace fp4::attention {

// The channels of pair i of a row of results: those that lane g has in product m, m * 8 + g.
template <int D> __device__ __forceinline__ int channel_of_pair(int i) { return i % 8 * (D / 8) + i / 8 * 2; }

template <typename T, int D> __device__ __forceinline__ void store_pair(const AttentionParams& p, const Place& at, int row, int pair, float low, float high) {
  const int group = p.heads / p.kv_heads, head = at.kv_head * group + row % group;
  T* y = (T*)p.y + (((int64_t)at.sequence * p.queries + row / group) * p.heads + head) * D + channel_of_pair<D>(pair);
  *(uint32_t*)y = pack<T>(low, high);
}

// With a sink, which has a share and no value: (sum, what outputs are multiplied by) for a peak and a sum.
__device__ __forceinline__ float2 shared_with_sink(const AttentionParams& p, const Place& at, int row, float peak, float total) {
  float shrink = 1;
  if (p.sinks) {
    const int group = p.heads / p.kv_heads;
    const float sink = AnyNumbers{p.sinks, p.sinks_type}[at.kv_head * group + row % group] * 1.4426950408889634f, higher = fmaxf(peak, sink);
    shrink = exp2_approx(peak - higher), total = total * shrink + exp2_approx(sink - higher);
  }
  return {total, total == 0 ? 0.f : shrink / total};
}

// Of the warps of a block, in shared memory.
template <typename F> struct Results {
  static constexpr int kRow = F::D + 4;  // floats of a row's output, padded so that lanes write to different banks
  static constexpr int kBytes = F::kWarps * F::ROWS * (kRow + 2) * 4;
  float* memory;

  __device__ __forceinline__ float2* output(int warp, int row) const { return (float2*)(memory + (warp * F::ROWS + row) * kRow); }
  // (peak, sum)
  __device__ __forceinline__ float2& stats(int warp, int row) const { return ((float2*)(memory + F::kWarps * F::ROWS * kRow))[warp * F::ROWS + row]; }

  __device__ __forceinline__ void put(const State<F>& state) const {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < F::kTiles; ++tile) {
      float total = state.total[tile];
      total += shuffle_xor(total, 1), total += shuffle_xor(total, 2);
      if (t == 0) stats(warp, 8 * tile + g) = {state.peak[tile], total};
      float2 *first = output(warp, 8 * tile + 2 * t), *second = output(warp, 8 * tile + 2 * t + 1);
#pragma unroll
      for (int m = 0; m < F::D / 16; ++m) {
        first[m * 8 + g] = {state.out[m][tile][0], state.out[m][tile][2]};
        second[m * 8 + g] = {state.out[m][tile][1], state.out[m][tile][3]};
      }
    }
  }
};

// Rows of all parts of all KV heads: as many (peak, sum) lie in scratch memory, then as many outputs.
__host__ __device__ __forceinline__ int64_t scratch_rows(const AttentionParams& p, int parts) {
  return (int64_t)p.batch * p.kv_heads * parts * (p.heads / p.kv_heads * p.queries);
}

template <typename F> struct Scratch {
  float2 *stats, *out;
  int parts, rows;  // at most, of a KV head; of a part

  static __device__ __forceinline__ Scratch of(const AttentionParams& p, int parts) {
    float2* stats = (float2*)p.scratch;
    return {stats, stats + scratch_rows(p, parts), parts, p.heads / p.kv_heads * p.queries};
  }
  // 32 bits, for there are no registers left.
  __device__ __forceinline__ int row(const Place& at, int part, int row) const { return (at.of_all * parts + part) * rows + row; }
};

// The result of this part: the answer where it is the only one, else to scratch memory.
template <typename F>
__device__ __forceinline__ void merge_warps(const AttentionParams& p, const Place& at, const Results<F>& results, const Scratch<F>& scratch) {
  constexpr int kPairs = F::D / 2;
  for (int i = threadIdx.x; i < scratch.rows * kPairs; i += F::kThreads) {
    const int row = i / kPairs, pair = i % kPairs;
    float peak = kNone, total = 0;
#pragma unroll
    for (int w = 0; w < F::kWarps; ++w) peak = fmaxf(peak, results.stats(w, row).x);
    const float reference = peak == kNone ? 0.f : peak;
    float2 out = {0, 0};
#pragma unroll
    for (int w = 0; w < F::kWarps; ++w) {
      const float2 of = results.stats(w, row), y = results.output(w, row)[pair];
      const float weight = exp2_approx(of.x - reference);
      total += of.y * weight, out.x += y.x * weight, out.y += y.y * weight;
    }
    if (at.parts == 1) {
      const float2 with = shared_with_sink(p, at, row, peak, total);
      store_pair<typename F::T, F::D>(p, at, row, pair, out.x * with.y, out.y * with.y);
    } else {
      const int to = scratch.row(at, at.part, row);
      if (pair == 0) __stcg(scratch.stats + to, float2{peak, total});
      __stcg(scratch.out + (int64_t)to * kPairs + pair, out);
    }
  }
}

// The answer from the results of all parts, kTogether of them at once.
template <typename F> __device__ __forceinline__ void combine_parts(const AttentionParams& p, const Place& at, const Scratch<F>& scratch) {
  constexpr int kPairs = F::D / 2, kTogether = 8;
  for (int i = threadIdx.x; i < scratch.rows * kPairs; i += F::kThreads) {
    const int row = i / kPairs, pair = i % kPairs;
    float peak = kNone, total = 0;
    float2 out = {0, 0};
    for (int first = 0; first < at.parts; first += kTogether) {
      float2 of[kTogether], y[kTogether];
      float higher = peak;
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int there = scratch.row(at, least_of(first + j, at.parts - 1), row);
        of[j] = __ldcg(scratch.stats + there), y[j] = __ldcg(scratch.out + (int64_t)there * kPairs + pair);
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) higher = fmaxf(higher, of[j].x);
      const float reference = higher == kNone ? 0.f : higher, shrink = exp2_approx(peak - reference);
      total *= shrink, out.x *= shrink, out.y *= shrink, peak = higher;
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const float weight = exp2_approx(of[j].x - reference);
        if (first + j < at.parts) total += of[j].y * weight, out.x += y[j].x * weight, out.y += y[j].y * weight;
      }
    }
    const float2 with = shared_with_sink(p, at, row, peak, total);
    store_pair<typename F::T, F::D>(p, at, row, pair, out.x * with.y, out.y * with.y);
  }
}

}  // namespace fp4::attention
