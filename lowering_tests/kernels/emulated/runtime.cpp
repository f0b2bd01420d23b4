// Fibers, barriers, asynchronous copies and the memory checks of emulated.h. One launch at a time, on one thread.
#undef _FORTIFY_SOURCE  // whose longjmp() refuses to jump to another stack
#include "emulated.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <bitset>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace emulated {
namespace {

constexpr int kLanes = 32, kMaxWarps = 20, kMaxBlocks = 16, kNamed = 16, kNobody = -1;
constexpr size_t kStack = 128 << 10, kDevice = size_t(256) << 20, kMaxShared = 227 << 10;
using Time = uint32_t;  // counts completed barriers

// Per 4 bytes of shared memory: who wrote last, and per warp when it was read last.
struct Word {
  int16_t writer = kNobody, waiter = kNobody;  // threads of the cluster; waiter: the first that waited for the copy which wrote it
  bool in_flight = false, published = false;
  Time written = 0, waited = 0;
  Time read[kMaxWarps] = {};       // 0: never, else time + 1; of the block's own warps
  uint8_t lane[kMaxWarps] = {};    // the reading lane, or kLanes: several
  Time read_remotely = 0;
};

using Warps = std::bitset<kMaxWarps * kMaxBlocks>;  // warps count over the cluster

struct Barrier {
  int arrived = 0;
  unsigned generation = 0;
  Time completed = 0;
  Warps warps, arriving;
  const char* what = nullptr;
  bool kept = false;  // each completion is, in `past`: of named barriers, behind which writes are published
  std::vector<std::pair<Time, Warps>> past;
};

struct Copy {
  uint8_t* to;
  const uint8_t* from;
  int bytes, from_global, before = 0;  // so many zeros before what comes from global memory, zeros behind it
};

struct Mbarrier {
  int arrivals, left, bytes = 0, phase = 0;  // bytes: promised, less those that have come; another block's may come before they are promised
  Time set_up = 0;
  std::deque<std::vector<uint8_t>> stored;              // values of asynchronous stores
  std::vector<Copy> coming, copies;                     // of this phase; of those that are over: they land when somebody waits
  std::vector<std::pair<int, Time>> arriving, arrived;  // which warps arrived when, or copied; in this phase, in the one that is over
  Warps waited, published;                              // for the phase that is over; and then published writes
  Barrier done;                                         // completes with each phase
};

struct Block {
  int rank, first_warp, live;  // threads that have not ended
  dim3 index;
  uint8_t* shared;
  std::vector<Word> words;
  Barrier named[kNamed], warp[kMaxWarps], meet[kMaxWarps], meet_four[kMaxWarps];  // meet: registers of a warp, of four; not memory
  void* operands[kMaxWarps][kLanes];
  std::map<const void*, Mbarrier> mbarriers;
  Time published[kMaxWarps] = {};  // when each warp last published writes
};

struct Fiber {
  ucontext_t begin;
  jmp_buf at;  // where it waits; unlike swapcontext() these jumps make no system call
  bool begun = false;
  Place place;
  Block* block;
  int id, warp, lane;  // id counts over the cluster
  bool done, began_early;  // not waited for the kernel before
  bool late = false;       // lets all others go first
  const Barrier* waits;
  unsigned generation;
  const int* flag;  // waits until it is `least` or more, or
  int least;
  uint32_t halves;  // until no half of it that these bits cover is 0; 0: the former
  bool flag_is_set() const {
    const uint32_t word = *flag | ~halves;
    return halves ? (word & 0xFFFF) && word >> 16 : *flag >= least;
  }
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
  std::set<Mbarrier*> waited;  // since it last published writes
  int warp_of_all() const { return block->first_warp + warp; }
};

struct Launch {  // of one cluster
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Fiber>> fibers;
  Barrier cluster;
  Time now = 1;
  int shared_bytes, threads, live, place = 0;  // place: of its memory, among those that have begun and not ended
};

Launch* the = nullptr;
Fiber* current = nullptr;
jmp_buf scheduler;
const std::function<void()>* body;
char message[512];
bool failed;
int launches = 0;
uint64_t orders = 0;  // how often what separated_now() reads has changed
unsigned seed = 0;

// Device memory: allocations lie apart, and valid[] is 1 for bytes that belong to one.
uint8_t* device = nullptr;
uint8_t* valid = nullptr;
size_t allocated = 0;
std::vector<std::pair<const uint8_t*, const uint8_t*>> constants;  // no kernel writes there

uint8_t* reserve(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : (uint8_t*)p;
}

constexpr size_t kApart = size_t(256) << 10;  // of two blocks' shared memory, so that an overrun meets nothing
uint8_t* const all_stacks = reserve(kStack * kLanes * kMaxWarps * kMaxBlocks);
uint8_t* const all_shared = reserve(kApart * kMaxBlocks);

void leave() {
  if (!_setjmp(current->at)) _longjmp(scheduler, 1);
}

void resume(Fiber& fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.begun) _longjmp(fiber.at, 1);
  fiber.begun = true;
  setcontext(&fiber.begin);
}

