// fp4.linear for some fifty to a few thousand rows on sm_90, by FP8 tensor cores: y[M, N] = x8[M, K] @ W8[N, K]^T * x_scale (+ bias), x8 E4M3 with a
// scale per token, W8 canonical NVFP4 rounded to E4M3 in registers: bit for bit the codes of fp4.dequantize_fp8, which writes them to memory.
//
// Each 256 k of a token lie in the order in which a quad decodes them (wide_fp8.cuh).
#include "multiply_fp8.cuh"

namespace {

using namespace fp4;

// 128 bytes of codes and 16 of scales of a row of W a step.
struct Dense {
  static constexpr int kCodes = kRows * 128, kRowBytes = 128 + 16;
  static constexpr int weight_stages(int tokens) { return tokens == 192 ? 3 : tokens == 64 ? 6 : 4; }
  static constexpr int token_stages(int tokens) { return tokens == 256 ? 4 : tokens == 192 ? 6 : 8; }

  struct Maps {
    TensorMap codes, scales;
  };
  struct Parts {
    const uint8_t *q, *s;
  };
  static cudaError_t map(Maps* maps, const Parts& p, int N, int K) {
    const cudaError_t status = tensor_map_2d(&maps->codes, p.q, N, K / 2, kRows, 128);
    return status == cudaSuccess ? tensor_map_2d(&maps->scales, p.s, N, K / 16, kRows, 16) : status;
  }

  __device__ __forceinline__ static void prefetch(const Maps& maps) { prefetch_tensor_map(maps.codes), prefetch_tensor_map(maps.scales); }
  __device__ __forceinline__ static void fetch(Shared to, const Maps& maps, int k, int row, Shared full) {
    tma_load_2d(to, maps.codes, k * 128, row, full);
    tma_load_2d(to + kCodes, maps.scales, k * 16, row, full);
  }

  StageFP8<8> lane_of;
  __device__ __forceinline__ Dense(const uint8_t* shared, int local, int lane) : lane_of(shared, kCodes, local, lane) {}
  template <int TILES, typename Arrived, typename Done>
  __device__ __forceinline__ void multiply(float (&acc)[TILES][4], int stage, int, Arrived arrived, Done done) const {
    lane_of.multiply(acc, stage, arrived, done);
  }
};

constexpr Costs kCosts{{0.77f, 1.0f, 1.23f, 1.52f}, 4.5f, 7.2f, 8.5f};

}  // namespace

extern "C" int64_t fp4_linear_wide_fp8_scratch(const LinearParams* call) { return is_call(call) ? scratch_bytes(*call) : 0; }

// serve() of multiply_fp8.cuh, with codes and scale.
extern "C" int fp4_linear_wide_fp8(const LinearParams* call) {
  return serve<Dense>(call, kCosts, [&] { return Dense::Parts{(const uint8_t*)call->codes, (const uint8_t*)call->scale}; });
}
