// The quantisation kernels: for rows kept in registers, and for rows of any length.
#pragma once

#include <cstdint>

#include "asymmetric.cuh"
#include "common/cluster_group.cuh"
#include "common/launch.cuh"
#include "encode_rows.cuh"
#include "params.h"
#include "rows.cuh"
#include "stages.cuh"

namespace ostinato {
namespace {

constexpr int kMaxThreads = 1024;

// Norm weights of a layer are constants that no earlier kernel writes. ops.rms_norm takes any
// tensor, which the preceding kernel may have written (1 + weight, for example): it is read after
// the wait, like x.
constexpr bool kConstantWeights = kEncodes;

// Loads the number of rows that are not padding. Inlined, so that it is awaited only at its first
// use: x, loaded later, has not arrived by then either.
__device__ __forceinline__ int32_t rows_of(const QuantizeParams& p) {
  int32_t rows = p.m;
  if (p.n_active != nullptr) {
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(rows) : "l"(p.n_active));
  }
  return rows;
}

// Normalises a row, and stores it. Thread `thread` of those that share the row has the vectors that
// begin at first_of(v), and weight_of(v) returns the norm weights of each.
template <Share kShare, bool kAligned, int kVectors, typename FirstOf, typename WeightOf>
__device__ __forceinline__ void finish_row(const QuantizeParams& p, const Static& fixed,
                                           const KnownDivisor& k, const Row& row, int64_t index,
                                           uint32_t thread, Values (&values)[kVectors],
                                           const FirstOf& first_of, const WeightOf& weight_of,
                                           Exchange<kVectors>& exchange) {
  constexpr bool kWarpPerRow = kShare == Share::warp;
  if constexpr (kLayerNorm) {
    __shared__ float means[kVectors * kMaxWarps];
    float partials[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      partials[v] = sum_values(values[v]);
    }
    const float sum =
        kWarpPerRow ? warp_row_sum(partials) : cta_row_sum<kVectors>(warp_sums(partials), means);
    const float mean = k.divide(sum);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      subtract_mean<kAligned>(values[v], mean, first_of(v), row.k);
    }
  }
  if constexpr (kNorm) {
    float squares[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      squares[v] = sum_squares(values[v]);
    }
    const float sum = kWarpPerRow ? warp_row_sum(squares)
                                  : cta_row_sum<kVectors>(warp_sums(squares), exchange.sums);
    const Divisor rms(root_mean_square(sum, k, p.eps));
    if (rms.fast) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        normalize<true>(values[v], rms, weight_of(v));
      }
    } else {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        normalize<false>(values[v], rms, weight_of(v));
      }
    }
  }
  if constexpr (kLayerNorm) {
    if (p.norm_bias != nullptr) {
      const Weight* bias = weights_at(p, p.norm_bias, index);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        add_bias<kAligned>(bias, first_of(v), row.k, values[v]);
      }
    }
  }

  if constexpr (kGroup > 0) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      encode_groups<Out, kAligned>(p, fixed, row, index, first_of(v), values[v]);
    }
  } else if constexpr (kAsymmetric) {
    encode_asymmetric_row<Out, kShare, kAligned>(p, row, index, thread, values, first_of);
  } else if constexpr (kEncodes) {
    encode_row<Out, kShare, kAligned>(p, fixed, row, index, thread, values, first_of, exchange);
  } else {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      write_rounded<kAligned>(row, first_of(v), values[v]);
    }
  }
}

// Discards the lines of an activated row, or of both halves of a gated one, from L2. The thread
// whose vector begins a line discards it once all readers have read it: they have met to find the
// row's scale, unless it was given and cannot become NaN. (Those of a group are the readers of
// whole lines.)
template <Share kShare, int kVectors, typename FirstOf>
__device__ __forceinline__ void discard_row(const Static& fixed, const Row& row,
                                            const FirstOf& first_of) {
  if (!kMarksNan && fixed.given) {
    if constexpr (kShare == Share::warp) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const uint32_t first = first_of(v);
    if (first < row.k && first * sizeof(In) % kLineBytes == 0) {
      discard_line(row.x + first);
      if constexpr (kGated) {
        discard_line(row.second + first);
      }
    }
  }
}

