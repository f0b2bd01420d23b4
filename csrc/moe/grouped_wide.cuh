// The two products of an MoE layer over pairs of token and expert, sorted by expert (route.cuh), on sm_90. Weights are decoded in registers: they are the A
// operand of wgmma, as in gemm/wide.cuh, or of mma, decoded by table.
//
// The kernel is persistent: a block works on one item after another. An item is a tile of pairs by a group of rows of W. The tiles of one expert are neighbours
// at each group, so that its weights come from DRAM once.
//
// The mainloop is not that of gemm/multiply_wide.cuh. There a warpgroup has 64 rows and warpgroups share K; here a warpgroup has 64 * SETS rows and all of K,
// 64 threads may gather the tokens, and each warp multiplies up to 16 tokens on its own. Both have Ring, wgmma and the decoding of weights in common.
#pragma once
#include "../gemm/table.cuh"
#include "route.cuh"

namespace fp4 {

// Tiles of up to 16 pairs are multiplied by mma, each warp on its own, which is faster than wgmma for so few pairs only (benchmarks/NOTES.md). Their weights
// are decoded by table. A multiprocessor has room for one table, so its blocks are teams of one block that share it.
template <int TOKENS> constexpr bool kByWarp = TOKENS <= 16;
template <int TOKENS, int BLOCKS> constexpr int kTeamsOf = kByWarp<TOKENS> ? BLOCKS : 1;

// How the work of a block is divided, and what lies where in its shared memory.
//
// GROUPS, SETS: GROUPS warpgroups have neighbouring rows of W, 64 * SETS each.
// W_STAGES, X_STAGES: stages of the rings of weights and of activations; a stage holds a step of K.
// UP: the first product. Half of a block's rows are gates, half are ups; a lane's rows g and g + 8 of each 16 belong to the same output. A block has 8 * GROUPS
//   * SETS outputs out of each 64 of 256 consecutive ones. Its four quarters of warps then write whole 16-byte chunks of the tiles that the second product
//   reads (kByWarp: each warp writes its own four bytes of a chunk).
// SHIFTED: a row of scales is no multiple of 16 bytes, as a tensor map asks for, but four rows are. The map takes four rows of scales for one. Of each of the
//   four a copy brings the two chunks of 16 bytes in which its 16 scales lie; in a stage, rows with the same place among four lie one behind the other. Beyond
//   K a copy brings scales of the next row, which are multiplied by codes that are zeros.
// BLOCKS: blocks a multiprocessor; kByWarp: teams of one block. A team has warps and rings of its own, behind the table.
template <bool UP, bool SHIFTED, int TOKENS, int GROUPS, int SETS, int W_STAGES, int X_STAGES, int BLOCKS> struct Stages {
  static constexpr int kConsumers = 128 * GROUPS, kThreads = kConsumers + 128, kSets = SETS * GROUPS, kRows = 64 * kSets;
  static constexpr int kCodes = kRows * 128, kWeights = kCodes + kRows * (SHIFTED ? 32 : 16), kHalf = kActivations<TOKENS> / 2;
  static constexpr int kTeams = kTeamsOf<TOKENS, BLOCKS>, kBlocks = BLOCKS / kTeams, kTable = kByWarp<TOKENS> ? kPairTable : 0;
  static constexpr int kStaging = UP && !kByWarp<TOKENS> ? SETS * TOKENS * 64 : 0;  // of a warpgroup
  static constexpr int kRest = X_STAGES * (kActivations<TOKENS> + 32) + GROUPS * kStaging;
  static constexpr int kRoom = (at_most(227, 228 / kBlocks - 1) - kTable / 1024) / kTeams * 1024 - kRest;
  static constexpr int kWStages = at_most(W_STAGES, kRoom / (kWeights + 16));
  static constexpr int kRings = kWStages * kWeights + X_STAGES * kActivations<TOKENS>;
  static constexpr int kTeamBytes = (kWStages * (kWeights + 16) + kRest + 1023) / 1024 * 1024, kBytes = kTable + kTeams * kTeamBytes;
  // kHigh: bytes of codes from a lane's row g to its row g + 8; kNext: to its row of the next set of 64 rows.
  static constexpr int kHigh = UP ? 4096 * kSets : 1024, kNext = UP ? 1024 : 8192;
  // The same of scales. kScalesPlace, SHIFTED: bytes to the rows with the next place among four.
  static constexpr int kScalesHigh = SHIFTED ? (UP ? 1024 * kSets : 64) : kHigh / 8, kScalesNext = SHIFTED ? (UP ? 64 : 512) : kNext / 8;
  static constexpr int kScalesPlace = UP ? 256 * kSets : 512 * kSets;
  static constexpr int kOfBlock = 8 / kSets;  // UP: groups of rows that make 256 outputs
};

// Multiplies a step of K of a warpgroup's 64 * SETS rows.
//
// codes0, codes1: the lane's codes of its row g, from its k 0 and its k 32 on; scales0, scales1: its scales of rows g and g + 8. arrived(j) waits for half j of
// the activations. done(j) is called when the products of the half before are complete; kByWarp it is not called. my_row, table: the lane's place in the
// activations for ldmatrix_x4(), and the table of fill_pairs(); both are read kByWarp only.
template <typename T, typename STAGES, int TOKENS, int SETS, int BATCH, typename Arrived, typename Done>
__device__ __forceinline__ void multiply_sets(float (&acc)[SETS][TOKENS / 8][4], const uint8_t* codes0, const uint8_t* codes1, const uint8_t* scales0,
                                              const uint8_t* scales1, Shared held, int my_row, Shared table, Arrived arrived, Done done) {
  constexpr int HIGH = STAGES::kHigh, NEXT = STAGES::kNext;
  uint32_t even[SETS][2], odd[SETS][2];
  uint4 q[2][SETS][2];
#pragma unroll
  for (int r = 0; r < SETS; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Numbers<T>::four_scales(*(const uint32_t*)((h ? scales1 : scales0) + r * STAGES::kScalesNext), even[r][h], odd[r][h]);
      q[0][r][h] = *(const uint4*)(codes0 + r * NEXT + h * HIGH);
      if (SETS == 1) q[1][r][h] = *(const uint4*)(codes1 + r * NEXT + h * HIGH);
    }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (SETS > 1 && j == 1)  // later, because registers are short
#pragma unroll
      for (int r = 0; r < SETS; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) q[1][r][h] = *(const uint4*)(codes1 + r * NEXT + h * HIGH);
    arrived(j);
#pragma unroll
    for (int b = 0; b < 4; b += BATCH) {
      uint32_t a[SETS][BATCH][2][4], x[BATCH][TOKENS / 8][4];
      if constexpr (kByWarp<TOKENS>)
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
#pragma unroll
          for (int n = 0; n < TOKENS / 8; ++n) ldmatrix_x4(x[i][n], held + (2 * j + (b + i) / 2) * (TOKENS * 128) + n * 1024 + (my_row ^ (b + i) % 2 * 64));
#pragma unroll
      for (int r = 0; r < SETS; ++r)
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint4& c = q[j][r][h];
            const uint32_t word = b + i == 0 ? c.x : b + i == 1 ? c.y : b + i == 2 ? c.z : c.w;
            const uint32_t by = (b + i) / 2 ? odd[r][h] : even[r][h];
            if constexpr (kByWarp<TOKENS>)
              decode_by_table<T>(word, table, 4 * (threadIdx.x & 31), by, j, a[r][i][h]);
            else
              decode_by_half<T>(word, by, j, a[r][i][h]);
          }
      if constexpr (!kByWarp<TOKENS>) wgmma_fence();
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
#pragma unroll
        for (int z = 0; z < 2; ++z)
#pragma unroll
          for (int r = 0; r < SETS; ++r) {
            const uint32_t a0 = a[r][i][0][2 * z], a1 = a[r][i][1][2 * z], a2 = a[r][i][0][2 * z + 1], a3 = a[r][i][1][2 * z + 1];
            if constexpr (kByWarp<TOKENS>)
#pragma unroll
              for (int n = 0; n < TOKENS / 8; ++n) mma_m16n8k16<T>(acc[r][n], a0, a1, a2, a3, x[i][n][2 * z], x[i][n][2 * z + 1]);
            else
              wgmma<T>(acc[r], a0, a1, a2, a3, wgmma_descriptor(held, (2 * j + (b + i) / 2) * (TOKENS * 128) + (b + i) % 2 * 64 + z * 32));
          }
      if constexpr (!kByWarp<TOKENS>) {
        wgmma_commit_group();
        if (!FP4_FAULT(SKIP_WGMMA_WAIT)) wgmma_wait<1>();
        if (b == 0) done(j);
      }
    }
  }
}

