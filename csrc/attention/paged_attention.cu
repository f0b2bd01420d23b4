// One decode step of fp4.paged_attention in one launch: append of each sequence's new token, attention over its old ones, combination (cluster.cuh). A tile of
// 16 tokens lies in one page, so that it has one entry of the table.
//
// PDL: the call's `early` says that the kernel before writes nothing of the cache, the table and the lengths: first tiles are then requested before the wait.
#include "page_tiles.cuh"

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
  // The new token, which is this number of a tile of this warp; -1: of none.
  __device__ __forceinline__ void load(NewToken<F>& added, int number) const {
    added.load(number, (const T*)p.key + sequence * p.key_strides[0] + kv_head * p.key_strides[1],
               (const T*)p.value + sequence * p.value_strides[0] + kv_head * p.value_strides[1]);
  }
  // This lane's part of the query.
  __device__ __forceinline__ void load(uint4 (&q)[F::kTiles][F::D / 32], int group) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < F::kTiles; ++i) {
      const int row = 8 * i + g;
      const T* from = (const T*)p.query + sequence * p.query_strides[0] + (kv_head * group + row) * p.query_strides[1];
#pragma unroll
      for (int c = 0; c < F::D / 32; ++c) q[i][c] = load_or_zero(from + exact_channel<F::D>(t, 8 * c), row < group);
    }
  }
  __device__ __forceinline__ void store(const NewToken<F>& added) const {
    if (to < 0) return;
    const int page = to / p.page_size, slot = to % p.page_size;
    added.store(keys.base + keys.offset(page, slot), values.base + values.offset(page, slot));
  }
};

// Shared memory: what other blocks send; behind it tiles, or in their place the results of the warps.
template <typename F> struct Memory {
  static constexpr int kTiles = (Exchange<F>::kBytes + 127) / 128 * 128;
  static constexpr int kBytes = kTiles + most_of(Results<F>::kBytes, F::kWarps * F::kStages * Tile<F>::kBytes);
};

// A tile of a warp is on its way while the one before it is multiplied. The warp whose tile has the new token has it in registers, long before it comes to that
// tile, and writes it to the cache, where nobody reads it in this launch.
template <typename F> __global__ void __launch_bounds__(F::kThreads, FP4_ARCH == 90 ? 0 : 1) paged_attention(const __grid_constant__ PagedParams p) {
  const Exchange<F> exchange{dynamic_shared()};
  begin_cluster(exchange, p.heads / p.kv_heads);
  uint8_t* tiles = dynamic_shared() + Memory<F>::kTiles;
  const int sequence = blockIdx.x / p.kv_heads, kv_head = blockIdx.x % p.kv_heads;
  if (!p.early) pdl_wait_then_trigger();
  PagedSource<F> source = PagedSource<F>::of(p, sequence, kv_head);
  constexpr int kChunks = F::D / 32;
  const int warp = threadIdx.x / 32, t = threadIdx.x % 4, group = p.heads / p.kv_heads, blocks = cluster_size(), rank = cluster_rank();
  const int stride = blocks * F::kWarps * kTokens, last = source.newest / kTokens * kTokens;  // where the tile of the new token begins
  int at = source.begin + (rank * F::kWarps + warp) * kTokens;
  auto tile_of = [&](int stage) { return Tile<F>{tiles + (warp * F::kStages + stage) * Tile<F>::kBytes}; };
  auto request = [&](int stage, int place, int token) {
    if (token < source.end)
      tile_of(stage).request(source.key_at(place, token), source.key_stride(), source.value_at(place, token), source.value_stride(), token,
                             [&](int i) { return source.is_read(i); });
    cp_async_commit_group();
  };
  int places[F::kStages];
#pragma unroll
  for (int i = 0; i < F::kStages; ++i) places[i] = source.place_of(at + i * stride);
#pragma unroll
  for (int i = 0; i < F::kStages - 1; ++i) request(i, places[i], at + i * stride);
  int place = places[F::kStages - 1];  // of the next tile that is requested
  __syncwarp();
  cluster_wait();
  source.wait();
  NewToken<F> added;  // of the warp whose tile it is in
  const bool adds = source.newest >= 0 && (last - at) % stride == 0 && last >= at;
  source.load(added, adds ? source.newest - last : -1);
  uint4 q[F::kTiles][kChunks];
  source.load(q, group);
  source.store(added);

  State<F> state;
  state.reset();
  for (int stage = 0; at < source.end; at += stride) {
    cp_async_wait_group<F::kStages - 2>();
    __syncwarp();  // what other lanes copied is here, and they have read the tile before
    const Tile<F> tile = tile_of(stage);
    if (at == last) tile.put(added);
    const int free = stage == 0 ? F::kStages - 1 : stage - 1, ahead = at + (F::kStages - 1) * stride;
    request(free, place, ahead);
    place = source.place_of(ahead + stride);
    stage = stage == F::kStages - 1 ? 0 : stage + 1;
    float s[F::kTiles][4];
    bool used[F::kTiles][4];
    const float ones[4] = {1.f, 1.f, 1.f, 1.f};
    tile.score(s, q);
#pragma unroll
    for (int i = 0; i < F::kTiles; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        s[i][j] *= p.scale;
        if (p.softcap > 0) s[i][j] = p.softcap * (1.f - __fdividef(2.f, 1.f + __expf(s[i][j] * __fdividef(2.f, p.softcap))));
        used[i][j] = source.is_used(at + own_token(t, j));
      }
    state.apply(state.template add_scores<false>(s, ones, used));
    tile.add_values(state, s);
  }
  cp_async_wait_group<0>();
  combine_cluster<F>(p, state, exchange, tiles, sequence, kv_head, channel_of);
}

