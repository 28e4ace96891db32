// Arguments of linear layers that quantise their activations themselves, in plain C++ without CUDA
// or torch headers. Strides count elements, sizes are logical, pointers are device pointers.
#pragma once

#include "common/fields.h"

namespace ostinato {

// y[n] = s * (w_scale[n] * sum_k q[k] w[n][k]) + bias[n], where q is x (plus residual, normalised)
// quantised with the scale s, for one token. Kernels with an activation function f read gates and
// ups [n / 2] each out of y, rounded to the output's dtype, and store f(gate) * up in fp32.
struct FusedLinearParams {
  OSTINATO_FIELDS_BEGIN(FusedLinearParams);
  OSTINATO_FIELD(const void*, x);  // [k] 16-bit
  // [k] added to x before the norm (rms_norm only), or null
  OSTINATO_OPTIONAL(const void*, residual);
  OSTINATO_OPTIONAL(void*, residual_out);  // [k] the sum, not x nor residual (with residual only)
  OSTINATO_OPTIONAL(const void*, norm_weight);  // [k] (rms_norm only)
  OSTINATO_OPTIONAL(float, eps);
  OSTINATO_FIELD(const void*, w);  // [n, k] 8-bit, packed (gemm_w8a8/packed.h)
  // [n] with stride 1 (per channel), or one element with stride 0
  OSTINATO_FIELD(const float*, w_scale);
  OSTINATO_FIELD(int32_t, w_scale_stride);
  OSTINATO_OPTIONAL(const void*, bias);  // [n] of the output dtype, or null
  OSTINATO_FIELD(void*, out);            // [n]; with an activation [n / 2] fp32
  // (with an activation only) the largest magnitude of what each CTA stored, NaN if it stored one
  OSTINATO_OPTIONAL(float*, maxima);
  OSTINATO_OPTIONAL(int32_t, n_maxima);  // the number of CTAs
  OSTINATO_FIELD(int32_t, n);
  OSTINATO_FIELD(int32_t, k);
  OSTINATO_OPTIONAL(int32_t, pdl);  // 1: launched with programmatic stream serialization
  OSTINATO_FIELDS_END();
};

// y[n] = s * (w_scale[n] * sum_k q[k] w[n][k]) + bias[n], where q is x quantised with the scale s,
// for one token.
struct ActivatedLinearParams {
  OSTINATO_FIELDS_BEGIN(ActivatedLinearParams);
  OSTINATO_FIELD(const float*, x);       // [k]
  OSTINATO_FIELD(const float*, maxima);  // [n_maxima] of which the largest is that of x, or NaN
  OSTINATO_FIELD(int32_t, n_maxima);
  OSTINATO_FIELD(const void*, w);  // as of FusedLinearParams, and so on
  OSTINATO_FIELD(const float*, w_scale);
  OSTINATO_FIELD(int32_t, w_scale_stride);
  OSTINATO_OPTIONAL(const void*, bias);
  OSTINATO_FIELD(void*, out);  // [n]
  OSTINATO_FIELD(int32_t, n);
  OSTINATO_FIELD(int32_t, k);
  OSTINATO_OPTIONAL(int32_t, pdl);
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
