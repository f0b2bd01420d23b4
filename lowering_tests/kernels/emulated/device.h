// C++ forms of the wrappers in csrc/common/device.cuh and launch.cuh: same names, same meaning.
#pragma once
#include <type_traits>

#include "cuda.h"

namespace fp4 {

inline uint8_t* dynamic_shared() { return emulated::dynamic_shared(); }

using Shared = uint8_t*;
inline Shared shared_address(void* p) { return (uint8_t*)p; }

template <int BYTES> inline void copy_async(Shared shared, const void* global) { emulated::copy_async(shared, global, BYTES, BYTES); }
template <int BYTES> inline void copy_async_or_zero(Shared shared, const void* global, bool live) { emulated::copy_async(shared, global, BYTES, live ? BYTES : 0); }
template <int BYTES> inline void copy_async_up_to(Shared shared, const void* global, int bytes) { emulated::copy_async(shared, global, BYTES, bytes); }
inline void copy_async_commit() { emulated::commit_copies(); }
template <int OPEN> inline void copy_async_wait() { emulated::wait_copies(OPEN); }

inline uint4 load_read_only(const void* p) { return *(const uint4*)p; }
inline uint4 load_or_zero(const void* p, bool live) { return live ? *(const uint4*)p : uint4{}; }
inline void wait_for_previous() { emulated::wait_for_previous(); }
inline void let_next_begin() { emulated::let_next_begin(); }
inline float load_float(const float* p) { return *p; }
inline uint32_t load_16(const void* p) { return *(const uint16_t*)p; }
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
inline uint32_t of_quad(uint32_t v, int t) {
  struct Lane {
    uint32_t v, got;
    int t;
  } mine{v, 0, t};
  emulated::together("a shuffle in a quad", &mine, [](void** lanes) {
    for (int i = 0; i < 32; ++i) ((Lane*)lanes[i])->got = ((Lane*)lanes[(i & ~3) | ((Lane*)lanes[i])->t])->v;
  });
  return mine.got;
}
struct Exchanged {
  int v, by;
  uint32_t got;
};
inline int shuffle_up(int v, int by) {
  Exchanged mine{v, by, 0};
  emulated::together("a shuffle up", &mine, [](void** lanes) {
    for (int i = 0; i < 32; ++i) ((Exchanged*)lanes[i])->got = ((Exchanged*)lanes[std::max(i - ((Exchanged*)lanes[i])->by, i < ((Exchanged*)lanes[i])->by ? i : 0)])->v;
  });
  return (int)mine.got;
}
inline uint32_t lanes_with(int v) {
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
inline void barrier(int id, int threads) { emulated::block_barrier(id, threads); }

// Barriers that count bytes. A counter has no bytes of its own here: it is known by its address.
inline void counter_init(Shared counter, int arrivals) { emulated::counter_init(counter, arrivals); }
inline void publish_counters() {}
inline void counter_arrive(Shared counter) { emulated::counter_arrive(counter, 0); }
inline void counter_promise(Shared counter, int bytes) { emulated::counter_arrive(counter, bytes); }
inline void counter_wait(Shared counter, int parity) { emulated::counter_wait(counter, parity); }
inline void counter_arrive_behind_copies(Shared counter) { copy_async_commit(), copy_async_wait<0>(), counter_arrive(counter); }
inline void let_wgmma_see() { emulated::publish_writes(); }
inline void counter_arrive_at(Shared counter, int rank) { emulated::counter_arrive_at(counter, rank); }
inline void copy_bulk(Shared shared, const void* global, int bytes, Shared counter) { emulated::copy_bulk(shared, global, bytes, counter, 0); }
inline void copy_bulk_to_cluster(Shared shared, const void* global, int bytes, Shared counter, uint16_t blocks) {
  emulated::copy_bulk(shared, global, bytes, counter, blocks ? blocks : 1u << 16);
}

using TileMap = emulated::TileMap;
using Planes = emulated::Planes;
inline cudaError_t plane_map(TileMap* map, const void* matrix, const Planes& of, int tile_planes, int tile_rows, int tile_bytes) {
  return emulated::make_tile_map(map, matrix, of, tile_planes, tile_rows, tile_bytes) ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t tile_map(TileMap* map, const void* matrix, int64_t rows, int64_t row_bytes, int tile_rows, int tile_bytes) {
  return plane_map(map, matrix, {row_bytes, rows, 1, row_bytes, 0}, 1, tile_rows, tile_bytes);
}
inline void prefetch_tile_map(const TileMap&) {}
inline void copy_tile(Shared to, const TileMap& map, int byte, int row, Shared counter) { emulated::copy_tile(to, map, byte, row, 0, counter, 0); }
inline void copy_planes(Shared to, const TileMap& map, int byte, int row, int plane, Shared counter) { emulated::copy_tile(to, map, byte, row, plane, counter, 0); }
inline void copy_tile_to_cluster(Shared to, const TileMap& map, int byte, int row, Shared counter, uint16_t blocks) {
  emulated::copy_tile(to, map, byte, row, 0, counter, blocks ? blocks : 1u << 16);
}

void set_registers();
template <int N> inline void more_registers() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256);
  set_registers();
}
template <int N> inline void fewer_registers() { more_registers<N>(); }

inline void flag_set(int* flag) { emulated::flag_set(flag); }
inline int flag_get(const int* flag) {  // who asks for a flag that is not set has nothing else to do
  emulated::flag_wait(flag);
  return *flag;
}

inline void let_second_begin() {}  // launch_second() begins when it has ended
inline void wait_for_first() {}

inline int cluster_size() { return emulated::cluster_size(); }
inline int cluster_rank() { return emulated::cluster_rank(); }
inline void cluster_barrier() { emulated::cluster_barrier(); }
template <typename T> inline const T* of_block(const T* shared, int rank) { return (const T*)emulated::other_block((void*)shared, rank); }

// Bodies in device.cpp; kHalf: float16 instead of bfloat16.
uint32_t multiply_pairs(bool half, uint32_t a, uint32_t b);
void mma_dense(bool half, float* c, const uint32_t (&a)[4], const uint32_t (&b)[4]);
void mma_sparse(bool half, int selector, float* c, const uint32_t (&a)[4], const uint32_t (&b)[4], uint32_t meta);
void mma_nvfp4(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, uint32_t a_scales, uint32_t b_scales);
void load_matrices(uint32_t (&to)[4], Shared row);
void store_matrices_transposed(Shared row, const uint32_t (&from)[4]);

template <typename T> constexpr bool kHalf = false;
template <> inline constexpr bool kHalf<__half> = true;

inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) { return multiply_pairs(false, a, b); }
inline uint32_t mul_f16x2(uint32_t a, uint32_t b) { return multiply_pairs(true, a, b); }
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

