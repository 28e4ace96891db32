// A position in a ring of slots (pipeline stages), each guarded by barriers.
#pragma once

#include <cstdint>

namespace ostinato {

// `parity` counts the rounds through the ring modulo 2: the phase of the slot's barriers.
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