// Rows of up to kElements elements per thread, which are read once and kept in registers.
template <int kElements, Share kShare, int kThreads, int kCtas, bool kAligned>
__global__ void __launch_bounds__(kThreads, kCtas)
    quantize_rows(const __grid_constant__ QuantizeParams p, const KnownDivisor count) {
  constexpr int kVectors = kElements / kVectorSize;
  constexpr int kMostLoads = !kAligned ? 1 : kElements * kThreads <= 16384 ? 4 : 2;
  constexpr int kLoadsInFlight = kVectors < kMostLoads ? kVectors : kMostLoads;
  // Norm weights that do not fit into registers are read again from the caches.
  constexpr bool kHoldWeights = kNorm && kElements <= 16;
  static_assert(kShare != Share::cluster || !kNorm, "the sum of squares is not shared among CTAs");
  __shared__ Exchange<kVectors> exchange;

  uint32_t threads = blockDim.x;
  uint32_t thread = threadIdx.x;
  int64_t index = blockIdx.x;
  if constexpr (kShare == Share::warp) {
    threads = 32;
    thread = threadIdx.x % 32;
    index = index * (blockDim.x / 32) + threadIdx.x / 32;
  } else if constexpr (kShare == Share::cluster) {
    const ClusterGroup cluster = this_cluster();
    threads = blockDim.x * cluster.num_blocks();
    thread = blockDim.x * cluster.block_rank() + threadIdx.x;
    index = blockIdx.x / cluster.num_blocks();
  }
  const int32_t rows = rows_of(p);
  const uint32_t k = static_cast<uint32_t>(p.k);
  const auto first_of = [&](int vector) { return (vector * threads + thread) * kVectorSize; };

  const Weight* norm_weight = weights_at(p, p.norm_weight, index);
  WeightVector weights[kHoldWeights ? kVectors : 1];
  const auto prefetch = [&](const Weight* row) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (first_of(v) < k) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + first_of(v)));
      }
    }
  };
  const auto ask_for_weights = [&] {
    if constexpr (kHoldWeights) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        load<kAligned, Reuse::kEveryRow>(norm_weight, first_of(v), k, weights[v]);
      }
    } else if constexpr (kNorm) {
      prefetch(norm_weight);
    }
    if constexpr (kLayerNorm) {
      if (p.norm_bias != nullptr) {
        prefetch(weights_at(p, p.norm_bias, index));
      }
    }
  };
  if constexpr (kConstantWeights) {
    ask_for_weights();
  }

  // Before the wait: the next GEMM fills its ring with weights while this kernel waits and works.
  let_successor_start();
  wait_for_predecessor();
  if (index >= p.m) {
    return;
  }
  if constexpr (!kConstantWeights) {
    ask_for_weights();
  }
  const Static fixed(p);
  const Row row(p, index);
  Values values[kVectors];
#pragma unroll
  for (int group = 0; group < kVectors; group += kLoadsInFlight) {
    Vector x[kLoadsInFlight];
    Vector second[kLoadsInFlight];
#pragma unroll
    for (int v = 0; v < kLoadsInFlight; ++v) {
      load_pair<kAligned>(row, first_of(group + v), x[v], second[v]);
    }
    if (group == 0 && index >= rows) {
      return;
    }
#pragma unroll
    for (int v = 0; v < kLoadsInFlight; ++v) {
      combine<kAligned>(row, first_of(group + v), x[v], second[v], values[group + v]);
    }
  }
  const auto weight_of = [&](int v) {
    if constexpr (!kHoldWeights) {
      load<kAligned, Reuse::kEveryRow>(norm_weight, first_of(v), k, weights[0]);
    }
    return weights[kHoldWeights ? v : 0];
  };
  finish_row<kShare, kAligned>(p, fixed, count, row, index, thread, values, first_of, weight_of,
                               exchange);
  if constexpr (kActivates && kEncodes && kAligned) {
    if (p.discard_x != 0) {
      discard_row<kShare, kVectors>(fixed, row, first_of);
    }
  }
}

// Two CTAs of the bare kind fit on an SM, in 32 registers a thread.
constexpr int kLongRowCtas = kKind == Kind::per_token && kTargets[0] == 900 ? 2 : 1;

