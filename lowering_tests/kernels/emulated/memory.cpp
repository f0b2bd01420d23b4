// The emulated memory, of the device and of blocks, and what is checked at every access.
#include "state.h"

#include <sys/mman.h>

namespace emulated {
namespace {

constexpr size_t kDevice = size_t(256) << 20;

// Device memory: allocations lie apart, and valid[] is 1 for bytes that belong to one.
uint8_t* device = nullptr;
uint8_t* valid = nullptr;
size_t allocated = 0;
std::vector<std::pair<const uint8_t*, const uint8_t*>> constants;  // no kernel writes there

}  // namespace

uint8_t* reserve(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : (uint8_t*)p;
}

uint8_t* const all_shared = reserve(kApart * kMaxBlocks);

namespace {

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

}  // namespace

void access(const uint8_t* p, int bytes, bool write, bool in_flight) {
  if (p < device || p >= device + kDevice) {
    if (p + bytes <= all_shared || p >= all_shared + kApart * kMaxBlocks) return;  // the fiber's own stack, constants
    return access_shared(p, bytes, write, in_flight);
  }
  if (current->began_early && std::none_of(constants.begin(), constants.end(), [&](auto& c) { return !write && p >= c.first && p + bytes <= c.second; }))
    fail("%s of global memory before the previous kernel has finished", write ? "write" : "read");
  check_inside(p, bytes, write ? "write" : "read");
}

void check(const void* address, int bytes, bool write) {
  if (current) access((const uint8_t*)address, bytes, write, false);
}

void prefetched(const void* global) {
  const uint8_t* p = (const uint8_t*)global;
  if (p >= device && p < device + kDevice) check_inside(p, 1, "prefetch");
}

void publish_writes() {
  Block& block = *current->block;
  block.published[current->warp] = ++the->now;
  for (Mbarrier* c : current->waited)
    if (c->waited[current->warp_of_all()]) c->published.set(current->warp_of_all());
  current->waited.clear();
}

namespace {

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

}  // namespace

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

}  // namespace emulated

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
