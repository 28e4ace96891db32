// INT8 GEMM for few tokens (M <= OSTINATO_TOKENS): weights are streamed once, at memory speed.
//
// One CTA per SM processes a contiguous run of weight tiles. One thread keeps a ring of bulk copies
// full, and starts before it waits for the preceding kernel, since weights are constants. Eight
// warps divide each chunk of K (and, for many tokens, the tokens), keep their share of x in
// registers, and add their sums through shared memory in a fixed order.
// docs/notebooks/gemm_small_m.md has reasons and measurements; config.cuh the macros; packed.h the
// layout of weights.
//
// With params.pdl, the preceding kernel may write x, x_scale and x_zero_point. It must not write w,
// w_scale, w_sum or bias, which are read before the wait.
#include <cuda_runtime.h>

#include "common/check.h"
#include "common/launch.cuh"
#include "common/mbarrier.cuh"
#include "config.cuh"
#include "consumer.cuh"
#include "gemm_w8a8/params.h"
#include "producer.cuh"

namespace ostinato::small_m {
namespace {

__global__ void __launch_bounds__(kThreads, 1)
    small_m_gemm(const __grid_constant__ W8A8GemmParams params, const TileShares shares) {
  extern __shared__ uint8_t storage[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(storage);
  const Work work(params, shares);
  if (threadIdx.x >= kMmaThreads) {
    produce(shared, params, work);
    return;
  }
  const bool vector_loads = (reinterpret_cast<uintptr_t>(params.x) % 16 == 0) &&
                            params.x_stride % 16 == 0 && params.k % 16 == 0;
  if (vector_loads) {
    Consumer<true>(shared, params, work).run();
  } else {
    Consumer<false>(shared, params, work).run();
  }
}

}  // namespace
}  // namespace ostinato::small_m

OSTINATO_EXPORT int ostinato_prepare() {
  return ostinato::allow_dynamic_smem(ostinato::small_m::small_m_gemm,
                                      sizeof(ostinato::small_m::SharedStorage));
}

OSTINATO_LAUNCH(ostinato::W8A8GemmParams) {
  using namespace ostinato::small_m;
  if (params->m < 1 || params->m > kTokens || params->n < 1 || params->k < 1 ||
      params->best != nullptr || reinterpret_cast<uintptr_t>(params->w) % 16 != 0) {
    return cudaErrorInvalidValue;
  }
  int sms = 0;
  OSTINATO_RETURN_IF_ERROR(ostinato::count_sms(&sms));
  const int tiles = ostinato::ceil_div(params->n, ostinato::kPackedRows);
  ostinato::LaunchConfig config;
  config.grid = dim3(tiles < sms ? tiles : sms);
  config.block = dim3(kThreads);
  config.dynamic_smem = sizeof(SharedStorage);
  config.pdl = params->pdl != 0;
  const TileShares shares(tiles, static_cast<int>(config.grid.x));
  return ostinato::launch(small_m_gemm, config, static_cast<cudaStream_t>(stream), *params, shares);
}
