// Partial results in the workspace.
#pragma once

#include "decode_arguments.cuh"

namespace ostinato::decode {

__device__ __forceinline__ float4* parts_of(const Arguments& params) {
  return reinterpret_cast<float4*>(static_cast<uint8_t*>(params.workspace) +
                                   counter_bytes(gridDim.x));
}

// A warp's region of a CTA's partial result: of the segment that it begins, or of another.
__device__ __forceinline__ float4* part_of(const Arguments& params, int cta, bool begins,
                                           int warp) {
  return parts_of(params) + ((2 * cta + begins) * kPartVectors + warp * kRegionVectors);
}

// A warp's region of a unit's result.
__device__ __forceinline__ float4* part_of_unit(const Arguments& params, int place, int warp) {
  return parts_of(params) + static_cast<int64_t>(place) * kPartVectors + warp * kRegionVectors;
}

// Of what a warp owns of a pair, and of its weights, in a region.
__device__ __forceinline__ int outputs_at(int pair, int step, int part) {
  return pair * kPairVectors + step * 8 + part;
}
__device__ __forceinline__ int weights_at(int pair) { return kWarpPairs * kPairVectors + pair; }

}  // namespace ostinato::decode