// 64 threads copy half of a step's activations: of each row 2 * 128 consecutive bytes, which go to two tiles. A thread copies one chunk of every eighth row,
// the same chunk of each. Its row i begins 512 * rows[i] bytes behind `from`; where rows[i] is negative, zeros are written.
template <int TOKENS> __device__ __forceinline__ void gather_half(Shared to, const uint8_t* from, int (&rows)[TOKENS / 8]) {
#pragma unroll
  for (int i = 0; i < TOKENS / 8; ++i) {
    needed(rows[i]);  // without it the compiler keeps the addresses of all rows in registers, which are short
    const uint8_t* at = from + (size_t)max(rows[i], 0) * 512;
    cp_async_zfill<16>(to + i * 1024, at, rows[i] >= 0);
    cp_async_zfill<16>(to + i * 1024 + TOKENS * 128, at + 128, rows[i] >= 0);
  }
}

// The items of a block, or of one of its TEAMS, one after the other. The entry of the next item is loaded while this one is worked on. EVEN: an expert has as
// many tiles as otherwise, but all of one size, a multiple of 8.
template <int TOKENS, bool EVEN = false, int TEAMS = 1> struct Items {
  const int4* tiles;
  int groups, item, items;
  int4 next;
  // The item that advance() gave; first, count: the place of its first pair, and how many pairs it has.
  int expert, first, count, tile, group;

  __device__ __forceinline__ Items(const Routed& routed, int groups, int team = 0)
      : tiles(routed.tiles), groups(groups), item(team * gridDim.x + blockIdx.x), items(__ldcg(routed.total) * groups) {
    next = item < items ? __ldcg(tiles + item / groups) : int4{};
  }
  __device__ __forceinline__ bool advance() {
    if (item >= items) return false;
    const int n = (next.z + TOKENS - 1) / TOKENS, local = item - next.w * groups, each = EVEN ? (next.z + 8 * n - 1) / (8 * n) * 8 : TOKENS;
    int t = 0;
    group = local;
    if (TEAMS == 1 || (!FP4_FAULT(ONE_TILE_AN_EXPERT) && n > 1)) t = local % n, group = local / n;  // most experts with few pairs have one tile, for which the division is left out
    expert = next.x, first = next.y + t * each, count = min(each, next.z - t * each), tile = next.w + t;
    item += (1 + FP4_FAULT(LEAVE_OUT_ITEMS)) * TEAMS * gridDim.x;
    if (item < items) next = __ldcg(tiles + item / groups);
    return true;
  }
};

