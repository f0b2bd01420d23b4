// What happens to sums: the warps of a block, and the blocks of a cluster, meet in shared memory in a fixed order, without
// atomics; then scale, bias, what a kernel is compiled to do behind them, and one rounding.
#pragma once
#include "activations.cuh"
#include "nvfp4.cuh"

namespace fp4 {

// y[M, N]; bias may be null.
template <typename T> struct Output {
  T* y;
  const T* bias;
  int M, N;

  __device__ __forceinline__ void store(int m, int n, float value) const {
    if (m < M && n < N) y[(size_t)m * N + n] = Numbers<T>::from_float(value + (bias ? Numbers<T>::to_float(bias[n]) : 0.f));
  }
};

// What a library of dense kernels does behind z = x @ W^T * global scale + bias. Decided when compiling (-DFP4_FINISH=): the plain
// kernels carry none of the rest.
enum Finish { kPlain = 0, kPointwise = 1, kGlu = 2 };  // z; act(z) * mul + residual; act(z of row n) * z of row n + N / 2
#ifndef FP4_FINISH
#define FP4_FINISH 0
#endif
constexpr Finish kFinish = (Finish)FP4_FINISH;

// Does a library whose kernels take one global scale take several? The others carry nothing of it. Of an expert's first product: one of gate, one of up.
#ifndef FP4_SEVERAL_SCALES
#define FP4_SEVERAL_SCALES 0
#endif
constexpr bool kSeveralScales = FP4_SEVERAL_SCALES;

// Which half of an RMSNorm a library has (-DFP4_RMS=). The norm's root mean square is a factor of a row, so it may be applied to the sums of the product behind
// the norm. kWritesSquares: besides y, z = y * (norm_offset + norm_weight), and for each row and 16 columns the sum of squares of y, float32 [M, N / 16];
// N % 16 == 0. kReadsSquares: x is such a z, and sums are multiplied by rsqrt(sum of the row's squares / K + eps) ahead of bias and activation.
enum Rms { kNoRms = 0, kWritesSquares = 1, kReadsSquares = 2 };
#ifndef FP4_RMS
#define FP4_RMS 0
#endif
constexpr Rms kRms = (Rms)FP4_RMS;

__device__ __forceinline__ float activate(float z, int act) {
  switch (act) {
    case kSilu: return z / (1.f + expf(-z));
    case kGelu: return 0.5f * z * (1.f + erff(z * 0.7071067811865476f));
    case kGeluTanh: return z / (1.f + expf(-1.5957691216057308f * z * (1.f + 0.044715f * z * z)));  // 0.5 z (1 + tanh u) = z sigmoid(2 u)
    case kRelu: return z < 0.f ? 0.f : z;  // a NaN stays one
    default: return z;
  }
}

// The arguments of the epilogue besides scale and bias.
template <typename T> struct Epilogue {
  const T *mul, *residual;  // as y, or null
  int second, third;        // rows of W at which the second and the third global scale begin
  int act;
#if FP4_RMS == 1
  const T* norm_weight;  // [N]
  T* z;
  float* squares;
  float norm_offset;
#elif FP4_RMS == 2
  const float* squares;  // [M, K / kSquared]
  float eps;
#endif

  // second, third: 0 stands for none.
  static __host__ __device__ Epilogue of(const void* mul, const void* residual, int second, int third, int act) {
    return {(const T*)mul, (const T*)residual, second ? second : INT32_MAX, third ? third : INT32_MAX, act};
  }
  static Epilogue of(const LinearParams& p) {
    Epilogue then = of(p.mul, p.residual, p.second, p.third, p.act);
#if FP4_RMS == 1
    then.norm_weight = (const T*)p.norm_weight, then.z = (T*)p.z, then.squares = (float*)p.squares, then.norm_offset = p.norm_offset;
#elif FP4_RMS == 2
    then.squares = (const float*)p.squares, then.eps = p.eps;
#endif
    return then;
  }
  // Of a kernel with nothing but scales and bias behind its sums.
  static __device__ Epilogue scales(int second, int third) { return kSeveralScales ? of(nullptr, nullptr, second, third, kNone) : of(nullptr, nullptr, 0, 0, kNone); }
  bool fits(Finish finish, int N) const {
    if (act < kNone || act > kLastActivation || second > third || second < 0 || third < 0) return false;
    return finish == kPlain ? !mul && !residual && !act : finish == kPointwise || (!mul && !residual && N % 2 == 0);
  }
  // Are the operands of this library's half of an RMSNorm there?
  bool fits_rms(int N) const {
#if FP4_RMS == 1
    return norm_weight && z && squares && N % kSquared == 0;
#elif FP4_RMS == 2
    return squares;
#else
    return true;
#endif
  }
};

// y[M, N] (kGlu: [M, N / 2]) of a weight of N rows; bias [N] may be null.
template <typename T> struct Result {
  static constexpr int kParts = kFinish == kGlu ? 2 : 1;  // rows of W that make one column of y, N / kParts apart
  T* y;
  const float* global_scale;
  const T* bias;
  int M, N;
  Epilogue<T> then;
  float unit;  // the first global scale * kWeightUnit
#if FP4_RMS == 2
  const float* roots;  // of the rows of x, the inverse ones
#endif

  __device__ __forceinline__ float z(int m, int row, float sum) const {
    float u = unit;
    if (row >= then.second) u = load_float(global_scale + (row < then.third ? 1 : 2)) * kWeightUnit;
#if FP4_RMS == 2
    u *= roots[m];
#endif
    return sum * u + (bias ? Numbers<T>::to_float(bias[row]) : 0.f);
  }
  // sums[p]: of row n + p * N / kParts.
  __device__ __forceinline__ void store(int m, int n, const float (&sums)[kParts]) const {
    const int columns = N / kParts;
    if (m < M && (n < columns || FP4_FAULT(STORE_COLUMNS_PAST_N))) y[(size_t)m * columns + n] = Numbers<T>::from_float(value(m, n, columns, sums));
  }
  // COUNT neighbouring columns from n on, a multiple of COUNT (2 or 4): in one store where rows of y are aligned for it.
  template <int COUNT> __device__ __forceinline__ void store_run(int m, int n, const float (&sums)[COUNT][kParts]) const {
    const int columns = N / kParts;
    if (m >= M || n >= columns) return;
    if (columns % COUNT) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) store(m, n + i, sums[i]);
      return;
    }
    struct alignas(COUNT * sizeof(T)) Run {
      T v[COUNT];
    } run;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) run.v[i] = Numbers<T>::from_float(value(m, n + i, columns, sums[i]));
    *(Run*)(y + (size_t)m * columns + n) = run;
  }
