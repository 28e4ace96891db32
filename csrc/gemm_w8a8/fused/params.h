// The arguments of a linear layer that makes its 8-bit activations itself, as a plain struct shared
// by the kernels and the loader (csrc/bindings/module.cpp). Plain C++: no CUDA and no torch header,
// so that the host compiler builds the loader alone. Sizes are logical, pointers are device
// pointers.
#pragma once

#include <cstdint>

namespace ostinato {

// y[n] = s * (w_scale[n] * sum_k q[k] w[n][k]) + bias[n], where q is x (plus residual, normalised)
// quantised with the scale s, for one token.
struct FusedLinearParams {
  const void* x;            // [k] 16-bit
  const void* residual;     // [k] added to x before the norm (rms_norm only), or null
  void* residual_out;       // [k] the sum, not x nor residual (with residual only)
  const void* norm_weight;  // [k] of x's dtype (rms_norm only)
  float eps;
  const void* w;         // [n, k] 8-bit, packed (gemm_w8a8/packed.h)
  const float* w_scale;  // [n] with stride 1 (per channel), or one element with stride 0
  int32_t w_scale_stride;
  const void* bias;  // [n] of the output dtype, or null
  void* out;         // [n]
  int32_t n, k;
  int32_t pdl;  // 1: launched with programmatic stream serialization
};

}  // namespace ostinato