// --- host ---------------------------------------------------------------------------------------------------------------------------------------------------

struct Shape {
  int warps, blocks;  // of a block; of a cluster
};

// Sweep on an H100, batch 1 to 64. A multiprocessor reads at most 40 GB/s, for which eight warps are enough. Few sequences get blocks of eight, as many as find
// room beside each other in clusters: a quarter of the multiprocessors are left, for those of a cluster have to be neighbours. One sequence of few KV heads gets
// clusters of 16, which are known to fit on sm_90 alone. More sequences get smaller blocks, so that all of them begin at once: three of four warps fit on a
// multiprocessor, or seven of two.
Shape shape_of(int programs) {
  const int there = multiprocessors();
  if (programs > 3 * there) return {2, 1};
  if (programs > there) return {4, 1};
  if (FP4_ARCH == 90 && programs * kMostBlocks <= there * 3 / 4) return {4, kMostBlocks};
  int blocks = 1;
  while (blocks < 8 && programs * blocks * 2 <= there * 3 / 4) blocks *= 2;
  return {8, blocks};
}

template <typename F> cudaError_t run(const PagedParams& p, int blocks) { return launch_clusters<F>(paged_attention<F>, p, blocks, Memory<F>::kBytes); }

template <typename T, int D, int ROWS> cudaError_t by_warps(const PagedParams& p, const Shape& s) {
  if (s.warps == 2) return run<Paged<T, D, ROWS, 2>>(p, s.blocks);
  if (s.warps == 4) return run<Paged<T, D, ROWS, 4>>(p, s.blocks);
  return run<Paged<T, D, ROWS, 8>>(p, s.blocks);
}

template <typename T> cudaError_t by_shape(const PagedParams& p) {
  const Shape shape = p.tile[0] > 0 ? Shape{p.tile[0], p.tile[1]} : shape_of(p.batch * p.kv_heads);
  const bool few = p.heads / p.kv_heads <= 8;
  if (p.D == 64) return few ? by_warps<T, 64, 8>(p, shape) : by_warps<T, 64, 16>(p, shape);
  return few ? by_warps<T, 128, 8>(p, shape) : by_warps<T, 128, 16>(p, shape);
}

bool fits(const PagedParams& p) {
  if (!is_call(&p) || p.batch < 1 || p.kv_heads < 1 || p.heads < p.kv_heads || p.heads % p.kv_heads || p.heads / p.kv_heads > kMostRows) return false;
  if (p.page_size < kTokens || p.page_size % kTokens || p.window < 0 || p.pages < 1) return false;
  return (p.D == 64 || p.D == 128) && (!p.tile[0] || ((p.tile[0] == 2 || p.tile[0] == 4 || p.tile[0] == 8) && are_blocks(p.tile[1])));
}

}  // namespace

// Returns a cudaError_t. D is 64 or 128, heads / kv_heads at most 16, page_size a multiple of 16; all rows begin at multiples of 16 bytes.
extern "C" int fp4_paged_attention(const PagedParams* call) {
  if (!call || !fits(*call)) return cudaErrorInvalidValue;
  return by_dtype(call->dtype, [&](auto zero) { return by_shape<decltype(zero)>(*call); });
}
