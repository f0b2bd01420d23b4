// The kernel for few rows of x: y[M, N] = x[M, K] @ W[N, K]^T, codes decoded by a table in shared memory. A `Weight` says how a dense or a 2:4-sparse weight
// lies in memory, how a step of it is fetched, and how a warp multiplies its share of a step. The ring's loops are those of table.cuh.
//
// As with multiply_wide.cuh, ptxas is sensitive to the form: an Epilogue made before the loop, or handed over by reference, gives other registers and another
// schedule. So do rings that fetch() computes, and a base class for what both Layouts have. Compare the machine code of both libraries after a change, and
// time it.
#pragma once
#include "table.cuh"

#if FP4_RMS == 2
#define FP4_ROOTS , roots
#else
#define FP4_ROOTS
#endif

namespace fp4 {

// A warp multiplies 16 * R rows. Weight::kSharers warps share a stage. then: an Epilogue, or what converts to one where sums are stored.
template <typename Weight, int R, int TILES, typename Layout, typename T, typename Then>
__device__ __forceinline__ void multiply_table(const typename Weight::Source& from, const TensorMap& activations, const Layout& layout,
                                               const float* global_scale, const T* bias, T* y, int M, int N, int K, const Then then) {
  constexpr int kSharers = Weight::kSharers;
  uint8_t* shared = dynamic_shared();
  const int warp = uniform(threadIdx.x >> 5), lane = threadIdx.x & 31, steps = K / Weight::kStepK, rows = layout.rows(), n0 = Weight::first_column(from, rows);
  const Shared full = shared_address(shared + layout.mbarriers()), free = full + 8 * layout.stages;

  if (threadIdx.x == 32 * layout.warps()) {
    init_ring(full, free, layout.stages, layout.row_warps() * (FP4_FAULT(ONE_OF_TWO_WARPS_FREES) ? 1 : kSharers));
    Weight::prefetch(from);
    prefetch_tensor_map(activations);
  }
  __syncthreads();

  if (warp == layout.warps()) {
    if (lane == 0) {
      const auto rings = Weight::rings(layout, shared);
      fetch_steps(
          steps, layout.stages, layout.early, free, [&](int k, int at) { Weight::fetch(from, layout, rings, rows, n0, k, at, full); },
          [&](int k, int at) { tma_load_3d(rings.first + at * layout.stage(), activations, 0, 0, k * Weight::kPlanes, full + 8 * at); });
    }
    return;
  }

  const int threads = 32 * layout.warps();
  fill_pairs<T, true>(shared, threadIdx.x, threads);
  if (!FP4_FAULT(SKIP_BARRIER_AFTER_TABLE)) named_barrier_sync(1, threads);
  const int g = lane >> 2, t = lane & 3, row_warp = warp % layout.row_warps(), k_group = warp / layout.row_warps();
  const Weight weight(layout, shared, row_warp * (16 * R), kSharers > 1 ? k_group % kSharers : 0, g, t, lane);
  float acc[R][TILES][4] = {};
#if FP4_RMS == 1
  constexpr int kEach = 64 / sizeof(T);  // else the end of the kernel would wait for memory; no kernel before writes it
  if (const int n = threadIdx.x * kEach; n < rows && n0 + n < N) prefetch_l2(then.norm_weight + n0 + n);
#endif
  pdl_wait_then_trigger();  // the kernel before may still read y, and may have written what the epilogue reads
#if FP4_RMS == 2
  float* const roots = (float*)(shared + layout.roots());
  read_roots(roots, then.squares, M, K, then.eps, threads);  // while the first activations are on their way
  named_barrier_sync(1, threads);  // take_turns() has to begin in all warps at once
#endif
  take_turns(steps, layout.stages, layout.k_groups / kSharers, k_group / kSharers, full, free, lane, layout.sets_a_warp - R, [&](int stage) {
    weight.multiply(acc, layout, shared, rows, stage, g, t, lane);
    return bits_of(acc);
  });

  if (!FP4_FAULT(SKIP_BARRIER_BEFORE_SUMS)) named_barrier_sync(1, threads);  // nobody reads the ring any more
  sum_turns_and_store<T, R, TILES>(acc, (float*)(shared + kPairTable), rows, weight.row(g), k_group, layout.k_groups, threads, n0,
                                   Weight::first_stored(rows, n0), {y, global_scale, bias, M, N, then, *global_scale * kWeightUnit FP4_ROOTS});
}

}  // namespace fp4
