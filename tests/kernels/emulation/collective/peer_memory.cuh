// Words that ranks send to each other arrive one by one, late and in any order.
#pragma once

#include <cstdint>

#include "emulator.h"

namespace ostinato {

inline void store_to_peer(uint4* to, const uint4& words) {
  uint32_t* const at = reinterpret_cast<uint32_t*>(to);
  const uint32_t sent[] = {words.x, words.y, words.z, words.w};
  for (int i = 0; i < 4; ++i) {
    emulator::defer([=, word = sent[i]] { at[i] = word; });
  }
}

inline uint4 load_from_peer(const uint4* from) {
  emulator::yield("another rank");
  const uint32_t* const at = reinterpret_cast<const uint32_t*>(from);
  return make_uint4(at[0], at[1], at[2], at[3]);
}

inline void store_word(uint32_t* to, uint32_t word) {
  *to = word;
  emulator::progress();
}

inline uint32_t load_word(const uint32_t* from) { return *from; }

template <typename T>
T* load_address(T* const* from) {
  return *from;
}

// Passes as threads look at it.
inline uint64_t nanoseconds() {
  static uint64_t now = 1;
  emulator::progress();
  return ++now;
}

}  // namespace ostinato
