// The arguments of timing the L2, as a plain struct shared by the kernel and the loader
// (csrc/bindings/module.cpp). Plain C++: no CUDA and no torch header, so that the host compiler
// builds the loader alone. Sizes are logical, pointers are device pointers.
#pragma once

#include <cstdint>

namespace ostinato {

// How many clocks SMs take to reach places in the L2 (csrc/l2/probe.cu). What is there is left as
// it is.
struct L2ProbeParams {
  void* base;
  const int64_t* offsets;  // [count], of bytes from base, multiples of 4
  int32_t* clocks;         // [sms, count]: of each SM for each; or [count]: each of one SM only
  int32_t* sms;            // [sms]: who has the row or, of the latter, every sms-th place
  int32_t count;
  int32_t by_all;  // 1: each place by every SM
};

}  // namespace ostinato
