// fp4.linear for one row: y[1, N] = x[1, K] @ W[N, K]^T (+ bias), W row-major canonical NVFP4, for sm_80 and later. x may be normalised first (RMSNorm).
//
// The kernel is bound by memory, so what counts is how many bytes are in flight:
//
//   - A warp works on groups of R rows of W. It takes every k_groups-th segment of 1024 k of them; a step is R rows by a segment.
//   - The lanes of a warp copy its steps (cp.async) to a ring that no other warp uses. They refill a stage as soon as they have read it to registers, so no
//     warp waits for another one.
//   - A warp fills its whole ring before the PDL wait.
//
// A step, and how codes and x become half2: gemv.cuh.
#include "gemv.cuh"

namespace {

using namespace fp4;

constexpr int kMostWarps = 16;                          // of a block; with 64 registers a thread a multiprocessor holds two such blocks: one of this kernel and one of the next

// groups: how many groups of R rows a block has; segments: how many segments K has. Shared memory holds x, a factor for each of its blocks of 16, the warps'
// sums of squares, what Behind holds, the sums of each k_group, and from byte `ring` on the warps' rings.
struct Layout {
  int groups, segments, warps, k_groups, stages, ahead, columns, ring;  // ahead: steps that a warp prefetches to L2 after those that fill its ring

  __host__ __device__ int row_warps() const { return warps / k_groups; }
  __host__ __device__ int factors() const { return segments * kSegment * 2; }
  __host__ __device__ int squares() const { return factors() + segments * kSegment / 16 * 4; }
  __host__ __device__ int behind() const { return squares() + kMostWarps * 4; }
  __host__ __device__ int vector() const { return columns / 2 * 4 + 8; }  // bytes for a number of 16 bits for each column; they begin at a multiple of four
};

// What the epilogue needs for a block's columns, from n0 on: global scales, biases, mul, residual. It is copied to shared memory while the product is computed,
// because the epilogue would wait for loads from global memory.
template <typename T> struct Behind {
  static constexpr int kParts = Result<T>::kParts, kScales = 3, kVectors = kFinish == kPointwise ? 3 : kParts;
  const uint8_t* at;
  int vector, n0;

  static __host__ __device__ int bytes(const Layout& l) { return kScales * 4 + kVectors * l.vector(); }
  __device__ __forceinline__ void copy(const float* global_scale, const T* bias, const Epilogue<T>& then, int count, int columns) const {
    const Shared to = shared_address((void*)at);
    if (threadIdx.x == 0 || (threadIdx.x == 1 && then.second != INT32_MAX) || (threadIdx.x == 2 && then.third != INT32_MAX))
      cp_async<4>(to + threadIdx.x * 4, global_scale + threadIdx.x);
    auto numbers = [&](const T* from, int place, int first) {  // of the columns from n0 on; `first` other numbers lie in front of column 0
      if (!from) return;
      const int even = (first + n0) & ~1, end = first + columns;
      for (int i = threadIdx.x; 2 * i < count + 1; i += blockDim.x) {
        const int n = even + 2 * i;
        if (n < end) cp_async_src_size<4>(to + kScales * 4 + place * vector + i * 4, from + n, n + 1 < end ? 4 : 2);
      }
    };
#pragma unroll
    for (int p = 0; p < kParts; ++p) numbers(bias, p, p * columns);
    if constexpr (kFinish == kPointwise) numbers(then.mul, 1, 0), numbers(then.residual, 2, 0);
  }
  __device__ __forceinline__ float number(int place, int first, int c) const {
    return Numbers<T>::to_float(((const T*)(at + kScales * 4 + place * vector))[c + ((first + n0) & 1)]);
  }
  __device__ __forceinline__ T value(const float (&sums)[kParts], int c, const T* bias, const Epilogue<T>& then, int columns) const {
    float z[kParts];
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const int row = n0 + c + (FP4_FAULT(UP_WITH_GATE_SCALE) ? 0 : p * columns);
      z[p] = sums[p] * (((const float*)at)[row < then.second ? 0 : row < then.third ? 1 : 2] * kWeightUnit) + (bias ? number(p, p * columns, c) : 0.f);
    }
    float v = z[0];
    if constexpr (kFinish != kPlain) v = activate(v, then.act);
    if constexpr (kFinish == kGlu) v *= z[kParts - 1];
    if constexpr (kFinish == kPointwise) {
      if (then.mul) v *= number(1, 0, c);
      if (then.residual) v += number(2, 0, c);
    }
    return Numbers<T>::from_float(v);
  }
};

