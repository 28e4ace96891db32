// Common arguments of attention kernels: tensors and L2 partitions. Strides count elements,
// pointers are device pointers.
#pragma once

#include <cstdint>

namespace ostinato {

// Heads of tokens: [tokens, heads, dim], the elements of a head contiguous.
struct Heads {
  void* data;
  int64_t stride;  // from token to token
  int64_t head_stride;
};
constexpr const char* kind_of(const Heads*) { return "pqq"; }

// Data of every head and slot of a paged cache: [pages, page_size, heads_kv, ...].
struct Slots {
  void* data;
  int64_t page_stride;
  int64_t stride;  // from slot to slot within a page
  int64_t head_stride;
};
constexpr const char* kind_of(const Slots*) { return "pqqq"; }

// The mapping of SMs and pages to L2 partitions, if known. Reads from the other partition cross the
// chip, which takes energy (docs/notebooks/l2_partition.md). A hint: results do not depend on it.
struct L2Partition {
  static constexpr int kSmWords = 8;
  uint32_t sms[kSmWords];  // bit i % 32 of word i / 32: the partition that SM i is on
  uint32_t pages, heads;   // keys and values of a head in a page are in the partition that is the
                           // parity of (page & pages) and (head & heads); heads = 0: not known
};
constexpr const char* kind_of(const L2Partition*) { return "IIIIIIIIII"; }

}  // namespace ostinato
