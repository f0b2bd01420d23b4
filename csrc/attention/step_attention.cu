// One decode step of fp4.cached_attention over a cache in the dtype of the query, in one launch: norm and rotation of query and key, append of each sequence's
// new token, attention over its old ones, combination (cluster.cuh). Each warp prepares the rows of the query for itself: a lane has all channels of a pair that
// is rotated, and four lanes have a row, so that nothing but the sum of a norm crosses lanes.
//
// PDL: the call's `early` says that the kernel before writes nothing of the cache and not the counter: first tiles are then requested before the wait.
#include "cluster.cuh"

namespace {

using namespace fp4;
using namespace fp4::attention;

template <typename T> __device__ __forceinline__ void numbers_of(float (&to)[8], const uint4& v) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = to_float(((const T*)words)[i]);
}

// Eight neighbouring numbers of an array of T or, if it is wide, of float32.
template <typename T> __device__ __forceinline__ void load_8_numbers(float (&to)[8], const void* array, int wide, int64_t at) {
  if (wide) {
    const float4 *from = (const float4*)((const float*)array + at), low = from[0], high = from[1];
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w, to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
  } else {
    const uint4 v = *(const uint4*)((const T*)array + at);
    numbers_of<T>(to, v);
  }
}

// This lane's channels of a row of the query or of keys: chunk c has exact_channel<D>(t, 8c) and the seven behind it. Rotation pairs channels that are a multiple
// of 32 apart, which are the same channel of two chunks.
template <typename F> struct Row {
  using T = typename F::T;
  static constexpr int D = F::D, kChunks = D / 32;
  float v[kChunks][8];

  __device__ __forceinline__ Row(const uint4 (&x)[kChunks]) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) numbers_of<T>(v[c], x[c]);
  }
  static __device__ __forceinline__ int channel(int c) { return exact_channel<D>(threadIdx.x % 4, 8 * c); }

  __device__ __forceinline__ void normalise(const AttentionParams& p, const void* weight) {
    float squares = 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int i = 0; i < 8; ++i) squares += v[c][i] * v[c][i];
    squares += shuffle_xor(squares, 1), squares += shuffle_xor(squares, 2);
    const float factor = rsqrtf(squares / D + p.eps);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float w[8];
      load_8_numbers<T>(w, weight, p.wide_norms, channel(c));
#pragma unroll
      for (int i = 0; i < 8; ++i) v[c][i] = v[c][i] * factor * (p.norm_offset + w[i]);
    }
  }
  // SHIFT: how many chunks lie between the two channels of a pair.
  template <int SHIFT> __device__ __forceinline__ void turn(const AttentionParams& p, int64_t angles) {
    if constexpr (2 * SHIFT <= kChunks) {
#pragma unroll
      for (int c = 0; c < SHIFT; ++c) {
        float (&a)[8] = v[c], (&b)[8] = v[c + SHIFT];
        const int64_t of_a = angles + channel(c) % p.angles, of_b = angles + channel(c + SHIFT) % p.angles;
        float cos_a[8], sin_a[8], cos_b[8], sin_b[8];
        load_8_numbers<T>(cos_a, p.cos, p.wide_angles, of_a), load_8_numbers<T>(sin_a, p.sin, p.wide_angles, of_a);
        load_8_numbers<T>(cos_b, p.cos, p.wide_angles, of_b), load_8_numbers<T>(sin_b, p.sin, p.wide_angles, of_b);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float first = a[i] * cos_a[i] - b[i] * sin_a[i], second = b[i] * cos_b[i] + a[i] * sin_b[i];
          a[i] = first, b[i] = second;
        }
      }
    }
  }
  // After RMSNorm and rotation, rounded once to T.
  __device__ __forceinline__ void prepare(uint4 (&x)[kChunks], const AttentionParams& p, const void* norm, int64_t angles) {
    if (norm) normalise(p, norm);
    if (p.rotary == 128) turn<2>(p, angles);
    if (p.rotary == 64) turn<1>(p, angles);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) x[c] = make_uint4(pack<T>(v[c][0], v[c][1]), pack<T>(v[c][2], v[c][3]), pack<T>(v[c][4], v[c][5]), pack<T>(v[c][6], v[c][7]));
  }
};

