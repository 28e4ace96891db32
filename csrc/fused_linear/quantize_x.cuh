// How each CTA makes the 8-bit rows of x that its product needs, in shared memory, with the bits of
// the kernels that do this alone (gemm_w8a8/quantize.cu): the same stages, and sums in the same
// order.
#pragma once

#include <cstdint>

#include "common/debug.cuh"
#include "common/launch.cuh"
#include "fused_linear/params.h"
#include "gemm_w8a8/quantize_rows.cuh"
#include "gemm_w8a8/quantize_stages.cuh"
#include "gemm_w8a8/small_m_config.cuh"
#include "gemm_w8a8/small_m_consumer.cuh"

namespace ostinato::fused_linear {
namespace {

using small_m::kMmaThreads;
using small_m::kMmaWarps;
using small_m::sync_mma_warps;

inline constexpr int kMaxK = OSTINATO_MAX_K;
inline constexpr int kCodeBytes = 16 * 1024;  // more would be missed by L1 (docs/gemm_small_m.md)
inline constexpr int kMaxRows = kCodeBytes / kMaxK;
inline constexpr int kVectors = kMaxK / (kVectorSize * kMmaThreads);  // of a row, per thread
static_assert(kVectors * kVectorSize * kMmaThreads == kMaxK, "every thread has whole vectors");
static_assert(kVectors * kMmaWarps <= 32, "a warp adds the sums of all warps");

struct RowStorage {
  uint8_t codes[kMaxRows][kMaxK];
  float scales[kMaxRows];
  float sums[32];
  float maxima[kMaxWarps];
};

// By all threads that multiply.
class RowQuantizer {
 public:
  // `writes_sum`: this CTA is the one that stores x + residual.
  __device__ RowQuantizer(RowStorage& shared, const FusedLinearParams& params, bool writes_sum)
      : shared_(shared), rows_{} {
    rows_.x = params.x;
    rows_.x_stride = params.x_stride;
    rows_.residual = params.residual;
    rows_.residual_stride = params.residual_stride;
    rows_.residual_out = writes_sum ? params.residual_out : nullptr;
    rows_.residual_out_stride = params.residual_out_stride;
    rows_.eps = params.eps;
    rows_.out = shared.codes;
    rows_.out_stride = kMaxK;
    rows_.m = params.m;
    rows_.k = params.k;
    if constexpr (kKind == Kind::rms_norm) {  // constants: before the wait
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        load<true, Reuse::kEveryRow>(static_cast<const Weight*>(params.norm_weight), first_of(v),
                                     static_cast<uint32_t>(params.k), weights_[v]);
      }
    }
  }

  // Calls `loaded` when all of x has come.
  template <typename Loaded>
  __device__ __forceinline__ void run(const KnownDivisor& k, const Loaded& loaded) {
    Vector x[kVectors];
    Vector second[kVectors];
    load_row(0, x, second);
    for (int index = 0; index < rows_.m; ++index) {
      const Row row(rows_, index);
      Values values[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        combine<true>(row, first_of(v), x[v], second[v], values[v]);
      }
      if (index + 1 < rows_.m) {
        load_row(index + 1, x, second);
      } else {
        loaded();
      }
      quantize(row, index, k, values);
    }
    OSTINATO_DELAY(fused_linear_codes_store, threadIdx.x / 32 == 2);
    sync_mma_warps();
  }

 private:
  static __device__ __forceinline__ uint32_t first_of(int vector) {
    return (vector * kMmaThreads + threadIdx.x) * kVectorSize;
  }

  __device__ __forceinline__ void load_row(int index, Vector (&x)[kVectors],
                                           Vector (&second)[kVectors]) const {
    const Row row(rows_, index);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      load_pair<true>(row, first_of(v), x[v], second[v]);
    }
  }

  __device__ __forceinline__ void quantize(const Row& row, int index, const KnownDivisor& k,
                                           Values (&values)[kVectors]) {
    if constexpr (kKind == Kind::rms_norm) {
      const Divisor rms(root_mean_square(sum_of_squares(values), k, rows_.eps));
      if (rms.fast) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          normalize<true>(values[v], rms, weights_[v]);
        }
      } else {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          normalize<false>(values[v], rms, weights_[v]);
        }
      }
    }
    float largest = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      largest = max_magnitude_of(largest, values[v]);
    }
    const float scale = dynamic_scale<Out>(maximum(largest));
    if (threadIdx.x == 0) {
      shared_.scales[index] = scale;
    }
    const Encoder encoder(Static(rows_), scale);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (encoder.bounded) {
        encoder.write<true, true>(row, first_of(v), values[v]);
      } else {
        encoder.write<true, false>(row, first_of(v), values[v]);
      }
    }
  }

  // The order of additions is that of quantize_rows.cuh.
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

  __device__ __forceinline__ float maximum(float largest) {
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

  RowStorage& shared_;
  QuantizeParams rows_;
  WeightVector weights_[kVectors];
};

}  // namespace
}  // namespace ostinato::fused_linear
