// Rows of partial results that the ranks of a group write to each other's memory, and their sum: no counters, no fences.
//
// An element that is 0 is not there yet: who reads waits until it is another number, and who writes stores -0 for 0 (Lamport's flags, as in NCCL's LL protocol
// and in TensorRT-LLM's one-shot all-reduce). Measured between two H200, a row of 4096 bfloat16 numbers from all blocks to all blocks of both: 1.7 us; 5.3 us
// with counters, whose release waits for the stores; 11.6 us by an all-reduce of NCCL.
//
// So the rows have to be 0 before they are written. There are three sets of them. A launch writes to one, and sets the one of the launch before to 0: nobody
// reads it any more, and a rank writes to it in its launch after the next, which begins when the next one has got what this rank sends behind this launch.
#pragma once
#include "rows.cuh"

namespace fp4 {

constexpr int kMostRanks = 8, kExchangeSums = 2, kExchangeRow = 16384, kExchangeSets = 3;  // sums of a launch; the most elements of a row
constexpr int kExchangeBlocks = 256;                                                       // the most blocks of a launch

// T has two bytes. A rank's memory, zeros ahead of the first launch: of each block the number of the set that its next launch uses, then the sets.
template <typename T> struct Exchange {
  uint8_t* memory[kMostRanks];  // of each rank, as this one reaches it
  int ranks, mine;

  __device__ __forceinline__ int* next_set() const { return (int*)memory[mine] + blockIdx.x; }
  // The part of rank `from` of a sum, in the memory of rank `of`.
  __device__ __forceinline__ T* row(int of, int set, int sum, int from) const {
    return (T*)(memory[of] + kExchangeBlocks * 4) + ((set * kExchangeSums + sum) * ranks + from) * kExchangeRow;
  }

  // Element n of this rank's part, to all ranks.
  __device__ __forceinline__ void store(int set, int sum, int n, T part) const {
    for (int of = 0; of < ranks; ++of) Rows<T>::store(row(of, set, sum, mine) + n, part);
  }
  // Element n of the sum, and of what is added to it: rounded once.
  __device__ __forceinline__ T load(int set, int sum, int n, float added) const {
    float v = 0.f;
    for (int from = 0; from < ranks; ++from) v += Rows<T>::load(row(mine, set, sum, from) + n);
    return Numbers<T>::from_float(v + added);
  }
  // Elements n to n + 7, before anything is added. The parts are added in the order of the ranks, on all of them.
  __device__ __forceinline__ void load(int set, int sum, int n, float (&to)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = 0.f;
    for (int from = 0; from < ranks; from += 2) {
      const T *one = row(mine, set, sum, from) + n, *other = row(mine, set, sum, min(from + 1, ranks - 1)) + n;
      uint4 parts[2];
      do parts[0] = load_relaxed(one), parts[1] = load_relaxed(other);
      while (!(all_there(parts[0]) && all_there(parts[1])));
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        if (from + part == ranks) break;
        const T* v = (const T*)&parts[part];
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i] += Numbers<T>::to_float(v[i]);
      }
    }
  }

  // By one warp of each block, behind the end of the launch before: what that one used becomes zeros.
  __device__ __forceinline__ void clear(int set, int lane) const {
    uint4* rows = (uint4*)row(mine, set == 0 ? kExchangeSets - 1 : set - 1, 0, 0);
    if (!FP4_FAULT(LEAVE_OLD_ROWS))
      for (int i = blockIdx.x * 32 + lane; i < kExchangeSums * ranks * (kExchangeRow / 8); i += gridDim.x * 32) rows[i] = uint4{};
  }
  __device__ __forceinline__ void finish(int set, int lane) const {
    if (lane == 0) *next_set() = set == kExchangeSets - 1 ? 0 : set + 1;
  }
};

}  // namespace fp4
