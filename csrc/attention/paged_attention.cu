// One decode step of fp4.paged_attention in one launch: append of each sequence's new token, attention over its old ones, combination.
//
// The blocks of a cluster share the tokens of one KV head of one sequence. Their warps take tiles of 16 tokens in turn, which lie in one page, so that a tile
// has one entry of the table; a tile is on its way to shared memory while the one before it is multiplied. Which lane multiplies what is said in call.cuh. The
// warp whose tile has the new token takes it from the arguments, long before it comes to that tile, and writes it to the cache, where nobody reads it in this
// launch.
//
// Each warp has a softmax of its own. They meet in the shared memory of their block, and the blocks' results in that of the cluster, where each block makes
// a part of the answer: no scratch memory, no counters, the same bits from run to run.
//
// PDL: the call's `early` says that the kernel before writes nothing of the cache, the table and the lengths: first tiles are then requested before the wait.
#include "append.cuh"
#include "combine.cuh"

namespace {

using namespace fp4;
using namespace fp4::attention;

constexpr int kMostBlocks = 16, kTogether = 8;  // of a cluster; those whose results are read at once

// A template's constants. ROWS: 8, or 16, heads that share a KV head.
template <typename T_, int D_, int ROWS_, int WARPS> struct Paged {
  using T = T_;
  static constexpr int D = D_, ROWS = ROWS_, kTiles = ROWS / 8, kWarps = WARPS, kThreads = 32 * kWarps;
  static constexpr int kStages = 2;  // tiles of a warp in shared memory: one is multiplied, one is on its way; more were not faster on an H100
};

// Where the tokens of a KV head of a sequence lie. A token's row has D numbers.
template <typename T> struct Pages {
  T* base;
  int64_t page, token;  // strides
  __device__ __forceinline__ int64_t offset(int of_page, int slot) const { return of_page * page + slot * token; }
};

// The first of the eight neighbouring channels that lane 4g + t reads of the values with number `chunk`.
__device__ __forceinline__ int value_channel(int g, int chunk) { return chunk * 64 + g * 8; }
// The channels of pair i = 8m + g of a row of results, which lane g has in product m.
__device__ __forceinline__ int channel_of(int i) { return value_channel(i % 8, i / 32) + i / 8 % 4 * 2; }

// This lane's part of the new token, if it has one.
template <typename F> struct NewToken {
  using T = typename F::T;
  static constexpr int kChunks = F::D / 32, kValueChunks = F::D / 64;
  uint4 k[kChunks], v[kValueChunks];
  int key, value;  // as which of its tokens of a tile this lane reads it, among the keys and among the values; -1: as none

  // number: of the token in its tile; -1: it is in none of this warp's.
  __device__ __forceinline__ void load(int number, const T* from_key, const T* from_value) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    key = number >= 0 && number % 8 == g ? number / 8 : -1;
    value = number >= 0 && number % 8 / 2 == t ? number / 8 * 2 + number % 2 : -1;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) k[c] = load_or_zero(from_key + exact_channel<F::D>(t, 8 * c), key >= 0);
#pragma unroll
    for (int c = 0; c < kValueChunks; ++c) v[c] = load_or_zero(from_value + value_channel(g, c), value >= 0);
  }
  // To its rows of the cache.
  __device__ __forceinline__ void store(T* to_key, T* to_value) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      if (key >= 0) *(uint4*)(to_key + exact_channel<F::D>(t, 8 * c)) = k[c];
#pragma unroll
    for (int c = 0; c < kValueChunks; ++c)
      if (value >= 0) *(uint4*)(to_value + value_channel(g, c)) = v[c];
  }
};

