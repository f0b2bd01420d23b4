// What the dense kernels share: their parameters, and a warp's stream of canonical NVFP4 rows through shared memory into MMA
// fragments.
#pragma once
#include "../common/epilogue.cuh"

namespace fp4 {

// Pointers and sizes of one y[M, N] = x[M, K] @ W[N, K]^T (+ bias). global_scale, up to three, is on the device; bias may be null.
template <typename T> struct Linear {
  const T* x;
  const uint8_t* q;
  const uint8_t* scale;
  const float* global_scale;
  const T* bias;
  T* y;
  int M, N, K;
  Epilogue<T> then;

  static Linear of(const LinearParams& p) {
    return {(const T*)p.x, (const uint8_t*)p.codes, (const uint8_t*)p.scale, (const float*)p.global_scale, (const T*)p.bias, (T*)p.y, p.M, p.N, p.K,
            Epilogue<T>::of(p)};
  }
  bool fits() const { return then.fits(kFinish, N) && then.fits_rms(N); }
  int columns() const { return N / Result<T>::kParts; }  // of y
};

// A kernel takes the members one by one: ptxas believes __restrict__ on parameters only, and needs up to 60 registers more without.
#define FP4_LINEAR_PARAMETERS                                                                                                                        \
  const T *__restrict__ x, const uint8_t *__restrict__ q, const uint8_t *__restrict__ scale, const float *__restrict__ global_scale,                 \
      const T *__restrict__ bias, T *__restrict__ y, int M, int N, int K, const Epilogue<T> then

template <typename T, typename Kernel>
cudaError_t launch(Kernel kernel, dim3 blocks, int threads, int shared_bytes, int cluster, const Linear<T>& p, cudaStream_t stream) {
  return launch(kernel, blocks, threads, shared_bytes, cluster, stream, p.x, p.q, p.scale, p.global_scale, p.bias, p.y, p.M, p.N, p.K, p.then);
}

// In kernels whose blocks own ROWS rows between their warps: the columns of y of a block, and where in W a warp's rows begin, which
// are the block's from `local` on.
template <typename T, int ROWS> constexpr int kBlockColumns = ROWS / Result<T>::kParts;
template <typename T, int ROWS> __device__ __forceinline__ int first_row(int n0, int local, int N) {
  return n0 + local + (local >= kBlockColumns<T, ROWS> ? N / 2 - kBlockColumns<T, ROWS> : 0);
}

constexpr int kStepK = 128;  // k a step: a quad reads 64 contiguous bytes of a row

// One warp's 16 * R rows of W, kStepK at a time through a ring of STAGES buffers filled by cp.async: no warp waits for
// another one, and registers are left for arithmetic. ANY_K: K is only a multiple of 16, so that a row of codes begins at a
// multiple of 8 bytes and a row of scales at any byte; else K is a multiple of 64 and copies are as wide as can be. PAIRED: the
// second half of the rows lies N / 2 behind the first one.
template <typename T, int R, int STAGES, bool ANY_K, bool PAIRED = false> struct WeightStream {
  static constexpr int kRows = 16 * R, kScaleBytes = ANY_K ? 12 : 8, kStage = kRows * (64 + kScaleBytes), kBytes = STAGES * kStage;
  uint8_t* ring;  // kBytes of shared memory, 16-byte aligned
  Shared address;  // of ring
  const uint8_t *q, *scale;
  int n0, N, K, lane;

  // Row i of the warp's. ptxas is sensitive to this sum's order: lane first, block last.
  __device__ __forceinline__ int row(int i) const { return min(n0 + i + (PAIRED && i >= kRows / 2 ? N / 2 - (FP4_FAULT(SECOND_HALF_TOO_FAR) ? 0 : kRows / 2) : 0), N - 1 + FP4_FAULT(READ_ROWS_PAST_N)); }

  // Rows past N and k past K are read from the last legal place: their products are never stored, or meet zero activations.
  __device__ __forceinline__ void fetch(int step, int slot) const {
    const int k = step * kStepK + (lane & 3) * 32;
    const Shared to = address + slot * kStage;
#pragma unroll
    for (int i = 0; i < 2 * R; ++i) {
      const size_t start = (size_t)row(8 * i + (lane >> 2)) * (K / 2);
      if constexpr (ANY_K) {
        cp_async<8>(to + i * 512 + lane * 16, q + start + min(k, K - 16) / 2);
        cp_async<8>(to + i * 512 + lane * 16 + 8, q + start + min(k + 16, K - 16) / 2);
      } else {
        cp_async<16>(to + i * 512 + lane * 16, q + start + (FP4_FAULT(READ_K_PAST_K) ? k : min(k, K - 32)) / 2);
      }
    }
    if constexpr (ANY_K) {  // the 12 aligned bytes around the row's 8; none past the last one
      const size_t total = (size_t)N * (K / 16);
#pragma unroll 1
      for (int i = lane; i < kRows * 3; i += 32) {
        const size_t at = (scale_at(i / 3, step) & ~(size_t)3) + i % 3 * 4;
        const int bytes = FP4_FAULT(READ_SCALES_PAST_END) ? 4 : at < total ? (int)min(total - at, (size_t)4) : 0;
        if (bytes % 4 == 0)
          cp_async_src_size<4>(to + kRows * 64 + i * 4, scale + (bytes ? at : 0), bytes);
        else  // the tensor's end
          *(uint32_t*)(ring + slot * kStage + kRows * 64 + i * 4) = scale[at] | (bytes > 1 ? scale[at + 1] << 8 : 0) | (bytes > 2 ? scale[at + 2] << 16 : 0);
      }
    } else {  // 8 scale bytes a row, two lanes of 4 bytes each
      const int ks = min(step * 8 + (lane & 1) * 4, K / 16 - 4);
#pragma unroll
      for (int i = 0; i < R; ++i) {
        const int at = 16 * i + (lane >> 1);
        cp_async<4>(to + kRows * 64 + at * 8 + (lane & 1) * 4, scale + (size_t)row(at) * (K / 16) + ks);
      }
    }
  }

  // Calls use(r, word, lo, hi) for every 16 rows r and every word of 8 codes of the lane's 32 k: lo and hi are the pairs of
  // decode() of rows g and g + 8, A fragments of two MMAs.
  template <typename Use> __device__ __forceinline__ void multiply(int step, int slot, Use use) const {
    const uint8_t* from = ring + slot * kStage;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const uint4 ql = *(const uint4*)(from + (2 * r) * 512 + lane * 16), qh = *(const uint4*)(from + (2 * r + 1) * 512 + lane * 16);
      const uint32_t sl = Numbers<T>::scales(two_scales(from, 16 * r + (lane >> 2), step)), sh = Numbers<T>::scales(two_scales(from, 16 * r + (lane >> 2) + 8, step));
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        uint32_t lo[4], hi[4];
        const uint32_t pick = word < 2 ? 0x1010 : 0x3232;
        decode<T>(word == 0 ? ql.x : word == 1 ? ql.y : word == 2 ? ql.z : ql.w, __byte_perm(sl, 0, pick), lo);
        decode<T>(word == 0 ? qh.x : word == 1 ? qh.y : word == 2 ? qh.z : qh.w, __byte_perm(sh, 0, pick), hi);
        use(r, word, lo, hi);
      }
    }
  }

 private:
  __device__ __forceinline__ size_t scale_at(int i, int step) const { return (size_t)row(i) * (K / 16) + step * 8; }

  __device__ __forceinline__ uint32_t two_scales(const uint8_t* from, int i, int step) const {
    const uint8_t* at = from + kRows * 64 + i * kScaleBytes + 2 * (lane & 3);
    if constexpr (!ANY_K) return *(const uint16_t*)at;
    at += scale_at(i, step) & 3;
    return at[0] | at[1] << 8;
  }
};

}  // namespace fp4
