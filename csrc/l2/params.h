// Arguments of the L2 probe, in plain C++ without CUDA or torch headers. Strides count elements,
// sizes are logical, pointers are device pointers.
#pragma once

#include "common/fields.h"

namespace ostinato {

// Measures the latency, in clocks, from SMs to addresses in L2 (csrc/l2/probe.cu). Does not change
// memory.
struct L2ProbeParams {
  OSTINATO_FIELDS_BEGIN(L2ProbeParams);
  OSTINATO_FIELD(void*, base);
  OSTINATO_FIELD(const int64_t*, offsets);  // [count] in bytes from base, multiples of 4
  // [sms, count]: of every SM to every address; or [count]: of one SM to each address
  OSTINATO_FIELD(int32_t*, clocks);
  // [sms]: the SM that has the row or, with [count], every sms-th address
  OSTINATO_FIELD(int32_t*, sms);
  OSTINATO_FIELD(int32_t, count);
  OSTINATO_FIELD(int32_t, by_all);  // 1: every SM measures every address
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
