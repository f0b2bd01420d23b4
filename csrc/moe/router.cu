// fp4.router for a few tokens in one launch on sm_90: every expert's score, each token's choice and its weights; and the RMSNorm in front of it, if the call has one.
//
// A cluster of up to eight blocks has eight tokens, the columns of an MMA. A block has the router's rows of 16 experts, and its warps share K. Scores go to the
// block that chooses for their token. The choice is that of gemm/routing.cuh: an expert's rank is the number of experts that are better.
//
// PDL: before the wait the router's rows begin to come to L2, which is right whoever writes them; the call's `early` says that the kernel before writes neither
// these nor the norm's weight: then a lane has its first ones in registers.
#include "../gemm/routing.cuh"

namespace {

using namespace fp4;

constexpr int kWarps = 16, kThreads = 32 * kWarps, kTokens = 8, kExperts = 16, kMostBlocks = 8;  // kExperts: of a block
constexpr int kSums = kExperts * kTokens;  // of a warp
constexpr int kChunk = 32, kAhead = 4;     // k that a warp takes at once; of so many chunks at a time
constexpr int kShare = kThreads / kSums;   // threads that compare an expert with others

// Shared memory. Experts are counted up to those of all blocks of a cluster, tokens up to those that a block chooses for.
struct Memory {
  uint32_t* keys;           // [tokens][experts]
  int* ids;                 // [tokens][kMostChosen]
  float *scores, *squares;  // the same; [warp][kTokens]
  float* sums;              // [warp][kExperts][kTokens]
  uint4* x;                 // of a call with a norm: what each lane has read of x

  static __device__ __forceinline__ Memory at(uint8_t* p) {
    uint32_t* keys = (uint32_t*)p;
    int* ids = (int*)(keys + kSums);
    float* scores = (float*)(ids + kTokens * kMostChosen);
    float* squares = scores + kTokens * kMostChosen;
    float* sums = squares + kWarps * kTokens;
    return {keys, ids, scores, squares, sums, (uint4*)(sums + kWarps * kSums)};
  }
  static int bytes(int chunks) { return 4 * (kSums + 2 * kTokens * kMostChosen + kWarps * (kTokens + kSums)) + chunks * 512; }
};

__device__ __forceinline__ void store_weight(const RouterParams& p, int at, float v) {
  if (p.weights_type == 2)
    ((float*)p.y)[at] = v;
  else if (p.weights_type == 1)
    ((__half*)p.y)[at] = __float2half_rn(v);
  else
    ((__nv_bfloat16*)p.y)[at] = __float2bfloat16_rn(v);
}

// The weights of a token's chosen experts, by one warp.
template <typename T> __device__ __forceinline__ void weigh(const RouterParams& p, const uint32_t* keys, const int* ids, const float* scores, int token, int lane) {
  const float peak = scores[0];
  float mine = lane < p.top_k ? expf(scores[lane] - peak) : 0.f, sum = mine;
  if (p.form == 0) {  // of a softmax over all experts
    sum = 0.f;
    for (int i = lane; i < p.experts; i += 32) sum += expf(Routing<T>::score_of(keys[i]) - peak);
  }
  mine /= sum_of_warp(sum);
  if (lane >= p.top_k) return;
  ((int64_t*)p.ids)[token * p.top_k + lane] = ids[lane];
  store_weight(p, token * p.top_k + lane, mine);
}

// A lane's part of a chunk of k is eight neighbours of a row, two k of each of four pairs of an MMA's operand: both operands have them in this order.
template <typename T, bool NORM> __global__ void __launch_bounds__(kThreads, 1) router(const __grid_constant__ RouterParams p) {
  const Memory memory = Memory::at(dynamic_shared());
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, blocks = cluster_size(), rank = cluster_rank();
  const int first = (int)blockIdx.z / blocks * kTokens, begin = rank * kExperts, all = blocks * kExperts, chunks = (p.K + kChunk - 1) / kChunk;
  const T *W = (const T*)p.weight, *x = (const T*)p.x + (size_t)(first + g) * p.K;
  const bool live = first + g < p.tokens;
  cluster_arrive();
  for (int i = threadIdx.x, lines = (p.K + 63) / 64; i < kExperts * lines; i += kThreads)
    if (begin + i / lines < p.experts) prefetch_l2(W + (size_t)(begin + i / lines) * p.K + i % lines * 64);

  auto k_of = [&](int chunk) { return chunk * kChunk + 8 * t; };
  uint4 rows[kAhead][2], norm[kAhead];
  auto load = [&](int chunk) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int expert = begin + 8 * h + g, k = k_of(chunk + kWarps * j);
        rows[j][h] = load_or_zero(W + (size_t)expert * p.K + k, expert < p.experts && k < p.K);
        if (NORM && h == 0) norm[j] = load_or_zero((const T*)p.norm_weight + k, k < p.K);
      }
  };
  if (p.early) load(warp);
  pdl_wait_then_trigger();
  if (!p.early) load(warp);
  float by = 1.f;  // one over the root mean square
  if constexpr (NORM) {
    float sum = 0.f;
    for (int chunk = warp; chunk < chunks; chunk += kWarps * kAhead) {
      uint4 v[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) v[j] = load_or_zero(x + k_of(chunk + kWarps * j), live && k_of(chunk + kWarps * j) < p.K);
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (chunk + kWarps * j < chunks) memory.x[(chunk + kWarps * j) * 32 + lane] = v[j];
        sum += sum_of_squares<T>(v[j]);
      }
    }
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    if (t == 0) memory.squares[warp * kTokens + g] = sum;
    __syncthreads();
    sum = 0.f;
    for (int i = 0; i < (FP4_FAULT(HALF_OF_THE_SQUARES) ? kWarps / 2 : kWarps); ++i) sum += memory.squares[i * kTokens + g];
    by = rsqrtf(sum / p.K + p.eps);
  }

  float acc[4] = {};
  for (int chunk = warp; chunk < chunks; chunk += kWarps * kAhead) {
    if (chunk != warp) load(chunk);
    uint4 v[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int at = chunk + kWarps * j, k = k_of(at);
      const bool inside = live && k < p.K;
      if constexpr (NORM) {
        v[j] = uint4{};
        if (inside) {
          float of[8];
          floats_of<T>(memory.x[at * 32 + lane], of);
          normalise<T>(of, norm[j], by, p.norm_offset);
          v[j] = packed<T>(of);
          if (at % blocks == rank) *(uint4*)((T*)p.normed + (size_t)(first + g) * p.K + k) = v[j];
        }
      } else {
        v[j] = load_or_zero(x + k, inside);
      }
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const uint4 &a = rows[j][0], &b = rows[j][1];
      mma_m16n8k16<T>(acc, a.x, b.x, a.y, b.y, v[j].x, v[j].y);
      mma_m16n8k16<T>(acc, a.z, b.z, a.w, b.w, v[j].z, v[j].w);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) *(float2*)(memory.sums + warp * kSums + (8 * h + g) * kTokens + 2 * t) = {acc[2 * h], acc[2 * h + 1]};
  __syncthreads();
  cluster_wait();  // all blocks have begun, so that their memory may be written
  if ((int)threadIdx.x < kSums) {
    const int expert = begin + threadIdx.x / kTokens, m = threadIdx.x % kTokens;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += memory.sums[w * kSums + threadIdx.x];
    if (p.bias && expert < p.experts) sum += Numbers<T>::to_float(((const T*)p.bias)[expert]);
    const uint32_t key = expert < p.experts ? Routing<T>::key_of(Numbers<T>::from_float(sum), expert) : 0;
    map_to_rank(memory.keys, m % blocks)[m / blocks * all + expert] = key;
  }
  if (!FP4_FAULT(SKIP_CLUSTER_BARRIER_BEFORE_CHOICE)) cluster_sync();

  // As many threads for each token of the block.
  const int slot = threadIdx.x / (all * kShare), of_token = threadIdx.x % (all * kShare), expert = of_token / kShare, part = of_token % kShare;
  const int token = first + slot * blocks + rank;
  const uint32_t* keys = memory.keys + slot * all;
  const uint32_t key = keys[expert];
  int better = 0;
#pragma unroll 4
  for (int i = part; i < all / 4; i += kShare) {
    const uint4 other = ((const uint4*)keys)[i];
    better += (other.x > key) + (other.y > key) + (other.z > key) + (other.w > key);
  }
#pragma unroll
  for (int mask = 1; mask < kShare; mask *= 2) better += __float_as_int(shuffle_xor(__int_as_float(better), mask));
  int* ids = memory.ids + slot * kMostChosen;
  float* scores = memory.scores + slot * kMostChosen;
  if (part == 0 && better < p.top_k && expert < p.experts) ids[better] = expert, scores[better] = Routing<T>::score_of(key);
  if (!FP4_FAULT(SKIP_BARRIER_BEFORE_WEIGHTS)) __syncthreads();
  if (of_token < 32 && token < p.tokens) weigh<T>(p, keys, ids, scores, token, lane);
}

