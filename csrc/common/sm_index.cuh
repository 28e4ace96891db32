// The index of the SM that runs a thread.
#pragma once

#include <cstdint>

namespace ostinato {

// As numbered by the device (%smid).
__device__ __forceinline__ uint32_t sm_index() {
  uint32_t index;
  asm("mov.u32 %0, %%smid;" : "=r"(index));
  return index;
}

}  // namespace ostinato
