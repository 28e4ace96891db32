// The arguments of norms, gates and quantisation: plain C++, without a header of CUDA or torch.
// Strides count elements, sizes are logical, pointers are device pointers.
#pragma once

#include "common/fields.h"

namespace ostinato {

// Rows of x -> 8-bit rows and their scales. Kernels whose results are not quantised store rows of
// x's dtype in `out`, and are given neither scales nor zero points.
struct QuantizeParams {
  OSTINATO_FIELDS_BEGIN(QuantizeParams);
  OSTINATO_FIELD(const void*, x);  // [m, k]; silu_mul: [m, 2k] = gate | up
  OSTINATO_FIELD(int64_t, x_stride);
  // [m, k] added to x before the norm (rms_norm only), or null
  OSTINATO_OPTIONAL(const void*, residual);
  OSTINATO_OPTIONAL(int64_t, residual_stride);
  OSTINATO_OPTIONAL(void*, residual_out);  // [m, k] the sum (rms_norm only), or null
  OSTINATO_OPTIONAL(int64_t, residual_out_stride);
  OSTINATO_OPTIONAL(const void*, norm_weight);  // [k] (rms_norm only)
  OSTINATO_OPTIONAL(float, eps);
  OSTINATO_OPTIONAL(const float*, static_scale);  // one element; null: dynamic per token
  OSTINATO_OPTIONAL(const int32_t*, zero_point);  // one element, with static_scale; null: symmetric
  OSTINATO_FIELD(void*, out);                     // [m, k] 8-bit
  OSTINATO_FIELD(int64_t, out_stride);
  OSTINATO_OPTIONAL(float*, scale_out);  // [m] (dynamic only)
  OSTINATO_FIELD(int32_t, m);
  OSTINATO_FIELD(int32_t, k);
  OSTINATO_OPTIONAL(int32_t, pdl);
  // One element, or null: rows from here on are padding, and are not written. Written before the
  // predecessor of the launch began.
  OSTINATO_OPTIONAL(const int32_t*, n_active);
  // Not 0: nobody reads x after this, and silu_mul may destroy what it has read of it.
  OSTINATO_OPTIONAL(int32_t, discard_x);
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
