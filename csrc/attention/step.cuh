// One new token of each sequence, in one launch: norm and rotation of query and key, rounding and append of the new token, attention to all of them,
// combination by the blocks of a cluster (cluster.cuh). Over a KVCache in the dtype of the query (step_attention.cu), in fp8 and k8v4
// (step_attention_codes.cu), and over pages in that dtype and in E4M3 (paged_attention.cu, paged_attention_fp8.cu).
//
// Tokens are taken by their slot. The last warp of a block is the producer: it has tiles copied in bulk, some ahead, and it prepares the new token, if that
// is in a tile of the block. The other warps prepare the rows of the query, each for itself, in registers, and take 16 tokens of each tile. The warp that
// comes to the new token puts it into its tile: what was copied there from the cache does not count, and the producer writes the cache meanwhile.
//
// A source says which tokens there are and copies them: Slots here, Pages in pages.cuh.
//
// PDL: the call's `early` says that the kernel before writes nothing of the cache, and not what the source reads: first tiles are then requested before the
// wait.
#pragma once
#include "../sm90/pipeline.cuh"
#include "cluster.cuh"
#include "query.cuh"

namespace {

using namespace fp4;
using namespace fp4::attention;

// Shared memory of a block for tiles: two blocks find room on a multiprocessor where it is large.
constexpr int kForTiles = kLargeSharedMemory ? 100 * 1024 : 84 * 1024;

template <Kind KIND, int D> constexpr int kRowBytes = KIND == kSame ? 2 * D : D / kPacked<KIND>;

// Warps that attend, besides the producer.
// - Few, for up to eight rows, over the caches of few sequences. The kernels before and behind are linear_chain then, which leaves the registers of four
//   warps, one on each of the four parts of a multiprocessor. With more, a block of this kernel begins when the chain's has ended, and the next chain's when
//   it has.
// - Else seven over codes: with the producer's they are two on each part, and two blocks fit. Four over a cache that is not rounded (sweep on an H200).
constexpr int kFew = 3;
// Slots of a cache beyond which 16 blocks of few warps are ahead of eight, and up to how many KV heads of all sequences. H200, a step of generate() of
// Qwen3-8B's shape, a sequence of 8,192 tokens: a layer 7.6 us less in k8v4 and 4.3 in bfloat16. Of 4,096 tokens 1.0 less, but such caches are made where
// nobody asked for one.
constexpr int kLong = 4608, kFewHeads = 8;

// A template's constants. ROWS: 8, or 16, heads that share a KV head. SCALED: each token has a scale; codes without have one for all tokens.
template <typename T_, Kind KEYS, Kind VALUES, int D_, int ROWS_, int WARPS, bool SCALED = KEYS != kSame> struct Step {
  using T = T_;
  static constexpr Kind kKeys = KEYS, kValues = VALUES;
  static constexpr int D = D_, ROWS = ROWS_, kTiles = ROWS / 8, kWarps = WARPS, kThreads = 32 * kWarps + 32;
  static constexpr int kKeySteps = KEYS == kINT8 ? D / 32 : D / 16;
  static constexpr bool kExact = false, kScaled = SCALED, kOneScale = KEYS != kSame && !SCALED;
};

// What the codes of all tokens of a KV head are multiplied by.
struct OneScale {
  float key, value;
};

// As many times 16 tokens as a block has warps, in shared memory, as they lie in the cache. A warp takes 16 of them.
template <typename F> struct Tile {
  static constexpr int kCount = kTokens * F::kWarps;
  static constexpr int kKeyRow = kRowBytes<F::kKeys, F::D>, kValueRow = kRowBytes<F::kValues, F::D>, kBlockRow = F::kValues == kNVFP4 ? F::D / 16 : 0;
  static constexpr int kValues = kCount * kKeyRow, kBlocks = kValues + kCount * kValueRow, kKeyScales = kBlocks + kCount * kBlockRow;
  static constexpr int kValueScales = kKeyScales + (F::kScaled ? kCount * 2 : 0), kBytes = kValueScales + (F::kScaled ? kCount * 2 : 0);
  uint8_t* memory;

  // From token `first` on.
  __device__ __forceinline__ Rows keys(int first) const { return {memory + first * kKeyRow, (__half*)(memory + kKeyScales) + first, nullptr, nullptr}; }
  __device__ __forceinline__ Rows values(int first) const {
    return {memory + kValues + first * kValueRow, (__half*)(memory + kValueScales) + first, memory + kBlocks + first * kBlockRow, nullptr};
  }

  // One thread: the `count` tokens from slot `at` on.
  __device__ __forceinline__ void request(const Rows& keys, const Rows& values, int at, int count, Shared mbarrier) const {
    const Shared to = shared_address(memory);
    mbarrier_arrive_expect_tx(mbarrier, count * (kBytes / kCount));
    cp_async_bulk(to, keys.codes + (int64_t)at * kKeyRow, count * kKeyRow, mbarrier);
    cp_async_bulk(to + kValues, values.codes + (int64_t)at * kValueRow, count * kValueRow, mbarrier);
    if constexpr (F::kScaled) {
      cp_async_bulk(to + kKeyScales, keys.scale + at, count * 2, mbarrier);
      cp_async_bulk(to + kValueScales, values.scale + at, count * 2, mbarrier);
    }
    if constexpr (kBlockRow) cp_async_bulk(to + kBlocks, values.blocks + (int64_t)at * kBlockRow, count * kBlockRow, mbarrier);
  }
};

// Zeros in the values of those of a warp's tokens that are not used: there may be NaN.
template <typename F> __device__ __forceinline__ void clear_values(const Rows& values, uint32_t used) {
  constexpr int kUnits = Tile<F>::kValueRow / 16;
  for (int i = threadIdx.x % 32; i < kTokens * kUnits; i += 32)
    if (!(used >> (i / kUnits) & 1)) *(uint4*)(values.codes + i * 16) = uint4{0, 0, 0, 0};
}

// The new token as it is stored, in shared memory.
template <typename F> struct NewRow16 {
  static constexpr int kKeyRow = Tile<F>::kKeyRow, kValueRow = Tile<F>::kValueRow, kBlockRow = Tile<F>::kBlockRow;
  static constexpr int kBlocks = kKeyRow + kValueRow, kScales = kBlocks + 16, kBytes = kScales + 16;
  uint8_t* memory;

  __device__ __forceinline__ Rows key() const { return {memory, (__half*)(memory + kScales), nullptr, nullptr}; }
  __device__ __forceinline__ Rows value() const { return {memory + kKeyRow, (__half*)(memory + kScales) + 2, memory + kBlocks, nullptr}; }

  // To a row of the keys and values of a tile, or of the cache; one warp.
  __device__ __forceinline__ void copy(const Rows& keys, const Rows& values, int row) const {
    copy(key(), kKeyRow, 0, keys, row), copy(value(), kValueRow, kBlockRow, values, row);
  }
  static __device__ __forceinline__ void copy(const Rows& from, int bytes, int blocks, const Rows& to, int row) {
    const int lane = threadIdx.x % 32;
    auto words = [&](const uint8_t* x, uint8_t* y, int count) {
      for (int i = lane; i < count / 4; i += 32) ((uint32_t*)y)[i] = ((const uint32_t*)x)[i];
    };
    words(from.codes, to.codes + (int64_t)row * bytes, bytes);
    if (blocks) words(from.blocks, to.blocks + (int64_t)row * blocks, blocks);
    if (F::kScaled && lane == 0) to.scale[row] = *from.scale;
  }
};

// Shared memory: tiles, as many as the call has stages, lie behind everything else.
template <typename F> struct Memory {
  // Few warps run beside linear_chain, whose next block has its shared memory beside three stages, and not beside four.
  static constexpr int kAtMost = F::kWarps == kFew ? 3 : 4;
  static constexpr int kMostStages = most_of(least_of(kForTiles / Tile<F>::kBytes, kAtMost), kLargeSharedMemory ? 2 : 1);
  static constexpr int kMbarriers = Exchange<F>::kBytes, kNew = kMbarriers + (2 * kMostStages + 2) * 8, kMean = kNew + NewRow16<F>::kBytes;
  static constexpr int kTiles = (kMean + F::D * 4 + 127) / 128 * 128;

  // A short cache needs fewer, and leaves room for the next kernel.
  static __host__ __device__ int stages(int slots, int blocks) {
    const int round = blocks * Tile<F>::kCount;
    return least_of((slots + round - 1) / round, kMostStages);
  }
  static int bytes(int stages) { return kTiles + most_of(Results<F>::kBytes, stages * Tile<F>::kBytes); }
};

// A stage of as many as the call has, and the parity of its phase.
struct Stage {
  int i = 0, parity = 0;
  __device__ __forceinline__ void next(int stages) {
    if (++i == stages) i = 0, parity ^= 1;
  }
};

// What the last warp of the block that has the new token does with it: norm, rotation, rounding. mean: of keys; D floats in shared memory, which it writes
// where the sequence begins with this token.
template <typename F>
__device__ __forceinline__ void prepare_new(const AttentionParams& p, int sequence, int kv_head, bool first, float* mean, const OneScale& scales,
                                            const NewRow16<F>& to) {
  using T = typename F::T;
  constexpr int D = F::D, E = Lanes<D>::kEach;
  const int channel = threadIdx.x % 32 * E;
  float* key_mean = (float*)p.key_mean + (int64_t)blockIdx.x * D + channel;
  Requested<D> of_key, of_value;
  NewRow<T> key{(const T*)p.key + sequence * p.key_strides[0] + kv_head * p.key_strides[1], p.k_norm, p.cos, p.sin, sequence * p.angle_strides[0]};
  const NewRow<T> value{(const T*)p.value + sequence * p.value_strides[0] + kv_head * p.value_strides[1], nullptr, nullptr, nullptr, 0};
  if (!p.rotary) key.cos = nullptr;
  of_key.template load_as<T, T, T>(p, key), of_value.template load_as<T, T, T>(p, value);
  float old_mean[E] = {};
  if (F::kScaled && !first)
#pragma unroll
    for (int i = 0; i < E; ++i) old_mean[i] = key_mean[i];
  Lanes<D> v = prepared<T, D>(p, value, of_value, mean);
  __syncwarp();
  Lanes<D> k = prepared<T, D>(p, key, of_key, mean);
  __syncwarp();
  if constexpr (F::kScaled) {
#pragma unroll
    for (int i = 0; i < E; ++i) {
      if (first) mean[channel + i] = key_mean[i] = old_mean[i] = is_finite(k.v[i]) ? k.v[i] : 0.f;
      k.v[i] -= old_mean[i];
    }
    const Rounded<F::kKeys, D> key_codes(k);
    const Rounded<F::kValues, D> value_codes(v);
    key_codes.store(to.key(), 0), value_codes.store(to.value(), 0);
  } else if constexpr (F::kOneScale) {
    const Rounded<F::kKeys, D> key_codes(k, scales.key);
    const Rounded<F::kValues, D> value_codes(v, scales.value);
    key_codes.template store<false>(to.key(), 0), value_codes.template store<false>(to.value(), 0);
  } else {
#pragma unroll
    for (int i = 0; i < E; i += 2) {
      *(uint32_t*)((T*)to.key().codes + channel + i) = pack<T>(k.v[i], k.v[i + 1]);
      *(uint32_t*)((T*)to.value().codes + channel + i) = pack<T>(v.v[i], v.v[i + 1]);
    }
  }
}

// The tokens of a KV head of a sequence in a KVCache; a ring (window > 0) holds position i in slot i % slots. In every array of the cache the tokens of a
// tile lie one behind the other.
template <typename F> struct Slots {
  struct Of {};                                   // what a call has besides AttentionParams
  static constexpr int kProducers = 1, begin = 0;  // lanes that copy; where the first tile begins
  const AttentionParams& p;
  Rows keys, values;
  const uint8_t* mask;
  int64_t held;     // old tokens
  int end, newest;  // behind the last slot that is looked at; that of the new token

  static __device__ __forceinline__ Slots of(const AttentionParams& p, const Of&, int sequence, int) {
    auto rows_of = [&](const CacheParams& c, int row_bytes) {
      const int64_t row = (int64_t)blockIdx.x * p.slots;
      return Rows{(uint8_t*)c.codes + row * row_bytes, (__half*)c.scale + row, (uint8_t*)c.blocks + row * (F::D / 16), nullptr};
    };
    const int64_t held = *(const int64_t*)p.position;
    const int end = (int)held + 1;
    return {p, rows_of(p.keys, Tile<F>::kKeyRow), rows_of(p.values, Tile<F>::kValueRow),
            p.mask ? (const uint8_t*)p.mask + sequence * p.mask_strides[0] : nullptr, held, p.window ? least_of(p.slots, end) : end, slot_of(p, (int)held)};
  }
  __device__ __forceinline__ bool is_valid() const { return held >= 0 && (p.window || held < p.slots); }
  __device__ __forceinline__ OneScale scales() const { return {1.f, 1.f}; }
  __device__ __forceinline__ bool is_used(int slot) const {
    const int held = (int)this->held, position = slot <= newest ? held - newest + slot : held - newest + slot - p.slots;
    return slot < end && position >= 0 && (!p.window || position > held - p.window) && unmasked(p, mask, position);
  }
  __device__ __forceinline__ void look_up(int, int) {}
  __device__ __forceinline__ void request(const Tile<F>& tile, int at, int, Shared mbarrier) {
    const int there = least_of(p.slots, (end + kTokens - 1) / kTokens * kTokens) - at;
    tile.request(keys, values, at, least_of(Tile<F>::kCount, there), mbarrier);
  }
  __device__ __forceinline__ void store(const NewRow16<F>& added) const { added.copy(keys, values, newest); }
};

// The weights of a tile's tokens in s, and their values are added. ALL: every one is used.
template <typename F, bool ALL>
__device__ __forceinline__ void add_tile(State<F>& state, const Rows& keys, const Rows& values, int count, uint32_t bits, const QueryFragments<F>& q,
                                         const AttentionParams& p) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float s[F::kTiles][4], scale[4] = {1.f, 1.f, 1.f, 1.f};
  bool used[F::kTiles][4];
#pragma unroll
  for (int i = 0; i < F::kTiles; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) used[i][j] = ALL || (bits >> own_token(t, j) & 1);
  if constexpr (F::kKeys == kSame) {
    using T = typename F::T;
    float c[2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int chunk = 0; chunk < F::D / 32; ++chunk) {
        const uint4 a = q.of[0][chunk], b = F::kTiles == 2 ? q.of[F::kTiles - 1][chunk] : uint4{0, 0, 0, 0};
        const uint4 k = *(const uint4*)(keys.codes + (ALL ? 8 * i + g : InShared{count}.row(8 * i + g)) * Tile<F>::kKeyRow + exact_channel<F::D>(t, 8 * chunk) * 2);
        mma_m16n8k16<T>(c[i], a.x, b.x, a.y, b.y, k.x, k.y);
        mma_m16n8k16<T>(c[i], a.z, b.z, a.w, b.w, k.z, k.w);
      }
#pragma unroll
    for (int i = 0; i < F::kTiles; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) s[i][j] = c[j / 2][j % 2 + 2 * i] * p.scale;
    cap<F>(p, s);
    state.apply(state.template add_scores<ALL>(s, scale, used));
    state.template add_exact<T>(s, [&](int chunk, int j) {
      return *(const uint4*)(values.codes + own_token(t, j) * Tile<F>::kValueRow + (g * (F::D / 8) + 8 * chunk) * 2);
    });
  } else {
    Keys<F> k;
    Values<F> v;
    k.load_from(keys, InShared{count}), v.load_from(values, InShared{count});
    score<F>(s, k, q);
    finish_scores<F>(s, scale, k.scale, v.scale, p, q.rest);
    state.apply(state.template add_scores<ALL>(s, scale, used));
    state.add_values(v, s);
  }
}

