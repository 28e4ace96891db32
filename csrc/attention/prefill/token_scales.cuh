// Scales of each token's keys and values. The producer reads them with a tile of keys, and writes
// them before it hands over the keys. They have stages of their own, since consumers need them
// after they have released the keys.
//
// The scale of a token's values multiplies its weight, which must stay in the range of fp16:
// weights are relative to a reference that rises with the greatest scale so far (Softmax). A value
// with a NaN or infinite scale becomes NaN itself.
#pragma once

#include "attention/common/ptx.cuh"
#include "common/ring.cuh"
#include "shared_storage.cuh"

namespace ostinato::prefill {

// What a query's score of a token is combined with.
struct TokenScale {
  float key;    // multiplies the score: the scale of the key times Arguments::logit_scale
  float value;  // multiplies the weight; finite

  __device__ __forceinline__ static TokenScale of(const Arguments& args, float key_scale,
                                                  float value_scale) {
    return {key_scale * args.logit_scale, is_number(value_scale) ? value_scale : 1.0f};
  }

  __device__ __forceinline__ static bool is_number(float scale) { return fabsf(scale) < INFINITY; }

  // The logit in base 2.
  __device__ __forceinline__ float logit(const Arguments& args, float score) const {
    const float softcap = args.params.softcap;
    const float logit = score * key;
    return softcap > 0 ? softcap * (kLog2E * hyperbolic_tangent(logit)) : logit;
  }
};

// Where the scales are. Kernels without scales of tokens have neither arguments nor memory for
// them, and never call these functions.
#if OSTINATO_TOKEN_SCALES
__device__ __forceinline__ TileScales& tile_scales_of(SharedStorage& shared, int slot) {
  return shared.scales[slot];
}
__device__ __forceinline__ uint64_t* scales_empty_of(SharedStorage& shared, int slot) {
  return &shared.scales_empty[slot];
}
__host__ __device__ __forceinline__ const Slots& key_scales_of(const Params& params) {
  return params.k_token_scale;
}
__host__ __device__ __forceinline__ const Slots& value_scales_of(const Params& params) {
  return params.v_token_scale;
}
#else
__device__ TileScales& tile_scales_of(SharedStorage& shared, int slot);
__device__ uint64_t* scales_empty_of(SharedStorage& shared, int slot);
__host__ __device__ const Slots& key_scales_of(const Params& params);
__host__ __device__ const Slots& value_scales_of(const Params& params);
#endif

// Scales of one token, read from global memory. `page` is 0 for packed keys.
__device__ __forceinline__ float read_token_scale(const Slots& scales, int64_t page, int64_t slot,
                                                  int head) {
  return static_cast<const float*>(
      scales.data)[page * scales.page_stride + slot * scales.stride + head * scales.head_stride];
}

// Writes the scales of a token of a tile. Those of tokens that no query sees must be finite.
// Returns the magnitude of the value's.
__device__ __forceinline__ float write_scales(TileScales& scales, const Arguments& args, int row,
                                              float key_scale, float value_scale) {
  const TokenScale scale = TokenScale::of(args, key_scale, value_scale);
  const int index = TileFactors::index(row);
  scales.key.of[index] = scale.key;
  scales.value.of[index] = scale.value;
  return fabsf(scale.value);
}

}  // namespace ostinato::prefill
