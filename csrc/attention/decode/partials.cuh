// Where partial results lie in the workspace.
#pragma once

#include "cluster_ops.cuh"
#include "kernel_args.cuh"

namespace ostinato::decode {

// A warp's region of a CTA's partial result: of the work tile that it begins, or of another.
__device__ __forceinline__ float4* partial_of(const Arguments& params, int cta, bool begins,
                                              int warp) {
  return params.partials +
         ((2 * cta + begins) * kPartialVectors + region_of(warp) * kRegionVectors);
}

// A warp's region of a split's result.
__device__ __forceinline__ float4* partial_of_split(const Arguments& params, int line_index,
                                                    int warp) {
  return params.partials + static_cast<int64_t>(line_index) * kPartialVectors +
         region_of(warp) * kRegionVectors;
}

// Of what a warp owns of a pair, and of its weights, in a region.
__device__ __forceinline__ int outputs_at(int pair, int vector) {
  return pair * kRankVectors + vector;
}
__device__ __forceinline__ int weights_at(int pair) { return kWarpPairs * kRankVectors + pair; }

}  // namespace ostinato::decode
