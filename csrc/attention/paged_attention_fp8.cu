// A decode step over pages in E4M3, with one scale of keys and one of values for all tokens, or for those of a KV head: pages.cuh.
#include "pages.cuh"

// Returns a cudaError_t. D is 64 or 128, heads / kv_heads at most 16, page_size a multiple of 16; all rows begin at multiples of 16 bytes.
extern "C" int fp4_paged_attention_fp8(const PagedParams* call) {
  if (!call || call->format != 0 || !call->key_scale || !call->value_scale || !fits(*call)) return cudaErrorInvalidValue;
  return by_dtype(call->dtype, [&](auto zero) { return by_shape<decltype(zero), kFP8>(*call); });
}
