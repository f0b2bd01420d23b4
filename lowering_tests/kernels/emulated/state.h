// What a launch of the emulator is while it runs, and what its parts share: runtime.cpp runs threads, memory.cpp checks what they touch, copies.cpp copies.
#pragma once
#undef _FORTIFY_SOURCE  // whose longjmp() refuses to jump to another stack
#include "emulated.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <bitset>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

namespace emulated {

constexpr int kLanes = 32, kMaxWarps = 20, kMaxBlocks = 16, kNamed = 16, kNobody = -1;
constexpr size_t kMaxShared = 227 << 10;
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

extern Launch* the;
extern Fiber* current;
extern char message[512];  // what went wrong in the last launch, or empty
extern uint64_t orders;    // how often what separated_now() reads has changed

// --- runtime.cpp

void leave();  // the thread waits: for what it has noted in `current`
void block_on(Barrier& barrier);
Block& block_of(int rank);  // of the cluster

// --- memory.cpp

constexpr size_t kApart = size_t(256) << 10;  // of two blocks' shared memory, so that an overrun meets nothing
extern uint8_t* const all_shared;
uint8_t* reserve(size_t bytes);
void access(const uint8_t* p, int bytes, bool write, bool in_flight);

// --- copies.cpp

void check_ended(const Block& block);  // of a cluster: what others do to its shared memory has been waited for

}  // namespace emulated
