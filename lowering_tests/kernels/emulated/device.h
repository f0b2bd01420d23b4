// C++ forms of the wrappers in csrc/common/device.cuh and csrc/sm90/ptx.cuh: same names, same meaning.
#pragma once
#include <type_traits>

#include "cuda.h"

namespace fp4 {

inline uint8_t* dynamic_shared() { return emulated::dynamic_shared(); }

using Shared = uint8_t*;
inline Shared shared_address(void* p) { return (uint8_t*)p; }

template <int BYTES> inline void cp_async(Shared shared, const void* global) { emulated::cp_async(shared, global, BYTES, BYTES); }
template <int BYTES> inline void cp_async_zfill(Shared shared, const void* global, bool live) { emulated::cp_async(shared, global, BYTES, live ? BYTES : 0); }
template <int BYTES> inline void cp_async_src_size(Shared shared, const void* global, int bytes) { emulated::cp_async(shared, global, BYTES, bytes); }
inline void cp_async_commit_group() { emulated::commit_copies(); }
template <int OPEN> inline void cp_async_wait_group() { emulated::wait_copies(OPEN); }

inline uint4 load_read_only(const void* p) { return *(const uint4*)p; }
inline uint4 load_or_zero(const void* p, bool live) { return live ? *(const uint4*)p : uint4{}; }
inline void griddepcontrol_wait() { emulated::griddepcontrol_wait(); }
inline void griddepcontrol_launch_dependents() { emulated::griddepcontrol_launch_dependents(); }
inline void prefetch_l2(const void* p) { emulated::prefetched(p); }
inline float load_float(const float* p) { return *p; }
inline uint4 load_128(const void* p) { return *(const uint4*)p; }
inline uint32_t load_16(const void* p) { return *(const uint16_t*)p; }
inline uint32_t load_8(const void* p) { return *(const uint8_t*)p; }
inline int count_arrival(int* counter) { return emulated::count_arrival(counter); }
// Who asks for what is not there yet has nothing else to do: it waits until no half is 0.
inline uint4 load_relaxed(const void* p) {
  for (int i = 0; i < 4; ++i) emulated::halves_wait((const uint32_t*)p + i, 0xFFFFFFFF);
  return *(const uint4*)p;
}
inline uint32_t load_relaxed_16(const void* p) {
  emulated::halves_wait((const uint32_t*)((uintptr_t)p & ~(uintptr_t)3), (uintptr_t)p & 2 ? 0xFFFF0000 : 0xFFFF);
  return *(const uint16_t*)p;
}
inline uint4 load_relaxed_or_zero(const void* p, bool live) { return live ? *(const uint4*)p : uint4{}; }
// What is stored behind it comes late.
inline void arrive_relaxed(int* counter) { emulated::count_arrival(counter), emulated::give_way(); }
inline void wait_for_relaxed(const int* counter, int count) { emulated::flag_wait(counter, count); }
inline void store_relaxed_16(void* p, uint32_t bits) { emulated::store_16((uint16_t*)p, bits); }
inline uint32_t load_table(Shared at) { return *(const uint32_t*)at; }
inline float shuffle_xor(float v, int mask) {
  struct Lane {
    float v, got;
    int mask;
  } mine{v, 0, mask};
  emulated::together("a shuffle", &mine, [](void** lanes) {
    for (int i = 0; i < 32; ++i) ((Lane*)lanes[i])->got = ((Lane*)lanes[i ^ ((Lane*)lanes[i])->mask])->v;
  });
  return mine.got;
}
inline float shuffle_from(float v, int lane) {
  struct Lane {
    float v, got;
    int from;
  } mine{v, 0, lane};
  emulated::together("a shuffle", &mine, [](void** lanes) {
    for (int i = 0; i < 32; ++i) ((Lane*)lanes[i])->got = ((Lane*)lanes[((Lane*)lanes[i])->from])->v;
  });
  return mine.got;
}
struct Exchanged {
  int v, by;
  uint32_t got;
};
inline uint32_t lanes_where(bool v) {
  Exchanged mine{v, 0, 0};
  emulated::together("a vote", &mine, [](void** lanes) {
    for (int i = 0; i < 32; ++i)
      for (int j = 0; j < 32; ++j) ((Exchanged*)lanes[i])->got |= (uint32_t)((Exchanged*)lanes[j])->v << j;
  });
  return mine.got;
}
inline bool any_lane(bool v) {
  bool mine = v;
  emulated::together("a vote", &mine, [](void** lanes) {
    bool any = false;
    for (int i = 0; i < 32; ++i) any |= *(bool*)lanes[i];
    for (int i = 0; i < 32; ++i) *(bool*)lanes[i] = any;
  });
  return mine;
}
inline float exp2_approx(float v) { return std::exp2(v); }
inline float log2_approx(float v) { return std::log2(v); }
inline float reciprocal_approx(float v) { return 1.f / v; }
inline uint32_t shuffle_from(uint32_t v, int lane) {
  Exchanged mine{(int)v, lane, 0};
  emulated::together("a shuffle", &mine, [](void** lanes) {
    for (int i = 0; i < 32; ++i) ((Exchanged*)lanes[i])->got = ((Exchanged*)lanes[((Exchanged*)lanes[i])->by])->v;
  });
  return mine.got;
}
inline uint32_t shuffle_in_quad(uint32_t v, int t) {
  struct Lane {
    uint32_t v, got;
    int t;
  } mine{v, 0, t};
  emulated::together("a shuffle in a quad", &mine, [](void** lanes) {
    for (int i = 0; i < 32; ++i) ((Lane*)lanes[i])->got = ((Lane*)lanes[(i & ~3) | ((Lane*)lanes[i])->t])->v;
  });
  return mine.got;
}
inline int shuffle_up(int v, int by) {
  Exchanged mine{v, by, 0};
  emulated::together("a shuffle up", &mine, [](void** lanes) {
    for (int i = 0; i < 32; ++i) ((Exchanged*)lanes[i])->got = ((Exchanged*)lanes[std::max(i - ((Exchanged*)lanes[i])->by, i < ((Exchanged*)lanes[i])->by ? i : 0)])->v;
  });
  return (int)mine.got;
}
inline uint32_t match_any(int v) {
  Exchanged mine{v, 0, 0};
  emulated::together("a match", &mine, [](void** lanes) {
    for (int i = 0; i < 32; ++i)
      for (int j = 0; j < 32; ++j) ((Exchanged*)lanes[i])->got |= (uint32_t)(((Exchanged*)lanes[i])->v == ((Exchanged*)lanes[j])->v) << j;
  });
  return mine.got;
}
inline void needed(float&) {}
inline void needed(int&) {}
inline int kept(int v) { return v; }
inline int uniform(int v) { return v; }
inline void named_barrier_sync(int id, int threads) { emulated::block_barrier(id, threads); }

// Barriers that count bytes. An mbarrier has no bytes of its own here: it is known by its address.
inline void mbarrier_init(Shared mbarrier, int arrivals) { emulated::mbarrier_init(mbarrier, arrivals); }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(Shared mbarrier) { emulated::mbarrier_arrive(mbarrier, 0); }
inline void mbarrier_arrive_expect_tx(Shared mbarrier, int bytes) { emulated::mbarrier_arrive(mbarrier, bytes); }
inline void mbarrier_wait_parity(Shared mbarrier, int parity) { emulated::mbarrier_wait_parity(mbarrier, parity); }
inline void cp_async_mbarrier_arrive(Shared mbarrier) { cp_async_commit_group(), cp_async_wait_group<0>(), mbarrier_arrive(mbarrier); }
inline void fence_proxy_async() { emulated::publish_writes(); }
inline void mbarrier_arrive_remote(Shared mbarrier, int rank) { emulated::mbarrier_arrive_remote(mbarrier, rank); }
inline void st_async(Shared shared, float2 value, Shared mbarrier, int rank) { emulated::st_async(shared, &value, sizeof value, mbarrier, rank); }
inline void cp_async_bulk(Shared shared, const void* global, int bytes, Shared mbarrier) { emulated::cp_async_bulk(shared, global, bytes, mbarrier, 0); }
inline void cp_async_bulk_multicast(Shared shared, const void* global, int bytes, Shared mbarrier, uint16_t blocks) {
  emulated::cp_async_bulk(shared, global, bytes, mbarrier, blocks ? blocks : 1u << 16);
}

using TensorMap = emulated::TensorMap;
using Planes = emulated::Planes;
inline cudaError_t tensor_map_3d(TensorMap* map, const void* matrix, const Planes& of, int tile_planes, int tile_rows, int tile_bytes) {
  return emulated::make_tensor_map(map, matrix, of, tile_planes, tile_rows, tile_bytes) ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t tensor_map_2d(TensorMap* map, const void* matrix, int64_t rows, int64_t row_bytes, int tile_rows, int tile_bytes) {
  return tensor_map_3d(map, matrix, {row_bytes, rows, 1, row_bytes, 0}, 1, tile_rows, tile_bytes);
}
using PagedRows = emulated::PagedRows;
inline cudaError_t tensor_map_pages(TensorMap* map, const void* cache, const PagedRows& of, int tile_tokens) {
  return emulated::make_page_map(map, cache, of, tile_tokens) ? cudaSuccess : cudaErrorInvalidValue;
}
inline void tma_load_page(Shared to, const TensorMap& map, int head, int token, int page, Shared mbarrier) {
  emulated::tma_load_page(to, map, head, token, page, mbarrier);
}
inline void prefetch_tensor_map(const TensorMap&) {}
inline void tma_load_2d(Shared to, const TensorMap& map, int byte, int row, Shared mbarrier) { emulated::tma_load_2d(to, map, byte, row, 0, mbarrier, 0); }
inline void tma_load_3d(Shared to, const TensorMap& map, int byte, int row, int plane, Shared mbarrier) { emulated::tma_load_2d(to, map, byte, row, plane, mbarrier, 0); }
inline void tma_load_2d_multicast(Shared to, const TensorMap& map, int byte, int row, Shared mbarrier, uint16_t blocks) {
  emulated::tma_load_2d(to, map, byte, row, 0, mbarrier, blocks ? blocks : 1u << 16);
}

void set_registers();
template <int N> inline void setmaxnreg_inc() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256);
  set_registers();
}
template <int N> inline void setmaxnreg_dec() { setmaxnreg_inc<N>(); }

