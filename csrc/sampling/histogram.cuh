// A histogram of tokens: their number and their total mass per bin.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sample_row.cuh"

namespace ostinato::sampling {

constexpr int kBins = 2 * kThreads;

struct Amount {
  Mass mass;
  uint32_t count;

  __device__ friend Amount operator+(const Amount& a, const Amount& b) {
    return {a.mass + b.mass, a.count + b.count};
  }
};

// Masses are stored as two 32-bit halves: shared-memory atomics on 64 bits are a CAS loop.
struct Histogram {
  uint32_t low[kBins];
  uint32_t high[kBins];
  uint32_t count[kBins];

  __device__ Amount operator[](int bin) const {
    return {Mass{high[bin]} << 32 | low[bin], count[bin]};
  }
  __device__ void set(int bin, const Amount& amount) {
    low[bin] = static_cast<uint32_t>(amount.mass);
    high[bin] = static_cast<uint32_t>(amount.mass >> 32);
    count[bin] = amount.count;
  }
  // Atomic: the thread whose addition overflows the low half carries 1 into the high half.
  __device__ __forceinline__ void add(int bin, const Amount& amount) {
    const uint32_t addend = static_cast<uint32_t>(amount.mass);
    const uint32_t before = atomicAdd(&low[bin], addend);
    const uint32_t rest = static_cast<uint32_t>(amount.mass >> 32) + (before + addend < before);
    if (rest != 0) {
      atomicAdd(&high[bin], rest);
    }
    atomicAdd(&count[bin], amount.count);
  }
};

}  // namespace ostinato::sampling