// x is not __restrict__, because the kernel before may still write it: the compiler must not read it by non-coherent loads.
template <typename T, int R>
__global__ void __launch_bounds__(32 * kMostWarps, 2)
    linear_gemv(const T* x, const uint8_t* __restrict__ q, const uint8_t* __restrict__ scale, const float* global_scale, const T* bias, T* y, const T* norm_weight,
                int N, int K, const Layout layout, float eps, float norm_offset, const Epilogue<T> then) {
  constexpr int kParts = Result<T>::kParts, kColumns = R / kParts;
  using Stage = Step<R>;
  uint8_t* shared = dynamic_shared();
  const int lane = threadIdx.x & 31, warp = uniform(threadIdx.x >> 5), threads = 32 * layout.warps, columns = N / kParts;
  const int first = blockIdx.x * layout.groups, groups = min(layout.groups, (columns + kColumns - 1) / kColumns - first), n0 = first * kColumns;
  float* squares = (float*)(shared + layout.squares());
  const Behind<T> behind{shared + layout.behind(), layout.vector(), n0};
  float* sums = (float*)(behind.at + Behind<T>::bytes(layout));  // [k_groups][groups * R]
  uint8_t* ring = shared + layout.ring + warp * (layout.stages * Stage::kBytes);
  const Shared ring_address = shared_address(ring), x_address = shared_address(shared);
  const int k_group = warp % layout.k_groups, row_warp = warp / layout.k_groups, row_warps = layout.row_warps(), chunks = layout.segments * (kSegment / 8);

  struct Place {  // of a step
    int group, segment;
  };
  auto next = [&](Place& at) {
    at.segment += layout.k_groups;
    if (at.segment >= layout.segments) at.segment = k_group, at.group += row_warps;
  };
  auto row = [&](int group, int i) -> size_t {  // row i of a group; past the last row of W it is the last one, and not stored
    return (uint32_t)(min(n0 + group * kColumns + i % kColumns, columns - 1 + FP4_FAULT(READ_ROWS_PAST_N)) + i / kColumns * columns);
  };
  auto fetch = [&](const Place& at, int slot) {
    if (at.group < groups) {
      const Shared to = ring_address + slot * Stage::kBytes;
      const int byte = at.segment * (kSegment / 2) + lane * 16, word = at.segment * (kSegment / 16) + lane % 16 * 4;
      const bool live = byte < K / 2 || FP4_FAULT(READ_K_PAST_K), live_scales = word < K / 16;
      const uint8_t *codes = q + (live ? byte : 0), *scales = scale + (live_scales ? word : 0);
#pragma unroll
      for (int i = 0; i < R; ++i) cp_async_zfill<16>(to + i * (kSegment / 2) + lane * 16, codes + row(at.group, i) * (uint32_t)(K / 2), live);
#pragma unroll
      for (int i = 0; i < R; i += 2)
        cp_async_src_size<4>(to + Stage::kCodes + i * (kSegment / 16) + lane * 4, scales + row(at.group, i + lane / 16) * (uint32_t)(K / 16), live_scales ? 4 : 0);
    }
    cp_async_commit_group();
  };

  const float share = 1.f / K;
  // Before the PDL wait a block reads only what no kernel before writes. The norm's weight comes first; a thread copies the part that it will use to where its
  // part of x will lie.
  if (norm_weight) {
    for (int c = threadIdx.x; c < chunks; c += threads) cp_async_zfill<16>(x_address + place_of_chunk(c), norm_weight + (c * 8 < K ? c * 8 : 0), c * 8 < K);
    cp_async_commit_group();
  }
  Place coming{row_warp, k_group}, here = coming;
  for (int i = 0; i < layout.stages; ++i) fetch(coming, i), next(coming);
  Place further = coming;
  for (int i = 0; i < layout.ahead && further.group < groups; ++i, next(further)) {  // a line of 128 bytes a lane
    const int line = lane % 4 * 128 + further.segment * (kSegment / 2);
    if (lane < 4 * R) {
      if (line < K / 2) prefetch_l2(q + row(further.group, lane / 4) * (uint32_t)(K / 2) + line);
    } else if (lane < 5 * R) {
      prefetch_l2(scale + row(further.group, lane - 4 * R) * (uint32_t)(K / 16) + further.segment * (kSegment / 16));
    }
  }
#if FP4_ARCH >= 90
  pdl_wait_then_trigger();
#endif

  uint4 raw[kBatch];  // parts of x. All are loaded before one is stored: a load behind a store to shared memory would wait for it
  auto load_x = [&](int from) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int c = from + threadIdx.x + i * threads;
      raw[i] = c * 8 < K ? *(const uint4*)(x + c * 8) : uint4{};
    }
  };
  const int batch = kBatch * threads;
  load_x(0);
  const int count = min(layout.columns, columns - n0);
  behind.copy(global_scale, bias, then, count, columns);  // belongs to the group that is committed next
  float by = 1.f;
  if (norm_weight) {
    float sum = 0.f;
    for (int from = 0; from < chunks; from += batch) {
      if (from) load_x(from);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        sum += sum_of_squares<T>(raw[i]);
      }
    }
    sum = sum_of_warp(sum);
    if (lane == 0) squares[warp] = sum;
    if (!FP4_FAULT(SKIP_BARRIER_BEFORE_SQUARES)) __syncthreads();
    sum = 0.f;
    for (int i = 0; i < layout.warps; ++i) sum += squares[i];
    by = rsqrtf(sum * share + eps);
    wait_for_all_but(layout.stages);  // the norm's weight
    if (batch < chunks) load_x(0);
  }
  for (int from = 0; from < chunks; from += batch) {
    if (from) load_x(from);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int c = from + threadIdx.x + i * threads;
      if (c >= chunks) break;  // whole warps
      uint4* to = (uint4*)(shared + place_of_chunk(c));
      float v[8];
      floats_of<T>(raw[i], v);
      if (norm_weight) normalise<T>(v, *to, by, norm_offset);
      const float factor = to_half_range(v);
      *to = in_order(v);
      if (c % 2 == 0) *(float*)(shared + layout.factors() + c / 2 * 4) = factor;
    }
  }
  if (!FP4_FAULT(SKIP_BARRIER_AFTER_X)) __syncthreads();

  float acc[R] = {};
  for (int slot = 0; here.group < groups;) {
    if (!FP4_FAULT(SKIP_COPY_WAIT)) wait_for_all_but(layout.stages - 1);
    __syncwarp();  // another lane copied this lane's scales
    Stage weights;
    weights.load(ring + slot * Stage::kBytes, lane);
    if (!FP4_FAULT(SKIP_WARP_BARRIER)) __syncwarp();  // all lanes have read the stage that is refilled now
    fetch(coming, slot), next(coming);
    if (++slot == layout.stages) slot = 0;
    weights.multiply(acc, shared + here.segment * (kSegment * 2), *(const float2*)(shared + layout.factors() + here.segment * (kSegment / 4) + lane * 8), lane);
    const int group = here.group;
    next(here);
    if (here.group != group) {
      const float sum = sum_of_lanes<R>(acc, lane);
      if (lane % (32 / R) == 0) sums[(k_group * layout.groups + group) * R + lane / (32 / R)] = sum;
#pragma unroll
      for (int i = 0; i < R; ++i) acc[i] = 0.f;
    }
  }
  cp_async_commit_group(), wait_for_all_but(0);  // the epilogue's operands; a warp without steps has not committed them yet
  if (!FP4_FAULT(SKIP_BARRIER_BEFORE_SUMS)) __syncthreads();
  for (int c = threadIdx.x; c < count; c += threads) {
    float all[kParts] = {};
    for (int kg = 0; kg < layout.k_groups; ++kg)
#pragma unroll
      for (int p = 0; p < kParts; ++p)
        all[p] += sums[(kg * layout.groups + c / kColumns) * R + c % kColumns + (FP4_FAULT(UP_FROM_GATE_ROWS) ? 0 : p * kColumns)];
    y[n0 + c] = behind.value(all, c, bias, then, columns);
  }
}

