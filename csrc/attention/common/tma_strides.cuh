// Strides of tensors as TMA takes them.
#pragma once

#include <cstdint>

namespace ostinato {

// From one element of a dimension to the next, in bytes. TMA steps over a dimension of one element
// too; such a stride may be anything, but not 0.
template <class T>
uint64_t map_step(int64_t stride, int64_t size) {
  return size > 1 ? static_cast<uint64_t>(stride) * sizeof(T) : 16;
}

}  // namespace ostinato
