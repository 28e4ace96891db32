// Barriers that count arrivals and bytes, by CTA and address: what they guard is not looked at.
#pragma once

#include <map>

#include "emulator.h"

namespace ostinato {

struct EmulatedBarrier {
  int count, pending;
  long bytes;
  uint32_t phase;
};

inline std::map<uint64_t, EmulatedBarrier> emulated_barriers;

inline void forget_barriers() { emulated_barriers.clear(); }

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - emulator::shared);
}

inline uint64_t barrier_key(int rank, uint32_t address) {
  return static_cast<uint64_t>(rank) << 32 | address;
}

inline EmulatedBarrier& barrier_at(int rank, uint32_t address) {
  const auto found = emulated_barriers.find(barrier_key(rank, address));
  if (found == emulated_barriers.end()) {
    emulator::fail("a barrier that nobody has initialised");
  }
  return found->second;
}

// Arrivals and bytes of which the barrier hears.
inline void tell_barrier(int rank, uint32_t address, int arrivals, long bytes) {
  EmulatedBarrier& barrier = barrier_at(rank, address);
  barrier.pending -= arrivals;
  barrier.bytes += bytes;
  if (barrier.pending < 0) {
    emulator::fail("more arrivals than a barrier expects");
  }
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.phase ^= 1;
    barrier.pending = barrier.count;
  }
  emulator::progress();
}

inline void init_barrier(uint64_t* barrier, int arrivals) {
  emulated_barriers[barrier_key(emulator::rank, shared_address(barrier))] = {arrivals, arrivals, 0,
                                                                             0};
}
inline void forget_barrier(uint64_t* barrier) {
  emulated_barriers.erase(barrier_key(emulator::rank, shared_address(barrier)));
}
inline void fence_barrier_init() {}
inline void arrive(uint64_t* barrier) {
  tell_barrier(emulator::rank, shared_address(barrier), 1, 0);
}
// Of addresses in a cluster.
constexpr int kEmulatedRankBit = 24;
inline void arrive_remote(uint32_t address) {
  tell_barrier(static_cast<int>(address >> kEmulatedRankBit),
               address & ((1u << kEmulatedRankBit) - 1), 1, 0);
}
inline void arrive_expecting(uint64_t* barrier, uint32_t bytes) {
  tell_barrier(emulator::rank, shared_address(barrier), 1, bytes);
}
inline void wait(uint64_t* barrier, uint32_t parity) {
  const uint32_t address = shared_address(barrier);
  while (barrier_at(emulator::rank, address).phase == parity) {
    emulator::yield("a barrier", address);
  }
  emulator::progress();
  if (emulator::random_number() % 4 == 0) {
    emulator::yield("nothing");
  }
}
// Who asks waits for another answer, or does something else.
inline bool is_complete(uint64_t* barrier, uint32_t parity) {
  const uint32_t address = shared_address(barrier);
  emulator::yield("a barrier's phase", address);
  return barrier_at(emulator::rank, address).phase != parity;
}
inline void sync_named(int barrier, int threads) { emulator::sync_at_named(barrier, threads); }
inline void arrive_named(int barrier, int threads) { emulator::arrive_at_named(barrier, threads); }

}  // namespace ostinato
