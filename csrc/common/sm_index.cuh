// Which SM a thread runs on.
#pragma once

#include <cstdint>

namespace ostinato {

// Its number, counted by the device.
__device__ __forceinline__ uint32_t sm_index() {
  uint32_t index;
  asm("mov.u32 %0, %%smid;" : "=r"(index));
  return index;
}

}  // namespace ostinato
