// Rows with a scale and a zero point of their own (OSTINATO_ASYMMETRIC): a row's range, 0 included,
// is mapped to -128..127. Bit-exact with runtime/ops/linear/quantize_asymmetric.py.
#pragma once

#include <cstdint>

#include "common/cluster_group.cuh"
#include "common/debug.cuh"
#include "common/quantize_math.cuh"
#include "params.h"
#include "rows.cuh"
#include "stages.cuh"

namespace ostinato {
namespace {

// max(a, b); NaN if either is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// How far numbers reach above and below 0: both at least 0, or NaN.
struct Range {
  float above;
  float below;

  __device__ __forceinline__ void widen(const Values& values) {
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) {
      above = max_or_nan(above, values[i]);
      below = max_or_nan(below, -values[i]);
    }
  }
};

// Shared memory for the ranges of the warps of a row, and of its CTA.
struct Ranges {
  float above[kMaxWarps];
  float below[kMaxWarps];
  Range cta;
};

// The range over the threads of a row (a warp or a CTA), returned to every thread.
template <bool kWarpPerRow>
__device__ __forceinline__ Range row_range(Range range, Ranges& partials) {
  range = {warp_max(range.above), warp_max(range.below)};
  if constexpr (!kWarpPerRow) {
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t warps = blockDim.x / 32;
    OSTINATO_DELAY(quantize_range_store, warp == warps - 1);
    if (lane == 0) {
      partials.above[warp] = range.above;
      partials.below[warp] = range.below;
    }
    __syncthreads();
    OSTINATO_DELAY(quantize_range_load, warp == 0);
    range = {warp_max(lane < warps ? partials.above[lane] : 0.0f),
             warp_max(lane < warps ? partials.below[lane] : 0.0f)};
  }
  return range;
}

// The range over the CTAs of a row. No CTA may end before all have read it: barrier_wait.
__device__ __forceinline__ Range cluster_range(const Range& range, Range& cta_range) {
  const ClusterGroup cluster = this_cluster();
  OSTINATO_DELAY(quantize_cluster_range_store, cluster.block_rank() == 0);
  if (threadIdx.x == 0) {
    cta_range = range;
  }
  cluster.sync();
  OSTINATO_DELAY(quantize_cluster_range_load, cluster.block_rank() == cluster.num_blocks() - 1);
  const uint32_t lane = threadIdx.x % 32;
  Range other = {0.0f, 0.0f};
  if (lane < cluster.num_blocks()) {
    other = *cluster.map_shared_rank(&cta_range, lane);
  }
  cluster.barrier_arrive();
  return {warp_max(other.above), warp_max(other.below)};
}

// The scale and zero point of a range, in the place of static ones.
__device__ __forceinline__ Static affine_of(const Range& range) {
  constexpr KnownDivisor kSteps(255.0f);
  const float width = kSteps.divide(__fadd_rn(range.above, range.below));
  const float scale = width < kSmallestScale ? kSmallestScale : width;  // NaN stays
  const float zero = rintf(__fadd_rn(Divisor(scale).divide(range.below), -128.0f));
  // NaN becomes -128: the scale shows it.
  return Static(scale, fminf(fmaxf(zero, -128.0f), 127.0f));
}

// Writes the scale and the zero point of a row, called by one of its threads.
__device__ __forceinline__ void write_affine(const QuantizeParams& p, int64_t index,
                                             const Static& own) {
  p.scale_out[index] = own.scale;
  p.zero_point_out[index] = static_cast<int32_t>(own.zero_point);
}

// Quantises a row's final values; writes codes, scale and zero point.
template <typename Code, Share kShare, bool kAligned, int kVectors, typename FirstOf>
__device__ __forceinline__ void encode_asymmetric_row(const QuantizeParams& p, const Row& row,
                                                      int64_t index, uint32_t thread,
                                                      const Values (&values)[kVectors],
                                                      const FirstOf& first_of) {
  __shared__ Ranges ranges;
  Range range = {0.0f, 0.0f};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    range.widen(values[v]);
  }
  range = row_range<kShare == Share::warp>(range, ranges);
  if constexpr (kShare == Share::cluster) {
    range = cluster_range(range, ranges.cta);
  }
  const Static own = affine_of(range);
  if (thread == 0) {
    write_affine(p, index, own);
  }
  const Encoder<Code> encoder(own, own.scale);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    encoder.template write<kAligned, false>(row, first_of(v), values[v]);
  }
  if constexpr (kShare == Share::cluster) {
    this_cluster().barrier_wait();
  }
}

// The same for a row of any length, whose values a thread computes twice: those that begin at
// `begin`, `begin` + `step`, ...
template <typename Code, bool kAligned, typename ValuesAt>
__device__ __forceinline__ void encode_asymmetric_long_row(const QuantizeParams& p, const Row& row,
                                                           int64_t index, uint32_t begin,
                                                           uint32_t step,
                                                           const ValuesAt& values_at) {
  __shared__ Ranges ranges;
  Range range = {0.0f, 0.0f};
  for (uint32_t first = begin; first < row.k; first += step) {
    Values values;
    values_at(first, values);
    range.widen(values);
  }
  const Static own = affine_of(row_range<false>(range, ranges));
  if (threadIdx.x == 0) {
    write_affine(p, index, own);
  }
  const Encoder<Code> encoder(own, own.scale);
  for (uint32_t first = begin; first < row.k; first += step) {
    Values values;
    values_at(first, values);
    encoder.template write<kAligned, false>(row, first, values);
  }
}

}  // namespace
}  // namespace ostinato