// Rows of any length, which are read once each for the sum, the maximum and the codes or results.
// With a residual, the first pass stores the sum, and later passes of the same threads read it
// back: residual_out may be the residual itself. `Code` is Out: a template parameter, so that code
// for codes is not instantiated where Out is no code.
template <bool kAligned, typename Code = Out>
__global__ void __launch_bounds__(kMaxThreads, kLongRowCtas)
    quantize_long_rows(const __grid_constant__ QuantizeParams p, const KnownDivisor count) {
  __shared__ float sums[kMaxWarps];
  __shared__ float maxima[kMaxWarps];
  const uint32_t k = static_cast<uint32_t>(p.k);
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t begin = threadIdx.x * kVectorSize;
  const uint32_t step = blockDim.x * kVectorSize;
  const Weight* norm_weight = weights_at(p, p.norm_weight, blockIdx.x);

  const int32_t rows = rows_of(p);
  let_successor_start();
  wait_for_predecessor();
  if (blockIdx.x >= rows) {
    return;
  }
  const Static fixed(p);
  Row row(p, blockIdx.x);
  float mean = 0.0f;
  if constexpr (kLayerNorm) {
    __shared__ float means[kMaxWarps];
    float sum = 0.0f;
    for (uint32_t first = begin; first - lane * kVectorSize < k; first += step) {
      Vector x, second;
      Values values;
      load_pair<kAligned>(row, first, x, second);
      combine<kAligned>(row, first, x, second, values);
      sum += warp_sum(sum_values(values));
    }
    mean = count.divide(cta_row_sum<1>(sum, means));
    if (row.second != nullptr) {
      row.x = row.residual_out;
      row.second = nullptr;
    }
  }
  float rms_value = 1.0f;
  if constexpr (kNorm) {
    // With 32 warps, the groups of 32 adjacent vectors of a warp are every 32nd group of the row.
    float sum = 0.0f;
    for (uint32_t first = begin; first - lane * kVectorSize < k; first += step) {
      Vector x, second;
      Values values;
      load_pair<kAligned>(row, first, x, second);
      combine<kAligned>(row, first, x, second, values);
      if constexpr (kLayerNorm) {
        subtract_mean<kAligned>(values, mean, first, k);
      }
      sum += warp_sum(sum_squares(values));
    }
    rms_value = root_mean_square(cta_row_sum<1>(sum, sums), count, p.eps);
    if (row.second != nullptr) {
      row.x = row.residual_out;
      row.second = nullptr;
    }
  }
  const Divisor rms(rms_value);
  const auto values_at = [&](uint32_t first, Values& values) {
    Vector x, second;
    load_pair<kAligned>(row, first, x, second);
    combine<kAligned>(row, first, x, second, values);
    if constexpr (kLayerNorm) {
      subtract_mean<kAligned>(values, mean, first, k);
    }
    if constexpr (kNorm) {
      WeightVector weight;
      load<kAligned, Reuse::kEveryRow>(norm_weight, first, k, weight);
      normalize<false>(values, rms, weight);
    }
    if constexpr (kLayerNorm) {
      if (p.norm_bias != nullptr) {
        add_bias<kAligned>(weights_at(p, p.norm_bias, blockIdx.x), first, k, values);
      }
    }
  };

  if constexpr (kGroup > 0) {
    for (uint32_t first = begin; first - lane * kVectorSize < k; first += step) {
      Values values;
      values_at(first, values);
      encode_groups<Code, kAligned>(p, fixed, row, blockIdx.x, first, values);
    }
  } else if constexpr (kAsymmetric) {
    encode_asymmetric_long_row<Code, kAligned>(p, row, blockIdx.x, begin, step, values_at);
  } else if constexpr (kEncodes) {
    float scale;
    if (fixed.given) {
      scale = fixed.scale;
    } else {
      float largest = 0.0f;
      for (uint32_t first = begin; first < k; first += step) {
        Values values;
        values_at(first, values);
        largest = max_magnitude_of(largest, values);
      }
      scale = dynamic_scale<Code>(row_max<false>(largest, maxima));
    }
    if (threadIdx.x == 0) {
      write_scale(p, blockIdx.x, scale);
    }
    const bool marks_nan = kMarksNan && fixed.given;
    if (marks_nan) {
      __syncthreads();  // behind the store of the scale
    }
    const Encoder<Code> encoder(fixed, scale);
    for (uint32_t first = begin; first < k; first += step) {
      Values values;
      values_at(first, values);
      if (marks_nan && holds_nan(values)) {
        p.scale_out[blockIdx.x] = kNan;
      }
      encoder.template write<kAligned, false>(row, first, values);
    }
  } else {
    for (uint32_t first = begin; first < k; first += step) {
      Values values;
      values_at(first, values);
      write_rounded<kAligned>(row, first, values);
    }
  }
}

}  // namespace
}  // namespace ostinato
