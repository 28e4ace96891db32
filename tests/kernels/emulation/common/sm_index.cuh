// Of 32 SMs any.
#pragma once

#include <cstdint>

namespace ostinato {

inline uint32_t sm_index() { return blockIdx.x * 2654435761u >> 27; }

}  // namespace ostinato
