// Weights that the L2 fetches while CTAs plan: with what the CTAs of the next product begin. It is
// a hint, by CTAs behind those of the segments. They write nothing.
#pragma once

#include <cstdint>

#include "common/l2_prefetch.cuh"
#include "common/sizes.cuh"
#include "params.h"

namespace ostinato::route {

inline constexpr int kFetchedBytes = 8192;  // at once: what is multiplied first comes first

__device__ __forceinline__ bool is_to_fetch(const MoeRouteParams& p) {
  return static_cast<int>(blockIdx.x) >= p.segments;
}

__device__ __forceinline__ int real_tokens(const MoeRouteParams& p) {
  return p.n_active == nullptr ? p.tokens : min(*p.n_active, p.tokens);
}

// Whether so many tokens will choose so many experts that some of all are fetched before they do.
__device__ __forceinline__ bool may_choose_any(const MoeRouteParams& p) {
  return real_tokens(p) >= p.next_least_tokens;
}

// Whether they have as many slots as there are experts: of those that are chosen the same would be
// fetched once more.
__device__ __forceinline__ bool choose_most(const MoeRouteParams& p) {
  return real_tokens(p) * p.top_k >= p.experts;
}

// By all threads of all these CTAs. `counts`: slots of each expert, of which those are fetched that
// have any; null: all experts are.
__device__ __forceinline__ void fetch_weights(const MoeRouteParams& p, const int* counts) {
  const int experts = counts == nullptr ? p.experts : min(p.experts, real_tokens(p) * p.top_k);
  if (experts <= 0) {
    return;
  }
  const int tiles = min(p.next_expert_tiles, max(1, p.next_ctas / experts) * p.next_cta_tiles);
  const int bytes = min(p.next_tile_bytes, p.next_budget / (experts * tiles)) / 16 * 16;
  const int of_chunk = p.experts * tiles, items = ceil_div(bytes, kFetchedBytes) * of_chunk;
  const int ctas = static_cast<int>(gridDim.x) - p.segments;
  const int first = static_cast<int>(blockIdx.x) - p.segments;
  for (int item = first + static_cast<int>(threadIdx.x) * ctas; item < items;
       item += static_cast<int>(blockDim.x) * ctas) {
    const int chunk = item / of_chunk, of_expert = item - chunk * of_chunk;
    const int expert = of_expert / tiles, tile = of_expert - expert * tiles;
    if (counts == nullptr || counts[expert] > 0) {
      const int64_t before = int64_t(expert) * p.next_expert_tiles + tile;
      const int at = chunk * kFetchedBytes;
      prefetch_to_l2(static_cast<const uint8_t*>(p.next_w) + before * p.next_tile_bytes + at,
                     min(kFetchedBytes, bytes - at));
    }
  }
}

}  // namespace ostinato::route
