// Arguments of the W8A8 and 16-bit GEMMs, in plain C++ without CUDA or torch headers. Strides count
// elements, sizes are logical, pointers are device pointers.
#pragma once

#include "common/fields.h"

namespace ostinato {

// y[m][n] = x_scale[m] * (w_scale[n] * sum_k (x[m][k] - x_zero_point[m]) w[n][k]) + bias[n]
// With operands of 16 bits there are neither scales nor zero points: these pointers are null.
//
// With block scales (a variant of the tiled kernel), a group is 128 of K, and
// y[m][n] = sum_group x_scale[group][m] * w_scale[group][n / 8] * sum_k x[m][k] w[n][k] + bias[n]
struct W8A8GemmParams {
  OSTINATO_FIELDS_BEGIN(W8A8GemmParams);
  OSTINATO_FIELD(const void*, x);  // [m, k] 8- or 16-bit
  OSTINATO_FIELD(int64_t, x_stride);
  OSTINATO_FIELD(const void*, w);     // [n, k] of the dtype of x
  OSTINATO_FIELD(int64_t, w_stride);  // 0: packed (packed.h)
  // [m] with stride 1 (per token), or one element with stride 0. Block scales: [k / 128][m], and
  // the stride is that of the groups, a multiple of 4, from a 16-byte aligned base.
  OSTINATO_FIELD(const float*, x_scale);
  OSTINATO_FIELD(int32_t, x_scale_stride);
  // [n] with stride 1 (per channel), or one element with stride 0. Block scales: likewise
  // [k / 128][n / 8].
  OSTINATO_FIELD(const float*, w_scale);
  OSTINATO_FIELD(int32_t, w_scale_stride);
  OSTINATO_OPTIONAL(const void*, bias);             // [n] of the output dtype, or null
  OSTINATO_OPTIONAL(const int32_t*, x_zero_point);  // as x_scale; null: symmetric
  OSTINATO_OPTIONAL(int32_t, x_zero_point_stride);
  OSTINATO_OPTIONAL(const int32_t*, w_sum);  // [n] row sums of w; needed with x_zero_point
  // One element, or null: rows of x from this index on are padding, and may be taken for zeros.
  // Written before the preceding kernel began.
  OSTINATO_OPTIONAL(const int32_t*, n_active);
  OSTINATO_FIELD(void*, out);  // [m, n]
  OSTINATO_FIELD(int64_t, out_stride);
  // For rows of out that are logits: the argmax keys (common/argmax_key.cuh) of slices of each row,
  // or null. Rows with a temperature of at most 0 and a penalty of 1 need no more, and may be
  // missing from `out`. Inputs are written by the preceding kernel at the latest.
  OSTINATO_OPTIONAL(uint64_t*, best);  // [m, slices of a row]; the kernel chooses how many
  OSTINATO_OPTIONAL(int64_t, best_stride);
  OSTINATO_OPTIONAL(const float*, temperature);         // [m], with best
  OSTINATO_OPTIONAL(const float*, repetition_penalty);  // [m], or null: all are 1
  OSTINATO_FIELD(int32_t, m);
  OSTINATO_FIELD(int32_t, n);
  OSTINATO_FIELD(int32_t, k);
  // How the tiled kernel tiles the output; 0: the launch chooses.
  // Channels of a CTA's tile, at most those compiled; a multiple of 16.
  OSTINATO_OPTIONAL(int32_t, tile_channels);
  OSTINATO_OPTIONAL(int32_t, tile_tokens);  // tokens of a tile, at most those compiled
  OSTINATO_OPTIONAL(int32_t, cluster);      // CTAs that share their copies: 1 or 2
  // 1: the CTAs have adjacent tokens and share weights instead of tokens
  OSTINATO_OPTIONAL(int32_t, share_weights);
  // 2: the CTAs of a cluster share the K of tiles that would leave SMs idle
  OSTINATO_OPTIONAL(int32_t, split_k);
  OSTINATO_OPTIONAL(int32_t, band);  // channel tiles that are processed side by side
  OSTINATO_OPTIONAL(int32_t, pdl);   // 1: launched with programmatic stream serialization
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
