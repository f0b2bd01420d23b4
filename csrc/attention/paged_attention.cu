// One decode step of fp4.paged_attention in one launch: append of each sequence's new token, attention over its old ones, combination (cluster.cuh). A tile of
// 16 tokens lies in one page, so that it has one entry of the table.
//
// PDL: the call's `early` says that the kernel before writes nothing of the cache, the table and the lengths: first tiles are then requested before the wait.
#include "cluster.cuh"

namespace {

using namespace fp4;
using namespace fp4::attention;

// Where the tokens of a KV head of a sequence lie. A token's row has D numbers.
template <typename T> struct Pages {
  T* base;
  int64_t page, token;  // strides
  __device__ __forceinline__ int64_t offset(int of_page, int slot) const { return of_page * page + slot * token; }
};

// Tokens by position.
template <typename F> struct PagedSource {
  using T = typename F::T;
  using Place = int;  // a page
  const PagedParams& p;
  Pages<T> keys, values;
  const T *own_keys, *own_values;  // what this lane copies of a tile's first row, of page 0
  const int* table;
  int sequence, kv_head, held, first, to;  // held: old tokens; to: the row of the cache that the new one is written to
  int begin, end, newest;

  static __device__ __forceinline__ PagedSource of(const PagedParams& p, int sequence, int kv_head) {
    const int held = ((const int*)p.lengths)[sequence] - 1, first = p.window ? most_of(held - p.window + 1, 0) : 0;
    const Pages<T> keys{(T*)p.keys + kv_head * p.keys_strides[2], p.keys_strides[0], p.keys_strides[1]};
    const Pages<T> values{(T*)p.values + kv_head * p.values_strides[2], p.values_strides[0], p.values_strides[1]};
    return {p, keys, values,
            keys.base + Tile<F>::row() * keys.token + Tile<F>::unit() * 8, values.base + Tile<F>::row() * values.token + Tile<F>::unit() * 8,
            (const int*)p.table + sequence * p.table_stride,
            sequence, kv_head, held, first, 0,
            first / kTokens * kTokens, held + 1, held};
  }
  // Also behind the end of the sequence: the table is read without a wait for the length.
  __device__ __forceinline__ int place_of(int token) const { return token / p.page_size < p.pages ? table[token / p.page_size] : 0; }
  __device__ __forceinline__ bool is_read(int token) const { return token >= first && token < held; }
  __device__ __forceinline__ bool is_used(int token) const { return token >= first && token <= held; }
  __device__ __forceinline__ int64_t key_stride() const { return keys.token; }
  __device__ __forceinline__ int64_t value_stride() const { return values.token; }
  __device__ __forceinline__ const T* key_at(int page, int token) const { return own_keys + keys.offset(page, token % p.page_size); }
  __device__ __forceinline__ const T* value_at(int page, int token) const { return own_values + values.offset(page, token % p.page_size); }

  __device__ __forceinline__ void wait() {
    to = (int)((const int64_t*)p.slots)[sequence];
    if (p.early) pdl_wait_then_trigger();
  }
  __device__ __forceinline__ void load(NewToken<F>& added, int number) const { load_new<F>(added, number, p, sequence, kv_head); }
  __device__ __forceinline__ void load(uint4 (&q)[F::kTiles][F::D / 32], int group) const { load_query<F>(q, p, sequence, kv_head, group); }
  __device__ __forceinline__ void store(const NewToken<F>& added) const {
    if (to < 0) return;
    const int page = to / p.page_size, slot = to % p.page_size;
    added.store(keys.base + keys.offset(page, slot), values.base + values.offset(page, slot));
  }
};

template <typename F> __global__ void __launch_bounds__(F::kThreads, FP4_ARCH == 90 ? 0 : 1) paged_attention(const __grid_constant__ PagedParams p) {
  const int sequence = blockIdx.x / p.kv_heads, kv_head = blockIdx.x % p.kv_heads;
  if (!p.early) pdl_wait_then_trigger();
  attend_in_cluster<F>(p, PagedSource<F>::of(p, sequence, kv_head), sequence, kv_head);
}

// --- host ---------------------------------------------------------------------------------------------------------------------------------------------------

template <typename T> cudaError_t run(const PagedParams& p) {
  const Shape shape = p.tile[0] > 0 ? Shape{p.tile[0], p.tile[1]} : shape_of(p.batch * p.kv_heads);
  return with_form<T>(p.D, p.heads / p.kv_heads, shape.warps,
                      [&](auto form) { return launch_clusters<decltype(form)>(paged_attention<decltype(form)>, p, shape.blocks); });
}

bool fits(const PagedParams& p) {
  if (!is_call(&p) || p.batch < 1 || p.kv_heads < 1 || p.heads < p.kv_heads || p.heads % p.kv_heads || p.heads / p.kv_heads > kMostRows) return false;
  if (p.page_size < kTokens || p.page_size % kTokens || p.window < 0 || p.pages < 1) return false;
  return (p.D == 64 || p.D == 128) && (!p.tile[0] || is_shape({p.tile[0], p.tile[1]}));
}

}  // namespace

// Returns a cudaError_t. D is 64 or 128, heads / kv_heads at most 16, page_size a multiple of 16; all rows begin at multiples of 16 bytes.
extern "C" int fp4_paged_attention(const PagedParams* call) {
  if (!call || !fits(*call)) return cudaErrorInvalidValue;
  return by_dtype(call->dtype, [&](auto zero) { return run<decltype(zero)>(*call); });
}
