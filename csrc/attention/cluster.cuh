// One KV head of one sequence by the blocks of a cluster: shapes, and how their softmaxes become one. What step.cuh is built on.
//
// The warps of all blocks take tiles of 16 tokens in turn. Each warp has a softmax of its own; they meet in the shared memory of their block. Each block then
// writes its result, in parts, to the shared memory of the blocks that make these parts of the answer: no scratch memory, no counters, no barrier, the same
// bits from run to run.
#pragma once
#include "../sm90/ptx.cuh"
#include "append.cuh"
#include "combine.cuh"

namespace fp4::attention {

constexpr int kMostBlocks = 16;  // of a cluster

// Results of blocks, as other blocks send them: of a unit, 32 neighbouring pairs of channels of a row, one (peak, sum) and an output for each pair. Unit u is
// made an answer of by block u % blocks. An mbarrier counts their bytes. Other blocks may be ahead, so nothing else lies there. A barrier of the cluster
// would first wait until the block's own writes to memory are there, and while the next kernel fetches its weights, that is several microseconds.
template <typename F> struct Exchange {
  static constexpr int kPairs = F::D / 2, kUnitsOfRow = kPairs / 32, kMostUnits = F::ROWS * kUnitsOfRow + kMostBlocks;  // each block has a whole number of them
  static constexpr int kStats = kMostUnits * 32 * 8, kMbarrier = kStats + kMostUnits * 8, kBytes = kMbarrier + 16;
  uint8_t* memory;

  __device__ __forceinline__ float2* outputs() const { return (float2*)memory; }
  __device__ __forceinline__ float2* stats() const { return (float2*)(memory + kStats); }
  __device__ __forceinline__ Shared mbarrier() const { return shared_address(memory + kMbarrier); }

  static __device__ __forceinline__ int units(int group) { return group * kUnitsOfRow; }
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

template <typename F> __device__ __forceinline__ void store_answer(const AttentionParams& p, int sequence, int head, int pair, float2 stat, float2 out) {
  float shrink = 1;
  if (p.sinks) {  // it has a share and no value
    const float sink = AnyNumbers{p.sinks, p.sinks_type}[head] * 1.4426950408889634f, higher = fmaxf(stat.x, sink);
    shrink = exp2_approx(stat.x - higher), stat.y = stat.y * shrink + exp2_approx(sink - higher);
  }
  const float by = stat.y == 0 ? 0.f : shrink / stat.y;
  typename F::T* y = (typename F::T*)p.y + ((int64_t)sequence * p.heads + head) * F::D + channel_of_pair<F::D>(pair);
  *(uint32_t*)y = pack<typename F::T>(out.x * by, out.y * by);
}

// Every block of the cluster calls it once, before it does anything else, and cluster_wait() before combine_cluster(): then all have begun, and others may write
// to its shared memory. group: rows of the query.
template <typename F> __device__ __forceinline__ void begin_cluster(const Exchange<F>& exchange, int group) {
  const int blocks = cluster_size(), units = Exchange<F>::units(group), rank = cluster_rank();
  if (blocks > 1 && threadIdx.x == 0) {
    mbarrier_init(exchange.mbarrier(), 1), fence_mbarrier_init();
    mbarrier_arrive_expect_tx(exchange.mbarrier(), (units - rank + blocks - 1) / blocks * blocks * 33 * 8);
  }
  cluster_arrive();
}

// The answer of the first kWarps warps of every block of the cluster; all threads call it. No copy to the tiles is in flight. memory: for the warps' results.
template <typename F>
__device__ __forceinline__ void combine_cluster(const AttentionParams& p, const State<F>& state, const Exchange<F>& exchange, uint8_t* memory, int sequence,
                                                int kv_head) {
  using X = Exchange<F>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = p.heads / p.kv_heads, blocks = cluster_size(), rank = cluster_rank();
  const int units = X::units(group), each = (units + blocks - 1) / blocks;
  const Results<F> warps{(float*)memory};
  __syncthreads();
  if (warp < F::kWarps) warps.put(state);
  __syncthreads();
  for (int unit = warp; unit < units && warp < F::kWarps; unit += F::kWarps) {
    const int row = unit / X::kUnitsOfRow, pair = unit % X::kUnitsOfRow * 32 + lane;
    float2 of[F::kWarps], y[F::kWarps], stat, out;
#pragma unroll
    for (int w = 0; w < F::kWarps; ++w) of[w] = warps.stats(w, row), y[w] = warps.output(w, row)[pair];
    add_results(of, y, stat, out);
    if (blocks == 1) {
      store_answer<F>(p, sequence, kv_head * group + row, pair, stat, out);
    } else {
      const int to = rank * each + unit / blocks, by = unit % blocks;
      st_async(shared_address(exchange.outputs() + to * 32 + lane), out, exchange.mbarrier(), by);
      if (lane == 0) st_async(shared_address(exchange.stats() + to), stat, exchange.mbarrier(), by);
    }
  }
  if (blocks == 1) return;
  for (int i = warp; i < each && warp < F::kWarps; i += F::kWarps) {
    const int unit = i * blocks + rank;
    if (unit >= units) return;
    mbarrier_wait_parity(exchange.mbarrier(), 0);
    float2 of[kMostBlocks], y[kMostBlocks], stat, out;
#pragma unroll
    for (int r = 0; r < kMostBlocks; ++r) {
      const bool there = r < blocks;
      of[r] = there ? exchange.stats()[r * each + i] : float2{kNone, 0};
      y[r] = there ? exchange.outputs()[(r * each + i) * 32 + lane] : float2{0, 0};
    }
    add_results(of, y, stat, out);
    store_answer<F>(p, sequence, kv_head * group + unit / X::kUnitsOfRow, unit % X::kUnitsOfRow * 32 + lane, stat, out);
  }
}

// --- host ---------------------------------------------------------------------------------------------------------------------------------------------------

inline bool are_blocks(int blocks) { return blocks >= 1 && blocks <= kMostBlocks; }

// How many clusters of each size begin at once on this GPU. A cluster lies within one group of multiprocessors, and groups differ: of this H200's eight, seven
// have 16 or more and one has 8.
struct Room {
  int clusters[kMostBlocks + 1] = {};

  // F: what the kernel is a template of; bytes: of shared memory. Those of more than half a multiprocessor's are alone on it.
  template <typename F, typename... P> static Room of(void (*kernel)(P...), int bytes) {
    Room room;
    for (int blocks = 1; blocks <= kMostBlocks; ++blocks) room.clusters[blocks] = clusters_at_once(kernel, F::kThreads, bytes, blocks);
    return room;
  }
  // The most blocks of so many clusters, of at most eight blocks.
  int most(int clusters_wanted) const {
    int blocks = 8;
    while (blocks > 1 && clusters[blocks] < clusters_wanted) --blocks;
    return blocks;
  }
};

// Blocks of each of `programs` KV heads of all sequences. alone: room where a block has a multiprocessor for itself; paired: where two find room on one.
// - Few heads over long caches get clusters of 16, which are known to fit on sm_90 alone.
// - Else one block on a multiprocessor. Where that leaves a quarter of them without work, two, if a fifth more clusters would fit: those wait for whole
//   groups, which other kernels still use. H200, 8,192 tokens in bfloat16: 16 heads by 4, 6 and 12 blocks 28.8, 23.0 and 26.6 us; 32 heads by 2, 3, 6 and 7
//   51.9, 45.5, 42.5 and 41.9, but in a step seven are behind two.
inline int blocks_in(const Room& alone, const Room& paired, int programs, int slots) {
  const int there = alone.clusters[1];
  if (FP4_ARCH == 90 && slots > 2048 && programs <= alone.clusters[kMostBlocks]) return kMostBlocks;
  const int one = alone.most(programs), two = paired.most(programs + programs / 5);
  return 4 * programs * one < 3 * there && programs * two > there ? two : one;
}

// F: what the kernel is a template of. of: what its source is made of.
template <typename F, typename Of>
cudaError_t launch_clusters(void (*kernel)(AttentionParams, Of), const AttentionParams& p, const Of& of, int blocks, int bytes) {
  const cudaError_t status = first_error({prefer_shared_memory(kernel), blocks > 8 ? allow_large_clusters(kernel) : cudaSuccess});
  if (status != cudaSuccess) return status;
  return fp4::launch(kernel, dim3(p.batch * p.kv_heads, 1, blocks), F::kThreads, bytes, blocks, {(cudaStream_t)p.stream, true}, p, of);
}

}  // namespace fp4::attention
