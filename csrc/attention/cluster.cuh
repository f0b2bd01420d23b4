// One new token of each sequence attends to the old ones and to itself, by clusters of blocks. What paged_attention.cu and step_attention.cu share.
//
// The blocks of a cluster share the tokens of one KV head of one sequence. Their warps take tiles of 16 tokens in turn; a tile is on its way to shared memory
// while the one before it is multiplied. Which lane multiplies what is said in call.cuh. The warp whose tile has the new token has it in registers, long before
// it comes to that tile, and writes it to the cache, where nobody reads it in this launch.
//
// Each warp has a softmax of its own. They meet in the shared memory of their block, and the blocks' results in that of the cluster, where each block makes
// a part of the answer: no scratch memory, no counters, the same bits from run to run.
#pragma once
#include "append.cuh"
#include "combine.cuh"

namespace fp4::attention {

constexpr int kMostBlocks = 16, kTogether = 8;  // of a cluster; those whose results are read at once

// A template's constants. ROWS: 8, or 16, heads that share a KV head.
template <typename T_, int D_, int ROWS_, int WARPS> struct Clustered {
  using T = T_;
  static constexpr int D = D_, ROWS = ROWS_, kTiles = ROWS / 8, kWarps = WARPS, kThreads = 32 * kWarps;
  static constexpr int kStages = 2;  // tiles of a warp in shared memory: one is multiplied, one is on its way; more were not faster on an H100
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

  // keys, values: where the tile's tokens lie, for this lane: from row() and unit() on; at: the number of the first of them; is_read(i): is token number i read?
  template <typename Read>
  __device__ __forceinline__ void request(const T* keys, int64_t key_stride, const T* values, int64_t value_stride, int at, const Read& is_read) const {
    constexpr int kTurns = 8 / kRows;  // copies that make half a tile
    const int h = row(), u = unit();
    // Row h of a copy is token h of 8: of the keys for lanes 4h .. 4h + 3, of the values as number h % 2 of lanes with t = h / 2.
    const Shared key = shared_address(memory + u / 4 * 512 + (4 * h + u % 4) * 16);
    const Shared value = shared_address(memory + (value_part(h % 2, u / 8)) * 512 + (4 * (u % 8) + h / 2) * 16);
#pragma unroll
    for (int i = 0; i < 2 * kTurns; ++i) {
      const int in_half = kRows * (i % kTurns);
      const bool there = is_read(at + kRows * i + h);
      cp_async_zfill<16>(key + key_part(i / kTurns, 0) * 512 + in_half * 64, keys + kRows * i * key_stride, there);
    }
#pragma unroll
    for (int i = 0; i < 2 * kTurns; ++i) {
      const int in_half = kRows * (i % kTurns);
      const bool there = is_read(at + kRows * i + h);
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

template <typename F, typename Params> __device__ __forceinline__ void store_answer(const Params& p, int sequence, int head, int pair, float2 stat, float2 out) {
  float shrink = 1;
  if (p.sinks) {  // it has a share and no value
    const float sink = AnyNumbers{p.sinks, p.sinks_type}[head] * 1.4426950408889634f, higher = fmaxf(stat.x, sink);
    shrink = exp2_approx(stat.x - higher), stat.y = stat.y * shrink + exp2_approx(sink - higher);
  }
  const float by = stat.y == 0 ? 0.f : shrink / stat.y;
  typename F::T* y = (typename F::T*)p.y + ((int64_t)sequence * p.heads + head) * F::D + channel_of(pair);
  *(uint32_t*)y = pack<typename F::T>(out.x * by, out.y * by);
}

// The new token, which is this number of a tile of this warp (-1: of none), and this lane's part of the query, as the call has them.
template <typename F, typename Params>
__device__ __forceinline__ void load_new(NewToken<F>& added, int number, const Params& p, int sequence, int kv_head) {
  using T = typename F::T;
  added.load(number, (const T*)p.key + sequence * p.key_strides[0] + kv_head * p.key_strides[1],
             (const T*)p.value + sequence * p.value_strides[0] + kv_head * p.value_strides[1]);
}
template <typename F, typename Params>
__device__ __forceinline__ void load_query(uint4 (&q)[F::kTiles][F::D / 32], const Params& p, int sequence, int kv_head, int group) {
  using T = typename F::T;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < F::kTiles; ++i) {
    const int row = 8 * i + g;
    const T* from = (const T*)p.query + sequence * p.query_strides[0] + (kv_head * group + row) * p.query_strides[1];
#pragma unroll
    for (int c = 0; c < F::D / 32; ++c) q[i][c] = load_or_zero(from + exact_channel<F::D>(t, 8 * c), row < group);
  }
}

// What a warp does. Source says, of one KV head of one sequence, of tokens by number (of their position, or of their slot in a cache):
//   begin, end              the tokens that are looked at; begin is that of a tile
//   newest                  the number of the new token
//   is_read(i), is_used(i)  is token i an old one that is attended to; or the new one
//   Place place_of(i)       where the tile lies that begins at token i, also behind the end
//   key_at, value_at        (place, i): its first rows; key_stride, value_stride: from row to row of a tile
//   wait()                  before anything that the kernel ahead in the stream writes
//   load(added, number)     the new token, which is this number of a tile of this warp; -1: it is not this warp's
//   load(q, group)          this lane's part of the query, of which `group` heads share the KV head
//   store(added)            the new token to the cache
template <typename F, typename Params, typename Source>
__device__ __forceinline__ void attend_in_cluster(const Params& p, Source source, int sequence, int kv_head) {
  using T = typename F::T;
  constexpr int kPairs = F::D / 2, kChunks = F::D / 32;
  const int warp = threadIdx.x / 32, t = threadIdx.x % 4, group = p.heads / p.kv_heads, blocks = cluster_size(), rank = cluster_rank();
  const int stride = blocks * F::kWarps * kTokens, last = source.newest / kTokens * kTokens;  // where the tile of the new token begins
  int at = source.begin + (rank * F::kWarps + warp) * kTokens;
  auto tile_of = [&](int stage) { return Tile<F>{dynamic_shared() + (warp * F::kStages + stage) * Tile<F>::kBytes}; };
  auto request = [&](int stage, typename Source::Place place, int token) {
    if (token < source.end)
      tile_of(stage).request(source.key_at(place, token), source.key_stride(), source.value_at(place, token), source.value_stride(), token,
                             [&](int i) { return source.is_read(i); });
    cp_async_commit_group();
  };
  typename Source::Place places[F::kStages];
#pragma unroll
  for (int i = 0; i < F::kStages; ++i) places[i] = source.place_of(at + i * stride);
#pragma unroll
  for (int i = 0; i < F::kStages - 1; ++i) request(i, places[i], at + i * stride);
  typename Source::Place place = places[F::kStages - 1];  // of the next tile that is requested
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
inline Shape shape_of(int programs) {
  const int there = multiprocessors();
  if (programs > 3 * there) return {2, 1};
  if (programs > there) return {4, 1};
  if (FP4_ARCH == 90 && programs * kMostBlocks <= there * 3 / 4) return {4, kMostBlocks};
  int blocks = 1;
  while (blocks < 8 && programs * blocks * 2 <= there * 3 / 4) blocks *= 2;
  return {8, blocks};
}

inline bool is_shape(const Shape& s) {
  return (s.warps == 2 || s.warps == 4 || s.warps == 8) && s.blocks >= 1 && s.blocks <= kMostBlocks && !(s.blocks & (s.blocks - 1));
}

// f(form), for heads of width D (64 or 128), `group` of which share a KV head, and blocks of so many warps.
template <typename T, int D, int ROWS, typename Launch> cudaError_t with_warps(int warps, const Launch& f) {
  if (warps == 2) return f(Clustered<T, D, ROWS, 2>{});
  if (warps == 4) return f(Clustered<T, D, ROWS, 4>{});
  return f(Clustered<T, D, ROWS, 8>{});
}
template <typename T, typename Launch> cudaError_t with_form(int D, int group, int warps, const Launch& f) {
  if (D == 64) return group <= 8 ? with_warps<T, 64, 8>(warps, f) : with_warps<T, 64, 16>(warps, f);
  return group <= 8 ? with_warps<T, 128, 8>(warps, f) : with_warps<T, 128, 16>(warps, f);
}

template <typename F> constexpr int kClusterBytes = most_of(BlockResults<F>::kBytes, F::kWarps * F::kStages * Tile<F>::kBytes);

template <typename F, typename Params> cudaError_t launch_clusters(void (*kernel)(Params), const Params& p, int blocks) {
  const cudaError_t status = first_error({prefer_shared_memory(kernel), blocks > 8 ? allow_large_clusters(kernel) : cudaSuccess});
  if (status != cudaSuccess) return status;
  return fp4::launch(kernel, dim3(p.batch * p.kv_heads, 1, blocks), F::kThreads, kClusterBytes<F>, blocks, {(cudaStream_t)p.stream, true}, p);
}

}  // namespace fp4::attention
