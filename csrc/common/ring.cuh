// A position in a ring of slots, each guarded by barriers.
#pragma once

#include <cstdint>

namespace ostinato {

// `parity` says how often the ring has gone round: that of the slot's barriers.
struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }

  __device__ __forceinline__ void advance(int slots, int steps) {
    const int ahead = slot + steps;
    const int rounds = ahead / slots;
    slot = ahead - rounds * slots;
    parity ^= rounds & 1;
  }
};

}  // namespace ostinato
