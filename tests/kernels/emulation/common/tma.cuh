// Copies of boxes, byte by byte, with the 128-byte swizzle or none, some time after they are asked
// for.
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

inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// Sizes and boxes of the first dimension in bytes.
struct EmulatedMap {
  char* data;
  int element;  // bytes
  bool swizzles;
  TensorMapShape<5> shape;

  uint32_t place(uint32_t address) const { return swizzles ? swizzled(address) : address; }
};
static_assert(sizeof(EmulatedMap) <= sizeof(CUtensorMap));

template <int kRank>
cudaError_t encode_tensor_map(CUtensorMap* map, const void* data,
                              const TensorMapShape<kRank>& shape, CUtensorMapSwizzle swizzle,
                              CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_UINT8,
                              CUtensorMapL2promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B) {
  EmulatedMap made = {static_cast<char*>(const_cast<void*>(data)),
                      type == CU_TENSOR_MAP_DATA_TYPE_UINT64   ? 8
                      : type == CU_TENSOR_MAP_DATA_TYPE_UINT16 ? 2
                                                               : 1,
                      swizzle != CU_TENSOR_MAP_SWIZZLE_NONE,
                      {{1, 1, 1, 1, 1}, {}, {1, 1, 1, 1, 1}}};
  for (int d = 0; d < kRank; ++d) {
    made.shape.size[d] = shape.size[d];
    made.shape.stride[d] = shape.stride[d];
    made.shape.box[d] = shape.box[d];
  }
  made.shape.size[0] *= made.element;
  made.shape.box[0] *= made.element;
  std::memcpy(static_cast<void*>(map), &made, sizeof(made));
  return cudaSuccess;
}
inline void prefetch_tensor_map(const CUtensorMap& /*map*/) {}

// Calls visit(offset in the box, address) of each byte; the address is null outside of the tensor.
template <class Visit>
void visit_box(const EmulatedMap& map, const int (&at)[5], const Visit& visit) {
  const auto& [size, stride, box] = map.shape;
  const int64_t first = static_cast<int64_t>(at[0]) * map.element;
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
    for (int64_t x = first; x < first + static_cast<int64_t>(box[0]); ++x, ++bytes) {
      const bool exists = inside && x >= 0 && x < static_cast<int64_t>(size[0]);
      visit(bytes, exists ? map.data + offset + x : nullptr);
    }
  }
}

inline EmulatedMap map_of(const CUtensorMap& map, const int (&place)[5], uint32_t address) {
  EmulatedMap made;
  std::memcpy(&made, static_cast<const void*>(&map), sizeof(made));
  if (reinterpret_cast<uintptr_t>(made.data + place[0] * made.element) % 16 != 0) {
    emulator::fail("a copy by TMA begins within 16 bytes: an illegal instruction");
  }
  if (address % 128 != 0) {
    emulator::fail("TMA copies to an address that is no multiple of 128");
  }
  return made;
}

struct Place {
  int of[5];
};

// What lies outside of the tensor arrives as zeros.
inline void tma_load_to(int rank, void* to, const CUtensorMap& map, const int (&place)[5],
                        uint64_t* barrier) {
  const uint32_t address = shared_address(to), barrier_address = shared_address(barrier);
  const EmulatedMap from = map_of(map, place, address);
  Place at;
  std::copy(place, place + 5, at.of);
  emulator::defer([=] {
    char* const shared = emulator::shared_of(rank);
    uint32_t bytes = 0;
    visit_box(from, at.of, [&](uint32_t offset, const char* global) {
      shared[from.place(address + offset)] = global != nullptr ? *global : 0;
      bytes = offset + 1;
    });
    tell_barrier(rank, barrier_address, 0, -static_cast<long>(bytes));
  });
}
inline void tma_load(void* to, const CUtensorMap& map, const int (&place)[5], uint64_t* barrier) {
  tma_load_to(emulator::rank, to, map, place, barrier);
}
inline void tma_load_multicast(void* to, const CUtensorMap& map, int x, int y, int z,
                               uint64_t* barrier, uint16_t ctas) {
  for (int rank = 0; ctas >> rank != 0; ++rank) {
    if ((ctas >> rank & 1) != 0) {
      tma_load_to(rank, to, map, {x, y, z, 0, 0}, barrier);
    }
  }
}
inline void tma_load(void* to, const CUtensorMap& map, int x, int y, int z, uint64_t* barrier) {
  tma_load(to, map, {x, y, z, 0, 0}, barrier);
}

inline std::map<uint64_t, int> emulated_stores;  // by thread, that have not read shared memory

inline uint64_t emulated_thread() { return barrier_key(emulator::rank, threadIdx.x); }

inline void tma_store(const CUtensorMap& map, const void* from, int x, int y, int z) {
  const uint64_t thread = emulated_thread();
  const int rank = emulator::rank;
  const uint32_t address = shared_address(from);
  const Place at = {{x, y, z, 0, 0}};
  const EmulatedMap to = map_of(map, at.of, address);
  ++emulated_stores[thread];
  emulator::defer([=] {
    const char* const shared = emulator::shared_of(rank);
    visit_box(to, at.of, [&](uint32_t offset, char* global) {
      if (global != nullptr) {
        *global = shared[to.place(address + offset)];
      }
    });
    --emulated_stores[thread];
    emulator::progress();
  });
}
inline void commit_stores() {}
template <int kPending>
void wait_stores_read() {
  static_assert(kPending == 0, "groups are not told apart");
  while (emulated_stores[emulated_thread()] > 0) {
    emulator::yield("its stores");
  }
}
inline void fence_shared_for_tma() {}

}  // namespace ostinato
