// A decode step over a cache in the dtype of the query: step.cuh.
#include "step.cuh"

// Returns a cudaError_t. D is 64 or 128, heads / kv_heads at most 16; one query; the cache contiguous; rotary 0, 64 or 128; norms and angles in the dtype of
// the query; all rows begin at multiples of 16 bytes.
extern "C" int fp4_step_attention(const AttentionParams* call) {
  if (!call || call->format != -1 || !fits(*call)) return cudaErrorInvalidValue;
  return by_dtype(call->dtype, [&](auto zero) { return by_shape<decltype(zero), kSame, kSame>(*call); });
}
