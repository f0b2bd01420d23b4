// Two to four products of one row in one launch, each of what the one before wrote: o + residual, gate_up with its GLU, down + residual and q/k/v of a decode
// step, with the RMSNorms in between, for sm_90 and later. The arithmetic is that of linear_gemv.cu, and so are the bits where
// as many warps share K.
//
// Between two kernels a multiprocessor has nothing to fetch: the ring of the next one is full, or finds no room yet. Here a warp's ring goes on: while the
// last rows of one product are summed, and while its blocks wait for each other, weights of the next product arrive, because they depend on nothing.
//
//   - Each block has the same share of the rows of every product, so each warp knows its steps of all products from the start, and fetches them in order.
//   - A product begins when the whole row of the one before is there, which says so itself (`Rows`). So all blocks must run at once: a cooperative launch.
//   - The next kernel may begin at once (PDL). It finds room beside this one's threads and three stages, and then waits.
//
// Two neighbours may be those of a mixture of experts (`Routing`): gate_up of the experts that a router chooses by the same x, and their down product. Of these
// the block knows the addresses when it knows the choice, so its ring is empty until then. Gate and up of all chosen experts are the rows of one product; down
// is one product over the experts' results side by side, each times its router's weight.
//
// On several GPUs each has a part of the weights, and a product whose K is divided gives a part of its result (`summed`). The blocks of all ranks write theirs to
// each other, and the next product begins with the sum (`Exchange`): a launch goes on across the all-reduce.
#include "../sm90/thread.cuh"
#include "chain.cuh"

namespace {

using namespace fp4;

// Numbers n to n + 7 of the sum over the ranks of a product's results, and the residual. sums_set: of Exchange; set: of Rows.
template <typename T> __device__ __forceinline__ uint4 summed(const Chain<T>& chain, int product, int sums_set, int set, int n) {
  const int earlier = chain.products[product].added;
  const T* from = earlier >= 0 ? chain.rows.row(set, earlier) : chain.sum_residual[product];
  uint4 residual = load_relaxed_or_zero(from + n, from != nullptr);
  if (earlier >= 0) Rows<T>::wait(residual, from + n);
  float v[8], added[8];
  chain.exchange.load(sums_set, chain.sum[product], n, v);
  floats_of<T>(residual, added);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] += added[i];
  return packed<T>(v);
}

// The columns of this block from the sums of its warps: to y, and to the row that the next product reads. What Operands holds has come meanwhile.
template <typename T, bool kSummed> __device__ __forceinline__ void finish(const Chain<T>& chain, const Memory<T>& memory, int product, int set, int sums_set) {
  const Product<T>& p = chain.products[product];
  const bool last = product == chain.count - 1, summed = kSummed && chain.sum[product] >= 0;
  const int n0 = p.first_of(blockIdx.x), count = p.columns_of(blockIdx.x);
  for (int c = threadIdx.x; c < count; c += kMultiplying) {
    float all[2] = {};
    for (int k_group = 0; k_group < 1 << p.log_k_groups; ++k_group) {
      const float* row = memory.sums + (k_group * p.groups + (c >> p.log_width)) * R + (c & ((1 << p.log_width) - 1));
      all[0] += row[0];
      if (p.parts == 2) all[1] += row[FP4_FAULT(UP_FROM_GATE_ROWS) ? 0 : R / 2];
    }
    // Measured: told here, others read the row when it has just come; told a barrier earlier, they read it in vain where many warps' sums are added.
    needed(all[0]);
    if (c == 0 && !last && !summed) chain.rows.tell(set, product);
    const T y = memory.operands.value(p, all, c);
    if (summed) {
      chain.exchange.store(sums_set, chain.sum[product], n0 + c, y);
    } else {
      if (!last) Rows<T>::store(chain.rows.row(set, product) + n0 + c, y);
      p.y[n0 + c] = y;
    }
  }
}

