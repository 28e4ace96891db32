// Copies of boxes, byte by byte with the 128-byte swizzle, some time after they are asked for.
#pragma once

#include "check.h"
#include "mbarrier.cuh"

namespace ostinato {

template <int kRank>
struct TensorMapShape {
  uint64_t size[kRank];
  uint64_t stride[kRank];  // bytes; of the first dimension 1
  uint32_t box[kRank];
};

struct EmulatedMap {
  char* data;
  TensorMapShape<5> shape;
};
static_assert(sizeof(EmulatedMap) <= sizeof(CUtensorMap));

inline cudaError_t encode_tensor_map(CUtensorMap* map, const void* data,
                                     const TensorMapShape<5>& shape, CUtensorMapSwizzle,
                                     CUtensorMapDataType, CUtensorMapL2promotion) {
  const EmulatedMap made = {static_cast<char*>(const_cast<void*>(data)), shape};
  std::memcpy(static_cast<void*>(map), &made, sizeof(made));
  return cudaSuccess;
}
inline void prefetch_tensor_map(const CUtensorMap& /*map*/) {}

inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// What lies outside of the tensor arrives as zeros.
inline void tma_load(void* to, const CUtensorMap& map, const int (&place)[5], uint64_t* barrier) {
  EmulatedMap from;
  std::memcpy(&from, static_cast<const void*>(&map), sizeof(from));
  int at[5];
  std::copy(place, place + 5, at);
  const int rank = emulator::rank;
  const uint32_t address = shared_address(to), barrier_address = shared_address(barrier);
  if (reinterpret_cast<uintptr_t>(from.data + at[0]) % 16 != 0) {
    emulator::fail("a copy by TMA begins within 16 bytes: an illegal instruction");
  }
  if (address % 128 != 0) {
    emulator::fail("TMA copies to an address that is no multiple of 128");
  }
  emulator::defer([=] {
    char* const shared = emulator::shared_of(rank);
    const auto& [size, stride, box] = from.shape;
    uint32_t bytes = 0;
    for (uint32_t row = 0; row < box[4] * box[3] * box[2] * box[1]; ++row) {
      uint32_t rest = row;
      int64_t offset = 0;
      bool inside = true;
      for (int d = 1; d < 5; rest /= box[d], ++d) {
        const int64_t x = at[d] + static_cast<int64_t>(rest % box[d]);
        inside &= x >= 0 && x < static_cast<int64_t>(size[d]);
        offset += x * static_cast<int64_t>(stride[d]);
      }
      for (int64_t x = at[0]; x < at[0] + static_cast<int64_t>(box[0]); ++x, ++bytes) {
        const bool exists = inside && x >= 0 && x < static_cast<int64_t>(size[0]);
        shared[swizzled(address + bytes)] = exists ? from.data[offset + x] : 0;
      }
    }
    tell_barrier(rank, barrier_address, 0, -static_cast<long>(bytes));
  });
}

}  // namespace ostinato
