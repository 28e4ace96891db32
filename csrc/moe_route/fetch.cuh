// Weights that the L2 fetches while tokens choose their experts. Where there are many more slots
// than experts, nearly all experts will be chosen: then memory need not be idle until it is known
// which. It is a hint, by CTAs that route nothing and wait for nobody.
#pragma once

#include <cstdint>

#include "common/l2_prefetch.cuh"
#include "params.h"

namespace ostinato::route {

__device__ __forceinline__ bool is_to_fetch(const MoeRouteParams& p) {
  return static_cast<int>(blockIdx.x) >= p.segments;
}

// By all threads of the CTAs behind those of segments. n_active may be read early.
__device__ __forceinline__ void fetch_weights(const MoeRouteParams& p) {
  const int active = p.n_active == nullptr ? p.tokens : *p.n_active;
  if (active < p.next_least_tokens) {
    return;
  }
  const int ctas = static_cast<int>(gridDim.x) - p.segments;
  for (int expert = static_cast<int>(blockIdx.x) - p.segments; expert < p.experts; expert += ctas) {
    const uint8_t* const of_expert = static_cast<const uint8_t*>(p.next_w) +
                                     int64_t(expert) * p.next_expert_tiles * p.next_tile_bytes;
    for (int tile = static_cast<int>(threadIdx.x); tile < p.next_tiles;
         tile += static_cast<int>(blockDim.x)) {
      prefetch_to_l2(of_expert + int64_t(tile) * p.next_tile_bytes, p.next_bytes);
    }
  }
}

}  // namespace ostinato::route