void block_on(Barrier& barrier) {
  current->waits = &barrier;
  current->generation = barrier.generation;
  leave();
}

void arrive(Barrier& barrier, int expected, const char* what) {
  if (barrier.arrived && barrier.what != what) fail("%s meets %s", what, barrier.what);
  barrier.what = what;
  barrier.arriving.set(current->warp_of_all());
  if (++barrier.arrived < expected) return block_on(barrier);
  barrier.arrived = 0;
  barrier.warps = barrier.arriving;
  barrier.arriving.reset();
  barrier.completed = ++the->now;
  ++orders;
  if (barrier.kept) barrier.past.emplace_back(barrier.completed, barrier.warps);
  ++barrier.generation;
}

bool separated_now(const Block& block, int warp_a, int warp_b, Time time) {
  if (warp_a == warp_b && block.warp[warp_b - block.first_warp].completed > time) return true;
  for (const Barrier& b : block.named)
    if (b.completed > time && b.warps[warp_a] && b.warps[warp_b]) return true;
  for (const auto& [address, c] : block.mbarriers)
    if (c.done.completed > time && c.waited[warp_b])
      for (const auto& [warp, when] : c.arrived)
        if (warp == warp_a && when > time) return true;
  return false;
}

// Has a barrier that both took part in completed after `time`, or an mbarrier of b's block at which a arrived and for which b has waited? `block` is b's.
bool separated(const Block& block, int warp_a, int warp_b, Time time) {
  if (the->cluster.completed > time) return true;
  struct Answer {
    const Block* block = nullptr;
    int warp_a, warp_b;
    Time time;
    uint64_t orders;
    bool is;
  };
  static Answer known[1 << 10];  // words that were written together are read together
  Answer& answer = known[(time * 31 + warp_a * 7 + warp_b) % std::size(known)];
  if (answer.block != &block || answer.warp_a != warp_a || answer.warp_b != warp_b || answer.time != time || answer.orders != orders)
    answer = {&block, warp_a, warp_b, time, orders, separated_now(block, warp_a, warp_b, time)};
  return answer.is;
}

void name_of(const Fiber& f, char* out, size_t size) { snprintf(out, size, "block %u,%u,%u thread %u", f.place.block.x, f.place.block.y, f.place.block.z, f.place.thread.x); }

void touch(Block& block, Word& word, size_t at, bool write, bool in_flight) {
  const bool own = &block == current->block;
  if (word.writer == kNobody && !write) fail("read of shared memory that nobody wrote, byte %zu", at);
  if (word.in_flight && !in_flight) fail("%s of shared byte %zu before its asynchronous copy was waited for", write ? "write" : "read", at);
  // A copy over one that has landed: who read it in between is checked below.
  if (word.writer != kNobody && word.writer != current->id && !(in_flight && word.published)) {
    const Fiber& writer = *the->fibers[word.writer];
    const bool passed_on = own && word.waiter != kNobody && separated(block, the->fibers[word.waiter]->warp_of_all(), current->warp_of_all(), word.waited);
    if (passed_on)
      ;
    else if (own ? !separated(block, writer.warp_of_all(), current->warp_of_all(), word.written) : the->cluster.completed <= word.written)
      fail("race: %s of shared byte %zu, written by thread %u of block rank %d with no barrier in between", write ? "write" : "read", at, writer.place.thread.x,
           writer.block->rank);
  }
  if (!write) {
    if (!own) {
      word.read_remotely = the->now + 1;
      return;
    }
    const int w = current->warp;
    const bool fresh = !word.read[w] || separated(block, block.first_warp + w, block.first_warp + w, word.read[w] - 1);
    word.lane[w] = fresh || word.lane[w] == current->lane ? current->lane : kLanes;
    word.read[w] = the->now + 1;
    return;
  }
  if (word.read_remotely && (own || word.writer != current->id) && the->cluster.completed <= word.read_remotely - 1)
    fail("race: write of shared byte %zu, which another block may still be reading", at);
  const int warps = (the->threads + kLanes - 1) / kLanes;
  for (int w = 0; w < warps; ++w) {
    if (!word.read[w]) continue;
    const Time time = word.read[w] - 1;
    const bool only_mine = own && w == current->warp && word.lane[w] == current->lane;
    const bool apart = only_mine || separated(*current->block, block.first_warp + w, current->warp_of_all(), time);
    if (!apart) fail("race: write of shared byte %zu, read by warp %d of block rank %d with no barrier in between", at, w, block.rank);
    word.read[w] = 0;
  }
  word.read_remotely = 0;
  word.writer = current->id;
  word.waiter = kNobody;
  word.written = the->now;
  word.in_flight = in_flight;
  word.published = false;
}

