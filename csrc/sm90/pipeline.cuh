// The ring between the threads that copy tiles to shared memory (producers) and the warps that multiply them (consumers).
//
// A ring has a number of stages, and a stage has two mbarriers. `full` completes a phase when the bytes that a producer announced have arrived; `free` completes
// a phase when every consumer has left the stage. Producers and consumers go through the stages in the same order, each with a Place of its own:
//
//   producer                                    consumer
//   ring.acquire(at);                           ring.wait(at);
//   mbarrier_arrive_expect_tx(ring.of(at), n);  ... multiply ...
//   tma_load_2d(..., ring.of(at));              ring.release(at);   one lane of each warp
//   at.next();                                  at.next();
//
// A parity wait sees one bit: a thread that skips a phase can take the next one for it. So who waits for a stage waits for each of its phases.
#pragma once
#include "ptx.cuh"

namespace fp4 {

// A stage of STAGES, and the parity of its phase.
template <int STAGES> struct Place {
  int i = 0, parity = 0;
  __device__ __forceinline__ void next(int steps = 1) {  // at most STAGES
    i += steps;
    if (i >= STAGES) i -= STAGES, parity ^= 1;
  }
};

// PARTS: a stage that is copied and freed in parts has both mbarriers for each of them.
template <int PARTS = 1> struct Ring {
  Shared full, free;  // the first stage's, 8 bytes each

  // All mbarriers of a ring of so many stages lie one behind the other, from `first` to end().
  __device__ __forceinline__ static Ring at(Shared first, int stages) { return {first, first + 8 * PARTS * stages}; }
  __device__ __forceinline__ Shared end(int stages) const { return free + 8 * PARTS * stages; }

  // One thread calls it, and fence_mbarrier_init() after its last ring, before all threads of the block, or of the cluster, meet.
  // arrivals: of producers, for a part of a stage; consumers: arrivals that free it.
  __device__ __forceinline__ void init(int stages, int arrivals, int consumers) const {
    for (int i = 0; i < PARTS * stages; ++i) mbarrier_init(full + 8 * i, arrivals), mbarrier_init(free + 8 * i, consumers);
  }
  // The mbarrier that copies report to.
  template <typename P> __device__ __forceinline__ Shared of(const P& at, int part = 0) const { return full + 8 * PARTS * at.i + 8 * part; }
  template <typename P> __device__ __forceinline__ Shared free_of(const P& at, int part = 0) const { return free + 8 * PARTS * at.i + 8 * part; }

  // The first time around, a stage is free: the phase before the first one counts as complete.
  template <typename P> __device__ __forceinline__ void acquire(const P& at, int part = 0) const { mbarrier_wait_parity(free_of(at, part), at.parity ^ 1); }
  template <typename P> __device__ __forceinline__ void wait(const P& at, int part = 0) const { mbarrier_wait_parity(of(at, part), at.parity); }
  template <typename P> __device__ __forceinline__ void release(const P& at, int part = 0) const { mbarrier_arrive(free_of(at, part)); }
};

}  // namespace fp4
