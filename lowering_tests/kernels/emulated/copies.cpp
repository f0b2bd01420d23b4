// Asynchronous copies and stores to shared memory, and the mbarriers that they report to.
#include "state.h"

namespace emulated {
namespace {

void land(const Copy& c, bool published) {
  for (auto& block : the->blocks)
    if (c.to >= block->shared && c.to < block->shared + kMaxShared)
      for (size_t i = (c.to - block->shared) / 4; i < (c.to - block->shared + c.bytes) / 4u; ++i) {
        block->words[i].in_flight = false;
        block->words[i].waiter = published && block.get() == current->block ? current->id : kNobody;
        block->words[i].waited = the->now;
        block->words[i].published = published;
      }
  memset(c.to, 0, c.bytes);
  memcpy(c.to + c.before, c.from, c.from_global);
}

}  // namespace

// Of a cluster, a block may end once what others do to its shared memory has been waited for: by a cluster barrier, or at the mbarriers.
void check_ended(const Block& block) {
  for (const auto& [address, c] : block.mbarriers) {
    if (!c.coming.empty() || !c.copies.empty()) fail("a block ended with copies for which nobody waited");
    for (const auto& phase : {c.arriving, c.waited.any() ? decltype(c.arrived)() : c.arrived})
      for (const auto& [warp, when] : phase)
        if (warp / (the->threads / kLanes) != block.rank && when > the->cluster.completed) fail("a block ended while others may still use its mbarriers");
  }
}

void cp_async(void* shared, const void* global, int bytes, int from_global) {
  if ((uintptr_t)shared % bytes || (uintptr_t)global % bytes) fail("asynchronous copy of %d bytes between misaligned addresses", bytes);
  if (from_global) access((const uint8_t*)global, from_global, false, false);
  access((uint8_t*)shared, bytes, true, true);  // it may land at any time from now on
  memset(shared, 0xFF, bytes);
  current->open.push_back({(uint8_t*)shared, (const uint8_t*)global, bytes, from_global});
}

void commit_copies() {
  current->groups.push_back(std::move(current->open));
  current->open.clear();
}

void wait_copies(int still_open) {
  while ((int)current->groups.size() > still_open) {
    for (const Copy& c : current->groups.front()) {
      access(c.to, c.bytes, true, true);
      land(c, false);
    }
    current->groups.pop_front();
  }
}

namespace {

Mbarrier& mbarrier(const void* address, const Block& block) {
  const bool own = &block == current->block;
  const char* there = (const char*)address + (block.shared - current->block->shared);
  if (!block.live) fail("an mbarrier of block rank %d, which has ended", block.rank);
  const auto found = the->blocks[block.rank]->mbarriers.find(there);
  if (found == block.mbarriers.end() || (!own && the->cluster.completed <= found->second.set_up)) fail("an mbarrier that nobody has set up");
  return found->second;
}

void complete(Mbarrier& c) {
  if (c.left) return;
  if (c.bytes < 0) fail("%d bytes more than were promised", -c.bytes);
  if (c.bytes) return;
  c.left = c.arrivals;
  c.phase ^= 1;
  c.arrived.swap(c.arriving);
  c.arriving.clear();
  c.copies.insert(c.copies.end(), c.coming.begin(), c.coming.end());
  c.coming.clear();
  c.waited.reset();
  c.published.reset();
  c.done.completed = ++the->now;
  ++c.done.generation;
  ++orders;
}

}  // namespace

void mbarrier_init(const void* address, int arrivals) {
  if ((uintptr_t)address % 8) fail("an mbarrier is not 8-byte aligned");
  access((const uint8_t*)address, 8, true, false);
  Mbarrier& c = current->block->mbarriers[address] = {arrivals, arrivals};
  c.set_up = the->now;
  ++orders;
}

namespace {

void arrive_at(Mbarrier& c, int bytes) {
  if (!c.left) fail("more arrivals at an mbarrier than it counts");
  c.arriving.emplace_back(current->warp_of_all(), ++the->now);
  c.bytes += bytes;
  --c.left;
  complete(c);
}

}  // namespace

void mbarrier_arrive(const void* address, int bytes) { arrive_at(mbarrier(address, *current->block), bytes); }

void mbarrier_arrive_remote(const void* address, int rank) {
  arrive_at(mbarrier(address, block_of(rank)), 0);
}

void mbarrier_wait_parity(const void* address, int parity) {
  Mbarrier& c = mbarrier(address, *current->block);
  c.done.what = "wait for an mbarrier";
  while (c.phase == parity) block_on(c.done);
  c.waited.set(current->warp_of_all());
  ++orders;
  current->waited.insert(&c);
  for (const Copy& copy : c.copies) land(copy, true);  // wgmma reads by the path by which it was written
  c.copies.clear();
}

namespace {

// All parts of one copy, which the mbarriers see when it is complete.
void copy_parts(const std::vector<Copy>& parts, int bytes, const void* address, unsigned blocks) {
  const int own = cluster_rank();
  if (!blocks) blocks = 1u << own;
  if (blocks >> cluster_size()) fail("a copy to blocks 0x%x of a cluster of %d", blocks & 0xFFFF, cluster_size());
  for (const Copy& part : parts)
    if (part.from_global) access(part.from, part.from_global, false, false);
  for (auto& block : the->blocks) {
    if (!(blocks >> block->rank & 1)) continue;
    Mbarrier& c = mbarrier(address, *block);
    if (c.bytes < bytes && (block->rank == own || !c.left)) fail("a bulk copy of %d bytes where %d are promised", bytes, c.bytes);
    for (Copy part : parts) {
      part.to += block->shared - current->block->shared;
      const size_t at = part.to - block->shared;
      for (size_t i = at / 4; i < (at + part.bytes) / 4 && i < block->words.size(); ++i)
        if (block->words[i].in_flight) fail("race: a copy to shared byte %zu before the last one there was waited for", 4 * i);
      access(part.to, part.bytes, true, true);
      memset(part.to, 0xFF, part.bytes);
      c.coming.push_back(part);
    }
    c.arriving.emplace_back(current->warp_of_all(), ++the->now);
    c.bytes -= bytes;
    complete(c);
  }
}

}  // namespace

void st_async(void* shared, const void* value, int bytes, const void* address, int rank) {
  if ((uintptr_t)shared % bytes) fail("an asynchronous store of %d bytes to a misaligned address", bytes);
  Mbarrier& c = mbarrier(address, block_of(rank));
  if (c.bytes < bytes) fail("an asynchronous store of %d bytes where %d are promised", bytes, c.bytes);
  c.stored.emplace_back((const uint8_t*)value, (const uint8_t*)value + bytes);
  copy_parts({{(uint8_t*)shared, c.stored.back().data(), bytes, bytes}}, bytes, address, 1u << rank);
}

void cp_async_bulk(void* shared, const void* global, int bytes, const void* address, unsigned blocks) {
  if ((uintptr_t)shared % 16 || (uintptr_t)global % 16 || bytes % 16) fail("a bulk copy of %d bytes between misaligned addresses", bytes);
  copy_parts({{(uint8_t*)shared, (const uint8_t*)global, bytes, bytes}}, bytes, address, blocks);
}

// What cuTensorMapEncodeTiled accepts for bytes.
bool make_tensor_map(TensorMap* map, const void* matrix, const Planes& of, int tile_planes, int tile_rows, int tile_bytes) {
  *map = {(const uint8_t*)matrix, of, tile_planes, tile_rows, tile_bytes};
  const int64_t most = int64_t(1) << 32;
  const bool known = tile_bytes == 16 || tile_bytes == 32 || tile_bytes == 64 || tile_bytes == 128;
  for (int64_t size : {of.rows, of.planes, of.row_bytes})
    if (size < 1 || size > most) return false;
  return known && (uintptr_t)matrix % 16 == 0 && of.row_pitch % 16 == 0 && of.plane_pitch % 16 == 0 && of.row_bytes <= of.row_pitch && tile_rows >= 1 &&
         tile_rows <= 256 && tile_planes >= 1 && tile_planes <= 256;
}

void tma_load_2d(void* shared, const TensorMap& map, int byte, int row, int plane, const void* address, unsigned blocks) {
  const int repeats = std::max(128, map.tile_bytes == 16 ? 0 : 8 * map.tile_bytes);  // bytes behind which the swizzle repeats
  const size_t start = (uint8_t*)shared - current->block->shared;
  if (byte % 16) fail("a tile from byte %d of a row, not a multiple of 16: an illegal instruction", byte);
  if (start % repeats) fail("a tile at shared byte %zu, not a multiple of %d", start, repeats);
  std::vector<Copy> parts;
  for (int p = 0; p < map.tile_planes; ++p)
    for (int r = 0; r < map.tile_rows; ++r)
      for (int b = 0; b < map.tile_bytes; b += 16) {
        // CUTLASS's Swizzle<3, 4, 3> for 128 bytes, <2, 4, 3> for 64, <1, 4, 3> for 32: bits 4.. of the address ^= bits 7..
        size_t at = start + (p * map.tile_rows + r) * map.tile_bytes + b;
        at ^= (at >> 7 & (map.tile_bytes / 16 - 1)) << 4;
        parts.push_back({current->block->shared + at, map.matrix, 16, 0});
        const int64_t z = (int64_t)plane + p, y = (int64_t)row + r, x = (int64_t)byte + b, from = std::max<int64_t>(x, 0), to = std::min(x + 16, map.of.row_bytes);
        if (z < 0 || z >= map.of.planes || y < 0 || y >= map.of.rows || from >= to) continue;
        parts.back().from += z * map.of.plane_pitch + y * map.of.row_pitch + from;
        parts.back().from_global = to - from;
        parts.back().before = from - x;
      }
  copy_parts(parts, map.tile_planes * map.tile_rows * map.tile_bytes, address, blocks);
}

bool make_page_map(TensorMap* map, const void* matrix, const PagedRows& of, int tile_tokens) {
  *map = {(const uint8_t*)matrix, {}, 1, tile_tokens, (int)of.row_bytes, of};
  for (int64_t size : {of.heads, of.tokens, of.pages, of.row_bytes})
    if (size < 1 || size > int64_t(1) << 32) return false;
  for (int64_t pitch : {of.head_pitch, of.token_pitch, of.page_pitch})
    if (pitch % 16 || pitch < 0 || pitch >= int64_t(1) << 40) return false;
  return (uintptr_t)matrix % 16 == 0 && of.row_bytes % 16 == 0 && of.row_bytes <= 256 && tile_tokens >= 1 && tile_tokens <= 256;
}

void tma_load_page(void* shared, const TensorMap& map, int head, int token, int page, const void* address) {
  const PagedRows& of = map.cache;
  if (((uint8_t*)shared - current->block->shared) % 128) fail("a tile at shared byte %td, not a multiple of 128", (uint8_t*)shared - current->block->shared);
  if (head < 0 || head >= of.heads || page < 0 || page >= of.pages) fail("head %d of page %d, which the cache has not", head, page);
  std::vector<Copy> parts;
  for (int r = 0; r < map.tile_rows; ++r)
    for (int b = 0; b < of.row_bytes; b += 16) {
      parts.push_back({(uint8_t*)shared + r * of.row_bytes + b, map.matrix, 16, 0});
      if (token + r >= of.tokens) continue;
      parts.back().from += page * of.page_pitch + (token + r) * of.token_pitch + head * of.head_pitch + b;
      parts.back().from_global = 16;
    }
  copy_parts(parts, map.tile_rows * (int)of.row_bytes, address, 0);
}

}  // namespace emulated