void access_shared(const uint8_t* p, int bytes, bool write, bool in_flight) {
  for (auto& block : the->blocks) {
    if (p + bytes <= block->shared || p >= block->shared + kMaxShared) continue;
    const size_t at = p - block->shared;
    if (p < block->shared || at + bytes > (size_t)the->shared_bytes) fail("%s of shared byte %zu, the block has %d", write ? "write" : "read", at, the->shared_bytes);
    for (size_t i = at / 4; i <= (at + bytes - 1) / 4; ++i) touch(*block, block->words[i], 4 * i, write, in_flight);
    return;
  }
}

void check_inside(const uint8_t* p, int bytes, const char* what) {
  const uint8_t* of = valid + (p - device);
  if (const void* outside = memchr(of, 0, bytes)) fail("%s of %d bytes of global memory, byte %d is outside every allocation", what, bytes, int((const uint8_t*)outside - of));
}

void access(const uint8_t* p, int bytes, bool write, bool in_flight) {
  if (p < device || p >= device + kDevice) {
    if (p + bytes <= all_shared || p >= all_shared + kApart * kMaxBlocks) return;  // the fiber's own stack, constants
    return access_shared(p, bytes, write, in_flight);
  }
  if (current->began_early && std::none_of(constants.begin(), constants.end(), [&](auto& c) { return !write && p >= c.first && p + bytes <= c.second; }))
    fail("%s of global memory before the previous kernel has finished", write ? "write" : "read");
  check_inside(p, bytes, write ? "write" : "read");
}

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

// Of a cluster, a block may end once what others do to its shared memory has been waited for: by a cluster barrier, or at the mbarriers.
void check_ended(const Block& block) {
  for (const auto& [address, c] : block.mbarriers) {
    if (!c.coming.empty() || !c.copies.empty()) fail("a block ended with copies for which nobody waited");
    for (const auto& phase : {c.arriving, c.waited.any() ? decltype(c.arrived)() : c.arrived})
      for (const auto& [warp, when] : phase)
        if (warp / (the->threads / kLanes) != block.rank && when > the->cluster.completed) fail("a block ended while others may still use its mbarriers");
  }
}

void entry() {
  (*body)();
  if (!current->open.empty() || !current->groups.empty()) fail("a thread ended with asynchronous copies in flight");
  if (--current->block->live == 0) check_ended(*current->block);
  current->done = true;
  --the->live;
  leave();
}

void deadlock(const Launch& launch);

// Can a thread go on, of a cluster that has just begun or that waited for a flag?
bool flagged(const Launch& launch) {
  return std::any_of(launch.fibers.begin(), launch.fibers.end(), [](auto& f) { return !f->done && (f->flag ? f->flag_is_set() : !f->waits || f->waits->generation != f->generation); });
}

// Until all threads have ended, or until nothing moves but flags of other clusters may do: false then.
bool run(Launch& launch) {
  the = &launch;
  std::vector<Fiber*> order;
  for (auto& f : launch.fibers) order.push_back(f.get());
  std::mt19937 random(seed);
  while (launch.live && !failed) {
    if (seed) std::shuffle(order.begin(), order.end(), random);
    bool moved = false;
    for (Fiber* f : order) {
      if (f->done || f->late || (f->waits && f->waits->generation == f->generation) || (f->flag && !f->flag_is_set())) continue;
      f->waits = nullptr;
      f->flag = nullptr;
      current = f;
      moved = true;
      resume(*f);
      if (failed) return true;
    }
    if (moved) continue;
    bool late = false;
    for (Fiber* f : order) late = std::exchange(f->late, false) || late;
    if (late || std::any_of(order.begin(), order.end(), [](Fiber* f) { return !f->done && f->flag; })) return false;
    deadlock(launch);
  }
  return true;
}

