// Copies of runs of bytes, some time after they are asked for.
#pragma once

#include "mbarrier.cuh"

namespace ostinato {

inline void bulk_copy_once(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  const int rank = emulator::rank;
  const uint32_t to = shared_address(shared), at = shared_address(barrier);
  if (to % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) {
    emulator::fail("a bulk copy that is not of whole vectors");
  }
  emulator::defer([=] {
    std::memcpy(emulator::shared_of(rank) + to, global, bytes);
    tell_barrier(rank, at, 0, -static_cast<long>(bytes));
  });
}

}  // namespace ostinato
