// The arguments of collectives over peer memory, in plain C++ without CUDA or torch headers.
// Strides count elements, sizes are logical, pointers are device pointers.
#pragma once

#include "common/fields.h"

namespace ostinato {

inline constexpr int kMostRanks = 8;

// State of a rank between launches, in memory of its own GPU. runtime/ops/collective/peers.py
// writes it, in this order.
struct CollectiveControl {
  // Of all ranks, in rank order, as this GPU addresses them: three regions of region_vectors each,
  // all bits of which are 1 at first.
  uint8_t* buffers[kMostRanks];
  // In memory of the host: [0] nonzero: stop waiting, which the host writes; [1] the error, too.
  uint32_t* host;
  uint32_t epoch;  // launches that have ended
  uint32_t ended;  // CTAs of the present launch that have ended
  // 0; 1 + the rank that did not come in time; or kStopped. From then on nobody waits.
  uint32_t error;
  uint32_t used;  // vectors of its region that the last launch used
};
inline constexpr uint32_t kStopped = 0x100;

// sum: out = the sum of x over ranks; rms_norm: total = that sum (+ residual), out = its norm,
// which may be quantised; gather: out[r] = x of rank r.
struct CollectiveParams {
  OSTINATO_FIELDS_BEGIN(CollectiveParams);
  OSTINATO_FIELD(const void*, x);  // [m, k]
  OSTINATO_FIELD(int64_t, x_stride);
  OSTINATO_OPTIONAL(const void*, residual);  // [m, k], or null (rms_norm only)
  OSTINATO_OPTIONAL(int64_t, residual_stride);
  OSTINATO_OPTIONAL(void*, total);  // [m, k] (rms_norm only)
  OSTINATO_OPTIONAL(int64_t, total_stride);
  OSTINATO_OPTIONAL(const void*, norm_weight);  // [k] (rms_norm only)
  OSTINATO_OPTIONAL(float, eps);
  OSTINATO_OPTIONAL(const float*, static_scale);  // as those of QuantizeParams, down to
  OSTINATO_OPTIONAL(const int32_t*, zero_point);
  OSTINATO_OPTIONAL(float*, scale_out);
  OSTINATO_OPTIONAL(int64_t, scale_stride);
  OSTINATO_OPTIONAL(int32_t, power_of_two);  // this one
  OSTINATO_FIELD(void*, out);                // [m, k]; of gather [size, m, k]
  OSTINATO_FIELD(int64_t, out_stride);
  OSTINATO_OPTIONAL(int64_t, out_rank_stride);  // (gather only)
  OSTINATO_FIELD(int32_t, m);
  OSTINATO_FIELD(int32_t, k);
  // One element, or null: rows from this index on are padding: neither sent nor written. Written
  // before the preceding kernel began, and equal on all ranks.
  OSTINATO_OPTIONAL(const int32_t*, n_active);
  OSTINATO_OPTIONAL(int32_t, first_row);  // the index of row 0, where a launch has a part of them
  OSTINATO_FIELD(CollectiveControl*, control);
  OSTINATO_FIELD(int64_t, region_vectors);  // 16-byte vectors of one of the three regions
  OSTINATO_FIELD(int32_t, rank);
  OSTINATO_FIELD(int32_t, size);
  // 1: each row is summed by one rank, which sends the sum; 0: by every rank.
  OSTINATO_FIELD(int32_t, two_shot);
  OSTINATO_FIELD(int32_t, sms);         // how many of the GPU's this rank may fill
  OSTINATO_FIELD(int64_t, timeout_ns);  // how long to wait for another rank
  // 1: the next kernel may start early. 0 where ranks share a GPU: it could take the place of what
  // another rank waits for.
  OSTINATO_OPTIONAL(int32_t, early_successor);
  OSTINATO_OPTIONAL(int32_t, pdl);  // 1: launched with programmatic stream serialization
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