inline void flag_set(int* flag) { emulated::flag_set(flag); }
inline int flag_get(const int* flag) {  // who asks for a flag that is not set has nothing else to do
  emulated::flag_wait(flag, 1);
  return *flag;
}

inline void pdl_trigger_in_call() {}  // launch_second() begins when it has ended
inline void pdl_wait_in_call() {}

inline int thread_again() { return threadIdx.x; }

inline int cluster_size() { return emulated::cluster_size(); }
inline int cluster_rank() { return emulated::cluster_rank(); }
inline void cluster_sync() { emulated::cluster_sync(); }
inline void cluster_arrive() {}
inline void cluster_wait() { emulated::cluster_sync(); }  // that all arrive there is less than it demands on a GPU, where who has ended has arrived
template <typename T> inline T* map_to_rank(T* shared, int rank) { return (T*)emulated::other_block((void*)shared, rank); }

// Bodies in device.cpp; kHalf: float16 instead of bfloat16.
uint32_t multiply_pairs(bool half, uint32_t a, uint32_t b);
void mma_dense(bool half, float* c, const uint32_t (&a)[4], const uint32_t (&b)[4]);
void mma_sparse(bool half, int selector, float* c, const uint32_t (&a)[4], const uint32_t (&b)[4], uint32_t meta);
void mma_int8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);
void mma_nvfp4(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, uint32_t a_scales, uint32_t b_scales);
void ldmatrix_x4(uint32_t (&to)[4], Shared row);
void stmatrix_x4_trans(Shared row, const uint32_t (&from)[4]);