// The warps that multiply. Two barriers of the whole block for each product but the first: behind the first one x may be read, behind the second one the sums. A
// routed one has three more in between: behind them the router's sums, the scores of all blocks, and the choice may be read.
template <typename T, bool kRouted, bool kSummed> __device__ __forceinline__ void multiply(const Chain<T>& chain, const Memory<T>& memory) {
  const int lane = threadIdx.x & 31, warp = uniform(threadIdx.x >> 5);
  uint8_t* ring = memory.rings + warp * (chain.stages * Step<R>::kBytes);
  const Shared ring_address = shared_address(ring);
  Fetching<T, kRouted> coming;
  coming.end = kRouted ? chain.routing.product : chain.count;
  coming.begin(chain, 0, warp, lane);
  // At most two stages are on their way at once: what the kernel before still writes, and so its end, waits behind all that is asked of memory.
  for (int i = 0; i < chain.stages; ++i) {
    coming.next(chain, ring_address + i * Step<R>::kBytes, warp, lane);
    cp_async_wait_group<1>();
  }
  if (kRouted) chain.routing.prefetch(kMultiplying);
#if FP4_ARCH >= 90
  pdl_wait_then_trigger();
#endif
  const int set = __ldcg(chain.rows.next_set()), sums_set = kSummed ? __ldcg(chain.exchange.next_set()) : 0;

  int slot = 0;
#pragma unroll 1
  for (int product = 0; product < chain.count; ++product) {
    const Product<T>& p = chain.products[product];
    const int K = p.K, groups = p.groups_of(blockIdx.x), chunks = p.segments * (kSegment / 8), k_groups = 1 << p.log_k_groups, k_group = warp & (k_groups - 1);
    const bool routed = kRouted && product == chain.routing.product, after_sum = kSummed && product && chain.sum[product - 1] >= 0;
    if (groups <= 0 && !routed) continue;
    // The norm's weights for the thread's first part of x come while the blocks wait for each other.
    uint4 norm_weight = {};
    if (p.norm_weight && threadIdx.x * 8 < K) norm_weight = load_128(p.norm_weight + threadIdx.x * 8);
    if (product && !FP4_FAULT(SKIP_BARRIER_BEFORE_X)) __syncthreads();
    const T* x_row = product ? chain.rows.row(set, product - 1) : p.x;
    uint4 raw[kBatch];  // a thread's part of x
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int c = threadIdx.x + i * kMultiplying;
      if (after_sum) {
        raw[i] = uint4{};
        if (c * 8 < K) raw[i] = summed(chain, product - 1, sums_set, set, c * 8);
      } else {
        raw[i] = load_relaxed_or_zero(x_row + (c * 8 < K ? c * 8 : 0), c * 8 < K);
      }
    }
    if (product && !after_sum) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int c = threadIdx.x + i * kMultiplying;
        if (c * 8 < K) Rows<T>::wait(raw[i], x_row + c * 8);
      }
    }
    const int thread = kRouted ? thread_again() : threadIdx.x;
    float by = 1.f;
    if (p.norm_weight) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) sum += sum_of_squares<T>(raw[i]);
      sum = sum_of_warp(sum);
      if (lane == 0) memory.squares[warp] = sum;
      if (!FP4_FAULT(SKIP_BARRIER_BEFORE_SQUARES)) named_barrier_sync(1, kMultiplying);
      sum = 0.f;
      for (int i = 0; i < kWarps; ++i) sum += memory.squares[i];
      by = rsqrtf(sum * (1.f / K) + p.eps);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int c = thread + i * kMultiplying;
      if (c >= chunks) break;  // whole warps
      float v[8];
      floats_of<T>(raw[i], v);
      if (p.norm_weight) normalise<T>(v, i == 0 ? norm_weight : c * 8 < K ? *(const uint4*)(p.norm_weight + c * 8) : uint4{}, by, p.norm_offset);
      if constexpr (kRouted) raw[i] = packed<T>(v);
      float factor = to_half_range(v);
      if (kRouted && product == chain.routing.product + 1) factor *= c * 8 < K ? memory.choice(chain).weights[chain.routing.expert_of(c * 8)] : 0.f;
      *(uint4*)(memory.x + place_of_chunk(c)) = in_order(v);
      if (c % 2 == 0) memory.factors[c / 2] = factor;
    }
    if (product + 1 < chain.count) {  // the weight of the next norm begins to come
      const Product<T>& then = chain.products[product + 1];
      if (then.norm_weight && threadIdx.x * 64 < then.K) prefetch_l2(then.norm_weight + threadIdx.x * 64);
    }
    if constexpr (kRouted)
      if (routed) chain.routing.score(raw, memory.choice(chain), warp, lane);
    if (!FP4_FAULT(SKIP_BARRIER_AFTER_X)) named_barrier_sync(1, kMultiplying);
    if (routed) {  // the ring is empty
      __syncthreads();
      if (product + 2 < chain.count) fetch_to_l2(chain.products[product + 2]);
      __syncthreads();
      chain.routing.choose(chain.rows.scores(set), memory.choice(chain));
      __syncthreads();
      coming.end = chain.count;
      coming.begin(chain, product, warp, lane);
      for (int i = 0, to = slot; i < chain.stages; ++i) {
        coming.next(chain, ring_address + to * Step<R>::kBytes, warp, lane);
        if (++to == chain.stages) to = 0;
      }
    }