template <typename F, typename Source>
__global__ void __launch_bounds__(F::kThreads, F::ROWS == 8 ? 2 : 1)
    step_attention(const __grid_constant__ AttentionParams p, const __grid_constant__ typename Source::Of of) {
  using T = typename F::T;
  using M = Memory<F>;
  const Exchange<F> exchange{dynamic_shared()};
  begin_cluster(exchange, p.heads / p.kv_heads);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = cluster_size(), rank = cluster_rank(), stages = M::stages(p.slots, blocks);
  const int sequence = blockIdx.x / p.kv_heads, kv_head = blockIdx.x % p.kv_heads, group = p.heads / p.kv_heads;
  const Ring<> ring = Ring<>::at(shared_address(dynamic_shared() + M::kMbarriers), M::kMostStages);
  const Shared is_ready = ring.end(M::kMostStages);  // the new token
  constexpr int kCount = Tile<F>::kCount;
  const int stride = blocks * kCount;
  if (!p.early) pdl_wait_then_trigger();
  Source source = Source::of(p, of, sequence, kv_head);
  int at = source.begin + rank * kCount;  // where the block's next tile begins
  if (warp == F::kWarps) source.look_up(at, stride);
  if (threadIdx.x == F::kWarps * 32) ring.init(M::kMostStages, Source::kProducers, F::kWarps), mbarrier_init(is_ready, 1), fence_mbarrier_init();
  cluster_wait();
  if (!source.is_valid()) {  // nothing is written to the cache
    if (p.early) pdl_wait_then_trigger();
    const float nan = __uint_as_float(0x7FC00000);
    for (int i = threadIdx.x; i < group * (F::D / 2) && rank == 0; i += F::kThreads)
      ((uint32_t*)p.y)[((int64_t)sequence * p.heads + kv_head * group) * (F::D / 2) + i] = pack<T>(nan, nan);
    return;
  }
  __syncthreads();

  const int last = source.newest / kTokens * kTokens;  // where the 16 tokens with the new one begin
  const bool has_new = source.newest >= 0 && (source.newest - source.begin) / kCount % blocks == rank;
  const NewRow16<F> added{dynamic_shared() + M::kNew};
  float* new_mean = (float*)(dynamic_shared() + M::kMean);
  auto tile_of = [&](int stage) { return Tile<F>{dynamic_shared() + M::kTiles + stage * Tile<F>::kBytes}; };

  State<F> state;
  state.reset();
  if (warp == F::kWarps) {
    Stage to;
    auto request = [&]() {
      ring.acquire(to);
      source.request(tile_of(to.i), at, stride, ring.of(to));
      to.next(stages), at += stride;
    };
    if (lane < Source::kProducers)
      for (int i = 0; i < stages && at < source.end; ++i) request();
    __syncwarp();
    if (p.early) pdl_wait_then_trigger();
    if (has_new) {
      prepare_new<F>(p, sequence, kv_head, source.held == 0, new_mean, source.scales(), added);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(is_ready);
      source.store(added);
    }
    if (lane < Source::kProducers)
      while (at < source.end) request();
    __syncwarp();
  } else {
    QueryRows<F> rows;
    rows.request_norm(p);
    if (p.early) pdl_wait_then_trigger();
    rows.request(p, sequence, kv_head, group);
    // q . (k + mean) = q . k + q . mean: the second term is the same for all tokens, and matters where something else is compared with their scores.
    const float* mean = F::kScaled && (p.softcap > 0 || p.sinks) ? (const float*)p.key_mean + (int64_t)blockIdx.x * F::D : nullptr;
    if (mean && source.held == 0 && has_new) mbarrier_wait_parity(is_ready, 0), mean = new_mean;
    QueryFragments<F> q(rows, p, mean);
    if constexpr (F::kOneScale)
#pragma unroll
      for (int i = 0; i < F::kTiles; ++i) q.rest.factor[i] *= source.scales().key;
    Stage from;
    for (; at < source.end; at += stride, from.next(stages)) {
      const int own = at + warp * kTokens;
      ring.wait(from);
      const Rows own_keys = tile_of(from.i).keys(warp * kTokens), own_values = tile_of(from.i).values(warp * kTokens);
      if (own == last) {
        mbarrier_wait_parity(is_ready, 0);
        added.copy(own_keys, own_values, source.newest - last);
        fence_proxy_async();  // before the next copy to this place
        __syncwarp();
      }
      const uint32_t used = lanes_where(source.is_used(own + lane % kTokens)) & 0xFFFF;
      if (used == 0xFFFF) {
        add_tile<F, true>(state, own_keys, own_values, kTokens, used, q, p);
      } else if (used) {
        if (!F::kScaled) {
          clear_values<F>(own_values, used);
          fence_proxy_async();
          __syncwarp();
        }
        add_tile<F, false>(state, own_keys, own_values, source.end - own, used, q, p);
      }
      __syncwarp();  // all have read their tokens
      if (lane == 0) ring.release(from);
    }
    if constexpr (F::kOneScale) state.multiply(source.scales().value);
  }
  combine_cluster<F>(p, state, exchange, dynamic_shared() + M::kTiles, sequence, kv_head);
}