// Tokens by their slot in the cache; a ring (window > 0) holds position i in slot i % slots.
template <typename F> struct StepSource {
  using T = typename F::T;
  struct Place {};
  const AttentionParams& p;
  T *keys, *values;  // of this KV head
  const uint8_t* mask;
  int sequence, kv_head, held;  // held: old tokens
  int begin, end, newest;

  static __device__ __forceinline__ StepSource of(const AttentionParams& p, int held, int sequence, int kv_head) {
    const int64_t row = (int64_t)blockIdx.x * p.slots * F::D;
    const int end = p.window ? least_of(p.slots, held + 1) : held + 1;
    return {p, (T*)p.keys.codes + row, (T*)p.values.codes + row, p.mask ? (const uint8_t*)p.mask + sequence * p.mask_strides[0] : nullptr,
            sequence, kv_head, held, 0, end, slot_of(p, held)};
  }
  __device__ __forceinline__ Place place_of(int) const { return {}; }
  __device__ __forceinline__ bool is_used(int slot) const {
    const int position = slot <= newest ? held - newest + slot : held - newest + slot - p.slots;
    return slot < end && position >= 0 && (!p.window || position > held - p.window) && unmasked(p, mask, position);
  }
  __device__ __forceinline__ bool is_read(int slot) const { return slot != newest && is_used(slot); }
  __device__ __forceinline__ int key_stride() const { return F::D; }
  __device__ __forceinline__ int value_stride() const { return F::D; }
  __device__ __forceinline__ const T* key_at(Place, int slot) const { return keys + (slot + Tile<F>::row()) * F::D + Tile<F>::unit() * 8; }
  __device__ __forceinline__ const T* value_at(Place, int slot) const { return values + (slot + Tile<F>::row()) * F::D + Tile<F>::unit() * 8; }

  __device__ __forceinline__ void wait() const {
    if (p.early) pdl_wait_then_trigger();
  }
  __device__ __forceinline__ int64_t angles() const { return sequence * p.angle_strides[0]; }
  __device__ __forceinline__ void load(NewToken<F>& added, int number) const {
    load_new<F>(added, number, p, sequence, kv_head);
    if (number >= 0) Row<F>(added.k).prepare(added.k, p, p.k_norm, angles());
  }
  __device__ __forceinline__ void load(uint4 (&q)[F::kTiles][F::D / 32], int group) const {
    load_query<F>(q, p, sequence, kv_head, group);
#pragma unroll
    for (int i = 0; i < F::kTiles; ++i) Row<F>(q[i]).prepare(q[i], p, p.q_norm, angles());
  }
  // A new token that is masked is written, and is a row of zeros to the tile, like any other that is not attended to.
  __device__ __forceinline__ void store(NewToken<F>& added) const {
    added.store(keys + newest * F::D, values + newest * F::D);
    if (!is_used(newest)) added.key = added.value = -1;
  }
};

template <typename F> __global__ void __launch_bounds__(F::kThreads, F::ROWS == 16 ? 1 : 0) step_attention(const __grid_constant__ AttentionParams p) {
  const int sequence = blockIdx.x / p.kv_heads, kv_head = blockIdx.x % p.kv_heads, group = p.heads / p.kv_heads;
  if (!p.early) pdl_wait_then_trigger();
  // Weights of norms are in nobody's cache: they are on their way before the wait.
  if (threadIdx.x * 64 < F::D * (p.wide_norms ? 4 : 2)) {
    if (p.q_norm) prefetch_l2((const uint8_t*)p.q_norm + threadIdx.x * 64);
    if (p.k_norm) prefetch_l2((const uint8_t*)p.k_norm + threadIdx.x * 64);
  }
  const int64_t position = *(const int64_t*)p.position;
  if (position < 0 || (!p.window && position >= p.slots)) {  // nothing is written to the cache
    if (p.early) pdl_wait_then_trigger();
    const float nan = __uint_as_float(0x7FC00000);
    for (int i = threadIdx.x; i < group * (F::D / 2) && cluster_rank() == 0; i += F::kThreads)
      ((uint32_t*)p.y)[((int64_t)sequence * p.heads + kv_head * group) * (F::D / 2) + i] = pack<typename F::T>(nan, nan);
    return;
  }
  attend_in_cluster<F>(p, StepSource<F>::of(p, (int)position, sequence, kv_head), sequence, kv_head);
}

// --- host ---------------------------------------------------------------------------------------------------------------------------------------------------

template <typename T> cudaError_t run(const AttentionParams& p) {
  const Shape shape = p.tile[0] > 0 ? Shape{p.tile[0], p.tile[1]} : shape_of(p.batch * p.kv_heads);
  return with_form<T>(p.D, p.heads / p.kv_heads, shape.warps,
                      [&](auto form) { return launch_clusters<decltype(form)>(step_attention<decltype(form)>, p, shape.blocks); });
}

bool fits(const AttentionParams& p) {
  if (!is_call(&p) || p.batch < 1 || p.kv_heads < 1 || p.heads < p.kv_heads || p.heads % p.kv_heads || p.heads / p.kv_heads > kMostRows) return false;
  if (p.queries != 1 || p.slots < 1 || p.window < 0 || p.window > p.slots || (int64_t)p.slots * p.D >= (int64_t)1 << 31) return false;
  if (p.rotary && ((p.rotary != 64 && p.rotary != 128) || p.rotary > p.D || p.angles < 1 || p.rotary % p.angles || p.angles % 8)) return false;
  return (p.D == 64 || p.D == 128) && (!p.tile[0] || is_shape({p.tile[0], p.tile[1]}));
}

}  // namespace

// Returns a cudaError_t. D is 64 or 128, heads / kv_heads at most 16; one query; the cache contiguous, in the dtype of the query; rotary 0, 64 or 128; all rows
// begin at multiples of 16 bytes.
extern "C" int fp4_step_attention(const AttentionParams* call) {
  if (!call || !fits(*call)) return cudaErrorInvalidValue;
  return by_dtype(call->dtype, [&](auto zero) { return run<decltype(zero)>(*call); });
}