#pragma unroll 1
    for (int group = warp >> p.log_k_groups; group < groups; group += kWarps >> p.log_k_groups) {
      float acc[R] = {};
#pragma unroll 1
      for (int segment = k_group; segment < p.segments; segment += k_groups) {
        wait_for_all_but<2>(chain.stages - 1 + FP4_FAULT(SKIP_COPY_WAIT));
        __syncwarp();  // another lane copied this lane's scales
        Step<R> weights;
        weights.load(ring + slot * Step<R>::kBytes, lane);
        if (!FP4_FAULT(SKIP_WARP_BARRIER)) __syncwarp();  // all lanes have read the stage that is refilled now
        coming.next(chain, ring_address + slot * Step<R>::kBytes, warp, lane);
        if (++slot == chain.stages) slot = 0;
        weights.multiply(acc, memory.x + segment * (kSegment * 2), *(const float2*)(memory.factors + segment * (kSegment / 16) + lane * 2), lane);
      }
      const float sum = sum_of_lanes<R>(acc, lane);
      if (lane % (32 / R) == 0) memory.sums[(k_group * p.groups + group) * R + lane / (32 / R)] = sum;
    }
    if (!FP4_FAULT(SKIP_BARRIER_BEFORE_SUMS)) __syncthreads();
    finish<T, kSummed>(chain, memory, product, set, sums_set);
  }
  cp_async_wait_group<0>();  // the groups behind the last step are empty
}

