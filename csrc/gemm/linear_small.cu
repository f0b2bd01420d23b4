// fp4.linear for 1 to 32 rows: y[M, N] = x[M, K] @ W[N, K]^T (+ bias), W row-major canonical NVFP4.
//
// Bandwidth-bound: every weight byte is read once. The weight is the MMA's A operand: a warp owns 16 * R rows of W and every
// WARPS-th step (128 k) of K, and streams them through its own ring of STAGES buffers in shared memory with cp.async, so that
// no warp ever waits for another one and registers are left for arithmetic. A quad reads 64 contiguous bytes of a row.
// Activations are the B operand, 8 tokens a tile, read from L2 (one warp of the block uses them, so shared memory would not
// save a byte). The warps' partial sums meet in shared memory at the end: no atomics, fixed order.
#include "../common/mma.cuh"
#include "../common/nvfp4.cuh"

namespace {

using namespace fp4;

// Left to itself ptxas caps the registers for occupancy, which is what measured best on sm_90 and spills elsewhere.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define FP4_BOUNDS(threads) __launch_bounds__(threads)
#else
#define FP4_BOUNDS(threads) __launch_bounds__(threads, 1)
#endif

template <int BYTES> __device__ __forceinline__ void copy_async(uint32_t shared, const void* global) {
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global));
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(BYTES));
}

__device__ __forceinline__ uint4 load_activation(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

template <typename T, int MT, int R, int WARPS, int STAGES>
__global__ void FP4_BOUNDS(32 * WARPS) linear_small(const T* __restrict__ x, const uint8_t* __restrict__ q, const uint8_t* __restrict__ scale,
                                                           const float* __restrict__ global_scale, const T* __restrict__ bias, T* __restrict__ y, int M, int N, int K) {
  constexpr int kRows = 16 * R, kTokens = 8 * MT;
  constexpr int kStage = kRows * 72;  // 64 bytes of codes and 8 of scales a row
  constexpr int kAhead = MT == 1 ? 2 : 1;
  extern __shared__ __align__(16) uint8_t shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int n0 = blockIdx.x * kRows;
  const int steps = (K + 127) / 128;
  uint8_t* ring = shared + warp * (STAGES * kStage);
  const uint32_t ring_address = (uint32_t)__cvta_generic_to_shared(ring);

  // Rows past N and k past K are read from the last legal place; their products are never stored, or meet zero activations.
  auto fetch = [&](int step, int slot) {
    const int k = min(step * 128 + t * 32, K - 32);
    const uint32_t to = ring_address + slot * kStage;
#pragma unroll
    for (int i = 0; i < 2 * R; ++i) {
      const int n = min(n0 + 8 * i + g, N - 1);
      copy_async<16>(to + i * 512 + lane * 16, q + (size_t)n * (K / 2) + k / 2);
    }
    // 8 scale bytes a row, two lanes of 4 bytes each
    const int ks = min(step * 8 + (lane & 1) * 4, K / 16 - 4);
#pragma unroll
    for (int i = 0; i < R; ++i) {
      const int row = 16 * i + (lane >> 1), n = min(n0 + row, N - 1);
      copy_async<4>(to + kRows * 64 + row * 8 + (lane & 1) * 4, scale + (size_t)n * (K / 16) + ks);
    }
  };
  auto fetch_x = [&](int step, uint4 (&to)[MT][4]) {
    const int k = step * 128 + t * 32;  // K is a multiple of 32: a lane's 32 k are all inside or all outside
#pragma unroll
    for (int j = 0; j < MT; ++j) {
      const int m = 8 * j + g;
#pragma unroll
      for (int i = 0; i < 4; ++i) to[j][i] = k < K && m < M ? load_activation(x + (size_t)m * K + k + 8 * i) : make_uint4(0, 0, 0, 0);
    }
  };

  float acc[R][MT][4] = {};
  auto compute = [&](int slot, const uint4 (&xs)[MT][4]) {
    const uint8_t* from = ring + slot * kStage;
    uint32_t xp[MT][4][4];
#pragma unroll
    for (int j = 0; j < MT; ++j)
#pragma unroll
      for (int word = 0; word < 4; ++word) pair_up(xs[j][word], xp[j][word]);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const uint4 ql = *(const uint4*)(from + (2 * r) * 512 + lane * 16), qh = *(const uint4*)(from + (2 * r + 1) * 512 + lane * 16);
      const uint8_t* scales = from + kRows * 64 + (16 * r + g) * 8 + 2 * t;
      const uint32_t sl = Numbers<T>::scales(*(const uint16_t*)scales), sh = Numbers<T>::scales(*(const uint16_t*)(scales + 64));
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        uint32_t lo[4], hi[4];
        const uint32_t pick = word < 2 ? 0x1010 : 0x3232;
        decode<T>(word == 0 ? ql.x : word == 1 ? ql.y : word == 2 ? ql.z : ql.w, __byte_perm(sl, 0, pick), lo);
        decode<T>(word == 0 ? qh.x : word == 1 ? qh.y : word == 2 ? qh.z : qh.w, __byte_perm(sh, 0, pick), hi);
#pragma unroll
        for (int j = 0; j < MT; ++j) {
          mma16816<T>(acc[r][j], lo[0], hi[0], lo[1], hi[1], xp[j][word][0], xp[j][word][1]);
          mma16816<T>(acc[r][j], lo[2], hi[2], lo[3], hi[3], xp[j][word][2], xp[j][word][3]);
        }
      }
    }
  };

  uint4 xs[kAhead][MT][4];
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (warp + i * WARPS < steps) fetch(warp + i * WARPS, i);
    asm volatile("cp.async.commit_group;");
  }
  if (kAhead == 2 && warp < steps) fetch_x(warp, xs[0]);
  int slot = 0;
  for (int step = warp; step < steps; step += WARPS) {
    const int next = step + (STAGES - 1) * WARPS;
    if (next < steps) fetch(next, slot == 0 ? STAGES - 1 : slot - 1);
    asm volatile("cp.async.commit_group;");
    fetch_x(kAhead == 2 ? step + WARPS : step, xs[kAhead - 1]);
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1));
    __syncwarp();  // scales were copied by other lanes
    compute(slot, xs[0]);
    __syncwarp();  // every lane has read this slot before it is filled again
    if (kAhead == 2)