template <typename T> inline void mma16816(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  mma_dense(kHalf<T>, c, {a0, a1, a2, a3}, {b0, b1, 0, 0});
}
template <typename T, int SELECTOR = 0>
inline void mma_sparse16832(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, uint32_t b2, uint32_t b3, uint32_t meta) {
  mma_sparse(kHalf<T>, SELECTOR, c, {a0, a1, a2, a3}, {b0, b1, b2, b3}, meta);
}

// wgmma (csrc/common/wgmma.cuh) works when it is waited for, on the registers it was given and on what shared memory holds then.
enum Type { kBfloat16, kFloat16, kE4M3 };
struct E4M3;
template <typename T> constexpr Type kType = std::is_same_v<T, E4M3> ? kE4M3 : kHalf<T> ? kFloat16 : kBfloat16;
// selector < 0: A is dense.
void wgmma_issue(Type type, float (*d)[4], int tiles, const uint32_t (&a)[4], const uint8_t* tile, uint32_t meta = 0, int selector = -1);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait_until(int open);
template <int TILES> inline void wgmma_sums(float (&)[TILES][4]) {}
template <int OPEN> inline void wgmma_wait() { wgmma_wait_until(OPEN); }
inline Shared tile_of(Shared tile, int bytes) { return tile + bytes; }
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
  bool early;
  Stream(cudaStream_t at, bool early = false) : at(at), early(early) {}
};

template <typename... P, typename... A>
inline cudaError_t launch(void (*kernel)(P...), dim3 blocks, int threads, int shared_bytes, int cluster, Stream stream, A... arguments) {
  constexpr int most = FP4_ARCH == 90 || (FP4_ARCH >= 100 && FP4_ARCH < 120) ? 227 : kLargeSharedMemory ? 163 : 99;  // KB a block
  if (shared_bytes > most * 1024 || (cluster > 1 && FP4_ARCH < 90)) return cudaErrorInvalidValue;
  return emulated::launch(blocks, threads, shared_bytes, cluster, stream.early, [=] { kernel((P)arguments...); });
}

template <typename... P, typename... A>
inline cudaError_t launch_second(void (*kernel)(P...), dim3 blocks, int threads, int shared_bytes, int cluster, Stream stream, A... arguments) {
  return launch(kernel, blocks, threads, shared_bytes, cluster, {stream.at, false}, arguments...);  // the first one has ended here
}
#endif

}  // namespace fp4
