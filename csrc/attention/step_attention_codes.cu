// A decode step over a cache in fp8 (format 0) or k8v4 (1): step.cuh. A library of its own, so that the one for caches that are not rounded compiles in half the
// time.
#include "step.cuh"

// Returns a cudaError_t. D is 64 or 128, heads / kv_heads at most 16; one query; the cache contiguous, of slots that are a multiple of 8; rotary 0, 64 or
// 128; norms and angles in the dtype of the query; all rows begin at multiples of 16 bytes.
extern "C" int fp4_step_attention_codes(const AttentionParams* call) {
  if (!call || (call->format != 0 && call->format != 1) || !fits(*call)) return cudaErrorInvalidValue;
  return by_dtype(call->dtype, [&](auto zero) {
    using T = decltype(zero);
    return call->format == 0 ? by_shape<T, kFP8, kFP8>(*call) : by_shape<T, kINT8, kNVFP4>(*call);
  });
}
