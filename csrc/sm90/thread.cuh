// The number of a thread, for a kernel that has no registers to keep what follows from it.
//
// The emulator brings a C++ body for the same name (lowering_tests/kernels/emulated/device.h).
#pragma once
#include "../common/device.cuh"

#ifndef FP4_EMULATED
namespace fp4 {

// threadIdx.x, asked again: what follows from an answer before is not kept for it.
__device__ __forceinline__ int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

}  // namespace fp4
#endif
