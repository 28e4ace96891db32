// Maps heads and CTAs to L2 partitions, where the partition of each page is known: a CTA reads
// pages from the partition of its own SM. Reading from the other partition takes more energy and a
// narrow path across the chip (docs/halves.md).
//
// Both partitions hold equally many heads of a page. So the scheduler's heads are indices: the even
// ones are, for each sequence, its heads in partition 0, the odd ones those in partition 1. CTAs
// are numbered so that those of partition 0 have even numbers, and with them even lines and heads.
// A sequence counts as where its first page is: other pages elsewhere cost time, and change no
// result.
#pragma once

#include <cstdint>

#include "attention/common/params.h"

namespace ostinato::decode {

__host__ __device__ __forceinline__ uint32_t parity(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __popc(bits) & 1;
#else
  return __builtin_popcount(bits) & 1;
#endif
}

// Whether as many of the heads are in one half as in the other, and are told by their number.
inline bool divides_heads(const L2Partition& halves, int heads) {
  const uint32_t lowest = halves.heads & -halves.heads;
  return lowest != 0 && lowest < (1u << 30) && heads % static_cast<int>(2 * lowest) == 0;
}

// The half that holds head 0 of a page.
__host__ __device__ __forceinline__ uint32_t partition_of_page(const L2Partition& halves,
                                                               int page) {
  return parity(static_cast<uint32_t>(page) & halves.pages);
}

// The head of a place, of a page whose head 0 is in the half `first`.
__host__ __device__ __forceinline__ int head_on_line(const L2Partition& halves, int line_head,
                                                     uint32_t first) {
  const uint32_t lowest = halves.heads & -halves.heads;
  const uint32_t index = static_cast<uint32_t>(line_head) / 2,
                 half = line_head % 2;  // in that half
  const uint32_t below = index & (lowest - 1);
  const uint32_t head = 2 * (index - below) + below;  // without the bit that tells
  return static_cast<int>(parity(head & halves.heads) == (first ^ half) ? head : head + lowest);
}

// What CTAs take one by one, each half its own: a count for each half.
struct PartitionTickets {
  static constexpr uint32_t kOne = 1 << 16;  // of half 1

  static __host__ __device__ __forceinline__ uint32_t step(uint32_t half) {
    return half ? kOne : 1;
  }
  static __host__ __device__ __forceinline__ uint32_t count(uint32_t taken) {
    return taken / kOne + taken % kOne;
  }
  // The number of a CTA that found `taken`, of 2 * `each`. Those of a half that are too many get
  // the other's last ones, which as many are missing for.
  static __host__ __device__ __forceinline__ int number(uint32_t taken, uint32_t half, int each) {
    const int rank = static_cast<int>(half ? taken / kOne : taken % kOne);
    const bool fits = rank < each;
    return 2 * (fits ? rank : 2 * each - 1 - rank) + static_cast<int>(fits ? half : half ^ 1);
  }
};

}  // namespace ostinato::decode
