// The instructions of sm_90, one wrapper each, by the names of PTX and CUTLASS: mbarriers, copies by the TMA unit, programmatic dependent launch, registers of
// warpgroups; and how the host describes a matrix to the TMA unit.
//
// The emulator brings C++ bodies for the same names (lowering_tests/kernels/emulated/device.h).
#pragma once
#include "../common/device.cuh"

#ifndef FP4_EMULATED
#include <cuda.h>  // the type of a tensor map; nothing of libcuda is linked

namespace fp4 {

// --- programmatic dependent launch (PDL) -------------------------------------------------------------------------------
//
// A kernel that is launched with PDL may start while the kernel before it in its stream still runs. griddepcontrol_wait() returns when all earlier kernels
// have ended and what they wrote is visible. Before it, a kernel reads nothing that the kernel before may write, and writes nothing at all.
// The next kernel may start when every block has called griddepcontrol_launch_dependents() or has ended. It may read what the kernel before this one wrote, so
// the wait comes first.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// The same two instructions between the kernels of one call, where the second is launched by launch_second(). The first may trigger without a wait, because the
// second reads nothing but the weight before its own wait.
__device__ __forceinline__ void pdl_trigger_in_call() { griddepcontrol_launch_dependents(); }
__device__ __forceinline__ void pdl_wait_in_call() { griddepcontrol_wait(); }

// --- mbarriers: barriers in shared memory that count arrivals and bytes -------------------------------------------------

// A barrier of 8 bytes that completes a phase with `arrivals`, and with the bytes that these promised. Once, before fence_mbarrier_init().
__device__ __forceinline__ void mbarrier_init(Shared mbarrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(arrivals) : "memory");
}
// Between mbarrier_init() and the __syncthreads behind which others use the mbarriers.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// It overtakes the thread's loads from shared memory: what the copy that it lets begin overwrites has to be in registers, and used, before.
__device__ __forceinline__ void mbarrier_arrive(Shared mbarrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mbarrier) : "memory"); }
// Arrives, too; call it before the copy.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Shared mbarrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(bytes) : "memory");
}
// Until phase `parity` (0, 1, 0, ...) is complete.
__device__ __forceinline__ void mbarrier_wait_parity(Shared mbarrier, int parity) {
  asm volatile("{.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;}" ::"r"(mbarrier), "r"(parity) : "memory");
}
// Arrives once all copies of this thread by cp_async() so far are there; one of the arrivals that the mbarrier counts.
__device__ __forceinline__ void cp_async_mbarrier_arrive(Shared mbarrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(mbarrier) : "memory");
}
// What threads wrote to shared memory, cp_async() included, and this thread has waited for: wgmma behind it sees it, as it sees bulk copies anyway.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Arrives at the mbarrier at the same place in another block of the cluster: what this thread has read there may be overwritten by a copy. It does
// not publish what this thread wrote: as a release to the cluster it would be a MEMBAR.ALL.GPU at every call, and mbarrier_wait_parity() would throw
// away L1; cluster_sync() publishes. The other block must not have ended.
__device__ __forceinline__ void mbarrier_arrive_remote(Shared mbarrier, int rank) {
  asm volatile("{.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(mbarrier), "r"(rank) : "memory");
}
// Eight bytes to the same place in another block of the cluster, whose mbarrier at the same place counts them; the other block must have begun and not have ended.
// Nothing else that this thread wrote is published, so it waits for nothing.
__device__ __forceinline__ void st_async(Shared shared, float2 value, Shared mbarrier, int rank) {
  asm volatile(
      "{.reg .b32 place, there;\nmapa.shared::cluster.u32 place, %0, %4;\nmapa.shared::cluster.u32 there, %3, %4;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [place], {%1, %2}, [there];}" ::"r"(shared),
      "f"(value.x), "f"(value.y), "r"(mbarrier), "r"(rank)
      : "memory");
}
// One thread copies; addresses and bytes are multiples of 16.
__device__ __forceinline__ void cp_async_bulk(Shared shared, const void* global, int bytes, Shared mbarrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared), "l"(global), "r"(bytes), "r"(mbarrier) : "memory");
}