// --- host ---------------------------------------------------------------------------------------------------------------------------------------------------

template <typename F, typename Source> cudaError_t run(const AttentionParams& p, const typename Source::Of& of, int blocks) {
  return launch_clusters<F>(step_attention<F, Source>, p, of, blocks, Memory<F>::bytes(Memory<F>::stages(p.slots, blocks)));
}

// Blocks of a KV head of a sequence where F has kMany warps.
template <typename F, typename Source> int blocks_of(const AttentionParams& p) {
  static const Room alone = Room::of<F>(step_attention<F, Source>, (kLargeSharedMemory ? 2 : 1) * kForTiles);
  static const Room paired = Room::of<F>(step_attention<F, Source>, Memory<F>::bytes(Memory<F>::kMostStages));
  return blocks_in(alone, paired, p.batch * p.kv_heads, p.slots);
}

// Where it has few. They leave room for the kernels beside them on every multiprocessor, so clusters of 16 need no multiprocessors of their own.
int blocks_of_few(const AttentionParams& p) { return FP4_ARCH == 90 && p.slots > kLong && p.batch * p.kv_heads <= kFewHeads ? kMostBlocks : 8; }

bool are_few(const AttentionParams& p) { return p.batch * p.kv_heads * 8 <= multiprocessors() * 3 / 4; }

