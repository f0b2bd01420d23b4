// Tiles of 16 tokens of a paged cache, as cp.async brings them to shared memory, and the new token, which is put into its tile.
#pragma once
#include "cluster.cuh"

namespace fp4::attention {

// A template's constants. ROWS: 8, or 16, heads that share a KV head.
template <typename T_, int D_, int ROWS_, int WARPS> struct Paged {
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
    state.template add_exact<T>(p, [&](int chunk, int j) { return part(value_part(j, chunk)); });
  }
};

}  // namespace fp4::attention