#pragma unroll
      for (int i = 0; i < 4; ++i) xs[0][0][i] = xs[kAhead - 1][0][i];
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }

  asm volatile("cp.async.wait_group 0;");
  __syncthreads();
  float* partial = (float*)shared;  // [WARPS][kTokens][kRows + 1]
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int j = 0; j < MT; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        partial[(warp * kTokens + 8 * j + 2 * t + (c & 1)) * (kRows + 1) + 16 * r + g + 8 * (c >> 1)] = acc[r][j][c];
  __syncthreads();
  const float unit = *global_scale * kWeightUnit;
  for (int i = threadIdx.x; i < kRows * kTokens; i += 32 * WARPS) {
    const int row = i % kRows, m = i / kRows, n = n0 + row;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += partial[(w * kTokens + m) * (kRows + 1) + row];
    if (m < M && n < N) y[(size_t)m * N + n] = Numbers<T>::from_float(sum * unit + (bias ? Numbers<T>::to_float(bias[n]) : 0.f));
  }
}

template <typename T, int MT, int R, int WARPS, int STAGES>
cudaError_t launch(const void* x, const void* q, const void* s, const void* g, const void* bias, void* y, int M, int N, int K, cudaStream_t stream) {
  auto kernel = linear_small<T, MT, R, WARPS, STAGES>;
  constexpr int ring = WARPS * STAGES * 16 * R * 72, sums = WARPS * 8 * MT * (16 * R + 1) * (int)sizeof(float);
  constexpr int bytes = ring > sums ? ring : sums;
  static_assert(bytes <= 227 * 1024, "does not fit shared memory");
  if (bytes > 48 * 1024) {
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (status != cudaSuccess) return status;
  }
  kernel<<<(N + 16 * R - 1) / (16 * R), 32 * WARPS, bytes, stream>>>((const T*)x, (const uint8_t*)q, (const uint8_t*)s, (const float*)g, (const T*)bias, (T*)y, M, N, K);
  return cudaGetLastError();
}

template <typename T, int MT>
cudaError_t by_tile(int R, int warps, int stages, const void* x, const void* q, const void* s, const void* g, const void* bias, void* y, int M, int N, int K, cudaStream_t stream) {
#define TILE(r, w, st) \
  if (R == r && warps == w && stages == st) return launch<T, MT, r, w, st>(x, q, s, g, bias, y, M, N, K, stream);
  TILE(2, 16, 2) TILE(4, 8, 2)
  if constexpr (MT == 1) { TILE(4, 8, 3) }
  if constexpr (MT == 4) { TILE(2, 8, 4) TILE(4, 4, 3) }
#undef TILE
  return cudaErrorInvalidConfiguration;
}

}  // namespace

// 32 tokens a block fit the registers on sm_90 only; the dispatch rows say the same.
#if FP4_ARCH == 90
constexpr int kMaxM = 32;
#else
constexpr int kMaxM = 16;
#endif

// Returns a cudaError_t. dtype 0: bfloat16, 1: float16. (rows_16, warps, stages): one of by_tile's. 1 <= M <= kMaxM,
// K % 64 == 0, x and q 16-byte aligned, scale 4-byte aligned; bias may be null.
extern "C" int fp4_linear_small(const void* x, const void* q, const void* s, const void* g, const void* bias, void* y, int M, int N, int K, int dtype,
                                int rows_16, int warps, int stages, void* stream) {
  if (M < 1 || M > kMaxM || K % 64) return cudaErrorInvalidValue;
  auto st = (cudaStream_t)stream;
#define TOKENS(mt)                                                                                               \
  return dtype == 0 ? by_tile<__nv_bfloat16, mt>(rows_16, warps, stages, x, q, s, g, bias, y, M, N, K, st) \
                    : by_tile<__half, mt>(rows_16, warps, stages, x, q, s, g, bias, y, M, N, K, st)
  if (M <= 8) TOKENS(1);
  if (M <= 16) TOKENS(2);
#if FP4_ARCH == 90
  TOKENS(4);
#else
  return cudaErrorInvalidValue;
#endif
#undef TOKENS
}