// rows: of W, a group; warps: of a block, of which 16 / warps share a multiprocessor; k_groups: warps that share K. stages % 16: steps in a warp's ring; stages
// / 16: steps that it prefetches to L2 besides, before the PDL wait (`early`).
struct Tile {
  int rows, warps, k_groups, stages;
};

// The layout of a tile: as many blocks as the device runs at once, and none has more than its share of the rows.
template <typename T, int R> Layout layout_of(Tile tile, int N, int K) {
  constexpr int kColumns = R / Result<T>::kParts;
  const int all = divided(N / Result<T>::kParts, kColumns), groups = divided(all, multiprocessors() * (kMostWarps / tile.warps));
  Layout l{groups, divided(K, kSegment), tile.warps, tile.k_groups, tile.stages % 16, tile.stages / 16, groups * kColumns, 0};
  while (l.k_groups > l.segments || l.warps % l.k_groups) --l.k_groups;
  l.ring = divided(l.behind() + Behind<T>::bytes(l) + l.k_groups * l.groups * R * 4, 16) * 16;
  return l;
}

// Chosen by a sweep on an H100: a chain of the four products of an 8B model's layer, two of them behind a norm.
//   - Four rows a step, because what is read of x then serves four rows.
//   - Two warps share K, so that a kilobyte of a row is read at once.
//   - Three stages, even where the next kernel then finds no room beside this one: a shorter ring costs more than that.
//   - Two blocks a multiprocessor for small weights: one begins while the other ends.
template <typename T> Tile best(int N, int K) {
  Tile tile{4, (int64_t)N * K <= 1 << 24 ? kMostWarps / 2 : kMostWarps, K > kSegment ? 2 : 1, 3};
  const int room = kMostRoom / (kMostWarps / tile.warps) - layout_of<T, 4>(tile, N, K).ring, each = tile.warps * Step<4>::kBytes;
  if (room < each) return {2, 8, 1, 2};  // a long row of x
  tile.stages = min(tile.stages, room / each);
  return tile;
}

