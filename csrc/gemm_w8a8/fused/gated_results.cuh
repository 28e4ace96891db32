// What becomes of gates and ups, in pairs of tiles: the activation function times up, in fp32, and
// the largest magnitude of what each CTA has made. The bits are those that quantize.cu computes of
// the stored gates and ups before it looks for the scale; a maximum has no order.
#pragma once

#include <cstdint>

#include "common/debug.cuh"
#include "common/quantize_math.cuh"
#include "gemm_w8a8/params.h"
#include "gemm_w8a8/quantize/activation_math.cuh"
#include "gemm_w8a8/quantize/rows.cuh"
#include "gemm_w8a8/small_m/config.cuh"

namespace ostinato::fused_linear {
namespace {

constexpr Function kActivation = Function::OSTINATO_ACTIVATION;

__device__ __forceinline__ float activate_gate(float gate) {
  constexpr float kLimit = kFastLimit<kActivation>;
  if constexpr (kLimit > 0.0f) {
    if (fabsf(gate) <= kLimit) {
      return activate<kActivation, true>(gate);
    }
  }
  return activate<kActivation, false>(gate);
}

// Of one token: the first warp has a gate in each of its first 16 lanes, and its up 16 lanes on.
class GatedResults {
 public:
  // `maxima` has one element for each CTA.
  __device__ explicit GatedResults(float* maxima) : maxima_(maxima) {}

  // `n` is the channel, of a gate in lanes that store.
  __device__ __forceinline__ void take(const W8A8GemmParams& params, int, int n, float y) {
    const float rounded = static_cast<float>(static_cast<small_m::Output>(y));
    const float up = __shfl_xor_sync(0xffffffffu, rounded, kPackedRows);
    if (threadIdx.x < kPackedRows) {
      const float value = __fmul_rn(activate_gate(rounded), up);
      largest_ = max_magnitude(largest_, value);
      static_cast<float*>(params.out)[n] = value;
    }
  }

  __device__ __forceinline__ void finish() {
    if (threadIdx.x < 32) {
      const float largest = warp_max(largest_);
      OSTINATO_DELAY(fused_linear_maxima_store, true);
      if (threadIdx.x == 0) {
        maxima_[blockIdx.x] = largest;
      }
    }
  }

 private:
  float* maxima_;
  float largest_ = 0.0f;
};

}  // namespace
}  // namespace ostinato::fused_linear