// The last warp: it asks whether the next x is there, so that the others need not, and brings what `finish` needs.
template <typename T, bool kRouted, bool kSummed> __device__ __forceinline__ void attend(const Chain<T>& chain, const Memory<T>& memory) {
  const int lane = threadIdx.x & 31;
#if FP4_ARCH >= 90
  pdl_wait_then_trigger();
#endif
  const Rows<T>& rows = chain.rows;
  const int set = __ldcg(rows.next_set());
  rows.clear(set, lane);
  int sums_set = 0;
  if constexpr (kSummed) sums_set = __ldcg(chain.exchange.next_set()), chain.exchange.clear(sums_set, lane);
  // The block's columns of a product's sum over the ranks, and the residual.
  auto store_sum = [&](int product) {
    const Product<T>& p = chain.products[product];
    const T *earlier = p.added >= 0 ? rows.row(set, p.added) : nullptr, *residual = chain.sum_residual[product];
    const int n0 = p.first_of(blockIdx.x), count = p.columns_of(blockIdx.x);
    for (int c = lane; c < count; c += 32) {
      const float added = earlier ? Rows<T>::load(earlier + n0 + c) : residual ? from_l2(residual + n0 + c) : 0.f;
      const T y = chain.exchange.load(sums_set, chain.sum[product], n0 + c, added);
      if (product < chain.count - 1) Rows<T>::store(rows.row(set, product) + n0 + c, y);  // where a later product adds it
      p.y[n0 + c] = y;
    }
  };
#pragma unroll 1
  for (int product = 0; product < chain.count; ++product) {
    const Product<T>& p = chain.products[product];
    const int groups = p.groups_of(blockIdx.x), n0 = p.first_of(blockIdx.x), count = p.columns_of(blockIdx.x);
    const bool routed = kRouted && product == chain.routing.product, after_sum = kSummed && product && chain.sum[product - 1] >= 0;
    if (product && (groups > 0 || routed)) {
      if (!after_sum && lane == 0) rows.wait_for_all(set, product - 1, chain.products[product - 1].blocks);
      if (!FP4_FAULT(SKIP_BARRIER_BEFORE_X)) __syncthreads();
    }
    if (after_sum) store_sum(product - 1);
    if (groups > 0 || routed) {
      if (routed) {
        __syncthreads();
        chain.routing.store_scores(rows.scores(set), memory.choice(chain), lane);
        if (lane == 0) rows.tell(set, kMostRows), rows.wait_for_all(set, kMostRows, gridDim.x);
        __syncthreads();
        if (!FP4_FAULT(SKIP_BARRIER_BEFORE_CHOICE)) __syncthreads();
        chain.routing.weigh(memory.choice(chain), lane);
      }
      const T* earlier = p.added >= 0 ? rows.row(set, p.added) : nullptr;
      for (int c = lane; c < count; c += 32) memory.operands.load(p, n0 + c, c, routed ? &chain.routing : nullptr, memory.choice(chain).ids, earlier);
      if (!FP4_FAULT(SKIP_BARRIER_BEFORE_SUMS)) __syncthreads();
    }
    if (kSummed && product == chain.count - 1 && chain.sum[product] >= 0) store_sum(product);
  }
  rows.finish(set, lane);
  if constexpr (kSummed) chain.exchange.finish(sums_set, lane);
}

// 72 registers, so that a block of the attention behind it, which waits, finds room beside this one's. A sum over ranks takes more.
template <typename T, bool kRouted, bool kSummed> __global__ void __maxnreg__(kSummed ? 80 : 72) linear_chain(const __grid_constant__ Chain<T> chain) {
  const Memory<T> memory = Memory<T>::of(chain);
  if (threadIdx.x < kMultiplying)
    multiply<T, kRouted, kSummed>(chain, memory);
  else
    attend<T, kRouted, kSummed>(chain, memory);
}

