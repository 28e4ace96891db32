// Arguments of norms, activations and quantisation, in plain C++ without CUDA or torch headers.
// Strides count elements, sizes are logical, pointers are device pointers.
#pragma once

#include "common/fields.h"

namespace ostinato {

// Rows of x -> 8-bit rows and their scales. Kernels without quantisation store rows of x's dtype in
// `out`, and take neither scales nor zero points.
struct QuantizeParams {
  OSTINATO_FIELDS_BEGIN(QuantizeParams);
  OSTINATO_FIELD(const void*, x);  // [m, k]; of gated activations: [m, 2k] = gate | up
  OSTINATO_FIELD(int64_t, x_stride);
  // [m, k] added to x before the norm (norms only), or null
  OSTINATO_OPTIONAL(const void*, residual);
  OSTINATO_OPTIONAL(int64_t, residual_stride);
  OSTINATO_OPTIONAL(void*, residual_out);  // [m, k] the sum (norms only), or null
  OSTINATO_OPTIONAL(int64_t, residual_out_stride);
  OSTINATO_OPTIONAL(const void*, norm_weight);  // [k] (norms only)
  OSTINATO_OPTIONAL(float, eps);
  OSTINATO_OPTIONAL(const float*, static_scale);  // one element; null: dynamic per token
  OSTINATO_OPTIONAL(const int32_t*, zero_point);  // one element, with static_scale; null: symmetric
  OSTINATO_FIELD(void*, out);                     // [m, k] 8-bit
  OSTINATO_FIELD(int64_t, out_stride);
  // (where rows are quantised) [m]: the static scale, too, but NaN for an int8 row that holds NaN;
  // of kernels for groups: [groups][m], groups of 128 of k
  OSTINATO_OPTIONAL(float*, scale_out);
  OSTINATO_OPTIONAL(int64_t, scale_stride);  // between the scales of two groups
  // 1: scales of groups are rounded up to powers of two
  OSTINATO_OPTIONAL(int32_t, power_of_two);
  OSTINATO_FIELD(int32_t, m);
  OSTINATO_FIELD(int32_t, k);
  OSTINATO_OPTIONAL(int32_t, pdl);
  // One element, or null: rows from this index on are padding, and are not written. Written before
  // the preceding kernel began.
  OSTINATO_OPTIONAL(const int32_t*, n_active);
  // Nonzero: x is not read after this kernel, and an activation may discard it.
  OSTINATO_OPTIONAL(int32_t, discard_x);
  // (layer_norm only, without residual and n_active) Above 1: x and out are [m / heads][heads][k],
  // of which the strides are those of the first dimension, and norm_weight is [heads][k].
  OSTINATO_OPTIONAL(int32_t, heads);
  OSTINATO_OPTIONAL(const void*, norm_bias);  // like norm_weight, or null (layer_norm only)
  // [m] (kernels for zero points of rows only)
  OSTINATO_OPTIONAL(int32_t*, zero_point_out);
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
