// A decode step over pages in the dtype of the query: pages.cuh.
#include "pages.cuh"

// Returns a cudaError_t. D is 64 or 128, heads / kv_heads at most 16, page_size a multiple of 16; all rows begin at multiples of 16 bytes.
extern "C" int fp4_paged_attention(const PagedParams* call) {
  if (!call || call->format != -1 || !fits(*call)) return cudaErrorInvalidValue;
  return by_dtype(call->dtype, [&](auto zero) { return by_shape<decltype(zero), kSame>(*call); });
}
