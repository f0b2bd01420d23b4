// The threads of emulated.h: fibers, which run until they wait, and the barriers at which they meet. One launch at a time, on one thread.
#include "state.h"

#include <cstdarg>
#include <cstdio>
#include <random>

namespace emulated {

Launch* the = nullptr;
Fiber* current = nullptr;
uint64_t orders = 0;
char message[512];

namespace {

jmp_buf scheduler;
const std::function<void()>* body;
bool failed;
int launches = 0;
unsigned seed = 0;
unsigned active_fault = 0;
constexpr size_t kStack = 128 << 10;
uint8_t* const all_stacks = reserve(kStack * kLanes * kMaxWarps * kMaxBlocks);

}  // namespace

void leave() {
  if (!_setjmp(current->at)) _longjmp(scheduler, 1);
}

void block_on(Barrier& barrier) {
  current->waits = &barrier;
  current->generation = barrier.generation;
  leave();
}

namespace {

void resume(Fiber& fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.begun) _longjmp(fiber.at, 1);
  fiber.begun = true;
  setcontext(&fiber.begin);
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

void name_of(const Fiber& f, char* out, size_t size) { snprintf(out, size, "block %u,%u,%u thread %u", f.place.block.x, f.place.block.y, f.place.block.z, f.place.thread.x); }

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
// What went wrong in the last launch, or an empty string.
const char* emulator_message() { return emulated::message; }

// The fault of this name is on in all launches from now on; none if the name is empty.
void emulator_fault(const char* name) { emulated::active_fault = *name ? emulated::fault_id(name) : 0; }

// 0: threads run in order; else they are shuffled.
void emulator_seed(unsigned seed) { emulated::seed = seed; }
}