void deadlock(const Launch& launch) {
  for (auto& f : launch.fibers)
    if (!f->done) {
      failed = true;
      snprintf(message, sizeof message, "deadlock: thread %u waits in a %s that others do not reach", f->place.thread.x, f->flag ? "loop for a flag" : f->waits->what);
      return;
    }
}

}  // namespace

const Place& place() { return current->place; }

void fail(const char* format, ...) {
  char who[96], text[384];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  name_of(*current, who, sizeof who);
  snprintf(message, sizeof message, "%s: %s", who, text);
  failed = true;
  _longjmp(scheduler, 1);
}

uint8_t* dynamic_shared() { return current->block->shared; }

void check(const void* address, int bytes, bool write) {
  if (current) access((const uint8_t*)address, bytes, write, false);
}

void prefetched(const void* global) {
  const uint8_t* p = (const uint8_t*)global;
  if (p >= device && p < device + kDevice) check_inside(p, 1, "prefetch");
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

void warp_barrier() { arrive(current->block->warp[current->warp], kLanes, "warp barrier"); }

void block_barrier(int id, int threads) {
  if (id < 0 || id >= kNamed || threads % kLanes) fail("barrier %d of %d threads", id, threads);
  current->block->named[id].kept = true;
  arrive(current->block->named[id], threads, "block barrier");
}

void cluster_sync() { arrive(the->cluster, the->fibers.size(), "cluster barrier"); }
int cluster_rank() { return current->block->rank; }
int cluster_size() { return the->blocks.size(); }

Block& block_of(int rank) {
  if (rank < 0 || rank >= cluster_size()) fail("block rank %d in a cluster of %d", rank, cluster_size());
  return *the->blocks[rank];
}

void* other_block(void* shared, int rank) {
  return block_of(rank).shared + ((uint8_t*)shared - current->block->shared);
}

void publish_writes() {
  Block& block = *current->block;
  block.published[current->warp] = ++the->now;
  for (Mbarrier* c : current->waited)
    if (c->waited[current->warp_of_all()]) c->published.set(current->warp_of_all());
  current->waited.clear();
}

// Has warp b, once a barrier or an mbarrier had separated it from a's writing at `time`, published what was written?
bool published_behind(const Block& block, int warp_a, int warp_b, Time time) {
  for (const Barrier& b : block.named)
    for (auto past = b.past.rbegin(); past != b.past.rend() && past->first > time; ++past)  // in the order of their times
      if (past->second[warp_a] && past->second[warp_b] && block.published[warp_b - block.first_warp] > past->first) return true;
  for (const auto& [address, c] : block.mbarriers)
    if (c.done.completed > time && c.published[warp_b])
      for (const auto& [warp, when] : c.arrived)
        if (warp == warp_a && when > time) return true;
  return false;
}

void check_published(const void* address, int bytes) {
  check(address, bytes, false);
  for (auto& block : the->blocks) {
    const size_t at = (const uint8_t*)address - block->shared;
    if ((const uint8_t*)address < block->shared || at >= (size_t)the->shared_bytes) continue;
    const Word* before = nullptr;
    for (size_t i = at / 4; i <= (at + bytes - 1) / 4; ++i) {
      const Word& word = block->words[i];
      if (before && before->writer == word.writer && before->written == word.written && !before->published) continue;  // the answer is the same
      before = &word;
      for (int warp = current->warp / 4 * 4, end = warp + 4; !word.published && warp < end; ++warp)
        if (!published_behind(*block, the->fibers[word.writer]->warp_of_all(), block->first_warp + warp, word.written))
          fail("wgmma reads shared byte %zu, which was not published", 4 * i);
    }
  }
}

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

void mbarrier_init(const void* address, int arrivals) {
  if ((uintptr_t)address % 8) fail("an mbarrier is not 8-byte aligned");
  access((const uint8_t*)address, 8, true, false);
  Mbarrier& c = current->block->mbarriers[address] = {arrivals, arrivals};
  c.set_up = the->now;
  ++orders;
}

void arrive_at(Mbarrier& c, int bytes) {
  if (!c.left) fail("more arrivals at an mbarrier than it counts");
  c.arriving.emplace_back(current->warp_of_all(), ++the->now);
  c.bytes += bytes;
  --c.left;
  complete(c);
}

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

void flag_set(int* flag) {
  access((const uint8_t*)flag, 4, true, false);
  *flag = 1;
}

void flag_wait(const int* flag, int least) {
  access((const uint8_t*)flag, 4, false, false);
  if (*flag >= least) return;
  current->flag = flag, current->least = least, current->halves = 0;
  leave();
}

void halves_wait(const uint32_t* word, uint32_t of) {
  access((const uint8_t*)word, 4, false, false);
  Fiber& f = *current;
  f.flag = (const int*)word, f.halves = of;
  if (f.flag_is_set())
    f.flag = nullptr;
  else
    leave();
}

void store_16(uint16_t* at, uint32_t bits) {
  access((const uint8_t*)at, 2, true, false);
  *at = bits;
}

void give_way() {
  current->late = true;
  leave();
}

int count_arrival(int* counter) {
  access((const uint8_t*)counter, 4, true, false);
  return (*counter)++;
}

void griddepcontrol_wait() { current->began_early = false; }

void griddepcontrol_launch_dependents() {
  if (current->began_early) fail("the next kernel may begin before this one has waited for the previous one");
}

unsigned active_fault = 0;
bool fault(unsigned id) { return id == active_fault; }

int launch_number() { return launches; }
int warpgroup() { return current->warp / 4; }

void together(const char* what, void* operands, void (*run)(void**), int lanes) {
  Block& block = *current->block;
  const int leader = lanes == kLanes ? current->warp : current->warp / 4 * 4;
  Barrier& barrier = lanes == kLanes ? block.meet[leader] : block.meet_four[leader];
  block.operands[current->warp][current->lane] = operands;
  if (barrier.arrived && barrier.what != what) fail("%s meets %s", what, barrier.what);
  barrier.what = what;
  if (++barrier.arrived < lanes) return block_on(barrier);
  barrier.arrived = 0;
  ++barrier.generation;
  run(block.operands[leader]);
}

int launch(dim3 blocks, int threads, int shared_bytes, int cluster, bool early, const std::function<void()>& kernel) {
  constexpr int kInvalid = 9, kFailed = 719;  // cudaErrorInvalidConfiguration, cudaErrorLaunchFailure
  failed = false;
  message[0] = 0;
  ++launches;
  if (threads < 1 || threads > kLanes * kMaxWarps || threads % kLanes || shared_bytes > (int)kMaxShared || cluster < 1 || cluster > kMaxBlocks || blocks.z % cluster || !blocks.x || !blocks.y)
    return kInvalid;
  body = &kernel;
  std::vector<std::unique_ptr<Launch>> begun;  // clusters that wait for a flag of a later one
  for (unsigned z = 0; z < blocks.z; z += cluster)
    for (unsigned y = 0; y < blocks.y; ++y)
      for (unsigned x = 0; x < blocks.x; ++x) {
        auto launch = std::make_unique<Launch>();
        while (std::any_of(begun.begin(), begun.end(), [&](auto& b) { return b->place == launch->place; })) ++launch->place;
        if ((launch->place + 1) * cluster > kMaxBlocks) {
          deadlock(*begun.front());
          return kFailed;
        }
        ++orders;
        launch->shared_bytes = shared_bytes;
        launch->threads = threads;
        launch->live = threads * cluster;
        for (int rank = 0; rank < cluster; ++rank) {
          auto block = std::make_unique<Block>();
          block->rank = rank;
          block->first_warp = rank * (threads / kLanes);
          block->live = threads;
          block->index = dim3(x, y, z + rank);
          block->shared = all_shared + kApart * (launch->place * cluster + rank);
          block->words.resize(shared_bytes / 4);
          memset(block->shared, 0xFF, shared_bytes);
          for (int t = 0; t < threads; ++t) {
            auto f = std::make_unique<Fiber>();
            f->place = {dim3(t, 0, 0), block->index, blocks, dim3(threads)};
            f->block = block.get();
            f->id = launch->fibers.size();
            f->warp = t / kLanes;
            f->lane = t % kLanes;
            f->done = false;
            f->began_early = early;
            f->waits = nullptr;
            f->flag = nullptr;
            getcontext(&f->begin);
            f->begin.uc_stack.ss_sp = all_stacks + kStack * (launch->place * cluster * threads + f->id);
            f->begin.uc_stack.ss_size = kStack;
            f->begin.uc_link = nullptr;
            makecontext(&f->begin, entry, 0);
            launch->fibers.push_back(std::move(f));
          }
          launch->blocks.push_back(std::move(block));
        }
        begun.push_back(std::move(launch));
        for (bool again = true; again && !failed;) {
          again = false;
          for (size_t i = begun.size(); i-- > 0 && !failed;)  // the newest first: what it sets may let others go on
            if (flagged(*begun[i])) {
              again = true;
              if (run(*begun[i])) begun.erase(begun.begin() + i);
            }
        }
        current = nullptr;
        the = nullptr;
        if (failed) return kFailed;
      }
  if (!begun.empty()) deadlock(*begun.front());
  return failed ? kFailed : 0;
}

}  // namespace emulated

