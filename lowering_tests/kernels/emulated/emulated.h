// A CUDA-shaped world on a CPU, for tests: csrc/*.cu compiled with a C++ compiler against this folder run here as they are.
//
// The analogue of Triton's interpreter. Threads of a block (of all blocks of a cluster) are fibers; a warp-wide instruction,
// a shuffle or a barrier waits until its threads have met. What csrc/common/device.cuh and csrc/sm90/ wrap in PTX on a GPU
// has its C++ form in device.h. The compiler reports every memory access to memory.cpp (it is run with -fsanitize=thread
// against a runtime of our own), which checks what compute-sanitizer would: bounds, alignment, reads of what nobody wrote,
// reads of an asynchronous copy that has not been waited for, and races between threads that no barrier separates.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emulated {

struct Place {
  dim3 thread, block, blocks, threads;
};
const Place& place();

// One line saying what went wrong; the launch ends there.
[[noreturn]] void fail(const char* format, ...);

uint8_t* dynamic_shared();
void check(const void* address, int bytes, bool write);  // as the compiler does for every access
void prefetched(const void* global);  // to L2, where the previous kernel's writes go, too: only the address is checked
void cp_async(void* shared, const void* global, int bytes, int from_global);  // the rest, up to bytes, is zero
void commit_copies();
void wait_copies(int groups_still_open);
void warp_barrier();
void block_barrier(int id, int threads);
void cluster_sync();
int cluster_rank();
int cluster_size();
void* other_block(void* shared, int rank);

// Every lane of the warp (of the warpgroup: 128) calls it with its own operands; run sees those of all lanes, once.
void together(const char* what, void* operands, void (*run)(void** lanes), int lanes = 32);

// wgmma reads shared memory by another path than threads write it: the one by which bulk copies land. What they wrote is seen there once
// every warp that multiplies has published it.
void publish_writes();
void check_published(const void* address, int bytes);

// Barriers in shared memory that count arrivals and bytes, and copies that report to them.
void mbarrier_init(const void* mbarrier, int arrivals);
void mbarrier_arrive(const void* mbarrier, int bytes);  // and promises so many bytes
void mbarrier_arrive_remote(const void* mbarrier, int rank);
void mbarrier_wait_parity(const void* mbarrier, int parity);

// To the same place in block `rank` of the cluster, whose mbarrier counts the bytes.
void st_async(void* shared, const void* value, int bytes, const void* mbarrier, int rank);
// `blocks`: a bit for each block of the cluster to which it is copied, to the same place in each; 0: the calling block.
void cp_async_bulk(void* shared, const void* global, int bytes, const void* mbarrier, unsigned blocks);

struct Planes {
  int64_t row_bytes, rows, planes, row_pitch, plane_pitch;
};
struct PagedRows {
  int64_t row_bytes, heads, tokens, pages, head_pitch, token_pitch, page_pitch;
};
struct TensorMap {
  const uint8_t* matrix;
  Planes of;
  int tile_planes, tile_rows, tile_bytes;
  PagedRows cache;  // of a map of pages, whose tiles have tile_rows tokens
};
bool make_page_map(TensorMap* map, const void* matrix, const PagedRows& of, int tile_tokens);
void tma_load_page(void* shared, const TensorMap& map, int head, int token, int page, const void* mbarrier);
bool make_tensor_map(TensorMap* map, const void* matrix, const Planes& of, int tile_planes, int tile_rows, int tile_bytes);
void tma_load_2d(void* shared, const TensorMap& map, int byte, int row, int plane, const void* mbarrier, unsigned blocks);

// Between blocks of a grid, which begin one after the other here: a cluster when all before it have ended or wait for a flag.
void flag_set(int* flag);
void flag_wait(const int* flag, int least);
void halves_wait(const uint32_t* word, uint32_t of);  // until no half of the word that `of` covers is 0
void store_16(uint16_t* at, uint32_t bits);           // which others may read at any time
int count_arrival(int* counter);
void give_way();  // all other threads, of other clusters, too, go on first

// FP4_FAULT(NAME) in a kernel is true while the test has switched on the fault of that name.
constexpr unsigned fault_id(const char* name) {
  unsigned id = 2166136261u;  // FNV-1a
  for (; *name; ++name) id = (id ^ (unsigned char)*name) * 16777619u;
  return id;
}
__attribute__((const)) bool fault(unsigned id);  // the same for all of a call
#define FP4_FAULT(name) (emulated::fault(std::integral_constant<unsigned, emulated::fault_id(#name)>::value))

int launch_number();
int warpgroup();

// Programmatic dependent launch: until a thread has waited it may touch no global memory but what the test called constant.
void griddepcontrol_wait();
void griddepcontrol_launch_dependents();

int launch(dim3 blocks, int threads, int shared_bytes, int cluster, bool early, const std::function<void()>& kernel);

}  // namespace emulated
