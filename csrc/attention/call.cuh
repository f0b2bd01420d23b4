// What every part of a decode step of attention over a cache in 8 or 4 bits knows: the call, and how the lanes of a warp share tokens and channels.
//
// A warp takes 16 tokens at a time. Scores are Q K^T with rows of the query as M, tokens as N, channels as K: lane 4g + t reads channels of its own, always the
// same ones, of tokens g and g + 8, from global memory to registers, and gets the scores of row g (and g + 8) with tokens 2t, 2t + 1, 2t + 8, 2t + 9. The
// output is V^T P^T with channels as M, rows as N, tokens as K: for it the same lane reads all channels d of 1/8 of a head (number g) of these four tokens. So
// the weights are where the second product wants them, no number of the cache crosses lanes, and none goes through shared memory.
#pragma once
#include "../common/nvfp4.cuh"
#include "../sm90/ptx.cuh"

namespace fp4::attention {

constexpr int kTokens = 16;            // of a tile of one warp
constexpr int kFirst = 4, kLast = 64;  // tokens that nvfp4 keeps exact: formats/kv.py
constexpr int kMostRows = 16;          // of a KV head: queries times the heads that share it
constexpr int kMostParts = 64;
constexpr float kLeastScale = 0x1p-24f, kMostScale = 65504.f;  // of a token

enum Kind { kFP8, kINT8, kNVFP4, kSame };  // kSame: not rounded, in the dtype of the query

// Codes in one byte, and the largest number that a scale of 1 stands for.
template <Kind KIND> constexpr int kPacked = KIND == kNVFP4 ? 2 : 1;
template <Kind KIND> constexpr float kTop = KIND == kFP8 ? 448.f : KIND == kINT8 ? 127.f : 6.f * 256.f;
// What a number made of codes is multiplied by to be code times block scale.
template <Kind KIND> constexpr float kUnit = KIND == kNVFP4 ? kWeightUnit : KIND == kFP8 && FP4_ARCH < 89 ? 256.f : 1.f;

// A template's constants. ROWS: 8, or 16, of the query. EXACT: the format keeps tokens exact.
template <typename T_, Kind KEYS, Kind VALUES, int D_, int ROWS_> struct Form {
  using T = T_;
  static constexpr Kind kKeys = KEYS, kValues = VALUES;
  static constexpr int D = D_, ROWS = ROWS_, kTiles = ROWS / 8;  // of 8 rows
  static constexpr bool kExact = KEYS == kNVFP4, kScaled = true;  // kScaled: each token has a scale of its keys and one of its values
  static constexpr int kWarps = D > 128 ? 4 : 8, kThreads = 32 * kWarps;
  static constexpr int kKeySteps = KEYS == kINT8 ? D / 32 : D / 16;  // products of a score
};

// A floating-point array of any dtype: 0 bfloat16, 1 float16, 2 float32.
struct AnyNumbers {
  const void* at;
  int type;
  __device__ __forceinline__ float operator[](int64_t i) const {
    return type == 0 ? __bfloat162float(((const __nv_bfloat16*)at)[i]) : type == 1 ? __half2float(((const __half*)at)[i]) : ((const float*)at)[i];
  }
};

template <typename T> __device__ __forceinline__ float to_float(T v) { return Numbers<T>::to_float(v); }
template <typename T> __device__ __forceinline__ T from_float(float v) { return Numbers<T>::from_float(v); }
// Two neighbours, rounded.
template <typename T> __device__ __forceinline__ uint32_t pack(float low, float high);
template <> __device__ __forceinline__ uint32_t pack<__half>(float low, float high) { return pack_f16x2(low, high); }
template <> __device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *(const uint32_t*)&v;
}

// What a block works on: one part of the tokens of one KV head of one sequence.
struct Place {
  int of_all, sequence, kv_head;  // of_all: among the KV heads of all sequences
  int part, parts;
  int held;        // tokens that the cache holds
  int begin, end;  // rounded tokens of this part, without the new ones
  bool last;       // the part that appends the new tokens
};

constexpr __host__ __device__ __forceinline__ int least_of(int a, int b) { return a < b ? a : b; }
constexpr __host__ __device__ __forceinline__ int most_of(int a, int b) { return a > b ? a : b; }

// Into how many parts a sequence is divided: at most `most`, and at most `alone` of less than `enough` tokens. Parts are multiples of `tile` tokens, a tile for
// each warp. Block i has part i / programs of KV head i % programs, so that blocks without a part are the last.
struct Parts {
  int most, alone, tile, enough;
  __host__ __device__ __forceinline__ int tokens(int count, int parts) const { return ((count + parts - 1) / parts + tile - 1) / tile * tile; }
  __device__ __forceinline__ int each(int count) const {
    const int first = tokens(count, alone);
    return first <= enough ? first : most_of(enough, tokens(count, most));
  }
};

template <bool EXACT> __device__ __forceinline__ Place place_of(const AttentionParams& p, const Parts& parts, int held) {
  Place at;
  const int programs = p.batch * p.kv_heads;
  at.of_all = blockIdx.x % programs, at.part = blockIdx.x / programs;
  at.sequence = at.of_all / p.kv_heads, at.kv_head = at.of_all % p.kv_heads;
  at.held = held;
  int first = p.window ? most_of(held - p.window + 1, 0) : 0, upto = held;
  if (EXACT) first = most_of(first, kFirst), upto = most_of(held + p.queries - kLast, first);
  const int count = upto - first, each = parts.each(count);
  at.parts = count > 0 ? (count + each - 1) / each : 1;
  at.begin = first + at.part * each, at.end = least_of(at.begin + each, upto);
  at.last = at.part == at.parts - 1;
  return at;
}

// The row of the cache that has position `at`, of one KV head; a ring holds position p in row p % slots.
__device__ __forceinline__ int slot_of(const AttentionParams& p, int at) { return p.window ? at % p.slots : at; }

// Where the token at `at` lies among the exact ones.
__device__ __forceinline__ int exact_slot(const AttentionParams& p, int at) { return at < kFirst ? at : kFirst + (at - kFirst) % (p.exact_slots - kFirst); }

}  // namespace fp4::attention
