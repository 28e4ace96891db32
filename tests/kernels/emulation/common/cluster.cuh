// The CTAs of a cluster: an address of one of them has its rank in the highest bits.
#pragma once

#include <cstdint>

#include "mbarrier.cuh"

namespace ostinato {

inline void sync_cluster() {
  emulator::arrive_in_cluster();
  emulator::wait_for_cluster();
}
inline void sync_cluster_relaxed() { sync_cluster(); }
inline uint32_t cluster_rank() { return static_cast<uint32_t>(emulator::rank); }
inline uint32_t remote_address(uint32_t address, uint32_t rank) {
  return address | rank << kEmulatedRankBit;
}

}  // namespace ostinato