// A tile of 16 tokens in shared memory, where cp.async brings it. Neighbouring lanes copy neighbouring bytes, so that whole lines are asked for; they land
// where the lane that multiplies them reads them, whose parts lie 512 bytes apart. Zeros where a token is not attended to: there may be NaN in memory.
template <typename F> struct Tile {
  using T = typename F::T;
  static constexpr int kChunks = F::D / 32, kValueChunks = F::D / 64, kParts = 2 * kChunks + 4 * kValueChunks, kBytes = kParts * 512;
  static constexpr int kUnits = F::D / 8, kRows = 32 / kUnits;  // of 16 bytes of a row; rows that a warp copies at once: 2 or 4
  uint8_t* memory;

  static __device__ __forceinline__ int key_part(int i, int chunk) { return i * kChunks + chunk; }
  static __device__ __forceinline__ int value_part(int j, int chunk) { return 2 * kChunks + chunk * 4 + j; }
  __device__ __forceinline__ uint4& part(int number) const { return *(uint4*)(memory + number * 512 + threadIdx.x % 32 * 16); }

  // Which of the rows that a warp copies at once this lane copies of, and which 16 bytes of it.
  static __device__ __forceinline__ int row() { return threadIdx.x % 32 / kUnits; }
  static __device__ __forceinline__ int unit() { return threadIdx.x % kUnits; }

  // keys, values: where the tile's tokens lie, for this lane: from row() and unit() on; first, end: of the tokens of the sequence that are read, of which the
  // tile's first one is `at`.
  __device__ __forceinline__ void request(const T* keys, int64_t key_stride, const T* values, int64_t value_stride, int at, int first, int end) const {
    constexpr int kTurns = 8 / kRows;  // copies that make half a tile
    const int h = row(), u = unit();
    // Row h of a copy is token h of 8: of the keys for lanes 4h .. 4h + 3, of the values as number h % 2 of lanes with t = h / 2.
    const Shared key = shared_address(memory + u / 4 * 512 + (4 * h + u % 4) * 16);
    const Shared value = shared_address(memory + (value_part(h % 2, u / 8)) * 512 + (4 * (u % 8) + h / 2) * 16);
#pragma unroll
    for (int i = 0; i < 2 * kTurns; ++i) {
      const int token = at + kRows * i + h, in_half = kRows * (i % kTurns);
      const bool there = token >= first && token < end;
      cp_async_zfill<16>(key + key_part(i / kTurns, 0) * 512 + in_half * 64, keys + kRows * i * key_stride, there);
    }
#pragma unroll
    for (int i = 0; i < 2 * kTurns; ++i) {
      const int token = at + kRows * i + h, in_half = kRows * (i % kTurns);
      const bool there = token >= first && token < end;
      cp_async_zfill<16>(value + i / kTurns * 1024 + in_half * 8, values + kRows * i * value_stride, there);
    }
  }

  // The new token in its place.
  __device__ __forceinline__ void put(const NewToken<F>& token) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      if (token.key >= 0) part(key_part(token.key, c)) = token.k[c];
#pragma unroll
    for (int c = 0; c < kValueChunks; ++c)
      if (token.value >= 0) part(value_part(token.value, c)) = token.v[c];
  }

  // Products of this lane's rows of the query with its four tokens.
  __device__ __forceinline__ void score(float (&s)[F::kTiles][4], const uint4 (&q)[F::kTiles][kChunks]) const {
    float c[2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const uint4 a = q[0][chunk], b = F::kTiles == 2 ? q[F::kTiles - 1][chunk] : uint4{0, 0, 0, 0};
        const uint4 k = part(key_part(i, chunk));
        mma_m16n8k16<T>(c[i], a.x, b.x, a.y, b.y, k.x, k.y);
        mma_m16n8k16<T>(c[i], a.z, b.z, a.w, b.w, k.z, k.w);
      }
#pragma unroll
    for (int tile = 0; tile < F::kTiles; ++tile)
#pragma unroll
      for (int j = 0; j < 4; ++j) s[tile][j] = c[j / 2][j % 2 + 2 * tile];
  }

  __device__ __forceinline__ void add_values(State<F>& state, const float (&p)[F::kTiles][4]) const {
    uint32_t weights[F::kTiles][2];
#pragma unroll
    for (int tile = 0; tile < F::kTiles; ++tile) weights[tile][0] = pack<T>(p[tile][0], p[tile][1]), weights[tile][1] = pack<T>(p[tile][2], p[tile][3]);
#pragma unroll
    for (int chunk = 0; chunk < kValueChunks; ++chunk) {
      const uint4 w[4] = {part(value_part(0, chunk)), part(value_part(1, chunk)), part(value_part(2, chunk)), part(value_part(3, chunk))};
      state.template add_numbers<T>(4 * chunk, w, weights);
    }
  }
};

