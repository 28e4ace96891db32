// Partial results in the workspace.
#pragma once

#include "cluster_ops.cuh"
#include "kernel_args.cuh"

namespace ostinato::decode {

// A warp's region of a CTA's partial result: of the segment that it begins, or of another.
__device__ __forceinline__ float4* part_of(const Arguments& params, int cta, bool begins,
                                           int warp) {
  return params.parts + ((2 * cta + begins) * kPartVectors + region_of(warp) * kRegionVectors);
}

// A warp's region of a unit's result.
__device__ __forceinline__ float4* part_of_unit(const Arguments& params, int place, int warp) {
  return params.parts + static_cast<int64_t>(place) * kPartVectors +
         region_of(warp) * kRegionVectors;
}

// Of what a warp owns of a pair, and of its weights, in a region.
__device__ __forceinline__ int outputs_at(int pair, int vector) {
  return pair * kRankVectors + vector;
}
__device__ __forceinline__ int weights_at(int pair) { return kWarpPairs * kRankVectors + pair; }

}  // namespace ostinato::decode
