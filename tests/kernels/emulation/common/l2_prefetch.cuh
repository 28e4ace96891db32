// What the L2 is asked to fetch, kept to be looked at.
#pragma once

#include <utility>
#include <vector>

namespace ostinato {

inline std::vector<std::pair<const void*, int>> prefetched;

inline void prefetch_to_l2(const void* address, int bytes) {
  prefetched.emplace_back(address, bytes);
}

}  // namespace ostinato
