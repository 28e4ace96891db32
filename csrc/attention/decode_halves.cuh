// Who works on what where it is known which half of the L2 holds a page: what the half of the SM
// holds first. The other half's comes across the chip, which takes energy, by a way that is narrow
// (docs/halves.md).
//
// Both halves hold as many heads of a page. So each half has as many segments, which its CTAs take
// in order; those that are left when they have ended are for all. A sequence is taken to be where
// its first page is: where its pages are not, reading them costs more, and nothing else changes.
#pragma once

#include <cstdint>

#include "attention/params.h"

namespace ostinato::decode {

__host__ __device__ __forceinline__ uint32_t parity(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __popc(bits) & 1;
#else
  return __builtin_popcount(bits) & 1;
#endif
}

// Whether as many of the heads are in one half as in the other, and are told by their number.
inline bool divides_heads(const Halves& halves, int heads) {
  const uint32_t lowest = halves.heads & -halves.heads;
  return lowest != 0 && lowest < (1u << 30) && heads % static_cast<int>(2 * lowest) == 0;
}

// The half that holds head 0 of a page.
__host__ __device__ __forceinline__ uint32_t half_of_page(const Halves& halves, int page) {
  return parity(static_cast<uint32_t>(page) & halves.pages);
}

// Of the heads of a page that `half` holds, counted from 0; `first` is the half that holds head 0.
__host__ __device__ __forceinline__ int head_in_half(const Halves& halves, int index,
                                                     uint32_t first, uint32_t half) {
  const uint32_t lowest = halves.heads & -halves.heads;
  const uint32_t below = static_cast<uint32_t>(index) & (lowest - 1);
  const uint32_t head = 2 * (static_cast<uint32_t>(index) - below) + below;  // without that bit
  return static_cast<int>(parity(head & halves.heads) == (first ^ half) ? head : head + lowest);
}

// Where a CTA begins: its place among those that begin in a half.
struct HalfPlace {
  uint32_t half;
  int rank;
};

// The numbers that CTAs of a launch take, each half from 0 on: a count of each half's.
struct HalfTickets {
  static constexpr uint32_t kOne = 1 << 16;  // of the second half

  static __host__ __device__ __forceinline__ uint32_t step(uint32_t half) {
    return half ? kOne : 1;
  }
  static __host__ __device__ __forceinline__ int rank(uint32_t taken, uint32_t half) {
    return static_cast<int>(half ? taken / kOne : taken % kOne);
  }
  static __host__ __device__ __forceinline__ uint32_t count(uint32_t taken) {
    return taken / kOne + taken % kOne;
  }
  // Each half has `places`, all CTAs are 2 * places. Those of a half that are too many begin in the
  // other, where as many are missing, from its last place on.
  static __host__ __device__ __forceinline__ HalfPlace place(uint32_t half, int rank, int places) {
    return rank < places ? HalfPlace{half, rank} : HalfPlace{half ^ 1, 2 * places - 1 - rank};
  }
};

}  // namespace ostinato::decode
