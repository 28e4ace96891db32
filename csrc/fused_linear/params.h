// The arguments of products that make their 8-bit activations themselves, as a plain struct shared
// by the kernels and the loader (csrc/bindings.cpp). Plain C++: no CUDA and no torch header, so that
// the host compiler builds the loader alone. Strides count elements, sizes are logical, pointers are
// device pointers.
#pragma once

#include <cstdint>

namespace ostinato {

// y[m][n] = s[m] * (w_scale[n] * sum_k q[m][k] w[n][k]) + bias[n], where q and s are the rows of x
// (plus residual, normalised), each quantised with a scale of its own.
struct FusedLinearParams {
  const void* x;  // [m, k] 16-bit
  int64_t x_stride;
  const void* residual;  // [m, k] added to x before the norm (rms_norm only), or null
  int64_t residual_stride;
  void* residual_out;  // [m, k] the sum (rms_norm only), or null; not x nor residual
  int64_t residual_out_stride;
  const void* norm_weight;  // [k] of x's dtype (rms_norm only)
  float eps;
  const void* w;         // [n, k] 8-bit, packed (gemm_w8a8/packed.h)
  const float* w_scale;  // [n] with stride 1 (per channel), or one element with stride 0
  int32_t w_scale_stride;
  const void* bias;  // [n] of the output dtype, or null
  void* out;         // [m, n]
  int64_t out_stride;
  int32_t m, n, k;
  int32_t pdl;  // 1: launched with programmatic stream serialization
};

}  // namespace ostinato
