// The arguments of an MoE layer.
#pragma once
#include "../common/epilogue.cuh"

namespace fp4 {

constexpr int kUnits = kSeveralScales ? 2 : 1;  // global scales of an expert's first product: one, or the gate's and up's

constexpr int kMostExperts = 1024;

// [n] of int32 or int64.
struct Ids {
  const void* at;
  int wide;
  __device__ __forceinline__ int64_t operator[](int i) const { return wide ? __ldg((const long long*)at + i) : __ldg((const int*)at + i); }
};
// The router's weights: bfloat16, float16 or float32 (0, 1, 2).
struct Factors {
  const void* at;
  int type;
  // The first `count` of COUNT from i on.
  template <int COUNT> __device__ __forceinline__ void take(float (&to)[COUNT], int i, int count) const {
    auto each = [&](auto one) {
#pragma unroll
      for (int j = 0; j < COUNT; ++j) to[j] = j < count ? one(i + j) : 0.f;
    };
    if (type == 0)
      each([&](int j) { return __bfloat162float(((const __nv_bfloat16*)at)[j]); });
    else if (type == 1)
      each([&](int j) { return __half2float(((const __half*)at)[j]); });
    else
      each([&](int j) { return __ldg((const float*)at + j); });
  }
};

// The local expert of pair i, or -1. `map`: global id -> local id, of map_size; none where it is null.
__device__ __forceinline__ int expert_of(const Ids& ids, const Ids& map, int map_size, int i, int E) {
  int64_t id = ids[i];
  if (map.at) id = id >= 0 && id < map_size ? map[(int)id] : -1;
  return id >= 0 && id < E ? (int)id : -1;
}

// What stands between the two products. Biases may be null: [E, 2 N] of the first, [E, N] of the second.
struct Between {
  const __nv_bfloat16 *bias, *down_bias;
  float alpha, limit;    // limit <= 0: none
  int more, interleaved;  // more: act(gate) * (up + 1); interleaved: rows are gate, up, gate, up, ...

  __device__ __forceinline__ float operator()(float gate, float up) const {
    if (limit > 0) {  // a NaN stays one
      gate = gate > limit ? limit : gate;
      up = up > limit ? limit : up < -limit ? -limit : up;
    }
    if (more) up += 1.f;
    return __fdividef(gate, 1.f + __expf(-alpha * gate)) * up;
  }
  // The row of W, among those of its expert, of output n: of its gate (half 0) and its up.
  __device__ __forceinline__ int row(int n, int half, int N) const { return interleaved ? 2 * n + half : n + half * N; }
};

// A call but for its tile. type of ids and map: 1 is int64; of the router's weights: 0 bfloat16, 1 float16, 2 float32.
struct Layer {
  const __nv_bfloat16* x;
  Ids ids, map;
  Factors weights;
  const uint8_t *codes[2], *scale[2];  // of gate_up [E, 2 I, K] and down [E, N, I]
  const float* global_scale[2];  // [E, kUnits] and [E]
  __nv_bfloat16* y;
  int tokens, top_k, E, K, I, N, map_size;
  Between between;

  static Layer of(const MoeParams& p) {
    using T = __nv_bfloat16;
    auto bytes = [](const void* at) { return (const uint8_t*)at; };
    return {(const T*)p.x,
            {p.ids, p.ids_type},
            {p.map, p.map_type},
            {p.weights, p.weights_type},
            {bytes(p.gate_up.codes), bytes(p.down.codes)},
            {bytes(p.gate_up.scale), bytes(p.down.scale)},
            {(const float*)p.gate_up.global_scale, (const float*)p.down.global_scale},
            (T*)p.y,
            p.tokens,
            p.top_k,
            p.E,
            p.K,
            p.I,
            p.N,
            p.map_size,
            {(const T*)p.gate_up.bias, (const T*)p.down.bias, p.alpha, p.limit, p.more, p.interleaved}};
  }

  int pairs() const { return tokens * top_k; }
  // The most tiles of up to so many pairs of one expert each.
  int64_t tiles_of(int most) const { return pairs() / most + (pairs() < E ? pairs() : E); }
  bool fits() const {
    return tokens >= 1 && top_k >= 1 && (int64_t)tokens * top_k <= 1 << 20 && E >= 1 && E <= kMostExperts && K >= 64 && K <= 1 << 15 && K % 64 == 0 && I >= 64 &&
           I <= 1 << 15 && I % 64 == 0 && N >= 8 && N % 8 == 0 && (int64_t)E * 2 * I <= INT32_MAX && (int64_t)E * N <= INT32_MAX && weights.type >= 0 && weights.type <= 2;
  }
};

}  // namespace fp4