// The results of a block's warps, and behind them the block's own, which all blocks of the cluster read.
template <typename F> struct BlockResults {
  static constexpr int kPairs = F::D / 2, kBytes = Results<F>::kBytes + F::ROWS * (kPairs + 1) * 8;
  Results<F> warps;
  float2 *stats, *output;  // (peak, sum) of a row; pairs of channels

  // In place of the tiles.
  static __device__ __forceinline__ BlockResults of(uint8_t* memory) {
    float2* stats = (float2*)(memory + Results<F>::kBytes);
    return {{(float*)memory}, stats, stats + F::ROWS};
  }

  // Of all warps, for a row and a pair: (peak, sum) and output.
  __device__ __forceinline__ void merge(int row, int pair, float2& stat, float2& out) const {
    float2 of[F::kWarps], y[F::kWarps];
#pragma unroll
    for (int w = 0; w < F::kWarps; ++w) of[w] = warps.stats(w, row), y[w] = warps.output(w, row)[pair];
    add_all<F::kWarps>(of, y, stat, out);
  }

  template <int COUNT> static __device__ __forceinline__ void add_all(const float2 (&of)[COUNT], const float2 (&y)[COUNT], float2& stat, float2& out) {
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
};

template <typename F> __device__ __forceinline__ void store_answer(const PagedParams& p, int sequence, int head, int pair, float2 stat, float2 out) {
  float shrink = 1;
  if (p.sinks) {  // it has a share and no value
    const float sink = AnyNumbers{p.sinks, p.sinks_type}[head] * 1.4426950408889634f, higher = fmaxf(stat.x, sink);
    shrink = exp2_approx(stat.x - higher), stat.y = stat.y * shrink + exp2_approx(sink - higher);
  }
  const float by = stat.y == 0 ? 0.f : shrink / stat.y;
  typename F::T* y = (typename F::T*)p.y + ((int64_t)sequence * p.heads + head) * F::D + channel_of(pair);
  *(uint32_t*)y = pack<typename F::T>(out.x * by, out.y * by);
}

template <typename F> __global__ void __launch_bounds__(F::kThreads) paged_attention(const __grid_constant__ PagedParams p) {
  using T = typename F::T;
  constexpr int D = F::D, kPairs = D / 2, kChunks = D / 32;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, group = p.heads / p.kv_heads;
  const int sequence = blockIdx.x / p.kv_heads, kv_head = blockIdx.x % p.kv_heads, blocks = cluster_size(), rank = cluster_rank();
  if (!p.early) pdl_wait_then_trigger();

  const int held = ((const int*)p.lengths)[sequence] - 1;  // old tokens
  const int first = p.window ? most_of(held - p.window + 1, 0) : 0;
  const int* table = (const int*)p.table + sequence * p.table_stride;
  const Pages<T> keys{(T*)p.keys + kv_head * p.keys_strides[2], p.keys_strides[0], p.keys_strides[1]};
  const Pages<T> values{(T*)p.values + kv_head * p.values_strides[2], p.values_strides[0], p.values_strides[1]};
  const int stride = blocks * F::kWarps * kTokens, last = held / kTokens * kTokens;  // where the tile of the new token begins
  int at = first / kTokens * kTokens + (rank * F::kWarps + warp) * kTokens;
  auto tile_of = [&](int stage) { return Tile<F>{dynamic_shared() + (warp * F::kStages + stage) * Tile<F>::kBytes}; };
  // Also behind the end of the sequence: the table is read without a wait for the length.
  auto page_of = [&](int token) { return token / p.page_size < p.pages ? table[token / p.page_size] : 0; };
  const T* own_keys = keys.base + Tile<F>::row() * keys.token + Tile<F>::unit() * 8;
  const T* own_values = values.base + Tile<F>::row() * values.token + Tile<F>::unit() * 8;
  auto request = [&](int stage, int page, int token) {
    const int slot = token % p.page_size;
    if (token <= held)
      tile_of(stage).request(own_keys + keys.offset(page, slot), keys.token, own_values + values.offset(page, slot), values.token, token, first, held);
    cp_async_commit_group();
  };
  int pages[F::kStages];
#pragma unroll
  for (int i = 0; i < F::kStages; ++i) pages[i] = page_of(at + i * stride);
#pragma unroll
  for (int i = 0; i < F::kStages - 1; ++i) request(i, pages[i], at + i * stride);
  int page = pages[F::kStages - 1];  // of the next tile that is requested
  const int to = (int)((const int64_t*)p.slots)[sequence];
  if (p.early) pdl_wait_then_trigger();
  NewToken<F> added;  // of the warp whose tile it is in
  const bool adds = held >= 0 && (last - at) % stride == 0 && last >= at;
  added.load(adds ? held - last : -1, (const T*)p.key + sequence * p.key_strides[0] + kv_head * p.key_strides[1],
             (const T*)p.value + sequence * p.value_strides[0] + kv_head * p.value_strides[1]);
  uint4 q[F::kTiles][kChunks];
#pragma unroll
  for (int i = 0; i < F::kTiles; ++i) {
    const int row = 8 * i + g;
    const T* from = (const T*)p.query + sequence * p.query_strides[0] + (kv_head * group + row) * p.query_strides[1];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) q[i][c] = load_or_zero(from + exact_channel<D>(t, 8 * c), row < group);
  }

  if (to >= 0) {
    const int page = to / p.page_size, slot = to % p.page_size;
    added.store(keys.base + keys.offset(page, slot), values.base + values.offset(page, slot));
  }

  State<F> state;
  state.reset();
  for (int stage = 0; at <= held; at += stride) {
    cp_async_wait_group<F::kStages - 2>();
    __syncwarp();  // what other lanes copied is here, and they have read the tile before
    const Tile<F> tile = tile_of(stage);
    if (at == last) tile.put(added);
    const int free = stage == 0 ? F::kStages - 1 : stage - 1, ahead = at + (F::kStages - 1) * stride;
    request(free, page, ahead);
    page = page_of(ahead + stride);
    stage = stage == F::kStages - 1 ? 0 : stage + 1;
    float s[F::kTiles][4];
    bool used[F::kTiles][4];
    const float ones[4] = {1.f, 1.f, 1.f, 1.f};
    tile.score(s, q);
#pragma unroll
    for (int i = 0; i < F::kTiles; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int token = at + own_token(t, j);
        s[i][j] *= p.scale;
        if (p.softcap > 0) s[i][j] = p.softcap * (1.f - __fdividef(2.f, 1.f + __expf(s[i][j] * __fdividef(2.f, p.softcap))));
        used[i][j] = token >= first && token <= held;
      }
    state.apply(state.template add_scores<false>(s, ones, used));
    tile.add_values(state, s);
  }
  cp_async_wait_group<0>();
  __syncthreads();

  const BlockResults<F> results = BlockResults<F>::of(dynamic_shared());
  results.warps.put(state);
  __syncthreads();
  for (int i = threadIdx.x; i < group * kPairs; i += F::kThreads) {
    const int row = i / kPairs, pair = i % kPairs;
    float2 stat, out;
    results.merge(row, pair, stat, out);
    if (blocks == 1) {
      store_answer<F>(p, sequence, kv_head * group + row, pair, stat, out);
    } else {
      if (pair == 0) results.stats[row] = stat;
      results.output[i] = out;
    }
  }
  if (blocks == 1) return;
  cluster_sync();
  for (int i = rank * F::kThreads + threadIdx.x; i < group * kPairs; i += blocks * F::kThreads) {
    float2 stat{kNone, 0}, out{0, 0};
    for (int first_of_some = 0; first_of_some < blocks; first_of_some += kTogether) {
      float2 of[kTogether + 1], y[kTogether + 1];
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
        const bool there = first_of_some + r < blocks;
        of[r] = there ? *map_to_rank(results.stats + i / kPairs, first_of_some + r) : float2{kNone, 0};
        y[r] = there ? *map_to_rank(results.output + i, first_of_some + r) : float2{0, 0};
      }
      of[kTogether] = stat, y[kTogether] = out;
      BlockResults<F>::template add_all<kTogether + 1>(of, y, stat, out);
    }
    store_answer<F>(p, sequence, kv_head * group + i / kPairs, i % kPairs, stat, out);
  }
  cluster_sync();  // nobody ends while its memory is read
}

