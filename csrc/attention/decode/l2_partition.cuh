// Maps heads and CTAs to L2 partitions, if the L2 partition of each page is known: a CTA reads
// pages from the partition of its own SM. Reading from the other partition costs energy and goes
// through a narrow link across the chip (docs/notebooks/l2_partition.md).
//
// Each partition holds partition of the heads of a page. The scheduler's head indices are permuted
// per sequence: even indices are the heads in partition 0, odd indices those in partition 1. CTAs
// are numbered so that CTAs of partition 0 have even numbers, hence even lines and even head
// indices. The first page decides for the whole sequence: if other pages differ, reads are slower,
// and results are the same.
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

// Whether the heads divide evenly between the partitions, by their lowest bit in `heads`.
inline bool divides_heads(const L2Partition& l2_partition, int heads) {
  const uint32_t lowest = l2_partition.heads & -l2_partition.heads;
  return lowest != 0 && lowest < (1u << 30) && heads % static_cast<int>(2 * lowest) == 0;
}

// The partition that holds head 0 of a page.
__host__ __device__ __forceinline__ uint32_t partition_of_page(const L2Partition& l2_partition,
                                                               int page) {
  return parity(static_cast<uint32_t>(page) & l2_partition.pages);
}

// The head with index `line_head` on the line, for a page whose head 0 is in partition `first`.
__host__ __device__ __forceinline__ int head_on_line(const L2Partition& l2_partition, int line_head,
                                                     uint32_t first) {
  const uint32_t lowest = l2_partition.heads & -l2_partition.heads;
  const uint32_t index = static_cast<uint32_t>(line_head) / 2,
                 partition = line_head % 2;  // its partition, if head 0 is in partition 0
  const uint32_t below = index & (lowest - 1);
  const uint32_t head = 2 * (index - below) + below;  // with the bit `lowest` cleared
  return static_cast<int>(parity(head & l2_partition.heads) == (first ^ partition) ? head
                                                                                   : head + lowest);
}

// Tickets that CTAs take from one counter, which counts the CTAs of each partition separately.
struct PartitionTickets {
  static constexpr uint32_t kOne = 1 << 16;  // one ticket of partition 1

  static __host__ __device__ __forceinline__ uint32_t step(uint32_t partition) {
    return partition ? kOne : 1;
  }
  static __host__ __device__ __forceinline__ uint32_t count(uint32_t taken) {
    return taken / kOne + taken % kOne;
  }
  // The number of the CTA whose atomic add returned `taken`, with `each` numbers per partition. If
  // more CTAs run on a partition than it has numbers, the surplus CTAs get the last numbers of the
  // other partition, which has as many CTAs too few.
  static __host__ __device__ __forceinline__ int number(uint32_t taken, uint32_t partition,
                                                        int each) {
    const int rank = static_cast<int>(partition ? taken / kOne : taken % kOne);
    const bool fits = rank < each;
    return 2 * (fits ? rank : 2 * each - 1 - rank) +
           static_cast<int>(fits ? partition : partition ^ 1);
  }
};

}  // namespace ostinato::decode
