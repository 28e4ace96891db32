// The arguments of timing the L2: plain C++, without a header of CUDA or torch. Strides count
// elements, sizes are logical, pointers are device pointers.
#pragma once

#include "common/fields.h"

namespace ostinato {

// How many clocks SMs take to reach places in the L2 (csrc/l2/probe.cu). What is there is left as
// it is.
struct L2ProbeParams {
  OSTINATO_FIELDS_BEGIN(L2ProbeParams);
  OSTINATO_FIELD(void*, base);
  OSTINATO_FIELD(const int64_t*, offsets);  // [count], of bytes from base, multiples of 4
  // [sms, count]: of each SM for each; or [count]: each of one SM only
  OSTINATO_FIELD(int32_t*, clocks);
  OSTINATO_FIELD(int32_t*, sms);  // [sms]: who has the row or, of the latter, every sms-th place
  OSTINATO_FIELD(int32_t, count);
  OSTINATO_FIELD(int32_t, by_all);  // 1: each place by every SM
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