// --- host ---------------------------------------------------------------------------------------------------------------------------------------------------

template <typename T, bool NORM> cudaError_t run(const RouterParams& p) {
  int blocks = 1;
  while (blocks * kExperts < p.experts) blocks *= 2;
  const dim3 grid(1, 1, divided(p.tokens, kTokens) * blocks);
  return launch(router<T, NORM>, grid, kThreads, Memory::bytes(NORM ? divided(p.K, kChunk) : 0), blocks, {(cudaStream_t)p.stream, true}, p);
}

bool fits(const RouterParams& p) {
  return p.size == (int64_t)sizeof(RouterParams) && p.tokens >= 1 && p.tokens <= 1 << 15 && p.experts >= 1 && p.experts <= kMostBlocks * kExperts && p.K >= 8 && p.K <= 8192 && p.K % 8 == 0 &&
         p.top_k >= 1 && p.top_k <= kMostChosen && p.top_k <= p.experts && p.form >= 0 && p.form <= 2 && p.weights_type >= 0 && p.weights_type <= 2 && (!p.norm_weight || p.normed);
}

}  // namespace

// Returns a cudaError_t. At most 128 experts, 32 of them chosen; K is a multiple of 8, at most 8192; x, weight, norm_weight and normed begin at multiples of 16 bytes.
extern "C" int fp4_router(const RouterParams* call) {
  if (!call || !fits(*call)) return cudaErrorInvalidValue;
  return by_dtype(call->dtype, [&](auto zero) {
    using T = decltype(zero);
    return call->norm_weight ? run<T, true>(*call) : run<T, false>(*call);
  });
}
