// Each CTA quantises x into shared memory, with the bits of the standalone kernels
// (gemm_w8a8/quantize/quantize.cu): the same stages, and sums in the same order.
#pragma once

#include <cstdint>

#include "common/debug.cuh"
#include "common/launch.cuh"
#include "gemm_w8a8/quantize/rows.cuh"
#include "gemm_w8a8/quantize/stages.cuh"
#include "gemm_w8a8/small_m/config.cuh"
#include "gemm_w8a8/small_m/consumer.cuh"
#include "params.h"

namespace ostinato::fused_linear {
namespace {

using small_m::kMmaThreads;
using small_m::kMmaWarps;
using small_m::sync_mma_warps;

constexpr int kMaxK = OSTINATO_MAX_K;
constexpr int kVectors = kMaxK / (kVectorSize * kMmaThreads);  // per thread
static_assert(kVectors * kVectorSize * kMmaThreads == kMaxK, "every thread has whole vectors");
static_assert(kVectors * kMmaWarps <= 32, "a warp adds the sums of all warps");

struct CodeStorage {
  uint8_t codes[kMaxK];
  float scale;
  float sums[kVectors * kMmaWarps];
  float maxima[kMmaWarps];
};

// Called by all MMA threads.
class Quantizer {
 public:
  // `writes_sum`: whether this CTA stores x + residual.
  __device__ Quantizer(CodeStorage& shared, const FusedLinearParams& params, bool writes_sum)
      : shared_(shared), eps_(params.eps), rows_{} {
    rows_.x = params.x;
    rows_.residual = params.residual;
    rows_.residual_out = writes_sum ? params.residual_out : nullptr;
    rows_.out = shared.codes;
    rows_.k = params.k;
    if constexpr (kKind == Kind::rms_norm) {  // constants: read before the wait
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        load<true, Reuse::kEveryRow>(static_cast<const Weight*>(params.norm_weight), first_of(v),
                                     static_cast<uint32_t>(params.k), weights_[v]);
      }
    }
  }

  // Calls `loaded` once x has been loaded.
  template <typename Loaded>
  __device__ __forceinline__ void run(const KnownDivisor& k, const Loaded& loaded) {
    const Row row(rows_, 0);
    Vector x[kVectors];
    Vector second[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      load_pair<true>(row, first_of(v), x[v], second[v]);
    }
    Values values[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      combine<true>(row, first_of(v), x[v], second[v], values[v]);
    }
    loaded();
    if constexpr (kKind == Kind::rms_norm) {
      const Divisor rms(root_mean_square(sum_of_squares(values), k, eps_));
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (rms.fast) {
          normalize<true>(values[v], rms, weights_[v]);
        } else {
          normalize<false>(values[v], rms, weights_[v]);
        }
      }
    }
    const float scale = dynamic_scale<Out>(maximum(values));
    if (threadIdx.x == 0) {
      shared_.scale = scale;
    }
    const Encoder<Out> encoder(Static(rows_), scale);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (encoder.bounded) {
        encoder.write<true, true>(row, first_of(v), values[v]);
      } else {
        encoder.write<true, false>(row, first_of(v), values[v]);
      }
    }
    OSTINATO_DELAY(fused_linear_codes_store, threadIdx.x / 32 == 2);
    sync_mma_warps();
  }

 private:
  static __device__ __forceinline__ uint32_t first_of(int vector) {
    return (vector * kMmaThreads + threadIdx.x) * kVectorSize;
  }

  // The order of additions is that of gemm_w8a8/quantize/rows.cuh.
  __device__ __forceinline__ float sum_of_squares(const Values (&values)[kVectors]) {
    float squares[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      squares[v] = sum_squares(values[v]);
    }
    constexpr int kLanesPerSum = 32 / kVectors;
    const uint32_t lane = threadIdx.x % 32;
    const float sum = warp_sums(squares);
    OSTINATO_DELAY(fused_linear_sum_store, threadIdx.x / 32 == kMmaWarps - 1);
    if (lane % kLanesPerSum == 0) {
      shared_.sums[lane / kLanesPerSum * kMmaWarps + threadIdx.x / 32] = sum;
    }
    sync_mma_warps();
    OSTINATO_DELAY(fused_linear_sum_load, threadIdx.x / 32 == 0);
    return warp_sum(lane < kVectors * kMmaWarps ? shared_.sums[lane] : 0.0f);
  }

  __device__ __forceinline__ float maximum(const Values (&values)[kVectors]) {
    float largest = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      largest = max_magnitude_of(largest, values[v]);
    }
    const uint32_t lane = threadIdx.x % 32;
    largest = warp_max(largest);
    OSTINATO_DELAY(fused_linear_maximum_store, threadIdx.x / 32 == kMmaWarps - 1);
    if (lane == 0) {
      shared_.maxima[threadIdx.x / 32] = largest;
    }
    sync_mma_warps();
    OSTINATO_DELAY(fused_linear_maximum_load, threadIdx.x / 32 == 0);
    return warp_max(lane < kMmaWarps ? shared_.maxima[lane] : 0.0f);
  }

  CodeStorage& shared_;
  const float eps_;
  QuantizeParams rows_;  // x as the only row of a quantisation launch
  WeightVector weights_[kVectors];
};

}  // namespace
}  // namespace ostinato::fused_linear