#if FP4_RMS == 1
  // Two columns from n on, an even one, of y and z, and of the squares of y as it is stored. All lanes of a warp call it; eight neighbours, from a multiple of
  // eight on, have one m and kSquared columns. stores: whether these are there, the same for all eight.
  __device__ __forceinline__ void store_squared(bool stores, int m, int n, const float (&sums)[2][kParts]) const {
    struct alignas(2 * sizeof(T)) Pair {
      T v[2];
    } stored, weighted;
    float square = 0.f;
    if (stores) {
      const Pair weight = *(const Pair*)(then.norm_weight + n);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        stored.v[i] = Numbers<T>::from_float(value(m, n + i, N, sums[i]));
        const float rounded = Numbers<T>::to_float(stored.v[i]);
        weighted.v[i] = Numbers<T>::from_float(rounded * (then.norm_offset + Numbers<T>::to_float(weight.v[i])));
        square += rounded * rounded;
      }
      *(Pair*)(y + (size_t)m * N + n) = stored;
      *(Pair*)(then.z + (size_t)m * N + n) = weighted;
    }
#pragma unroll
    for (int lanes = 1; lanes < (FP4_FAULT(HALF_OF_THE_SQUARES) ? 4 : 8); lanes *= 2) square += shuffle_xor(square, lanes);
    if (stores && threadIdx.x % 8 == 0) then.squares[(size_t)m * (N / kSquared) + n / kSquared] = square;
  }
