// Partial results in the workspace: where they lie, and how they get from SM to SM.
//
// Without a fence: who counts himself among a segment's warps may have stores on their way, and who
// counts last waits for them at the vectors themselves. Each is written by one access, and is known
// to be there by its first word, which is never 0 (bits are inverted, and no arithmetic ends in the
// NaN of all ones). Whoever has read a vector makes it 0 again, for the next launch.
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

// A vector with its first word inverted.
struct PartVector {
  uint32_t words[4];

  static __device__ __forceinline__ PartVector of(const float4& x) {
    return {{max(~__float_as_uint(x.x), 1u), __float_as_uint(x.y), __float_as_uint(x.z),
             __float_as_uint(x.w)}};
  }
  __device__ __forceinline__ bool arrived() const { return words[0] != 0; }
  __device__ __forceinline__ float4 value() const {
    return make_float4(__uint_as_float(~words[0]), __uint_as_float(words[1]),
                       __uint_as_float(words[2]), __uint_as_float(words[3]));
  }
};

// PTX: accesses of type b128 are single ones, those of vectors are as many as elements.
__device__ __forceinline__ void store_part(float4* to, const float4& x) {
  const PartVector v = PartVector::of(x);
  asm volatile(
      "{\n"
      ".reg .b64 low, high;\n"
      ".reg .b128 all;\n"
      "mov.b64 low, {%1, %2};\n"
      "mov.b64 high, {%3, %4};\n"
      "mov.b128 all, {low, high};\n"
      "st.relaxed.gpu.global.b128 [%0], all;\n"
      "}" ::"l"(to),
      "r"(v.words[0]), "r"(v.words[1]), "r"(v.words[2]), "r"(v.words[3])
      : "memory");
}

__device__ __forceinline__ PartVector load_part(const float4* from) {
  PartVector v;
  asm volatile(
      "{\n"
      ".reg .b64 low, high;\n"
      ".reg .b128 all;\n"
      "ld.relaxed.gpu.global.b128 all, [%4];\n"
      "mov.b128 {low, high}, all;\n"
      "mov.b64 {%0, %1}, low;\n"
      "mov.b64 {%2, %3}, high;\n"
      "}"
      : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
      : "l"(from)
      : "memory");
  return v;
}

}  // namespace ostinato::decode
