// Which vectors of a tile of 8-bit keys or values a thread dequantises, and where they lie in the
// tile of operands.
//
// A vector is 16 elements: 16 bytes in global memory, and two vectors of 16 bytes of the operand.
// Two warps have half of a tile's rows each. A warp has four vectors of eight rows at once. Eight
// lanes, whose stores share a cycle, have two adjacent rows, so that the swizzle spreads each store
// over all banks.
#pragma once

#include "shared_storage.cuh"

namespace ostinato::prefill {

inline constexpr int kKvWarps = 2;                  // that dequantise keys; as many do values
inline constexpr int kWarpRows = kKeys / kKvWarps;  // of a tile
inline constexpr int kRowSets = ceil_div(kWarpRows, 32);

template <int kWidth>
struct VectorsOf {
  static constexpr int kOfRow = kWidth / 16;
  static constexpr int kParts = kOfRow / 4;                        // of a row: four vectors
  static constexpr int kRowsAtOnce = 8;                            // by one instruction of a warp
  static constexpr int kCount = kWarpRows / kRowsAtOnce * kParts;  // of a lane
  static_assert(!kDequantizes || kOfRow == 4 || kOfRow == 8 || kOfRow == 16,
                "8-bit heads have 64, 128 or 256 elements");
  static_assert(!kDequantizes || kWarpRows % 32 == 0, "each lane has as many vectors");

  // The lane's i-th vector: its row is first_row(i) + row(lane).
  __device__ __forceinline__ static constexpr unsigned first_row(unsigned i) {
    return i / kParts * kRowsAtOnce;
  }
  __device__ __forceinline__ static constexpr unsigned row(unsigned lane) { return lane / 4; }
  // Its first byte of the row is i's plus the lane's.
  __device__ __forceinline__ static constexpr unsigned byte_of(unsigned i) {
    return i % kParts * 64;
  }
  __device__ __forceinline__ static constexpr unsigned byte_of_lane(unsigned lane) {
    return lane % 4 * 16;
  }

  // Offset of one of the two operand vectors of a lane's i-th vector, from the warp's first row.
  __device__ __forceinline__ static constexpr unsigned offset(unsigned i, unsigned half,
                                                              unsigned lane) {
    const unsigned of_lane = row(lane) * kStripBytes + ((2 * (lane % 4) + half) ^ row(lane)) * 16;
    return of_lane + i % kParts * kKeyStrip + first_row(i) * kStripBytes;
  }

  // Offset to which a lane's i-th vector is copied before it is converted: in the second half of
  // the row, and of odd rows the other four vectors: of eight lanes, each has banks of its own.
  __device__ __forceinline__ static constexpr unsigned copied_offset(unsigned i, unsigned lane) {
    const unsigned to = (kOfRow + i % kParts * 4 + lane % 4) ^ row(lane) % 2 * 4;
    return to / 8 * kKeyStrip + (first_row(i) + row(lane)) * kStripBytes + to % 8 * 16;
  }
};

template <class What>
using KvVectors = VectorsOf<std::is_same_v<What, Keys> ? kDim : kValueDim>;

}  // namespace ostinato::prefill
