// A call of a 2:4-sparse kernel, its pointers typed.
#pragma once
#include "../common/epilogue.cuh"

namespace fp4 {

// y[M, N] = x[M, K] @ W[N, K]^T (+ bias). values: the kept codes of W; second, third: rows of W at which those global scales begin, 0: none.
template <typename T> struct SparseLinear {
  const T* x;
  const uint8_t *values, *meta, *scale;
  const float* global_scale;
  const T* bias;
  T* y;
  int M, N, K, second, third;
  Stream stream;

  static SparseLinear of(const LinearParams& p) {
    return {(const T*)p.x, (const uint8_t*)p.codes, (const uint8_t*)p.meta, (const uint8_t*)p.scale, (const float*)p.global_scale, (const T*)p.bias,
            (T*)p.y, p.M, p.N, p.K, p.second, p.third, stream_of(p)};
  }
};

}  // namespace fp4