// To the same place in each block of the cluster whose bit is set in `blocks`; the mbarrier at the same place in each counts the bytes, which each block
// promises to itself, before or after.
__device__ __forceinline__ void cp_async_bulk_multicast(Shared shared, const void* global, int bytes, Shared mbarrier, uint16_t blocks) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(shared), "l"(global),
               "r"(bytes), "r"(mbarrier), "h"(blocks)
               : "memory");
}

// A row-major matrix of bytes and the shape of its tiles: made by tensor_map_2d() on the host, given to a kernel as `const __grid_constant__ TensorMap`.
using TensorMap = CUtensorMap;

// One thread calls it, early.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
// One thread copies the tile that begins at (row, byte), byte a multiple of 16 (else it is an illegal instruction): what lies outside the matrix is zero, and its bytes are counted. Row r of
// the tile lies at r * tile_bytes; of its 16-byte chunks, chunk c lies at place c ^ r % 8 for tiles of 128 bytes a row, c ^ r / 2 % 4 for
// 64, c ^ r / 4 % 2 for 32, c for 16. The tile begins at a multiple of 1024, 512, 256 or 128 bytes.
__device__ __forceinline__ void tma_load_2d(Shared to, const TensorMap& map, int byte, int row, Shared mbarrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map), "r"(byte), "r"(row),
               "r"(mbarrier)
               : "memory");
}
// The same of a map of planes: the tile's planes lie one behind the other.
__device__ __forceinline__ void tma_load_3d(Shared to, const TensorMap& map, int byte, int row, int plane, Shared mbarrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to), "l"(&map), "r"(byte),
               "r"(row), "r"(plane), "r"(mbarrier)
               : "memory");
}
// Of a map of pages: the rows of a tile, whole, lie one behind the other. The tile begins at a multiple of 128 bytes.
__device__ __forceinline__ void tma_load_page(Shared to, const TensorMap& map, int head, int token, int page, Shared mbarrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to), "l"(&map), "r"(0),
               "r"(head), "r"(token), "r"(page), "r"(mbarrier)
               : "memory");
}
// As cp_async_bulk_multicast() copies.
__device__ __forceinline__ void tma_load_2d_multicast(Shared to, const TensorMap& map, int byte, int row, Shared mbarrier, uint16_t blocks) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(&map),
               "r"(byte), "r"(row), "r"(mbarrier), "h"(blocks)
               : "memory");
}

// Registers of each thread of a warpgroup, all of which call it together; one waits until others have given up what it asks for (sm_90a).
template <int N> __device__ __forceinline__ void setmaxnreg_inc() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void setmaxnreg_dec() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// Between blocks of a grid, through global memory: a thread that has seen the flag set also sees what the thread that set it wrote before; for the other
// threads of both blocks, a __threadfence() and a barrier on each side. Only blocks that have begun may be waited for.
__device__ __forceinline__ void flag_set(int* flag) { asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory"); }
__device__ __forceinline__ int flag_get(const int* flag) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");
  return v;
}

// --- host: tensor maps --------------------------------------------------------------------------------------------------

// Rows of row_bytes every row_pitch bytes, in planes every plane_pitch bytes.
struct Planes {
  int64_t row_bytes, rows, planes, row_pitch, plane_pitch;
};
// A paged cache: rows of row_bytes for each head of each token of each page; pitches in bytes.
struct PagedRows {
  int64_t row_bytes, heads, tokens, pages, head_pitch, token_pitch, page_pitch;
};

using Encode = decltype(&cuTensorMapEncodeTiled);
// Null: the driver is older than CUDA 12.
inline Encode tensor_map_encoder() {
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    return status == cudaSuccess && result == cudaDriverEntryPointSuccess ? (Encode)found : nullptr;
  }();
  return encode;
}