// --- what the test calls ------------------------------------------------------------------------------------------

extern "C" {
// A zero-filled allocation with red zones around it; null when the device is full. offset: distance from 256-byte alignment.
void* emulator_allocate(size_t bytes, size_t offset) {
  using namespace emulated;
  if (!device) {
    device = reserve(kDevice);
    valid = reserve(kDevice);
  }
  const size_t start = (allocated + 256 + 255) / 256 * 256 + offset;
  if (start + bytes + 256 > kDevice) return nullptr;
  memset(valid + start, 1, bytes);
  allocated = start + bytes;
  return device + start;
}

void emulator_free_all() {
  using namespace emulated;
  message[0] = 0;  // a call that its host refuses launches nothing: what the last call said is not its own
  if (!device) return;
  memset(valid, 0, allocated);
  allocated = 0;
  constants.clear();
}

// No kernel writes these bytes, so that one that begins before the last one has finished may read them.
void emulator_constant(const void* start, size_t bytes) { emulated::constants.push_back({(const uint8_t*)start, (const uint8_t*)start + bytes}); }

// What went wrong in the last launch, or an empty string.
const char* emulator_message() { return emulated::message; }

// The fault of this name is on in all launches from now on; none if the name is empty.
void emulator_fault(const char* name) { emulated::active_fault = *name ? emulated::fault_id(name) : 0; }

// 0: threads run in order; else they are shuffled.
void emulator_seed(unsigned seed) { emulated::seed = seed; }

// --- what the compiler calls: -fsanitize=thread for accesses, -fsanitize=alignment,shift,... for undefined behaviour ----

#define ACCESS(n)                                                            \
  void __tsan_read##n(void* p) { emulated::check(p, n, false); }             \
  void __tsan_write##n(void* p) { emulated::check(p, n, true); }             \
  void __tsan_unaligned_read##n(void* p) { emulated::check(p, n, false); }   \
  void __tsan_unaligned_write##n(void* p) { emulated::check(p, n, true); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
#undef ACCESS
void __tsan_read_range(void* p, size_t n) { emulated::check(p, n, false); }
void __tsan_write_range(void* p, size_t n) { emulated::check(p, n, true); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
char __tsan_atomic8_load(const volatile char* p, int) { return *p; }  // of the guard of a static variable of the host
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

static void undefined(const char* what) {
  if (emulated::current) emulated::fail("undefined behaviour: %s", what);
}
void __ubsan_handle_type_mismatch_v1(void*, void*) { undefined("misaligned or null access"); }
void __ubsan_handle_shift_out_of_bounds(void*, void*, void*) { undefined("shift by too much"); }
void __ubsan_handle_add_overflow(void*, void*, void*) { undefined("signed addition overflows"); }
void __ubsan_handle_sub_overflow(void*, void*, void*) { undefined("signed subtraction overflows"); }
void __ubsan_handle_mul_overflow(void*, void*, void*) { undefined("signed multiplication overflows"); }
void __ubsan_handle_negate_overflow(void*, void*) { undefined("signed negation overflows"); }
void __ubsan_handle_pointer_overflow(void*, void*, void*) { undefined("pointer arithmetic overflows"); }
void __ubsan_handle_divrem_overflow(void*, void*, void*) { undefined("division by zero"); }
void __ubsan_handle_out_of_bounds(void*, void*) { undefined("index outside a local array"); }
}
