// The arguments of a call: every kernel's C function takes a pointer to one of these structs. The kernels' sources, the binding, which knows no CUDA, and
// fp4_inductor/kernels/params.py share them. A pointer that a kernel does not take is null, a number is 0.
#pragma once
#include <stdint.h>

namespace fp4 {

constexpr int kSquared = 16;  // columns of y of which a kernel that writes squares gives one sum

// y [M, N] by a linear kernel: x [M, K], a weight of N rows. Which parts a kernel takes, and of which sizes, is said where it is defined.
struct LinearParams {
  int64_t size = sizeof(LinearParams);  // as the caller knows it
  const void *x, *x_scale, *row_scale;
  const void *codes, *meta, *scale, *global_scale;
  const void *bias, *mul, *residual;
  const void* norm_weight;  // [K], in the dtype of x: x is normalised first, by its root mean square; null: it is not
  void *z, *squares;  // of half an RMSNorm: epilogue.cuh; null: there is none
  void *y, *scratch;
  int64_t scratch_bytes;
  void* stream;
  int M, N, K;
  int dtype;           // of y and what is added to it, 0: bfloat16, 1: float16
  int second, third;   // rows of the weight at which the second and the third global scale begin, 0: none
  int act;             // activations.cuh
  int early;           // it may begin, and fetch its first weights, while the kernel before it in its stream runs; that one must not write the weight
  float eps, norm_offset;  // of that norm: x * rsqrt(mean(x^2) + eps) * (norm_offset + norm_weight)
  int tile[4];         // the kernel's own numbers; all 0: its own choice
};

// Two to four linear products of one row in one launch, each of which reads the result of the one before it.
struct ChainParams {
  int64_t size = sizeof(ChainParams);  // as the caller knows it
  LinearParams products[4];            // calls of their own: x of a later one is y of the one before it, and residual may be y of any earlier one
  void* arrivals;                      // int32: its end is memory of Rows (rows.cuh), zeros ahead of the first launch; the next one follows on the same stream
  int64_t arrivals_count;
  // Two neighbours may be gate_up and down of the experts that a router chooses by what gate_up reads. Their codes, scales and global scales are those of all
  // experts, N and K those of one, y of gate_up is [top_k, I]. router [experts, K] is of the dtype of x.
  const void* router;  // null: there are none
  void* memory[8];            // of each rank of a group, as this one reaches it: exchange.cuh
  int count;                  // of products; early, dtype and stream are those of the first
  int finish[4];              // Finish of epilogue.cuh
  int routed;                 // the number of gate_up
  int experts, top_k, units;  // units: global scales of an expert's gate_up, 2: of gate and of up
  int form, rounded;          // of the router's weights: FORMS of ops/router.py; rounded to the dtype of x
  // Results of the products that are `summed` are summed over the ranks of a group, ahead of the residual: exchange.cuh.
  int summed[4];
  int ranks, rank;  // 0 ranks: there is no group
};

// The weight of one product of every expert.
struct ExpertParams {
  const void *codes, *meta, *scale, *global_scale, *bias;
};

// y [tokens, N] by an MoE layer: x [tokens, K], ids and weights [tokens, top_k], gate_up of 2 I and down of N rows for each of E experts.
struct MoeParams {
  int64_t size = sizeof(MoeParams);  // as the caller knows it
  const void *x, *ids, *weights;
  const void* map;  // global id -> local id, of map_size
  ExpertParams gate_up, down;
  void *y, *scratch;
  int64_t scratch_bytes;
  void* stream;
  int tokens, top_k, E, K, I, N;
  int ids_type, map_type;  // 0: int32, 1: int64
  int weights_type;        // 0: bfloat16, 1: float16, 2: float32
  int map_size;
  float alpha, limit;     // limit <= 0: none
  int more, interleaved;  // more: act(gate) * (up + 1); interleaved: rows are gate, up, gate, up, ...
  int tile[7];            // the kernel's own numbers
};

// weights y and ids [tokens, top_k] of the experts that a router [experts, K] chooses for tokens x [tokens, K].
struct RouterParams {
  int64_t size = sizeof(RouterParams);  // as the caller knows it
  const void *x, *weight, *bias;        // the bias is [experts]
  const void* norm_weight;              // [K]: x is normalised first, as in LinearParams; null: it is not
  void* normed;                         // [tokens, K]: x normalised
  void *y, *ids;                        // ids are int64
  void* stream;
  int tokens, experts, K, top_k;
  int dtype;         // of x, weight, bias, norm_weight and normed, 0: bfloat16, 1: float16
  int weights_type;  // of y, 0: bfloat16, 1: float16, 2: float32
  int form;          // of the weights: FORMS of ops/router.py
  int early;         // it may begin, and read weight and norm_weight, while the kernel before it in its stream runs, which writes neither
  float eps, norm_offset;
};

// The keys or the values of a cache, all [batch, kv_heads, slots, ...] and contiguous.
struct CacheParams {
  void *codes, *scale, *blocks, *exact;
};

// y [batch, queries, heads, D] by attention of new tokens [batch, heads or kv_heads, queries, D] to a cache and to themselves, which are appended to it.
struct AttentionParams {
  int64_t size = sizeof(AttentionParams);  // as the caller knows it
  const void *query, *key, *value;
  CacheParams keys, values;
  void* key_mean;               // float32 [batch, kv_heads, D]
  const void* position;         // one int64: how many tokens the cache holds
  const void *mask, *sinks;     // a byte for each position, a number for each head
  const void *q_norm, *k_norm;  // [D]
  const void *cos, *sin;        // [1 or batch, queries, angles]
  void *arrivals, *y, *scratch;
  int64_t scratch_bytes;
  void* stream;
  int64_t query_strides[3], key_strides[3], value_strides[3], mask_strides[2], angle_strides[2];  // in elements, without the last of 1
  int batch, heads, kv_heads, queries, D, slots, exact_slots, window, mask_length, rotary, angles;
  int dtype;                               // of the new tokens, 0: bfloat16, 1: float16
  int sinks_type;                          // 0: bfloat16, 1: float16, 2: float32
  int wide_norms, wide_angles;             // 1: they are float32, 0: of the dtype of the new tokens
  int format;                              // of the cache, 0: fp8, 1: k8v4, 2: nvfp4 (formats/kv.py), -1: the dtype of the new tokens
  int early;                               // old tokens may be read while the kernel before it in its stream runs, which writes none of them
  float scale, softcap, eps, norm_offset;  // scale and softcap in base 2; softcap 0: none
  int tile[2];                             // 0: the kernel's own choice. cached_attention: the most parts of a sequence. step_attention: blocks of a KV head
};

// y [batch, heads, D] by attention of one new token of each sequence to the old ones in a paged cache [pages, page_size, kv_heads, D] and to itself.
struct PagedParams {
  int64_t size = sizeof(PagedParams);  // as the caller knows it
  const void *query, *key, *value;     // [batch, heads or kv_heads, D]
  void *keys, *values;                 // of the cache
  const void* table;                   // int32 [batch, ...]: the pages of each sequence
  const void* lengths;                 // int32 [batch]: with the new token; 0: no sequence, its rows of y are zeros
  const void* slots;                   // int64 [batch]: the row of the cache, counted over all pages, that the new token is written to; below 0: none
  const void* sinks;                   // a number for each head
  const void *key_scale, *value_scale;  // of a cache in fp8, whose numbers are code * scale: float32, one, or one a KV head
  void *y, *stream;
  int64_t query_strides[2], key_strides[2], value_strides[2];  // in elements, as all strides, without the last of 1
  int64_t keys_strides[3], values_strides[3], table_stride;    // of pages, of tokens and of heads
  int batch, heads, kv_heads, D, page_size, pages, window;  // pages: of a sequence in the table
  int cache_pages;        // that the cache has
  int dtype, sinks_type;  // as in AttentionParams
  int format;             // of the cache, 0: fp8, -1: the dtype of the new tokens
  int scale_stride;       // 0: one scale of each of keys and values, 1: one a KV head
  int early;              // the cache, the table and the lengths may be read while the kernel before it in its stream runs, which writes none of them
  float scale, softcap;   // in base 2; softcap 0: none
  int tile[2];            // blocks that share a KV head of a sequence, 1 to 16; warps that attend, 3 or another number; 0: the kernel's own choice
};

// False for a null pointer, and for the struct of a caller that was built with another version of this file.
template <typename Params> bool is_call(const Params* p) { return p && p->size == (int64_t)sizeof(Params); }

// Of a linear kernel; norm, squares: it takes an RMSNorm, or half of one, without which it refuses a call that asks for it.
inline bool is_call(const LinearParams* p, bool norm = false, bool squares = false) {
  return p && p->size == (int64_t)sizeof(LinearParams) && (norm || !p->norm_weight) && (squares || (!p->z && !p->squares));
}

}  // namespace fp4
