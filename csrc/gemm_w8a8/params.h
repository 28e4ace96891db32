// The arguments of W8A8 products: plain C++, without a header of CUDA or torch. Strides count
// elements, sizes are logical, pointers are device pointers.
#pragma once

#include "common/fields.h"

namespace ostinato {

// y[m][n] = x_scale[m] * (w_scale[n] * sum_k (x[m][k] - x_zero_point[m]) w[n][k]) + bias[n]
struct W8A8GemmParams {
  OSTINATO_FIELDS_BEGIN(W8A8GemmParams);
  OSTINATO_FIELD(const void*, x);  // [m, k] 8-bit
  OSTINATO_FIELD(int64_t, x_stride);
  OSTINATO_FIELD(const void*, w);     // [n, k] 8-bit
  OSTINATO_FIELD(int64_t, w_stride);  // 0: packed (packed.h)
  // [m] with stride 1 (per token), or one element with stride 0
  OSTINATO_FIELD(const float*, x_scale);
  OSTINATO_FIELD(int32_t, x_scale_stride);
  // [n] with stride 1 (per channel), or one element with stride 0
  OSTINATO_FIELD(const float*, w_scale);
  OSTINATO_FIELD(int32_t, w_scale_stride);
  OSTINATO_OPTIONAL(const void*, bias);             // [n] of the output dtype, or null
  OSTINATO_OPTIONAL(const int32_t*, x_zero_point);  // as x_scale; null: symmetric
  OSTINATO_OPTIONAL(int32_t, x_zero_point_stride);
  OSTINATO_OPTIONAL(const int32_t*, w_sum);  // [n] row sums of w; needed with x_zero_point
  // One element, or null: rows of x from here on are padding, and may be taken for zeros. Written
  // before the predecessor of the launch began.
  OSTINATO_OPTIONAL(const int32_t*, n_active);
  OSTINATO_FIELD(void*, out);  // [m, n]
  OSTINATO_FIELD(int64_t, out_stride);
  // Where rows of out are logits to be sampled from: the places (common/argmax_key.cuh) of the best
  // of each part of a row, or null. Rows with a temperature that is not above 0 and a penalty of 1
  // need no more: they may be left out of `out`. Written by the predecessor at the latest.
  OSTINATO_OPTIONAL(uint64_t*, best);  // [m, parts of a row]; how many is the kernel's choice
  OSTINATO_OPTIONAL(int64_t, best_stride);
  OSTINATO_OPTIONAL(const float*, temperature);         // [m], with best
  OSTINATO_OPTIONAL(const float*, repetition_penalty);  // [m], or null: all are 1
  OSTINATO_FIELD(int32_t, m);
  OSTINATO_FIELD(int32_t, n);
  OSTINATO_FIELD(int32_t, k);
  // How the tiled kernel cuts the output; 0 leaves the choice to the launch.
  // Channels of a CTA's tile, at most those compiled; a multiple of 16.
  OSTINATO_OPTIONAL(int32_t, tile_channels);
  OSTINATO_OPTIONAL(int32_t, tile_tokens);  // tokens of a tile, at most those compiled
  OSTINATO_OPTIONAL(int32_t, cluster);      // CTAs that share what they copy: 1 or 2
  // 1: they are of neighbouring tokens and share their weights, not tokens
  OSTINATO_OPTIONAL(int32_t, share_weights);
  // 2: the CTAs of a cluster share K of tiles that would leave SMs idle
  OSTINATO_OPTIONAL(int32_t, split_k);
  OSTINATO_OPTIONAL(int32_t, band);  // tiles of channels that are walked side by side
  OSTINATO_OPTIONAL(int32_t, pdl);   // 1: launched with programmatic stream serialization
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
