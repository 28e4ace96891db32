// Copies by threads, done at once; that they have arrived is told later.
#pragma once

#include "mbarrier.cuh"

namespace ostinato {

inline bool elect_lane() {
  __syncwarp();
  return emulator::lane() == 0;
}

inline void copy_vector(uint32_t to, const void* from) {
  std::memcpy(emulator::shared + to, from, 16);
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