inline cudaError_t encode_tensor_map(TensorMap* map, const void* matrix, int dimensions, const cuuint64_t* size, const cuuint64_t* pitch, const cuuint32_t* tile,
                                     CUtensorMapSwizzle swizzle) {
  const cuuint32_t each[4] = {1, 1, 1, 1};
  if (!tensor_map_encoder()) return cudaErrorNotSupported;
  const CUresult made = tensor_map_encoder()(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, dimensions, (void*)matrix, size, pitch, tile, each, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                             swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

inline cudaError_t encode_planes(TensorMap* map, const void* matrix, int dimensions, const Planes& of, int tile_planes, int tile_rows, int tile_bytes) {
  if ((tile_bytes != 16 && tile_bytes != 32 && tile_bytes != 64 && tile_bytes != 128) || of.rows < 1 || of.row_bytes < 1 || of.planes < 1 || tile_rows < 1)
    return cudaErrorInvalidValue;
  const CUtensorMapSwizzle swizzle = tile_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : tile_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                     : tile_bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                        : CU_TENSOR_MAP_SWIZZLE_NONE;
  const cuuint64_t size[3] = {(cuuint64_t)of.row_bytes, (cuuint64_t)of.rows, (cuuint64_t)of.planes}, pitch[2] = {(cuuint64_t)of.row_pitch, (cuuint64_t)of.plane_pitch};
  const cuuint32_t tile[3] = {(cuuint32_t)tile_bytes, (cuuint32_t)tile_rows, (cuuint32_t)tile_planes};
  return encode_tensor_map(map, matrix, dimensions, size, pitch, tile, swizzle);
}

// For tma_load_2d(): `rows` rows of row_bytes, in tiles of up to 256 rows of 16, 32, 64 or 128 bytes. The matrix lies at a multiple of 16 bytes, and so
// does every row. cudaErrorInvalidValue if there is no such map, cudaErrorNotSupported if the driver is older than CUDA 12.
inline cudaError_t tensor_map_2d(TensorMap* map, const void* matrix, int64_t rows, int64_t row_bytes, int tile_rows, int tile_bytes) {
  return encode_planes(map, matrix, 2, {row_bytes, rows, 1, row_bytes, 0}, 1, tile_rows, tile_bytes);
}
// For tma_load_3d(); the pitches are multiples of 16.
inline cudaError_t tensor_map_3d(TensorMap* map, const void* matrix, const Planes& of, int tile_planes, int tile_rows, int tile_bytes) {
  return encode_planes(map, matrix, 3, of, tile_planes, tile_rows, tile_bytes);
}
// For tma_load_page(): tiles of so many tokens of one head of one page. A row has at most 256 bytes; pitches are multiples of 16.
inline cudaError_t tensor_map_pages(TensorMap* map, const void* cache, const PagedRows& of, int tile_tokens) {
  const cuuint64_t size[4] = {(cuuint64_t)of.row_bytes, (cuuint64_t)of.heads, (cuuint64_t)of.tokens, (cuuint64_t)of.pages};
  const cuuint64_t pitch[3] = {(cuuint64_t)of.head_pitch, (cuuint64_t)of.token_pitch, (cuuint64_t)of.page_pitch};
  const cuuint32_t tile[4] = {(cuuint32_t)of.row_bytes, 1, (cuuint32_t)tile_tokens, 1};
  return encode_tensor_map(map, cache, 4, size, pitch, tile, CU_TENSOR_MAP_SWIZZLE_NONE);
}

}  // namespace fp4
#endif

namespace fp4 {

// What a thread does before it stores: the kernel before may still read what is written here. The trigger comes second, because the next kernel may read what
// the kernel before wrote.
__device__ __forceinline__ void pdl_wait_then_trigger() {
  if (FP4_FAULT(TRIGGER_BEFORE_PDL_WAIT)) griddepcontrol_launch_dependents();
  if (FP4_FAULT(STORE_BEFORE_PDL_WAIT)) return;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
}

}  // namespace fp4
