// One KV head of one sequence by the blocks of a cluster: shapes, and how their softmaxes become one. What paged_attention.cu and step_attention.cu share.
//
// The warps of all blocks take tiles of 16 tokens in turn. Each warp has a softmax of its own; they meet in the shared memory of their block. Each block then
// writes its result, in parts, to the shared memory of the blocks that make these parts of the answer: no scratch memory, no counters, one barrier of the
// cluster, the same bits from run to run.
#pragma once
#include "append.cuh"
#include "combine.cuh"

namespace fp4::attention {

constexpr int kMostBlocks = 16;  // of a cluster

// Results of blocks, as other blocks send them: of a unit, 32 neighbouring pairs of channels of a row, one (peak, sum) and an output for each pair. Unit u is made
// an answer of by block u % blocks.
template <typename F> struct Exchange {
  static constexpr int kPairs = F::D / 2, kUnitsOfRow = kPairs / 32, kMostUnits = F::ROWS * kUnitsOfRow + kMostBlocks;  // each block has a whole number of them
  static constexpr int kBytes = kMostUnits * 33 * 8;
  float2 *output, *stats;

  static __device__ __forceinline__ Exchange of(uint8_t* memory) { return {(float2*)memory, (float2*)memory + kMostUnits * 32}; }
};

// Shared memory: tiles, or in their place the results of the warps; what other blocks send lies behind them, for these may be ahead.
template <typename F, int TILES> struct ClusterMemory {
  static constexpr int kExchange = (most_of(Results<F>::kBytes, TILES) + 15) / 16 * 16, kBytes = kExchange + Exchange<F>::kBytes;
};

template <int COUNT> __device__ __forceinline__ void add_results(const float2 (&of)[COUNT], const float2 (&y)[COUNT], float2& stat, float2& out) {
  stat = {kNone, 0}, out = {0, 0};
#pragma unroll
  for (int i = 0; i < COUNT; ++i) stat.x = fmaxf(stat.x, of[i].x);
  const float reference = stat.x == kNone ? 0.f : stat.x;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const float weight = exp2_approx(of[i].x - reference);
    stat.y += of[i].y * weight, out.x += y[i].x * weight, out.y += y[i].y * weight;
  }
}

// channels(pair): the first of the two channels of this pair.
template <typename F, typename Params, typename Channels>
__device__ __forceinline__ void store_answer(const Params& p, int sequence, int head, int pair, float2 stat, float2 out, const Channels& channels) {
  float shrink = 1;
  if (p.sinks) {  // it has a share and no value
    const float sink = AnyNumbers{p.sinks, p.sinks_type}[head] * 1.4426950408889634f, higher = fmaxf(stat.x, sink);
    shrink = exp2_approx(stat.x - higher), stat.y = stat.y * shrink + exp2_approx(sink - higher);
  }
  const float by = stat.y == 0 ? 0.f : shrink / stat.y;
  typename F::T* y = (typename F::T*)p.y + ((int64_t)sequence * p.heads + head) * F::D + channels(pair);
  *(uint32_t*)y = pack<typename F::T>(out.x * by, out.y * by);
}

// Every block of the cluster calls it once, before it does anything else: others may write to its shared memory once all have.
__device__ __forceinline__ void begin_cluster() { cluster_arrive(); }

// The answer of the first kWarps warps of every block of the cluster; all threads call it. No copy to the tiles is in flight.
template <typename F, typename Params, typename Channels>
__device__ __forceinline__ void combine_cluster(const Params& p, const State<F>& state, int exchange_at, int sequence, int kv_head, const Channels& channels) {
  using X = Exchange<F>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = p.heads / p.kv_heads, blocks = cluster_size(), rank = cluster_rank();
  const int units = group * X::kUnitsOfRow, each = (units + blocks - 1) / blocks;
  const X exchange = X::of(dynamic_shared() + exchange_at);
  const Results<F> warps{(float*)dynamic_shared()};
  __syncthreads();
  if (warp < F::kWarps) warps.put(state);
  __syncthreads();
  cluster_wait();
  for (int unit = warp; unit < units && warp < F::kWarps; unit += F::kWarps) {
    const int row = unit / X::kUnitsOfRow, pair = unit % X::kUnitsOfRow * 32 + lane;
    float2 of[F::kWarps], y[F::kWarps], stat, out;
#pragma unroll
    for (int w = 0; w < F::kWarps; ++w) of[w] = warps.stats(w, row), y[w] = warps.output(w, row)[pair];
    add_results(of, y, stat, out);
    if (blocks == 1) {
      store_answer<F>(p, sequence, kv_head * group + row, pair, stat, out, channels);
    } else {
      const int to = rank * each + unit / blocks, by = unit % blocks;
      map_to_rank(exchange.output, by)[to * 32 + lane] = out;
      if (lane == 0) map_to_rank(exchange.stats, by)[to] = stat;
    }
  }
  if (blocks == 1) return;
  cluster_sync();
  for (int i = warp; i < each && warp < F::kWarps; i += F::kWarps) {
    const int unit = i * blocks + rank;
    if (unit >= units) return;
    float2 of[kMostBlocks], y[kMostBlocks], stat, out;
#pragma unroll
    for (int r = 0; r < kMostBlocks; ++r) {
      const bool there = r < blocks;
      of[r] = there ? exchange.stats[r * each + i] : float2{kNone, 0};
      y[r] = there ? exchange.output[(r * each + i) * 32 + lane] : float2{0, 0};
    }
    add_results(of, y, stat, out);
    store_answer<F>(p, sequence, kv_head * group + unit / X::kUnitsOfRow, unit % X::kUnitsOfRow * 32 + lane, stat, out, channels);
  }
}

// --- host ---------------------------------------------------------------------------------------------------------------------------------------------------

inline bool are_blocks(int blocks) { return blocks >= 1 && blocks <= kMostBlocks && !(blocks & (blocks - 1)); }

// F: what the kernel is a template of.
template <typename F, typename Params> cudaError_t launch_clusters(void (*kernel)(Params), const Params& p, int blocks, int bytes) {
  const cudaError_t status = first_error({prefer_shared_memory(kernel), blocks > 8 ? allow_large_clusters(kernel) : cudaSuccess});
  if (status != cudaSuccess) return status;
  return fp4::launch(kernel, dim3(p.batch * p.kv_heads, 1, blocks), F::kThreads, bytes, blocks, {(cudaStream_t)p.stream, true}, p);
}

}  // namespace fp4::attention
