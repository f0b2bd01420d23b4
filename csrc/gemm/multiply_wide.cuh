// The mainloop of linear_wide and sparse_linear_wide: y[M, N] = x[M, K] @ W[N, K]^T by wgmma. A weight is decoded in registers, where it is wgmma's A
// operand; tokens in shared memory are its B operand.
//
// One thread fetches weights and one fetches activations, each through a ring of TMA copies (sm90/pipeline.cuh). The other warpgroups multiply: they lie side
// by side in rows and in K. Every sum has a fixed order. Two types say the rest:
//
//   Weight   how a weight lies in memory (dense, 2:4-sparse): its bytes in a stage, its TMA copies, how a step of it is loaded, decoded and multiplied.
//   Work     which tiles a block has, and which steps of their K: the tile begins at row() and token(), its steps are k .. last() - 1; next() is the
//            next tile, while left > 0.
//
// Each kernel has its own list of parameters and calls multiply_wide(), which is inlined. ptxas is sensitive to the order in which variables are declared and
// captured here: with another order the same instructions get other registers and another schedule. Compare the machine code of both libraries after a
// change, and time it.
#pragma once
#include "wide.cuh"

namespace fp4 {

// What blocks share. kSplit: the blocks of a cluster share K. kShare: the two blocks of a cluster have neighbouring rows and share the activations. kStream:
// all blocks take equal shares of all tiles' steps (stream K).
enum class Blocks { kSplit, kShare, kStream };

// ROWS of W and TOKENS a block; KGROUPS warpgroups for each 64 rows, which take steps of K in turn.
template <typename T, int ROWS, int TOKENS, int KGROUPS> struct WideTile {
  using Type = T;
  static constexpr int kRows = ROWS, kTokens = TOKENS, kKGroups = KGROUPS, kGroups = ROWS / 64 * KGROUPS;
  static constexpr int kConsumers = 128 * kGroups, kThreads = kConsumers + 128;
};

// A step is 256 k. A stage of weights holds Weight::kSteps of them. A stage of activations holds one, and each half of it is copied, waited for and freed by
// itself.
template <typename Weight> struct Shape : Weight::Tile {
  using W = typename Weight::Tile;
  static constexpr int kWeights = W::kRows * Weight::kRowBytes, kTokenTile = W::kTokens * 128, kHalf = 2 * kTokenTile;
  static constexpr int kReaders = W::kRows / 16 * at_most(W::kKGroups, Weight::kSteps);  // warps that free a stage of weights
  static constexpr int kTurn = at_least(W::kKGroups / Weight::kSteps, 1);                // stages of weights between two steps of a warpgroup
  // Rings are multiples of a turn, so that a warpgroup meets every phase of the mbarriers that it waits for.
  static constexpr int kXStages = Weight::kTokenStages, kActivationBytes = kXStages * kActivations<W::kTokens>, kRoom = 226 * 1024 - Weight::kTable;
  static constexpr int kWStages = at_most(Weight::kMostStages, (kRoom - kActivationBytes) / kWeights) / kTurn * kTurn;
  static constexpr int kEarly = at_most(kWStages, at_least(1, kEarlyBytes / kWeights));  // stages of weights that go ahead of the first activations
  static constexpr int kSums = kWideSums<W::kRows, W::kTokens, W::kKGroups>;             // in the rings' place, at the end
  static constexpr int kRings = at_least(kWStages * kWeights + kActivationBytes, kSums), kBytes = Weight::kTable + kRings + 16 * kWStages + 32 * kXStages;
  static constexpr int kRegisters = W::kGroups <= 2 ? 232 : W::kGroups == 3 ? 152 : 112;  // of a thread that multiplies
  static constexpr int kFetching = W::kGroups == 4 ? 32 : 40;                                        // and of one that fetches
  static_assert(kBytes <= 227 * 1024 && kWStages >= at_least(2, kTurn) && kXStages % W::kKGroups == 0, "does not fit shared memory");
};

// Stores a warp's rows n0 .. n0 + 15 from registers. Lanes of rows g and g ^ 1 swap one token's sums: each stores two neighbouring columns of the other.
template <int TILES, typename T> __device__ __forceinline__ void store_pairs(const float (&acc)[TILES][4], int m0, int n0, int g, int t, const Result<T>& out) {
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool odd = g & 1;
      const float even_token = acc[i][2 * h], odd_token = acc[i][2 * h + 1], got = shuffle_xor(odd ? even_token : odd_token, 4);
      const float pair[2][Result<T>::kParts] = {{odd ? got : even_token}, {odd ? odd_token : got}};
      out.template store_run<2>(m0 + 8 * i + 2 * t + odd, n0 + (g & 6) + 8 * h, pair);
    }
}

