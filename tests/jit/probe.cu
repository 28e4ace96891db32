// A small kernel with all that the workshop offers: a producer warpgroup hands bytes to two
// consumer warpgroups through shared memory; out[i] = x[i] for i < k.
//
//   OSTINATO_PROBE_WASTE  bytes of local memory that each thread uses for nothing
#include <cuda_runtime.h>

#include <cstdint>

#include "common/check.h"
#include "common/debug.cuh"
#include "common/launch.cuh"
#include "common/registers.cuh"
#include "gemm_w8a8/quantize/params.h"

namespace ostinato {
namespace {

using Registers = RegisterTable<2, kDebugPrint>;

constexpr int kWarpgroup = 128;
constexpr int kThreads = 3 * kWarpgroup;

__global__ void __launch_bounds__(kThreads, 1)
    copy_bytes(const __grid_constant__ QuantizeParams params) {
  extern __shared__ uint8_t staged[];
  const auto* x = static_cast<const uint8_t*>(params.x);
  const int i = blockIdx.x * kWarpgroup + threadIdx.x % kWarpgroup;
  const int warpgroup = threadIdx.x / kWarpgroup;
  wait_for_predecessor();
#if OSTINATO_PROBE_WASTE > 0
  volatile uint8_t waste[OSTINATO_PROBE_WASTE];
  waste[i % OSTINATO_PROBE_WASTE] = 1;
#endif
  if (warpgroup == 0) {
    give_up_registers<Registers::kSplit.producer>();
    OSTINATO_DELAY(probe_store, threadIdx.x / 32 == 1);
    staged[threadIdx.x] = i < params.k ? x[i] : 0;
    OSTINATO_PRINT(i == 0, "probe: %d bytes\n", params.k);
    __syncthreads();
  } else {
    take_registers<Registers::kSplit.consumer>();
    __syncthreads();
    OSTINATO_DELAY(probe_load, threadIdx.x / 32 == 5);
    if (i < params.k && i % 2 == warpgroup - 1) {
      static_cast<uint8_t*>(params.out)[i] = staged[threadIdx.x % kWarpgroup];
    }
  }
  let_successor_start();
}

}  // namespace
}  // namespace ostinato

OSTINATO_EXPORT int ostinato_prepare(void) {
  return ostinato::allow_dynamic_smem(ostinato::copy_bytes, ostinato::kWarpgroup);
}

OSTINATO_LAUNCH(ostinato::QuantizeParams) {
  ostinato::LaunchConfig config;
  config.grid = dim3((params->k + ostinato::kWarpgroup - 1) / ostinato::kWarpgroup);
  config.block = dim3(ostinato::kThreads);
  config.dynamic_smem = ostinato::kWarpgroup;
  config.pdl = params->pdl != 0;
  return ostinato::launch(ostinato::copy_bytes, config, static_cast<cudaStream_t>(stream), *params);
}