// --- host ---------------------------------------------------------------------------------------------------------------------------------------------------

// {warps of a block, blocks of a cluster} (sweep on an H100, batch 1 to 64). A multiprocessor reads at most 40 GB/s, for which eight warps are enough. Few
// sequences get blocks of eight, as many as find room beside each other in clusters: a quarter of the multiprocessors are left, for those of a cluster have to
// be neighbours. One sequence of few KV heads gets clusters of 16, which are known to fit on sm_90 alone. More sequences get smaller blocks, so that all of
// them begin at once: three of four warps fit on a multiprocessor, or seven of two.
struct Shape {
  int warps, blocks;
};
Shape shape_of(const PagedParams& p) {
  if (p.tile[0] > 0) return {p.tile[0], p.tile[1]};
  const int programs = p.batch * p.kv_heads, there = multiprocessors();
  if (programs > 3 * there) return {2, 1};
  if (programs > there) return {4, 1};
  if (FP4_ARCH == 90 && programs * kMostBlocks <= there * 3 / 4) return {4, kMostBlocks};
  int blocks = 1;
  while (blocks < 8 && programs * blocks * 2 <= there * 3 / 4) blocks *= 2;
  return {8, blocks};
}

template <typename F> cudaError_t run(const PagedParams& p, int blocks) {
  constexpr int kBytes = most_of(BlockResults<F>::kBytes, F::kWarps * F::kStages * Tile<F>::kBytes);
  const cudaError_t status = first_error({prefer_shared_memory(paged_attention<F>), blocks > 8 ? allow_large_clusters(paged_attention<F>) : cudaSuccess});
  if (status != cudaSuccess) return status;
  return fp4::launch(paged_attention<F>, dim3(p.batch * p.kv_heads, 1, blocks), F::kThreads, kBytes, blocks, {(cudaStream_t)p.stream, true}, p);
}