template <typename T> constexpr bool kHalf = false;
template <> inline constexpr bool kHalf<__half> = true;

inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) { return multiply_pairs(false, a, b); }
inline uint32_t mul_f16x2(uint32_t a, uint32_t b) { return multiply_pairs(true, a, b); }
uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c);
inline uint32_t add_f16x2(uint32_t a, uint32_t b) { return fma_f16x2(a, 0x3C003C00u, b); }
inline float half_of(uint32_t pair, bool high) { return (float)emulated::from_f16((unsigned short)(high ? pair >> 16 : pair)); }
inline uint32_t pack_f16x2(float low, float high) { return emulated::to_f16(low) | (uint32_t)emulated::to_f16(high) << 16; }
inline uint32_t mul_bf16x2_by_half(uint32_t a, uint32_t b, bool high) { return mul_bf16x2(a, (high ? b >> 16 : b & 0xFFFF) * 0x10001u); }
inline uint32_t mul_f16x2_by_half(uint32_t a, uint32_t b, bool high) { return mul_f16x2(a, (high ? b >> 16 : b & 0xFFFF) * 0x10001u); }
void unpack_e4m3(uint32_t v, uint32_t& low, uint32_t& high);
uint32_t pack_e4m3(uint32_t low, uint32_t high);
uint32_t round_e4m3(float a, float b, float c, float d);
inline uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  if (selector & 0x8888) emulated::fail("a selector of bytes that copies signs");
  return __byte_perm(low, high, selector);
}
inline uint32_t signed_byte(int i) { return 0x8440 | i | i << 12; }
inline uint32_t pick_signed_byte(uint32_t v, uint32_t selector) { return __byte_perm(v, 0, selector); }
template <uint32_t MASK> inline uint32_t masked(uint32_t v) { return v & MASK; }
template <uint32_t MASK> inline uint32_t masked_or(uint32_t a, uint32_t b) { return (a & MASK) | b; }