template <typename T, int R> cudaError_t run(Tile tile, const Linear<T>& p, const LinearParams& call) {
  const auto [rows, warps, k_groups, stages] = tile;
  if (warps < 1 || warps > kMostWarps || k_groups < 1 || warps % k_groups || stages < 1 || stages % 16 < 1 || stages % 16 > kMostStages) return cudaErrorInvalidConfiguration;
  Layout layout = layout_of<T, R>(tile, p.N, p.K);
  if (!call.early) layout.ahead = 0;
  const int bytes = layout.ring + warps * layout.stages * Step<R>::kBytes;
  if (bytes > kMostRoom) return cudaErrorInvalidConfiguration;
  const cudaError_t status = prefer_shared_memory(linear_gemv<T, R>);
  if (status != cudaSuccess) return status;
  const int all = divided(p.columns(), R / Result<T>::kParts);
  return fp4::launch(linear_gemv<T, R>, dim3(divided(all, layout.groups)), 32 * warps, bytes, 1, Stream((cudaStream_t)call.stream, FP4_ARCH >= 90 && call.early),
                     p.x, p.q, p.scale, p.global_scale, p.bias, p.y, (const T*)call.norm_weight, p.N, p.K, layout, call.eps, call.norm_offset, p.then);
}

template <typename T> cudaError_t by_tile(Tile tile, const Linear<T>& p, const LinearParams& call) {
#define TILE(r) \
  if (tile.rows == r) return run<T, r>(tile, p, call);
  TILE(2) TILE(4)
#undef TILE
  return cudaErrorInvalidConfiguration;
}

}  // namespace

// Returns a cudaError_t. Takes what linear_table does, and a norm: x is x * rsqrt(mean(x^2) + eps) * (norm_offset + norm_weight [K]) in float32, rounded once
// to its dtype. early: the kernel before writes neither the weight nor norm_weight. tile: (rows, warps, k_groups, stages): rows in {2, 4}, at most 16 warps, a
// multiple of k_groups, 1 <= stages % 16 <= 8. M = 1, K % 64 == 0, K <= 32768; x, codes, scale and norm_weight 16-byte aligned.
extern "C" int fp4_linear_gemv(const LinearParams* call) {
  if (!is_call(call, true) || call->M != 1 || call->N < 1 || call->K < 64 || call->K % 64 || call->K > 32768) return cudaErrorInvalidValue;
  const auto [rows, warps, k_groups, stages] = call->tile;
  return by_dtype(call->dtype, [&](auto zero) {
    using T = decltype(zero);
    const Linear<T> p = Linear<T>::of(*call);
    return !p.fits() ? cudaErrorInvalidValue : by_tile<T>(rows ? Tile{rows, warps, k_groups, stages} : best<T>(p.N, p.K), p, *call);
  });
}