// One block a multiprocessor. Measured, o to q/k/v of an 8B model: three stages; with four the chain takes as long on an H100 and 2 us more on an H200, with five
// 1.3 and 3, because what is under way delays the counters and x of the next product.
template <typename T, bool kRouted, bool kSummed> cudaError_t run(const ChainParams& call) {
  Chain<T> chain = {};
  int sums_of_ranks = 0;
  chain.count = call.count, chain.rows = Rows<T>::at_end_of(call.arrivals, call.arrivals_count);
  const int blocks = multiprocessors(), stages = call.products[0].tile[0];
  if (blocks > kMostBlocks) return cudaErrorInvalidValue;
  int sums = 0;
  for (int i = 0; i < call.count; ++i) {
    LinearParams c = call.products[i];
    if (c.M != 1) return cudaErrorInvalidValue;
    if (kRouted && !chain.routing.take(call, i, blocks, c)) return cudaErrorInvalidValue;
    const int parts = call.finish[i] == kGlu ? 2 : 1, columns = c.N / parts;
    const Epilogue<T> then = Epilogue<T>::of(c.mul, c.residual, c.second, c.third, c.act);
    Product<T>& p = chain.products[i];
    p = {(const T*)c.x, (const uint8_t*)c.codes, (const uint8_t*)c.scale, (const float*)c.global_scale, (const T*)c.bias, (const T*)c.residual,
         (const T*)c.norm_weight, (T*)c.y, c.K, columns, parts, c.act, then.second, then.third, c.eps, c.norm_offset};
    p.added = -1;
    for (int j = 0; j < i; ++j)
      if (p.residual == chain.products[j].y) p.added = j;
    chain.sum[i] = kSummed && call.summed[i] ? sums_of_ranks++ : -1;
    if (chain.sum[i] >= 0) chain.sum_residual[i] = p.residual, p.residual = nullptr;
    // The whole row of an earlier sum is read as the residual: a product whose end all blocks wait for by a counter has to stand in between.
    if (chain.sum[i] >= 0 && (call.finish[i] == kGlu || c.act || columns > kExchangeRow || (i && chain.sum[i - 1] >= 0))) return cudaErrorInvalidValue;
    p.log_width = parts == 2 ? 1 : 2, p.all = divided(columns, R / parts), p.groups = divided(p.all, blocks), p.blocks = divided(p.all, p.groups), p.segments = divided(c.K, kSegment);
    p.log_k_groups = stages ? c.tile[1] : p.best_k_groups();
    while (1 << p.log_k_groups > p.segments) --p.log_k_groups;
    p.row = call.products[i].K / 2, p.step = (kSegment / 2) << p.log_k_groups;
    const bool alike = columns % (1 << p.log_width) == 0 && !(kRouted && i == call.routed);
    p.to_group = alike ? ((kWarps >> p.log_k_groups) << p.log_width) * p.row : 0;
    if (c.K < 64 || c.K % 64 || c.K > kMostK || c.N < 2 || c.N % 2 || c.mul || !then.fits((Finish)call.finish[i], c.N))
      return cudaErrorInvalidValue;
    if (i && (c.x != call.products[i - 1].y || c.K != chain.products[i - 1].columns)) return cudaErrorInvalidValue;
    chain.segments = p.segments > chain.segments ? p.segments : chain.segments;
    chain.columns = p.groups << p.log_width > chain.columns ? p.groups << p.log_width : chain.columns;
    const int of = (1 << p.log_k_groups) * p.groups * R;
    sums = of > sums ? of : sums;
  }
  chain.ring = divided(chain.segments * (kSegment * 2 + kSegment / 4) + (kWarps + 5 * chain.columns + sums) * 4 + (kRouted ? kChoiceBytes : 0), 16) * 16;
  const int each = kWarps * Step<R>::kBytes, room = (kMostRoom - chain.ring) / each;
  chain.stages = stages ? stages : room < 3 ? room : 3;
  if (chain.stages < 1 || chain.stages > room || chain.stages > kMostStages) return cudaErrorInvalidConfiguration;
  if constexpr (kSummed) {
    if (sums_of_ranks > kExchangeSums || call.ranks > kMostRanks || call.rank < 0 || call.rank >= call.ranks || blocks > kExchangeBlocks) return cudaErrorInvalidValue;
    chain.exchange.ranks = call.ranks, chain.exchange.mine = call.rank;
    for (int i = 0; i < call.ranks; ++i) {
      if (!call.memory[i]) return cudaErrorInvalidValue;
      chain.exchange.memory[i] = (uint8_t*)call.memory[i];
    }
  }
  const cudaError_t status = prefer_shared_memory(linear_chain<T, kRouted, kSummed>);
  if (status != cudaSuccess) return status;
  const Stream stream((cudaStream_t)call.products[0].stream, call.products[0].early != 0, true);
  return fp4::launch(linear_chain<T, kRouted, kSummed>, dim3(blocks), kThreads, chain.ring + chain.stages * each, 1, stream, chain);
}

}  // namespace

// Returns a cudaError_t. Each product as linear_gemv takes it, with an RMSNorm or without; finish kPlain, kPointwise without mul, or kGlu. M = 1; K % 64 == 0,
// K <= 16384; N % 2 == 0; x, codes, scale and norm_weight 16-byte aligned. tile: of the first product the stages, 1 to 8,
// of each log2 of the warps that share K; 0 stages: its own choice. early: the kernel before writes none of the weights.
extern "C" int fp4_linear_chain(const ChainParams* call) {
  if (!is_call(call) || call->count < 2 || call->count > kMostProducts) return cudaErrorInvalidValue;
  if (!call->arrivals || call->arrivals_count * 4 < Rows<__half>::kBytes) return cudaErrorInvalidValue;
  return by_dtype(call->products[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    if (call->ranks) return call->router ? run<T, true, true>(*call) : run<T, false, true>(*call);
    return call->router ? run<T, true, false>(*call) : run<T, false, false>(*call);
  });
}
