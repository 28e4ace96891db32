// Which vectors of a tile of 8-bit keys or values a thread dequantises, and where they lie in the
// tile of operands.
//
// A vector is 16 elements: 16 bytes in global memory, and two vectors of 16 bytes of the operand.
// Two warps have half of a tile's rows each. Eight lanes, whose stores share a cycle, have four
// vectors of two adjacent rows, so that the swizzle spreads each store over all banks.
#pragma once

#include "shared_storage.cuh"

namespace ostinato::prefill {

inline constexpr int kKvWarps = 2;                  // that dequantise keys; as many do values
inline constexpr int kWarpRows = kKeys / kKvWarps;  // of a tile
inline constexpr int kRowSets = ceil_div(kWarpRows, 32);

template <int kWidth>
struct VectorsOf {
  static constexpr int kOfRow = kWidth / 16;
  static constexpr int kRowsAtOnce = 32 / kOfRow;         // by one instruction of a warp
  static constexpr int kCount = kWarpRows / kRowsAtOnce;  // of a lane
  static_assert(!kDequantizes || kOfRow == 4 || kOfRow == 8 || kOfRow == 16,
                "8-bit heads have 64, 128 or 256 elements");
  static_assert(!kDequantizes || kWarpRows % 32 == 0, "each lane has as many vectors");

  // Bits 0 and 1 of the lane are of the vector, and bit 2 is of the row. Of bits 3 and 4, the lower
  // ones are of the vector.
  __device__ __forceinline__ static constexpr unsigned vector(unsigned lane) {
    return lane % 4 + lane / 8 * 4 % kOfRow;
  }
  __device__ __forceinline__ static constexpr unsigned row(unsigned lane) {
    return lane / 4 % 2 + lane / 8 / (kOfRow / 4) * 2;
  }

  // Offset of one of the two operand vectors of a lane's i-th vector, from the warp's first row.
  // Rows are a sum of two parts whose bits do not overlap, that of the lane and that of i, so that
  // only constants depend on i.
  __device__ __forceinline__ static constexpr unsigned offset(unsigned i, unsigned half,
                                                              unsigned lane) {
    const unsigned to = 2 * vector(lane);
    const unsigned of_lane =
        to / 8 * kKeyStrip + row(lane) * kStripBytes + (to % 8 ^ row(lane)) * 16;
    const unsigned first_row = i * kRowsAtOnce;
    return (of_lane ^ (first_row % 8 + half) * 16) + first_row * kStripBytes;
  }

  // Offset to which a lane's first vector is copied before it is converted; the others follow by
  // rows. The second half of the row, and of odd rows the other four vectors: of eight lanes, each
  // has banks of its own.
  __device__ __forceinline__ static constexpr unsigned copied_offset(unsigned lane) {
    const unsigned to = (kOfRow + vector(lane)) ^ row(lane) % 2 * 4;
    return to / 8 * kKeyStrip + row(lane) * kStripBytes + to % 8 * 16;
  }
};

template <class What>
using KvVectors = VectorsOf<std::is_same_v<What, Keys> ? kDim : kValueDim>;

}  // namespace ostinato::prefill