template <typename T> inline void mma_m16n8k16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  mma_dense(kHalf<T>, c, {a0, a1, a2, a3}, {b0, b1, 0, 0});
}
template <typename T, int SELECTOR = 0>
inline void mma_sp_m16n8k32(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, uint32_t b2, uint32_t b3, uint32_t meta) {
  mma_sparse(kHalf<T>, SELECTOR, c, {a0, a1, a2, a3}, {b0, b1, b2, b3}, meta);
}

// wgmma (csrc/sm90/wgmma.cuh) works when it is waited for, on the registers it was given and on what shared memory holds then.
enum Type { kBfloat16, kFloat16, kE4M3 };
struct E4M3;
template <typename T> constexpr Type kType = std::is_same_v<T, E4M3> ? kE4M3 : kHalf<T> ? kFloat16 : kBfloat16;
// selector < 0: A is dense.
void wgmma_issue(Type type, float (*d)[4], int tiles, const uint32_t (&a)[4], const uint8_t* tile, uint32_t meta = 0, int selector = -1);
void wgmma_fence();
void wgmma_commit_group();
void wgmma_wait_until(int open);
template <int TILES> inline void wgmma_fence_operand(float (&)[TILES][4]) {}
template <int OPEN> inline void wgmma_wait() { wgmma_wait_until(OPEN); }
inline Shared wgmma_descriptor(Shared tile, int bytes) { return tile + bytes; }
template <typename T, int TILES> inline void wgmma(float (&d)[TILES][4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, Shared b) {
  wgmma_issue(kType<T>, d, TILES, {a0, a1, a2, a3}, b);
}
template <typename T, int SELECTOR, int TILES>
inline void wgmma_sparse(float (&d)[TILES][4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, Shared b, uint32_t meta) {
  wgmma_issue(kType<T>, d, TILES, {a0, a1, a2, a3}, b, meta, SELECTOR);
}

#ifndef FP4_EMULATED_SMS
#define FP4_EMULATED_SMS 5
#endif
inline int multiprocessors() { return FP4_EMULATED_SMS; }

#ifdef FP4_ARCH  // a source of csrc/, not device.cpp
struct Stream {
  cudaStream_t at;
  bool early, together;
  Stream(cudaStream_t at, bool early = false, bool together = false) : at(at), early(early), together(together) {}
};

template <typename... P, typename... A>
inline cudaError_t launch(void (*kernel)(P...), dim3 blocks, int threads, int shared_bytes, int cluster, Stream stream, A... arguments) {
  constexpr int most = FP4_ARCH == 90 || (FP4_ARCH >= 100 && FP4_ARCH < 120) ? 227 : kLargeSharedMemory ? 163 : 99;  // KB a block
  if (shared_bytes > most * 1024 || (cluster > 1 && FP4_ARCH < 90)) return cudaErrorInvalidValue;
  const int all = blocks.x * blocks.y * blocks.z, a_multiprocessor = threads <= 1024 ? std::min(2048 / threads, most * 1024 / std::max(shared_bytes, 1)) : 0;
  if (stream.together && all > FP4_EMULATED_SMS * a_multiprocessor) return cudaErrorInvalidValue;
  return emulated::launch(blocks, threads, shared_bytes, cluster, stream.early, [=] { kernel((P)arguments...); });
}

template <typename... P> inline cudaError_t prefer_shared_memory(void (*)(P...)) { return cudaSuccess; }
template <typename... P> inline cudaError_t allow_large_clusters(void (*)(P...)) { return cudaSuccess; }
template <typename... P> inline int clusters_at_once(void (*)(P...), int, int shared_bytes, int cluster) {
  return FP4_EMULATED_SMS * (shared_bytes > 114 * 1024 ? 1 : 2) / cluster;
}

template <typename... P, typename... A>
inline cudaError_t launch_second(void (*kernel)(P...), dim3 blocks, int threads, int shared_bytes, int cluster, Stream stream, A... arguments) {
  return launch(kernel, blocks, threads, shared_bytes, cluster, {stream.at, false}, arguments...);  // the first one has ended here
}
#endif

}  // namespace fp4
