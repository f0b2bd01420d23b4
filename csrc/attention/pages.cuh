// One decode step of fp4.paged_attention in one launch: step.cuh over pages. 16 tokens that a warp takes lie in one page, so that they have one entry of the
// table.
//
// PDL: the call's `early` says that the kernel before writes nothing of the cache, the table, the lengths and the slots.
#pragma once
#include "step.cuh"

namespace {

// The tokens of a KV head of a sequence, by position. So many lanes of the producer have the 16 tokens of a warp copied, each.
template <typename F> struct Pages {
  struct Of {
    TensorMap keys, values;
    PagedParams call;
  };
  static constexpr int kProducers = F::kWarps, kAhead = 4;  // entries of the table that a lane has asked for
  static constexpr int kEach = Tile<F>::kKeyRow / F::D;  // bytes of a number in the cache
  const PagedParams& c;
  const TensorMap &key_map, &value_map;
  const int* table;
  int64_t to;  // the row of the cache that the new token is written to; below 0: none
  int kv_head, held, first, begin, end, newest;  // old tokens; the first that is attended to; as Slots has them
  OneScale one_scale;
  int ahead[kAhead];

  static __device__ __forceinline__ Pages of(const AttentionParams&, const Of& of, int sequence, int kv_head) {
    const PagedParams& c = of.call;
    const int held = ((const int*)c.lengths)[sequence] - 1, first = c.window ? most_of(held - c.window + 1, 0) : 0;
    return {c, of.keys, of.values, (const int*)c.table + sequence * c.table_stride, ((const int64_t*)c.slots)[sequence],
            kv_head, held, first, first / kTokens * kTokens, held + 1, held, scales_of(c, kv_head), {}};
  }
  static __device__ __forceinline__ OneScale scales_of(const PagedParams& c, int kv_head) {
    if constexpr (F::kOneScale) return {((const float*)c.key_scale)[kv_head * c.scale_stride], ((const float*)c.value_scale)[kv_head * c.scale_stride]};
    return {1.f, 1.f};
  }
  __device__ __forceinline__ bool is_valid() const { return true; }
  __device__ __forceinline__ OneScale scales() const { return one_scale; }
  __device__ __forceinline__ bool is_used(int position) const { return position >= first && position <= held; }

  // Also behind the end of the sequence: the table is read without a wait for the length.
  __device__ __forceinline__ int page_of(int position) const {
    const int i = position / c.page_size;
    return i < c.pages ? table[i] : 0;
  }
  __device__ __forceinline__ void look_up(int at, int stride) {
    if (threadIdx.x % 32 < kProducers)
#pragma unroll
      for (int i = 0; i < kAhead; ++i) ahead[i] = page_of(at + threadIdx.x % 32 * kTokens + i * stride);
  }
  __device__ __forceinline__ void request(const Tile<F>& tile, int at, int stride, Shared mbarrier) {
    const int unit = threadIdx.x % 32, position = at + unit * kTokens, page = ahead[0];
#pragma unroll
    for (int i = 0; i < kAhead - 1; ++i) ahead[i] = ahead[i + 1];
    ahead[kAhead - 1] = page_of(position + kAhead * stride);
    if (position >= end) {
      mbarrier_arrive(mbarrier);
      return;
    }
    const Shared rows = shared_address(tile.memory) + unit * kTokens * Tile<F>::kKeyRow;
    const int token = position % c.page_size;
    mbarrier_arrive_expect_tx(mbarrier, 2 * kTokens * Tile<F>::kKeyRow);
    tma_load_page(rows, key_map, kv_head, token, page, mbarrier);
    tma_load_page(rows + Tile<F>::kValues, value_map, kv_head, token, page, mbarrier);
  }
  __device__ __forceinline__ void store(const NewRow16<F>& added) const {
    if (to < 0) return;
    auto row_of = [&](void* cache, const int64_t (&strides)[3]) {
      const int64_t page = to / c.page_size, token = to % c.page_size;
      return Rows{(uint8_t*)cache + (page * strides[0] + token * strides[1] + kv_head * strides[2]) * kEach, nullptr, nullptr, nullptr};
    };
    added.copy(row_of(c.keys, c.keys_strides), row_of(c.values, c.values_strides), 0);
  }
};

// --- host ---------------------------------------------------------------------------------------------------------------------------------------------------

// The call of a step over a KVCache with the same query, which is neither normalised nor rotated.
AttentionParams step_of(const PagedParams& c) {
  AttentionParams p = {};
  p.query = c.query, p.key = c.key, p.value = c.value, p.sinks = c.sinks, p.y = c.y, p.stream = c.stream;
  for (int i = 0; i < 2; ++i) p.query_strides[i] = c.query_strides[i], p.key_strides[i] = c.key_strides[i], p.value_strides[i] = c.value_strides[i];
  p.batch = c.batch, p.heads = c.heads, p.kv_heads = c.kv_heads, p.queries = 1, p.D = c.D, p.window = c.window;
  p.slots = (int)std::min<int64_t>((int64_t)c.pages * c.page_size, 1 << 30);
  p.dtype = c.dtype, p.sinks_type = c.sinks_type, p.format = c.format, p.early = c.early, p.scale = c.scale, p.softcap = c.softcap;
  return p;
}

template <typename F> cudaError_t run_pages(const PagedParams& c, const AttentionParams& p, int blocks) {
  typename Pages<F>::Of of{{}, {}, c};
  auto map = [&](TensorMap* to, const void* cache, const int64_t (&s)[3]) {
    constexpr int64_t each = Pages<F>::kEach;
    return tensor_map_pages(to, cache, {F::D * each, c.kv_heads, c.page_size, c.cache_pages, s[2] * each, s[1] * each, s[0] * each}, kTokens);
  };
  const cudaError_t status = first_error({map(&of.keys, c.keys, c.keys_strides), map(&of.values, c.values, c.values_strides)});
  return status == cudaSuccess ? run<F, Pages<F>>(p, of, c.tile[0] ? c.tile[0] : blocks) : status;
}

template <typename T, Kind KIND, int D> cudaError_t by_rows(const PagedParams& c) {
  constexpr int kMany = KIND == kSame ? 4 : 7;
  using Wide = Step<T, KIND, KIND, D, 16, kMany, false>;
  using Many = Step<T, KIND, KIND, D, 8, kMany, false>;
  using Few = Step<T, KIND, KIND, D, 8, kFew, false>;
  const AttentionParams p = step_of(c);
  if (c.heads / c.kv_heads > 8) return run_pages<Wide>(c, p, blocks_of<Wide, Pages<Wide>>(p));
  if (c.tile[1] ? c.tile[1] == kFew : are_few(p)) return run_pages<Few>(c, p, blocks_of_few(p));
  return run_pages<Many>(c, p, blocks_of<Many, Pages<Many>>(p));
}

template <typename T, Kind KIND> cudaError_t by_shape(const PagedParams& c) { return c.D == 64 ? by_rows<T, KIND, 64>(c) : by_rows<T, KIND, 128>(c); }

bool fits(const PagedParams& c) {
  if (!is_call(&c) || c.batch < 1 || c.kv_heads < 1 || c.heads < c.kv_heads || c.heads % c.kv_heads || c.heads / c.kv_heads > kMostRows) return false;
  if (c.page_size < kTokens || c.page_size % kTokens || c.window < 0 || c.pages < 1 || c.cache_pages < 1) return false;
  return (c.D == 64 || c.D == 128) && (!c.tile[0] || are_blocks(c.tile[0])) && c.tile[1] >= 0;
}

}  // namespace
