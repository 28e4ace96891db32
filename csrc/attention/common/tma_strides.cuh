// Strides of tensors for TMA.
#pragma once

#include <cstdint>

namespace ostinato {

// The stride of a dimension in bytes. The stride of a dimension of one element is arbitrary, but
// TMA does not accept 0.
template <class T>
uint64_t map_step(int64_t stride, int64_t size) {
  return size > 1 ? static_cast<uint64_t>(stride) * sizeof(T) : 16;
}

}  // namespace ostinato
