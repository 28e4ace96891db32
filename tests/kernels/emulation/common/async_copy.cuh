// Copies by threads. Those that a thread waits for are done then, and are garbage before; others
// are done at once, and that they have arrived is told later.
#pragma once

#include <map>
#include <vector>

#include "mbarrier.cuh"

namespace ostinato {

inline bool elect_lane() {
  __syncwarp();
  return emulator::lane() == 0;
}

inline void copy_vector(uint32_t to, const void* from) {
  std::memcpy(emulator::shared + to, from, 16);
}

struct EmulatedCopy {
  char* to;
  const void* from;
  int bytes;
};
using EmulatedCopies = std::vector<std::vector<EmulatedCopy>>;  // by group; the last one is open

// Of a thread of a CTA.
inline EmulatedCopies& emulated_copies() {
  static std::map<std::pair<int, int>, EmulatedCopies> of_threads;
  EmulatedCopies& groups = of_threads[{emulator::rank, threadIdx.x}];
  if (groups.empty()) {
    groups.emplace_back();
  }
  return groups;
}

inline void copy_vector_part_of_group(uint32_t to, const void* from, int bytes) {
  std::memset(emulator::shared + to, 0xee, 16);
  emulated_copies().back().push_back({emulator::shared + to, from, bytes});
}

inline void commit_copies() { emulated_copies().emplace_back(); }

template <int kPending>
void wait_copies() {
  EmulatedCopies& groups = emulated_copies();
  while (groups.size() > kPending + 1) {
    for (const EmulatedCopy& copy : groups.front()) {
      std::memset(copy.to, 0, 16);
      if (copy.bytes > 0) {
        std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
      }
    }
    groups.erase(groups.begin());
  }
}

inline void arrive_when_copied(uint64_t* barrier) {
  emulator::yield("nothing");
  arrive(barrier);
}

inline void copy_vector_part(uint32_t to, const void* from, int bytes) {
  char* const shared = emulator::shared + to;
  std::memset(shared, 0, 16);
  std::memcpy(shared, from, static_cast<size_t>(bytes));
}

inline void copy_word_part(uint32_t to, const void* from, bool exists) {
  std::memset(emulator::shared + to, 0, 4);
  if (exists) {
    std::memcpy(emulator::shared + to, from, 4);
  }
}

}  // namespace ostinato