template <typename T, int D, int ROWS> cudaError_t by_warps(const PagedParams& p) {
  const Shape shape = shape_of(p);
  if (shape.warps == 2) return run<Paged<T, D, ROWS, 2>>(p, shape.blocks);
  if (shape.warps == 4) return run<Paged<T, D, ROWS, 4>>(p, shape.blocks);
  return run<Paged<T, D, ROWS, 8>>(p, shape.blocks);
}

template <typename T> cudaError_t by_shape(const PagedParams& p) {
  const bool few = p.heads / p.kv_heads <= 8;
  if (p.D == 64) return few ? by_warps<T, 64, 8>(p) : by_warps<T, 64, 16>(p);
  return few ? by_warps<T, 128, 8>(p) : by_warps<T, 128, 16>(p);
}

bool fits(const PagedParams& p) {
  if (!is_call(&p) || p.batch < 1 || p.kv_heads < 1 || p.heads < p.kv_heads || p.heads % p.kv_heads || p.heads / p.kv_heads > kMostRows) return false;
  if (p.page_size < kTokens || p.page_size % kTokens || p.window < 0 || p.pages < 1) return false;
  if (p.tile[0] && p.tile[0] != 2 && p.tile[0] != 4 && p.tile[0] != 8) return false;
  if (p.tile[0] && (p.tile[1] < 1 || p.tile[1] > kMostBlocks || (p.tile[1] & (p.tile[1] - 1)))) return false;
  return p.D == 64 || p.D == 128;
}

}  // namespace

// Returns a cudaError_t. D is 64 or 128, heads / kv_heads at most 16, page_size a multiple of 16; all rows begin at multiples of 16 bytes.
extern "C" int fp4_paged_attention(const PagedParams* call) {
  if (!call || !fits(*call)) return cudaErrorInvalidValue;
  return by_dtype(call->dtype, [&](auto zero) { return by_shape<decltype(zero)>(*call); });
}
