// Alignment of matrices.
#pragma once

#include <cstdint>

namespace ostinato {

// Whether TMA and 16-byte vectors can address every row, of this stride in bytes.
inline bool aligned(const void* pointer, int64_t stride) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride % 16 == 0;
}

}  // namespace ostinato
