// Barriers of a cluster, by the emulator's.
#pragma once

#include "emulator.h"

namespace ostinato {

inline void sync_cluster() {
  emulator::arrive_in_cluster();
  emulator::wait_for_cluster();
}

}  // namespace ostinato