#endif

 private:
  __device__ __forceinline__ float value(int m, int n, int columns, const float (&sums)[kParts]) const {
    float v = z(m, n, sums[0]);
    if constexpr (kFinish != kPlain) v = activate(v, then.act);
    if constexpr (kFinish == kGlu) v *= z(m, FP4_FAULT(UP_WITH_GATE_SCALE) ? n : n + columns, sums[kParts - 1]);
    if constexpr (kFinish == kPointwise) {
      const size_t at = (size_t)m * columns + n;
      if (then.mul) v *= Numbers<T>::to_float(then.mul[at]);
      if (then.residual) v += Numbers<T>::to_float(then.residual[at]);
    }
    return v;
  }
};

// Are these starts of a second and a third global scale that this library's sparse kernels take? 0: there is none.
inline bool starts_fit(int second, int third) { return kSeveralScales ? second >= 0 && third >= 0 && (third == 0 || (second && second < third)) : !second && !third; }

// Bytes of shared memory that sum_and_store needs.
template <int R, int MT, int WARPS> constexpr int kSumBytes = WARPS * 8 * MT * (16 * R + 1) * (int)sizeof(float);

// acc: each warp's share of the same 16 * R rows by 8 * MT tokens, as mma_m16n8k16 leaves it; with kGlu the first half of the rows
// belongs to columns n0 onwards, the second half to the same columns. `shared` is free for use by all warps; token 0 comes first;
// `splits` blocks of the cluster hold shares of the same sums.
template <typename T, int R, int MT, int WARPS>
__device__ __forceinline__ void sum_and_store(const float (&acc)[R][MT][4], uint8_t* shared, int splits, int n0, const Result<T>& out) {
  constexpr int kRows = 16 * R, kTokens = 8 * MT, kThreads = 32 * WARPS, kParts = Result<T>::kParts, kColumns = kRows / kParts;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  float* partial = (float*)shared;  // [WARPS][kTokens][kRows + 1]
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int j = 0; j < MT; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        partial[(warp * kTokens + 8 * j + 2 * t + (c & 1)) * (kRows + 1 - FP4_FAULT(SUMS_TOO_CLOSE)) + 16 * r + g + 8 * (c >> 1)] = acc[r][j][c];
  if (!FP4_FAULT(SKIP_BARRIER_BEFORE_SUMS)) __syncthreads();
  auto over_warps = [&](int row, int m) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += partial[(w * kTokens + m) * (kRows + 1) + row];
    return sum;
  };
  if (splits == 1) {
    for (int i = threadIdx.x; i < kColumns * kTokens; i += kThreads) {
      float sums[kParts];
#pragma unroll
      for (int p = 0; p < kParts; ++p) sums[p] = over_warps(i % kColumns + (FP4_FAULT(UP_FROM_GATE_ROWS) ? 0 : p * kColumns), i / kColumns);
      out.store(i / kColumns, n0 + i % kColumns, sums);
    }
    return;
  }
  for (int i = threadIdx.x; i < kRows * kTokens; i += kThreads) partial[i / kRows * (kRows + 1) + i % kRows] = over_warps(i % kRows, i / kRows);
  if (!FP4_FAULT(SKIP_CLUSTER_BARRIER_BEFORE_SUMS)) cluster_sync();
  const int slice = kColumns / splits, first = cluster_rank() * slice;
  for (int i = threadIdx.x; i < slice * kTokens; i += kThreads) {
    const int column = first + i % slice, m = i / slice;
    float sums[kParts] = {};
    for (int r = 0; r < splits; ++r)
#pragma unroll
      for (int p = 0; p < kParts; ++p) sums[p] += map_to_rank(partial, r)[m * (kRows + 1) + column + p * kColumns];
    out.store(m, n0 + column, sums);
  }
  cluster_sync();  // nobody leaves while its sums are being read
}

}  // namespace fp4
