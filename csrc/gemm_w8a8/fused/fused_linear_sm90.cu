// W8A8 linear layer for one token, in one launch: each CTA quantises x (after RMS norm and
// residual, if requested) into its shared memory, and multiplies it like the small-M GEMM, whose
// ring of weights fills meanwhile. Quantising in every CTA costs less than the boundary between two
// kernels. docs/notebooks/decode_step.md has the measurements.
//
// With an activation function, the layer is one of gates and ups: it stores what the function makes
// of these in fp32, and their largest magnitudes, for activated_linear_sm90.cu.
//
// Compiled with the macros of gemm_w8a8/small_m/config.cuh, those of gemm_w8a8/quantize/quantize.cu
// (kinds per_token and rms_norm) and
//   OSTINATO_MAX_K       the longest x: 4096 or 8192
//   OSTINATO_ACTIVATION  none, or a function (gemm_w8a8/quantize/activation_math.cuh): then with
//                        OSTINATO_PAIRED_TILES=1
//
// With params.pdl, the preceding kernel may write x and residual. It must not write the other
// inputs, which are read before the wait.
#include <cuda_runtime.h>

#include <type_traits>

#include "common/check.h"
#include "common/launch.cuh"
#include "gated_results.cuh"
#include "gemm_w8a8/params.h"
#include "gemm_w8a8/small_m/config.cuh"
#include "gemm_w8a8/small_m/consumer.cuh"
#include "gemm_w8a8/small_m/producer.cuh"
#include "params.h"
#include "quantize_x.cuh"

namespace ostinato::fused_linear {
namespace {

using small_m::kPairedTiles;
using small_m::kThreads;
using small_m::TileShares;
using small_m::Work;

struct alignas(128) SharedStorage {
  small_m::SharedStorage product;
  CodeStorage x;
};
static_assert(sizeof(SharedStorage) <= small_m::kSmemLimit, "shared memory of one CTA per SM");
static_assert(kPairedTiles == (kActivation != Function::none), "gates and ups are paired");
static_assert(!kPairedTiles || std::is_same_v<small_m::Output, In>, "gates have the dtype of x");

struct StoredResults : small_m::StoredResults {
  __device__ explicit StoredResults(float*) {}
};
using Results = std::conditional_t<kPairedTiles, GatedResults, StoredResults>;

// GEMM arguments with x in shared memory.
__device__ W8A8GemmParams product_of(const FusedLinearParams& p, const CodeStorage& x) {
  W8A8GemmParams product = {};
  product.x = x.codes;
  product.x_scale = &x.scale;
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

__global__ void __launch_bounds__(kThreads, 1)
    fused_linear(const __grid_constant__ FusedLinearParams params, const TileShares shares,
                 const KnownDivisor k) {
  extern __shared__ uint8_t storage[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(storage);
  const W8A8GemmParams product = product_of(params, shared.x);
  const Work work(product, shares);
  if (threadIdx.x >= kMmaThreads) {
    small_m::produce(shared.product, product, work);
    return;
  }
  Quantizer quantizer(shared.x, params, blockIdx.x == 0);
  small_m::Consumer<true, Results> consumer(shared.product, product, work, Results(params.maxima));
  wait_for_predecessor();
  quantizer.run(k, [&] { consumer.announce_x(); });
  consumer.fill_slots();
  consumer.multiply();
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

bool has_valid_results(const FusedLinearParams& p) {
  constexpr int kPairRows = 2 * kPackedRows;
  return kPairedTiles ? p.maxima != nullptr && p.n % kPairRows == 0 && p.n_maxima >= 1 &&
                            p.n_maxima <= p.n / kPairRows
                      : p.maxima == nullptr;
}

bool is_valid(const FusedLinearParams& p) {
  return p.n >= 1 && p.k >= 16 && p.k <= kMaxK && p.k % 16 == 0 && is_aligned(p.x) &&
         is_aligned(p.w) && is_aligned(p.residual) && is_aligned(p.residual_out) &&
         is_aligned(p.norm_weight) && (p.norm_weight != nullptr) == (kKind == Kind::rms_norm) &&
         (p.residual == nullptr) == (p.residual_out == nullptr) &&
         (p.residual == nullptr || kKind == Kind::rms_norm) && has_valid_results(p);
}

}  // namespace
}  // namespace ostinato::fused_linear

OSTINATO_EXPORT int ostinato_prepare() {
  using namespace ostinato::fused_linear;
  return ostinato::allow_dynamic_smem(fused_linear, sizeof(SharedStorage));
}

OSTINATO_LAUNCH(ostinato::FusedLinearParams) {
  using namespace ostinato::fused_linear;
  if (!is_valid(*params)) {
    return cudaErrorInvalidValue;
  }
  int sms = 0;
  OSTINATO_RETURN_IF_ERROR(ostinato::count_sms(&sms));
  const int units =
      ostinato::ceil_div(params->n, ostinato::small_m::kTilesOfUnit * ostinato::kPackedRows);
  ostinato::LaunchConfig config;
  config.grid = dim3(kPairedTiles ? params->n_maxima : units < sms ? units : sms);
  config.block = dim3(kThreads);
  config.dynamic_smem = sizeof(SharedStorage);
  config.pdl = params->pdl != 0;
  const TileShares shares(units, static_cast<int>(config.grid.x));
  return ostinato::launch(fused_linear, config, static_cast<cudaStream_t>(stream), *params, shares,
                          ostinato::KnownDivisor(static_cast<float>(params->k)));
}
