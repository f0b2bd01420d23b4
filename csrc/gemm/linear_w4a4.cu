// y[M, N] = x[M, K] @ W[N, K]^T (+ bias) with both operands canonical NVFP4, on the FP4 tensor cores of sm_120 and sm_121:
// block-scaled MMA takes codes and E4M3 scales as they lie in memory, so nothing is decoded.
//
// A block owns 128 rows of W (16 a warp) and 64 tokens; all threads bring both operands' next steps (128 k) with cp.async,
// kStages deep. Sums of a warp stay in registers: no split of K, no atomics.
#include "../common/epilogue.cuh"

namespace {

using namespace fp4;

constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = 16 * kWarps, kTokens = 64, kTiles = kTokens / 8, kStages = 4, kStepK = 128;
constexpr int kLines = kRows + kTokens;  // lines of 64 bytes of codes and 8 of scales: first the weight's rows, then the tokens
constexpr int kStage = kLines * 72;

// Chunk c (16 bytes, 32 k) of a line; the rotation keeps eight lines read together in different banks.
__device__ __forceinline__ int place(int line, int c) { return line * 64 + (c ^ (line >> 1 & 3)) * 16; }

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    linear_w4a4(const uint8_t* __restrict__ x, const uint8_t* __restrict__ x_scale, const float* __restrict__ row_scale, const uint8_t* __restrict__ q,
                const uint8_t* __restrict__ scale, const float* __restrict__ global_scale, const T* __restrict__ bias, T* __restrict__ y, int M, int N, int K) {
  uint8_t* shared = dynamic_shared();
  const Shared address = shared_address(shared);
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
  const int n0 = blockIdx.x * kRows, m0 = blockIdx.y * kTokens, steps = (K + kStepK - 1) / kStepK;

  // Outside the matrices all is zero, scales too: a stray scale byte could be a NaN.
  auto fetch = [&](int step, int slot) {
    const Shared to = address + slot * kStage;
    for (int i = thread; i < kLines * 4; i += kThreads) {
      const int line = i / 4, c = i % 4, k = step * kStepK + c * 32, row = line < kRows ? n0 + line : m0 + line - kRows;
      const bool live = k < K && row < (line < kRows ? N : M);
      cp_async_zfill<16>(to + place(line, c), (line < kRows ? q : x) + (live ? (size_t)row * (K / 2) + k / 2 : 0), live);
    }
    for (int i = thread; i < kLines * 2; i += kThreads) {
      const int line = i / 2, k = step * kStepK + i % 2 * 64, row = line < kRows ? n0 + line : m0 + line - kRows;
      const bool live = k < K && row < (line < kRows ? N : M);
      cp_async_src_size<4>(to + kLines * 64 + i * 4, (line < kRows ? scale : x_scale) + (live ? (size_t)row * (K / 16) + k / 16 : 0), live ? 4 : 0);
    }
  };

  float acc[kTiles][4] = {};
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < steps) fetch(i, i);
    cp_async_commit_group();
  }
  for (int step = 0; step < steps; ++step) {
    cp_async_wait_group<kStages - 2>();
    __syncthreads();  // what the others brought; and everybody has left the slot that is filled next
    const int next = step + kStages - 1;
    if (next < steps) fetch(next, next % kStages);
    cp_async_commit_group();
    const uint8_t *from = shared + step % kStages * kStage, *scales = from + kLines * 64;
    auto codes = [&](int line, int c) { return *(const uint32_t*)(from + place(line, c) + 4 * t); };
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 64 k
      const int row = 16 * warp + g;
      const uint32_t a0 = codes(row, 2 * half), a1 = codes(row + 8, 2 * half), a2 = codes(row, 2 * half + 1), a3 = codes(row + 8, 2 * half + 1);
      const uint32_t a_scales = *(const uint32_t*)(scales + (row + 8 * (t & 1)) * 8 + 4 * half);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const int token = kRows + 8 * j + g;
        mma_nvfp4(acc[j], a0, a1, a2, a3, codes(token, 2 * half), codes(token, 2 * half + 1), a_scales, *(const uint32_t*)(scales + token * 8 + 4 * half));
      }
    }
  }
  cp_async_wait_group<0>();
  const float unit = *global_scale;
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int m = m0 + 8 * j + 2 * t + (c & 1);
      Output<T>{y, bias, M, N}.store(m, n0 + 16 * warp + g + 8 * (c >> 1), acc[j][c] * (unit * row_scale[min(m, M - 1)]));
    }
}

}  // namespace

// Returns a cudaError_t. Takes x codes [M, K/2], x_scale [M, K/16], row_scale [M]: the activations as NVFP4, a global scale per token; codes, scale,
// global_scale and bias. 1 <= M <= 2^20, K % 64 == 0; codes 16-byte aligned, scales 4-byte aligned; bias may be null.
extern "C" int fp4_linear_w4a4(const LinearParams* call) {
  if (!is_call(call)) return cudaErrorInvalidValue;
  const int M = call->M, N = call->N, K = call->K;
  if (M < 1 || M > 1 << 20 || N < 1 || K < 64 || K % 64) return cudaErrorInvalidValue;
  return by_dtype(call->dtype, [&](auto zero) {
    using T = decltype(zero);
    const dim3 blocks((N + kRows - 1) / kRows, (M + kTokens - 1) / kTokens);
    return launch(linear_w4a4<T>, blocks, kThreads, kStages * kStage, 1, (cudaStream_t)call->stream, (const uint8_t*)call->x, (const uint8_t*)call->x_scale,
                  (const float*)call->row_scale, (const uint8_t*)call->codes, (const uint8_t*)call->scale, (const float*)call->global_scale,
                  (const T*)call->bias, (T*)call->y, M, N, K);
  });
}