template <typename F> cudaError_t run_slots(const AttentionParams& p, int blocks) { return run<F, Slots<F>>(p, {}, p.tile[0] ? p.tile[0] : blocks); }

template <typename T, Kind KEYS, Kind VALUES, int D> cudaError_t by_rows(const AttentionParams& p) {
  constexpr int kMany = KEYS == kSame ? 4 : 7;
  using Wide = Step<T, KEYS, VALUES, D, 16, kMany>;
  using Many = Step<T, KEYS, VALUES, D, 8, kMany>;
  using Few = Step<T, KEYS, VALUES, D, 8, kFew>;
  if (p.heads / p.kv_heads > 8) return run_slots<Wide>(p, blocks_of<Wide, Slots<Wide>>(p));
  return (p.tile[1] ? p.tile[1] == kFew : are_few(p)) ? run_slots<Few>(p, blocks_of_few(p)) : run_slots<Many>(p, blocks_of<Many, Slots<Many>>(p));
}

template <typename T, Kind KEYS, Kind VALUES> cudaError_t by_shape(const AttentionParams& p) {
  return p.D == 64 ? by_rows<T, KEYS, VALUES, 64>(p) : by_rows<T, KEYS, VALUES, 128>(p);
}

bool fits(const AttentionParams& p) {
  if (!is_call(&p) || p.batch < 1 || p.kv_heads < 1 || p.heads < p.kv_heads || p.heads % p.kv_heads || p.heads / p.kv_heads > kMostRows) return false;
  if (p.queries != 1 || p.slots < 1 || p.window < 0 || p.window > p.slots || (int64_t)p.slots * p.D >= (int64_t)1 << 31) return false;
  if (p.format >= 0 && p.slots % 8) return false;
  if (p.rotary && ((p.rotary != 64 && p.rotary != 128) || p.rotary > p.D || (p.angles != p.rotary && 2 * p.angles != p.rotary))) return false;
  if (p.wide_norms || p.wide_angles) return false;
  return (p.D == 64 || p.D == 128) && (!p.tile[0] || are_blocks(p.tile[0])) && p.tile[1] >= 0;
}

}  // namespace