// A bfloat16 that is loaded here and converted where it is used, so that nothing waits for the load before.
struct Late {
  uint32_t bits = 0;
  Late() = default;
  __device__ __forceinline__ explicit Late(const __nv_bfloat16& v) : bits(load_16(&v)) {}
  __device__ __forceinline__ operator float() const { return __uint_as_float(bits << 16); }
};

// One product. UP: the first one, of weights [E, 2 N, K]; it writes h = act(gate) * up as tiles of N columns for the second one. Else the second one, of
// weights [E, N, K]; it writes out[place of the pair, N].
// GATHERED: x lies as arrange_tokens() wrote it, and two warps gather the rows of each tile; else the activations lie in tiles. The other parameters: as of
// Stages.
template <typename T, bool UP, bool SHIFTED, bool GATHERED, int TOKENS, int GROUPS, int SETS, int W_STAGES, int X_STAGES, int BATCH, int BLOCKS>
__global__ void __launch_bounds__((128 * GROUPS + 128) * kTeamsOf<TOKENS, BLOCKS>, BLOCKS / kTeamsOf<TOKENS, BLOCKS>)
    product(const __grid_constant__ TensorMap codes, const __grid_constant__ TensorMap codes_up, const __grid_constant__ TensorMap scales,
            const __grid_constant__ TensorMap scales_up, const uint8_t* __restrict__ x, const Routed routed, const float* __restrict__ global_scale,
            uint8_t* __restrict__ h, T* __restrict__ out, int N, int K, int groups, int top_k, const Between between) {
  using S = Stages<UP, SHIFTED, TOKENS, GROUPS, SETS, W_STAGES, X_STAGES, BLOCKS>;
  const int team = S::kTeams > 1 ? uniform(threadIdx.x / S::kThreads) : 0;
  uint8_t* shared = dynamic_shared() + S::kTable + (FP4_FAULT(TEAMS_SHARE_RINGS) ? 0 : team * S::kTeamBytes);
  const Shared weights = shared_address(shared), activations = weights + S::kWStages * S::kWeights;
  const auto w_ring = Ring<>::at(weights + S::kRings + GROUPS * S::kStaging, S::kWStages);
  const auto x_ring = Ring<2>::at(w_ring.end(S::kWStages), X_STAGES);
  const int warp = (threadIdx.x >> 5) - team * (S::kThreads / 32), lane = threadIdx.x & 31, steps = (K + kWideK - 1) / kWideK;
  constexpr int kFewer = GATHERED ? TOKENS > 48 ? 72 : 56 : SHIFTED ? 56 : 40;  // registers of a thread that fetches
  // SHIFTED: where, in bytes behind the first of four rows, the scales of row i of the four begin; half: 0 for a gate, 1 for an up.
  auto scales_at = [&](int i, int half) { return SHIFTED ? (UP && between.interleaved ? 2 * i + half : i) * (K / 16) : 0; };
  if (threadIdx.x == team * S::kThreads) {
    w_ring.init(S::kWStages, 1, 4 * GROUPS);
    x_ring.init(X_STAGES, GATHERED ? 64 : 1, 4 * GROUPS);
    fence_mbarrier_init();
  }
  if (threadIdx.x == S::kConsumers) prefetch_tensor_map(codes);
  if constexpr (kByWarp<TOKENS>) fill_pairs<T>(dynamic_shared(), FP4_FAULT(ONE_TEAM_FILLS_TABLE) ? threadIdx.x % S::kThreads : threadIdx.x, S::kTeams * S::kThreads);
  __syncthreads();
  if (UP) pdl_wait_in_call();  // for the routing, which is complete when the second product begins
  pdl_trigger_in_call();
  Items<TOKENS, false, S::kTeams> items(routed, groups, team);

  if (warp >= 4 * GROUPS) {
    if (GROUPS > 1 || BLOCKS > 1) setmaxnreg_dec<kFewer>();
    if (warp == 4 * GROUPS && lane == 0) {  // fetches weights
      Place<S::kWStages> w;
      const int planes = between.interleaved ? N / 64 : N / 32;  // of an expert
      while (items.advance()) {
        const int row = UP ? items.group % S::kOfBlock * (8 * S::kSets) : items.expert * N + items.group * S::kRows;
        const int plane = UP ? items.expert * planes + items.group / S::kOfBlock * 4 : 0;
        for (int k = 0; k < steps; ++k, w.next()) {
          const Shared to = weights + w.i * S::kWeights, full = w_ring.of(w);
          w_ring.acquire(w);
          mbarrier_arrive_expect_tx(full, S::kWeights);
          if constexpr (UP) {
            tma_load_3d(to, codes, k * 128, row, plane, full);
            tma_load_3d(to + S::kHigh, FP4_FAULT(UPS_ARE_GATES) ? codes : codes_up, k * 128, row, plane, full);
          } else {
            tma_load_2d(to, codes, k * 128, row, full);
          }
          const Shared at = to + S::kCodes;
#pragma unroll
          for (int i = 0; i < (SHIFTED ? 4 : 1); ++i) {
            const int first = SHIFTED ? row / 4 : row, byte = k * 16 + scales_at(i, 0) / 16 * 16, byte_up = k * 16 + scales_at(i, 1) / 16 * 16;
            if constexpr (UP) {
              tma_load_3d(at + i * S::kScalesPlace, scales, byte, first, plane, full);
              tma_load_3d(at + i * S::kScalesPlace + S::kScalesHigh, scales_up, byte_up, first, plane, full);
            } else {
              tma_load_2d(at + i * S::kScalesPlace, scales, byte, first, full);
            }
          }
        }
      }
    } else if (GATHERED && warp >= 4 * GROUPS + 2) {  // gathers activations
      const int chunk = lane % 8, row = threadIdx.x % 64 / 8, place = row * 128 + (chunk ^ (FP4_FAULT(SKIP_SWIZZLE) ? 0 : row)) * 16;
      Place<X_STAGES> at;
      while (items.advance()) {
        const uint8_t* from = x + chunk * 16;
        int rows[TOKENS / 8];
#pragma unroll
        for (int i = 0; i < TOKENS / 8; ++i) rows[i] = 8 * i + row < items.count ? __ldcg(routed.order + items.first + 8 * i + row) : -top_k;
#pragma unroll
        for (int i = 0; i < TOKENS / 8; ++i) rows[i] = (FP4_FAULT(GATHER_PAIRS) ? rows[i] % 40 : rows[i] / top_k) * steps;
        for (int k = 0; k < steps; ++k, at.next())
#pragma unroll 1
          for (int j = 0; j < 2; ++j, from += 256) {
            if (!FP4_FAULT(SKIP_TOKENS_FREE_WAIT)) x_ring.acquire(at, j);
            gather_half<TOKENS>(activations + at.i * kActivations<TOKENS> + j * S::kHalf + place, from, rows);
            if (FP4_FAULT(ARRIVE_BEFORE_COPIES))
              mbarrier_arrive(x_ring.of(at, j));
            else
              cp_async_mbarrier_arrive(x_ring.of(at, j));
          }
      }
    } else if (!GATHERED && warp == 4 * GROUPS + 1 && lane == 0) {  // fetches activations that lie in tiles
      Place<X_STAGES> at;
      if (!UP) pdl_wait_in_call();
      while (items.advance()) {
        const uint8_t* from = x + (size_t)items.tile * steps * kActivations<TOKENS>;
        for (int k = 0; k < steps; ++k, at.next())
#pragma unroll
          for (int j = 0; j < 2; ++j, from += S::kHalf) {
            const Shared full = x_ring.of(at, j);
            x_ring.acquire(at, j);
            mbarrier_arrive_expect_tx(full, S::kHalf);
            cp_async_bulk(activations + at.i * kActivations<TOKENS> + j * S::kHalf, from, S::kHalf, full);
          }
      }
    }
    return;
  }
  constexpr int kEach = 65536 / (BLOCKS * S::kThreads) / 8 * 8;  // registers of a thread before some are given to the threads that multiply
  if (GROUPS > 1 || BLOCKS > 1) setmaxnreg_inc<(kEach * (GROUPS + 1) - kFewer) / GROUPS / 8 * 8>();

  const int g = lane >> 2, t = lane & 3, rows = GROUPS > 1 ? uniform(warp >> 2) : 0, quarter = warp & 3;
  const int row = UP ? quarter * 8 * S::kSets + rows * SETS * 8 + g : rows * SETS * 64 + quarter * 16 + g;  // the lane's first row in a stage
  const uint8_t *codes0 = shared + row * 128 + ((2 * t) ^ g) * 16, *codes1 = shared + row * 128 + ((2 * t + 1) ^ g) * 16;
  const uint8_t* my_scales[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // of four rows, number i, chunk c lies at c ^ i / 4 % 2
    const int chunked = (row + FP4_FAULT(SCALES_OF_ANOTHER_ROW)) % 4 * S::kScalesPlace + row / 4 * 32 + ((FP4_FAULT(SCALES_BEGIN_ALIGNED) ? 4 * t : scales_at(row % 4, half) % 16 + 4 * t) ^ (FP4_FAULT(SKIP_SCALES_SWIZZLE) ? 0 : row / 16 % 2 * 16));
    my_scales[half] = shared + S::kCodes + half * S::kScalesHigh + (SHIFTED ? chunked : row * 16 + 4 * t);
  }
  const int my_row = lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;
  const Shared table = shared_address(dynamic_shared());
  const int zero = steps >> 31;  // 0, which the compiler does not know
  uint8_t* staging = shared + S::kRings + rows * S::kStaging;
  Place<S::kWStages> w;
  Place<X_STAGES> at;
  using Bias = std::conditional_t<kByWarp<TOKENS>, Late, float>;
  while (items.advance()) {
    // Global scales and biases are loaded while the sums are computed.
    constexpr int kOwn = UP ? kUnits : 1;
    float units[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) units[i] = load_float(global_scale + items.expert * kOwn + i);
    Bias bias[SETS][2];
    const __nv_bfloat16* biases = UP ? between.bias : between.down_bias;
#pragma unroll
    for (int r = 0; r < SETS; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int n = UP ? items.group / S::kOfBlock * 256 + 64 * quarter + 8 * (items.group % S::kOfBlock * S::kSets + rows * SETS + r) + g
                         : items.group * S::kRows + row + 64 * r + 8 * c;
        bias[r][c] = biases && n < N ? Bias(biases[(size_t)items.expert * (UP ? 2 * N : N) + (UP ? between.row(n, c, N) : n)]) : Bias{};
      }
    const int expert_group = items.group, first = items.first, count = items.count, tile = items.tile;
    float acc[SETS][TOKENS / 8][4] = {};
    bool frees = false;  // this lane frees the half that was multiplied last
    Shared last_half = x_ring.free;
#pragma unroll 1
    for (int k = 0; k < steps; ++k, w.next(), at.next()) {
      if (!FP4_FAULT(SKIP_WEIGHTS_WAIT)) w_ring.wait(w);
      const int stage = w.i * S::kWeights;
      multiply_sets<T, S, TOKENS, SETS, BATCH>(
          acc, codes0 + stage, codes1 + stage, my_scales[0] + stage, my_scales[1] + stage, activations + at.i * kActivations<TOKENS>, my_row, table,
          [&](int j) {
            if (FP4_FAULT(PUBLISH_ROWS_EARLY)) fence_proxy_async();
            x_ring.wait(at, j);
            if (GATHERED && !kByWarp<TOKENS> && !FP4_FAULT(PUBLISH_ROWS_EARLY) && !FP4_FAULT(SKIP_PUBLISHING_ROWS)) fence_proxy_async();
          },
          [&](int j) {
            if (frees && !(FP4_FAULT(ONE_WARP_KEEPS_TOKENS) && threadIdx.x < 32)) mbarrier_arrive(last_half);
            frees = lane == 0;
            last_half = x_ring.free_of(at, j);
          });
      const int behind = kByWarp<TOKENS> ? (int)bits_of(acc) & zero : 0;  // 0, known when the last MMA is complete: the arrivals below must not overtake its loads
      __syncwarp();
      if (lane == 0) mbarrier_arrive(w_ring.free_of(w) + behind);
      if (kByWarp<TOKENS> && lane == 0 && (!FP4_FAULT(ONE_WARP_KEEPS_TOKENS) || warp)) mbarrier_arrive(x_ring.free_of(at) + behind), mbarrier_arrive(x_ring.free_of(at) + 8 + behind);
    }
    if constexpr (!kByWarp<TOKENS>) {
      wgmma_wait<0>();
#pragma unroll
      for (int r = 0; r < SETS; ++r) wgmma_fence_operand(acc[r]);
      if (frees) mbarrier_arrive(last_half);
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      needed(units[i]);
      units[i] *= kWeightUnit;
    }
    const float unit = units[0], up_unit = units[kOwn - 1];
    if constexpr (UP) {
      const int block = expert_group / S::kOfBlock, word0 = expert_group % S::kOfBlock * S::kSets + rows * SETS;  // block: of 256 outputs; word0: of eight outputs in each 64 of these
      const bool live = block * 256 + 64 * quarter < N, second = g & (kByWarp<TOKENS> ? 1 : 4);
      if (!kByWarp<TOKENS> && !FP4_FAULT(STAGING_OVERWRITTEN)) named_barrier_sync(1 + rows, 128);  // all have read what was staged before
#pragma unroll
      for (int r = 0; r < SETS; ++r)
#pragma unroll
        for (int i = 0; i < TOKENS / 8; ++i) {
          const float h0 = live ? between(fmaf(acc[r][i][0], unit, bias[r][0]), fmaf(acc[r][i][2], up_unit, bias[r][1])) : 0.f;
          const float h1 = live ? between(fmaf(acc[r][i][1], unit, bias[r][0]), fmaf(acc[r][i][3], up_unit, bias[r][1])) : 0.f;
          // Two lanes hold a pair of outputs, n and n + 4 (for decode_by_table() neighbours), of two tokens. They swap, so that each holds both outputs of one
          // token.
          const float got = shuffle_xor(second ? h0 : h1, kByWarp<TOKENS> && !FP4_FAULT(H_IN_DECODE_ORDER) ? 4 : 16);
          const int m = 8 * i + 2 * t + second;
          const __nv_bfloat162 both = __floats2bfloat162_rn(second ? got : h0, second ? h1 : got);
          if constexpr (kByWarp<TOKENS>) {
            const int word = word0 + r;
            uint8_t* to = h + ((size_t)tile * ((N + kWideK - 1) / kWideK) + block) * kActivations<TOKENS>;
            *(__nv_bfloat162*)(to + word / 2 * (TOKENS * 128) + m * 128 + ((word % 2 * 4 + g / 2) ^ (m & 7)) * 16 + quarter * 4) = both;
          } else {
            *(__nv_bfloat162*)(staging + (r * TOKENS + m) * 64 + (g & 3) * 16 + quarter * 4) = both;
          }
        }
      if constexpr (!kByWarp<TOKENS>) {
        named_barrier_sync(1 + rows, 128);
        uint8_t* to = h + ((size_t)tile * ((N + kWideK - 1) / kWideK) + block) * kActivations<TOKENS>;
        constexpr int kChunks = SETS * TOKENS * 4;
#pragma unroll
        for (int i = 0; i < (kChunks + 127) / 128; ++i) {
          const int v = i * 128 + (threadIdx.x & 127), c = v % 4, m = v / 4 % TOKENS, word = word0 + v / 4 / TOKENS;
          if (kChunks % 128 == 0 || v < kChunks)
            *(uint4*)(to + word / 2 * (TOKENS * 128) + m * 128 + ((word % 2 * 4 + c) ^ (m & 7)) * 16) = *(const uint4*)(staging + v * 16);
        }
      }
    } else {
      const int n0 = expert_group * S::kRows + row;
#pragma unroll
      for (int r = 0; r < SETS; ++r)
#pragma unroll
        for (int i = 0; i < TOKENS / 8; ++i)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            // Lanes g and g ^ 1 swap, so that each holds two neighbouring outputs of one token.
            const bool second = g & 1;
            const float v0 = fmaf(acc[r][i][2 * c], unit, bias[r][c]), v1 = fmaf(acc[r][i][2 * c + 1], unit, bias[r][c]), got = shuffle_xor(second ? v0 : v1, 4);
            const int m = 8 * i + 2 * t + second, n = n0 + 64 * r - second + 8 * c;
            if ((m < count || FP4_FAULT(STORE_ROWS_PAST_PAIRS)) && n < N) *(__nv_bfloat162*)(out + (size_t)(first + m) * N + n) = __floats2bfloat162_rn(second ? got : v0, second ? v1 : got);
          }
    }
  }
}

}  // namespace fp4
