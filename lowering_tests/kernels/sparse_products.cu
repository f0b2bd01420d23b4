// One product of test_emulated_wgmma_sparse.py by wgmma's sparse form, and by mma.sp: y[64, 16] = A[64, 32] B[16, 32]^T. Also runs on a GPU of sm_90.
#include "sm90/wgmma.cuh"

namespace {

using namespace fp4;

// registers: [4][128], the kept numbers of each thread; meta: [128]; b: [16][64], of which 32 columns from `half` * 32 on are multiplied.
template <typename T, int SELECTOR, bool WIDE>
__global__ void __launch_bounds__(128) product(const uint32_t* __restrict__ registers, const uint32_t* __restrict__ meta, const uint8_t* __restrict__ b, float* __restrict__ y,
                                               int half) {
  uint8_t* tile = dynamic_shared();
  const Shared address = shared_address(tile), arrived = address + 2048;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  uint32_t a[4];
  for (int r = 0; r < 4; ++r) a[r] = registers[128 * r + threadIdx.x];
  float c[2][4] = {};
  if (threadIdx.x == 0) {
    mbarrier_init(arrived, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(arrived, 2048);
    for (int token = 0; token < 16; ++token)
      for (int chunk = 0; chunk < 8; ++chunk) cp_async_bulk(address + token * 128 + (chunk ^ (token & 7)) * 16, b + token * 128 + chunk * 16, 16, arrived);
  }
  __syncthreads();
  mbarrier_wait_parity(arrived, 0);
  if constexpr (WIDE) {
    wgmma_fence();
    wgmma_sparse<T, SELECTOR>(c, a[0], a[1], a[2], a[3], wgmma_descriptor(address, half * 64), meta[threadIdx.x]);
    wgmma_commit_group();
    wgmma_wait<0>();
    wgmma_fence_operand(c);
  } else {
    const uint32_t word = meta[threadIdx.x / 4 * 4 + 2 * SELECTOR + t % 2];
    for (int j = 0; j < 2; ++j) {
      uint32_t k[4];
      for (int i = 0; i < 4; ++i) {  // k 8 i + 2 t and the next one of token g
        const int token = 8 * j + g;
        k[i] = *(const uint32_t*)(tile + token * 128 + ((4 * half + i) ^ (token & 7)) * 16 + 4 * t);
      }
      mma_sp_m16n8k32<T>(c[j], a[0], a[1], a[2], a[3], k[0], k[1], k[2], k[3], word);
    }
  }
  for (int j = 0; j < 2; ++j)
    for (int i = 0; i < 4; ++i) y[(16 * warp + g + 8 * (i / 2)) * 16 + 8 * j + 2 * t + i % 2] = c[j][i];
}

template <typename T, bool WIDE> cudaError_t run(const void* a, const void* meta, const void* b, void* y, int half, int selector, void* stream) {
  return launch(selector ? product<T, 1, WIDE> : product<T, 0, WIDE>, dim3(1), 128, 2048 + 16, 1, (cudaStream_t)stream, (const uint32_t*)a, (const uint32_t*)meta,
                (const uint8_t*)b, (float*)y, half);
}

}  // namespace

// dtype 0: bfloat16, 1: float16.
extern "C" int product_wide(const void* a, const void* meta, const void* b, void* y, int half, int selector, int dtype, void* stream) {
  return dtype ? run<__half, true>(a, meta, b, y, half, selector, stream) : run<__nv_bfloat16, true>(a, meta, b, y, half, selector, stream);
}
extern "C" int product_of_warps(const void* a, const void* meta, const void* b, void* y, int half, int selector, int dtype, void* stream) {
  return dtype ? run<__half, false>(a, meta, b, y, half, selector, stream) : run<__nv_bfloat16, false>(a, meta, b, y, half, selector, stream);
}
