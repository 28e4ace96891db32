// Measures the latency from SMs to addresses in L2, in clocks (docs/notebooks/l2_partition.md).
//
// Uses atomics, which execute in the partition that owns the address, while a load may hit a copy
// in the SM's own partition. They add zero, so memory does not change. Each CTA has an SM to
// itself.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/check.h"
#include "common/launch.cuh"
#include "common/sm_index.cuh"
#include "params.h"

namespace ostinato {
namespace {

// the minimum of kTakes measurements of kAtomics atomics each
constexpr int kTakes = 3, kAtomics = 8;
constexpr int kSmem = 200 * 1024;  // of an SM's 228 KB: no room for a second CTA
constexpr int kApart = 7;          // distance of the first addresses of adjacent CTAs

// A dependent chain: each atomic's address includes the previous result, masked to zero. The
// compiler does not know that `zero` is 0.
__device__ int32_t clocks_to(uint32_t* address, uint32_t zero) {
  int32_t fastest = INT32_MAX;
#pragma unroll 1
  for (int take = 0; take < kTakes; ++take) {
    uint32_t found = 0;
    const int64_t start = clock64();
#pragma unroll 1
    for (int i = 0; i < kAtomics; ++i) {
      found = atomicOr(address + (found & zero), zero);
    }
    const int64_t end = clock64() + (found & zero);
    fastest = min(fastest, static_cast<int32_t>(end - start));
  }
  return fastest / kAtomics;
}

__global__ void __launch_bounds__(32)
    probe(const __grid_constant__ L2ProbeParams p, uint32_t zero) {
  if (threadIdx.x != 0) {
    return;
  }
  p.sms[blockIdx.x] = static_cast<int32_t>(sm_index());
  const auto measure = [&](int32_t i) {
    return clocks_to(reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(p.base) + p.offsets[i]),
                     zero);
  };
  if (p.by_all == 0) {
    for (int32_t i = static_cast<int32_t>(blockIdx.x); i < p.count; i += gridDim.x) {
      p.clocks[i] = measure(i);
    }
    return;
  }
  int32_t* const row = p.clocks + int64_t{1} * blockIdx.x * p.count;
  for (int32_t step = 0; step < p.count; ++step) {
    const int32_t i = (step + static_cast<int32_t>(blockIdx.x) * kApart) % p.count;
    row[i] = measure(i);
  }
}

}  // namespace
}  // namespace ostinato

OSTINATO_EXPORT int ostinato_prepare(void) {
  return ostinato::allow_dynamic_smem(ostinato::probe, ostinato::kSmem);
}

OSTINATO_LAUNCH(ostinato::L2ProbeParams) {
  using namespace ostinato;
  if (params->count < 1) {
    return cudaErrorInvalidValue;
  }
  int sms = 0;
  OSTINATO_RETURN_IF_ERROR(count_sms(&sms));
  LaunchConfig config;
  config.block = dim3(32);
  config.grid = dim3(static_cast<uint32_t>(sms));
  config.dynamic_smem = kSmem;
  return launch(probe, config, static_cast<cudaStream_t>(stream), *params, 0u);
}
