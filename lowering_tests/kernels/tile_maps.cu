// Kernels of test_emulated_tiles.py, which also run on a GPU of sm_90: what device.cuh says about tiles, clusters, registers and flags.
#include "sm90/ptx.cuh"

namespace {

using namespace fp4;

// The tile that begins at (row, byte), as it lies in shared memory `at` bytes from its beginning.
__global__ void __launch_bounds__(32) one_tile(const __grid_constant__ TensorMap map, uint8_t* __restrict__ out, int bytes, int byte, int row, int at) {
  uint8_t* tile = dynamic_shared() + at;
  const Shared arrived = shared_address(tile + bytes);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(map);
    mbarrier_init(arrived, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(arrived, bytes);
    tma_load_2d(shared_address(tile), map, byte, row, arrived);
  }
  __syncthreads();
  mbarrier_wait_parity(arrived, 0);
  for (int i = threadIdx.x * 16; i < bytes; i += 512) *(uint4*)(out + i) = *(const uint4*)(tile + i);
}

constexpr int kRows = 64, kTile = kRows * 128, kMask = 64, kDepth = 2;

// Each block of a cluster writes all tiles of 64 rows x 128 bytes of its row of tiles, each XOR its own 64 bytes of `masks`, to its own matrix of whole tiles.
// Every tile is copied once: each block copies a share of it to all, another one at each step. Four warps write, one thread of the others copies.
__global__ void __launch_bounds__(256, 1) all_tiles(const __grid_constant__ TensorMap map, const uint8_t* __restrict__ masks, uint8_t* __restrict__ out, int steps) {
  uint8_t* shared = dynamic_shared();
  const int ranks = cluster_size(), rank = cluster_rank(), warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const Shared tiles = shared_address(shared), xors = tiles + kDepth * kTile, arrived = xors + kDepth * kMask, freed = arrived + 8 * kDepth;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kDepth; ++i) mbarrier_init(arrived + 8 * i, 1), mbarrier_init(freed + 8 * i, FP4_FAULT(OTHER_READERS_NOT_COUNTED) ? 4 : 4 * ranks);
    fence_mbarrier_init();
  }
  if (FP4_FAULT(BARRIERS_UNKNOWN_TO_CLUSTER))
    __syncthreads();
  else
    cluster_sync();  // others arrive at them, too

  int place = 0, parity = 0;
  if (warp >= 4) {
    setmaxnreg_dec<40>();
    if (threadIdx.x == 128)
      for (int step = 0; step < steps; ++step) {
        if (!FP4_FAULT(SKIP_FREE_WAIT)) mbarrier_wait_parity(freed + 8 * place, parity ^ 1);
        mbarrier_arrive_expect_tx(arrived + 8 * place, kTile + (FP4_FAULT(EXPECT_TOO_FEW_BYTES) ? 0 : FP4_FAULT(EXPECT_TOO_MANY_BYTES) ? 2 * kMask : kMask));
        const int rows = kRows / ranks, part = kMask / ranks, share = (rank + step) % ranks;
        const uint16_t all = ((1 + FP4_FAULT(COPY_TO_A_BLOCK_TOO_MANY)) << ranks) - 1;
        tma_load_2d_multicast(tiles + place * kTile + share * rows * 128, map, step * 128, blockIdx.x * kRows + share * rows, arrived + 8 * place, FP4_FAULT(COPY_TILE_TO_ONE_BLOCK) ? 1 << rank : all);
        cp_async_bulk_multicast(xors + place * kMask + share * part, masks + step * kMask + share * part, part, arrived + 8 * place, all);
        place = place + 1 == kDepth ? 0 : place + 1;
        parity ^= place == 0;
      }
    __syncwarp();
  } else {
    if (warp == 0 || !FP4_FAULT(ONE_WARP_ASKS_FOR_REGISTERS)) setmaxnreg_inc<160>();
    const int row = threadIdx.x / 2;
    uint8_t* to = out + (((size_t)rank * gridDim.x + blockIdx.x) * kRows + row) * steps * 128;
    for (int step = 0; step < steps; ++step) {
      if (!FP4_FAULT(SKIP_WAIT)) mbarrier_wait_parity(arrived + 8 * place, parity ^ FP4_FAULT(WAIT_FOR_LAST_PHASE));
      if (FP4_FAULT(FREE_BEFORE_READING) && lane < ranks) mbarrier_arrive_remote(freed + 8 * place, lane);
      for (int i = 0; i < 4; ++i) {
        const int chunk = threadIdx.x % 2 * 4 + i;
        uint4 v = *(const uint4*)(shared + place * kTile + row * 128 + (chunk ^ (FP4_FAULT(SKIP_SWIZZLE) ? 0 : row & 7)) * 16);
        const uint4 mask = *(const uint4*)(shared + kDepth * kTile + place * kMask + i * 16);
        v.x ^= mask.x, v.y ^= mask.y, v.z ^= mask.z, v.w ^= mask.w;
        *(uint4*)(to + step * 128 + chunk * 16) = v;
      }
      if (!FP4_FAULT(SKIP_SYNC_BEFORE_FREEING)) __syncwarp();  // every lane has read
      if (lane < ranks) mbarrier_arrive_remote(freed + 8 * place, FP4_FAULT(FREE_FOR_OWN_BLOCK_ONLY) ? rank : lane);
      place = place + 1 == kDepth ? 0 : place + 1;
      parity ^= place == 0;
    }
    __syncwarp();
  }
  if (!FP4_FAULT(BLOCK_ENDS_EARLY)) cluster_sync();  // a block whose mbarriers others still use does not end
}

// out[b] = x[0] + ... + x[b], handed on from block to block. flags: zeros.
__global__ void __launch_bounds__(32) running_sums(const int* __restrict__ x, int* __restrict__ out, int* __restrict__ flags) {
  if (threadIdx.x) return;
  const int b = blockIdx.x;
  if (b)
    while (!flag_get(flags + b - 1)) {
    }
  out[b] = x[b] + (b ? __ldcg(out + b - 1) : 0);
  if (!FP4_FAULT(FLAG_NOT_SET)) flag_set(flags + b);
}

}  // namespace

extern "C" int one(const void* matrix, void* out, int rows, int row_bytes, int tile_rows, int tile_bytes, int byte, int row, int at, void* stream) {
  TensorMap map;
  const cudaError_t status = tensor_map_2d(&map, matrix, rows, row_bytes, tile_rows, tile_bytes);
  if (status != cudaSuccess) return status;
  return launch(one_tile, dim3(1), 32, at + tile_rows * tile_bytes + 8, 1, (cudaStream_t)stream, map, (uint8_t*)out, tile_rows * tile_bytes, byte, row, at);
}

extern "C" int all(const void* matrix, const void* masks, void* out, int rows, int row_bytes, int ranks, void* stream) {
  TensorMap map;
  const cudaError_t status = tensor_map_2d(&map, matrix, rows, row_bytes, kRows / ranks, 128);
  if (status != cudaSuccess) return status;
  return launch(all_tiles, dim3((rows + kRows - 1) / kRows, 1, ranks), 256, kDepth * (kTile + kMask + 16), ranks, (cudaStream_t)stream, map, (const uint8_t*)masks,
                (uint8_t*)out, (row_bytes + 127) / 128);
}

extern "C" int sums(const void* x, void* flags, void* out, int count, void* stream) {
  return launch(running_sums, dim3(count), 32, 0, 1, (cudaStream_t)stream, (const int*)x, (int*)out, (int*)flags);
}