// source: what a Weight is fetched from. make_work(): the block's Work. result(M): what becomes of the sums of tokens below M; it loads the global scale, so
// the PDL wait comes before it. With one tile a block it is called behind the mainloop, because it would hold registers there; else once, before the first
// tile.
template <typename Weight, Blocks BLOCKS, typename MakeWork, typename MakeResult>
__device__ __forceinline__ void multiply_wide(const typename Weight::Source& source, const TensorMap& tokens, int tile_tokens, MakeWork make_work,
                                              MakeResult result) {
  using S = Shape<Weight>;
  using T = typename S::Type;
  constexpr int kRows = S::kRows, kTokens = S::kTokens, kKGroups = S::kKGroups;
  constexpr bool kShares = BLOCKS == Blocks::kShare, kOneTile = decltype(make_work())::kOneTile;
  uint8_t* shared = dynamic_shared() + Weight::kTable;
  const Shared weights = shared_address(shared), activations = weights + S::kWStages * S::kWeights;
  const auto w_ring = Ring<>::at(shared_address(shared + S::kRings), S::kWStages);
  const auto x_ring = Ring<2>::at(w_ring.end(S::kWStages), S::kXStages);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  auto work = make_work();
  const int rank = work.rank;

  if (threadIdx.x == 0) {
    w_ring.init(S::kWStages, 1, S::kReaders);
    x_ring.init(S::kXStages, 1, kRows / 16 * (kShares && !FP4_FAULT(OTHER_READERS_NOT_COUNTED) ? 2 : 1));
    fence_mbarrier_init();
  }
  if (threadIdx.x == S::kConsumers) Weight::prefetch(source);
  if (threadIdx.x == S::kConsumers + 32) prefetch_tensor_map(tokens);
  if (kShares && !FP4_FAULT(BARRIERS_UNKNOWN_TO_CLUSTER))
    cluster_sync();  // the other block arrives at them, too
  else
    __syncthreads();

  if (warp >= 4 * S::kGroups) {
    setmaxnreg_dec<S::kFetching>();
    if (warp == 4 * S::kGroups && lane == 0) {
      Place<S::kWStages> at;
      for (int early = S::kEarly; work.left > 0; work.next())
        for (int k = work.k; k < work.last(); k += Weight::kSteps, at.next()) {
          if (early-- == 0) griddepcontrol_wait();  // copies of one block are served in order: activations are not to wait for a full ring
          w_ring.acquire(at);
          const Shared to = weights + at.i * S::kWeights, full = w_ring.of(at);
          mbarrier_arrive_expect_tx(full, Weight::bytes());
          Weight::fetch(to, source, k, work.row(), full);
        }
    } else if (warp == 4 * S::kGroups + 1 && lane == 0) {
      Place<S::kXStages> at;
      if (!FP4_FAULT(FETCH_BEFORE_PDL_WAIT)) griddepcontrol_wait();  // it may have written x
      for (; work.left > 0; work.next()) {
        const int m0 = work.token();
        for (int k = work.k; k < work.last(); ++k, at.next())
          for (int h = 0; h < 2; ++h) {
            const Shared to = activations + at.i * kActivations<kTokens> + h * S::kHalf, full = x_ring.of(at, h);
            if (!FP4_FAULT(SKIP_TOKENS_FREE_WAIT)) x_ring.acquire(at, h);
            mbarrier_arrive_expect_tx(full, tile_tokens * 256);
            const int byte = k * (2 * kWideK) + h * kWideK;
            if constexpr (kShares) {  // each of the two copies one of the half's two tiles
              tma_load_2d_multicast(to + rank * S::kTokenTile, tokens, byte + rank * 128, m0, full, FP4_FAULT(COPY_TO_OWN_BLOCK_ONLY) ? 1 << rank : 3);
            } else {
              tma_load_2d(to, tokens, byte, m0, full);
              tma_load_2d(to + S::kTokenTile, tokens, byte + 128, m0, full);
            }
          }
      }
    }
    __syncwarp();
    if (kShares && !FP4_FAULT(BLOCK_ENDS_EARLY))
      cluster_sync();
    else if (BLOCKS == Blocks::kSplit && work.splits() > 1)
      cluster_sync(), cluster_sync();  // with those of the sums
    return;
  }

  setmaxnreg_inc<S::kRegisters>();
  if (tile_tokens < kTokens) clear_other_tokens<kTokens>(shared + S::kWStages * S::kWeights, 4 * S::kXStages, tile_tokens, S::kConsumers);
  Weight::fill_table();
  pdl_wait_then_trigger();  // the kernel before may still read y, and may have written what the epilogue reads
  const int g = lane >> 2, t = lane & 3, group = uniform(warp >> 2), row_group = group % (kRows / 64), k_group = group / (kRows / 64);
  const int local = row_group * 64 + (warp & 3) * 16;  // the warp's first row
  Weight weight(source, shared, local, g, t, k_group, work.row());
  decltype(result(0)) out{};
  if constexpr (!kOneTile) out = result(source.M);
  Place<S::kWStages> w;
  Place<S::kXStages> x;
  w.next(k_group / Weight::kSteps), x.next(k_group);
  bool frees = false;  // this lane gives back the half that was multiplied last
  Shared last_half = x_ring.free;

  for (; work.left > 0; work.next()) {
    float acc[kTokens / 8][4] = {};
    const int n0 = work.row(), m0 = work.token(), first = work.k, last = work.last();
    if constexpr (!kOneTile) out.M = min(source.M, m0 + tile_tokens);
    if (work.k + k_group < last) weight.load_ahead(n0, work.k + k_group);
#pragma unroll 1
    for (int k = first + k_group; k < last; k += kKGroups) {
      if (!FP4_FAULT(SKIP_WEIGHTS_WAIT)) w_ring.wait(w);
      if (FP4_FAULT(FREE_WEIGHTS_EARLY) && lane == 0) w_ring.release(w);
      // Where two steps of a stage are two warpgroups', each frees it after its own; where they are one warpgroup's, it frees the stage after the second.
      const int stage = w.i * S::kWeights, second = kKGroups < Weight::kSteps ? (k - first) & 1 : 0;
      typename Weight::Loaded loaded;
      weight.load(loaded, stage, second);
      if (k + kKGroups < last) weight.load_ahead(n0, k + kKGroups);
      const Shared half = x_ring.of(x), held = activations + x.i * kActivations<kTokens>;
      weight.multiply(
          acc, loaded, stage, held,
          [&](int j) { if (!FP4_FAULT(SKIP_TOKENS_WAIT)) mbarrier_wait_parity(half + 8 * j, x.parity); },
          [&x, &frees, &last_half, &x_ring, &lane, &warp, &rank](int j) {
            if (frees && (!FP4_FAULT(ONE_WARP_KEEPS_TOKENS) || warp)) {
              mbarrier_arrive(last_half);
              if (kShares && !FP4_FAULT(OTHER_BLOCK_NOT_TOLD)) mbarrier_arrive_remote(last_half, rank ^ 1);
            }
            frees = lane == 0;
            last_half = x_ring.free_of(x, j);
          });
      __syncwarp();
      const bool leaves = kKGroups >= Weight::kSteps || second;
      if (lane == 0 && leaves) w_ring.release(w);
      if (leaves) w.next(S::kTurn);
      x.next(kKGroups);
    }
    wgmma_wait<0>();
    wgmma_fence_operand(acc);
    if constexpr (BLOCKS == Blocks::kStream) {
      if (work.k > 0) {  // a later block has the tile's first steps, and stores it
        work.put(acc);
        continue;
      }
      for (int b = (int)blockIdx.x - 1; last < work.steps && b >= 0 && work.end(b) > work.tile * work.steps; --b) work.add(acc, b);
      store_pairs(acc, m0, n0 + local, g, t, out);
    } else {
      if (kShares && !FP4_FAULT(BLOCK_ENDS_EARLY)) cluster_sync();  // nobody leaves while the other arrives at its mbarriers
      if constexpr (kOneTile) out = result(min(source.M, m0 + tile_tokens));
      sum_k_groups_and_store<T, kRows, kTokens, kKGroups>(acc, (float*)shared, k_group, local, work.splits(), kShares ? 0 : rank, n0, m0, out);
    }
  }
}

}  // namespace fp4
