// Groups of a warpgroup's MMAs: each runs at the time of its issue, or as late as a wait allows.
#pragma once

#include <deque>
#include <map>
#include <vector>

#include "tma.cuh"

namespace ostinato {

using MmaGroup = std::vector<std::function<void()>>;
struct PendingMmas {
  MmaGroup open;
  std::deque<MmaGroup> committed;
};
inline std::map<uint64_t, PendingMmas> emulated_mmas;

inline PendingMmas& pending_mmas() { return emulated_mmas[emulated_thread()]; }

inline void run_mmas(const MmaGroup& group) {
  for (const auto& mma : group) {
    mma();
  }
}

inline void begin_multiplying() {}
// The lanes of a warp have the same MMAs at the same time.
inline void commit_multiplication() {
  PendingMmas& mmas = pending_mmas();
  const bool soon =
      __shfl_sync(0xffffffff, static_cast<int>(emulator::random_number() % 2), 0) != 0;
  if (soon && mmas.committed.empty()) {
    run_mmas(mmas.open);
    mmas.committed.push_back({});
  } else {
    mmas.committed.push_back(std::move(mmas.open));
  }
  mmas.open.clear();
}
// MMAs are of a warpgroup: no warp sees the end of its own before the others'.
template <int kPending>
void wait_multiplied() {
  __syncwarp();
  PendingMmas& mmas = pending_mmas();
  while (mmas.committed.size() > kPending) {
    run_mmas(mmas.committed.front());
    mmas.committed.pop_front();
  }
  constexpr int kFirstFreeBarrier = 8;  // of the named ones
  constexpr int kMmaThreads = 128;      // of a warpgroup
  emulator::sync_at_named(kFirstFreeBarrier + threadIdx.x / kMmaThreads, kMmaThreads);
}

}  // namespace ostinato
