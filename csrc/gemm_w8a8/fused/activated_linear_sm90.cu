// W8A8 linear layer for one token whose fp32 activations fused_linear_sm90.cu has left beside their
// largest magnitudes: quantised to INT8 as they are multiplied, like the small-M GEMM, whose ring
// of weights fills meanwhile. No kernel between the two quantises. docs/notebooks/decode_step.md
// has the reasons.
//
// Compiled with the macros of gemm_w8a8/small_m/config.cuh.
//
// With params.pdl, the preceding kernel may write x and maxima. It must not write the other inputs,
// which are read before the wait.
#include <cuda_runtime.h>

#include "activated_consumer.cuh"
#include "common/check.h"
#include "common/launch.cuh"
#include "gemm_w8a8/params.h"
#include "gemm_w8a8/small_m/config.cuh"
#include "gemm_w8a8/small_m/producer.cuh"
#include "params.h"

namespace ostinato::activated_linear {
namespace {

using small_m::TileShares;

// Arguments of the GEMM, but for those of x.
__device__ W8A8GemmParams product_of(const ActivatedLinearParams& p) {
  W8A8GemmParams product = {};
  product.w = p.w;
  product.w_scale = p.w_scale;
  product.w_scale_stride = p.w_scale_stride;
  product.bias = p.bias;
  product.out = p.out;
  product.m = 1;
  product.n = p.n;
  product.k = p.k;
  return product;
}

__global__ void __launch_bounds__(small_m::kThreads, 1)
    activated_linear(const __grid_constant__ ActivatedLinearParams params,
                     const TileShares shares) {
  extern __shared__ uint8_t storage[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(storage);
  const W8A8GemmParams product = product_of(params);
  const Work work(product, shares);
  if (threadIdx.x >= small_m::kMmaThreads) {
    small_m::produce(shared, product, work);
    return;
  }
  Consumer(shared, params, product, work).run();
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

bool is_valid(const ActivatedLinearParams& p) {
  return p.n >= 1 && p.k >= 4 && p.k % 4 == 0 && p.n_maxima >= 1 && is_aligned(p.x) &&
         is_aligned(p.w);
}

}  // namespace
}  // namespace ostinato::activated_linear

OSTINATO_EXPORT int ostinato_prepare() {
  using namespace ostinato::activated_linear;
  return ostinato::allow_dynamic_smem(activated_linear, sizeof(SharedStorage));
}

OSTINATO_LAUNCH(ostinato::ActivatedLinearParams) {
  using namespace ostinato::activated_linear;
  if (!is_valid(*params)) {
    return cudaErrorInvalidValue;
  }
  int sms = 0;
  OSTINATO_RETURN_IF_ERROR(ostinato::count_sms(&sms));
  const int tiles = ostinato::ceil_div(params->n, ostinato::kPackedRows);
  ostinato::LaunchConfig config;
  config.grid = dim3(tiles < sms ? tiles : sms);
  config.block = dim3(ostinato::small_m::kThreads);
  config.dynamic_smem = sizeof(SharedStorage);
  config.pdl = params->pdl != 0;
  const TileShares shares(tiles, static_cast<int>(config.grid.x));
  return ostinato::launch(activated_linear, config, static_cast<cudaStream_t>(stream), *params,
                          shares);
}
