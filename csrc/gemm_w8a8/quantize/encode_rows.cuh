// Writing a row's codes and scales, once its values are final.
#pragma once

#include <cstdint>

#include "common/cluster_group.cuh"
#include "params.h"
#include "rows.cuh"
#include "stages.cuh"

namespace ostinato {
namespace {

// Shared memory for reductions over a row.
template <int kVectors>
struct Exchange {
  float sums[kVectors * kMaxWarps];
  float maxima[kMaxWarps];
  float cta_maximum;
};

__device__ __forceinline__ float cluster_max(float x, float& cta_maximum) {
  const ClusterGroup cluster = this_cluster();
  OSTINATO_DELAY(quantize_cluster_store, cluster.block_rank() == 0);
  if (threadIdx.x == 0) {
    cta_maximum = x;
  }
  cluster.sync();
  OSTINATO_DELAY(quantize_cluster_load, cluster.block_rank() == cluster.num_blocks() - 1);
  const uint32_t lane = threadIdx.x % 32;
  x = warp_max(lane < cluster.num_blocks() ? *cluster.map_shared_rank(&cta_maximum, lane) : 0.0f);
  cluster.barrier_arrive();
  return x;
}

// Writes a row's scale, called by one of its threads.
__device__ __forceinline__ void write_scale(const QuantizeParams& p, int64_t index, float scale) {
  OSTINATO_DELAY(quantize_scale_store, true);
  p.scale_out[index] = scale;
}

// Quantises a row's final values, and writes codes and scale. A static scale that a NaN replaces
// is stored first, and the threads that found one store theirs behind a barrier after the codes,
// which need not wait for it. A warp votes instead.
template <typename Code, Share kShare, bool kAligned, int kVectors, typename FirstOf>
__device__ __forceinline__ void encode_row(const QuantizeParams& p, const Static& fixed,
                                           const Row& row, int64_t index, uint32_t thread,
                                           const Values (&values)[kVectors],
                                           const FirstOf& first_of, Exchange<kVectors>& exchange) {
  float scale;
  bool found_nan = false;
  if (fixed.given) {
    scale = fixed.scale;
    if constexpr (kMarksNan) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        found_nan |= holds_nan(values[v]);
      }
    }
    if constexpr (kMarksNan && kShare == Share::warp) {
      found_nan = __any_sync(0xffffffffu, found_nan);
    }
  } else {
    float largest = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      largest = max_magnitude_of(largest, values[v]);
    }
    largest = row_max<kShare == Share::warp>(largest, exchange.maxima);
    if constexpr (kShare == Share::cluster) {
      largest = cluster_max(largest, exchange.cta_maximum);
    }
    scale = dynamic_scale<Code>(largest);
  }
  if (thread == 0) {
    write_scale(p, index, kShare == Share::warp && found_nan ? kNan : scale);
  }
  if constexpr (kMarksNan && kShare == Share::cluster) {
    if (fixed.given) {
      this_cluster().barrier_arrive();
    }
  }
  const Encoder<Code> encoder(fixed, scale);
  if (encoder.bounded) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      encoder.template write<kAligned, true>(row, first_of(v), values[v]);
    }
  } else {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      encoder.template write<kAligned, false>(row, first_of(v), values[v]);
    }
  }
  if constexpr (kShare == Share::cluster) {
    if (!fixed.given || kMarksNan) {
      // No CTA may end while another can still read its maximum, and a static scale is stored.
      this_cluster().barrier_wait();
    }
  }
  if constexpr (kMarksNan && kShare != Share::warp) {
    if (fixed.given) {
      if constexpr (kShare == Share::cta) {
        __syncthreads();  // the scale is stored
      }
      if (found_nan) {
        p.scale_out[index] = kNan;
      }
    }
  }
}

// Quantises one vector of each lane by groups of kGroup elements of a row, which adjacent lanes
// have; writes codes and scales. Vectors past the end of the row are zeros.
template <typename Code, bool kAligned>
__device__ __forceinline__ void encode_groups(const QuantizeParams& p, const Static& fixed,
                                              const Row& row, int64_t index, uint32_t first,
                                              const Values& values) {
  const float largest = lanes_max<kGroup / kVectorSize>(max_magnitude_of(0.0f, values));
  float scale = dynamic_scale<Code>(largest);
  if (p.power_of_two != 0) {
    scale = ceil_power_of_two(scale);
  }
  if (first % kGroup == 0 && first < row.k) {
    p.scale_out[first / kGroup * p.scale_stride + index] = scale;
  }
  const Encoder<Code> encoder(fixed, scale);
  if (encoder.bounded) {
    encoder.template write<kAligned, true>(row, first, values);
  } else {
    encoder.template write<kAligned, false>(row, first, values);
  }
}

}  // namespace
}  // namespace ostinato
