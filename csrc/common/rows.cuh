// Rows of results that the blocks of one launch write for each other, without a release, which waits until all that was stored has arrived.
//
// An element that is 0 is not there yet: who reads waits until it is another number, and who writes stores -0 for 0 (Lamport's flags, as in NCCL's LL protocol).
// Blocks that ask for a whole row again and again take bandwidth away from what they wait for. So each block counts itself when its part of the row is about to
// be stored, and one thread of each block asks for the count: it tells when to read, and proves nothing.
//
// All has to be 0 ahead of the launch. There are two sets of rows and counters: a launch uses one, and sets the other, which the launch before it used, to 0.
#pragma once
#include "nvfp4.cuh"

namespace fp4 {

constexpr int kMostRows = 3, kMostColumns = 16384, kMostScores = 512;  // rows of a launch, elements of one, and of the row of scores that is apart from them
constexpr int kMostBlocks = 256;                                       // of a launch

// Is no half of these words 0?
__device__ __forceinline__ bool all_there(const uint4& v) {
  auto missing = [](uint32_t w) { return (w - 0x00010001u) & ~w; };
  return !((missing(v.x) | missing(v.y) | missing(v.z) | missing(v.w)) & 0x80008000u);
}

// T has two bytes. The memory holds, of each block, the number of the set that its next launch uses, then the sets.
template <typename T> struct Rows {
  static constexpr int kCounter = 128;  // bytes from one to the next, so that each has a line of its own
  static constexpr int kHead = kMostBlocks * 4, kCounters = (kMostRows + 1) * kCounter, kScores = kCounters + kMostRows * kMostColumns * 2;
  static constexpr int kSet = kScores + kMostScores * 2, kBytes = kHead + 2 * kSet + 16;  // 16: to align it
  uint8_t* memory;

  // At the end of `count` words.
  static Rows at_end_of(void* words, int64_t count) { return {(uint8_t*)(((uintptr_t)words + count * 4 - kBytes + 15) / 16 * 16)}; }

  __device__ __forceinline__ int* next_set() const { return (int*)memory + blockIdx.x; }
  __device__ __forceinline__ uint8_t* of(int set) const { return memory + kHead + set * kSet; }
  __device__ __forceinline__ int* counter(int set, int number) const { return (int*)(of(set) + number * kCounter); }
  __device__ __forceinline__ T* row(int set, int number) const { return (T*)(of(set) + kCounters) + number * kMostColumns; }
  __device__ __forceinline__ T* scores(int set) const { return (T*)(of(set) + kScores); }  // with counter kMostRows

  __device__ __forceinline__ void tell(int set, int number) const { arrive_relaxed(counter(set, number)); }
  __device__ __forceinline__ void wait_for_all(int set, int number, int blocks) const { wait_for_relaxed(counter(set, number), blocks); }

  static __device__ __forceinline__ void store(T* p, T y) {
    const uint32_t bits = two_bytes_of(y);
    store_relaxed_16(p, bits || FP4_FAULT(STORE_ZERO) ? bits : 0x8000);
  }
  static __device__ __forceinline__ T load_exact(const T* p) {
    uint32_t bits;
    do bits = load_relaxed_16(p);
    while (!bits);
    return of_two_bytes<T>(bits);
  }
  static __device__ __forceinline__ float load(const T* p) { return Numbers<T>::to_float(load_exact(p)); }
  // v: the 8 elements at p, as they were a moment ago.
  static __device__ __forceinline__ void wait(uint4& v, const T* p) {
    while (!all_there(v) && !FP4_FAULT(BELIEVE_COUNTER)) v = load_relaxed(p);
  }

  // By one warp of each block, behind the end of the launch before.
  __device__ __forceinline__ void clear(int set, int lane) const {
    uint4* other = (uint4*)of(1 - set);
    if (!FP4_FAULT(LEAVE_ROWS))
      for (int i = blockIdx.x * 32 + lane; i < kSet / 16; i += gridDim.x * 32) other[i] = uint4{};
  }
  // By the same warp, at the end.
  __device__ __forceinline__ void finish(int set, int lane) const {
    __syncwarp();
    if (lane == 0) *next_set() = 1 - set;
  }
};

}  // namespace fp4
