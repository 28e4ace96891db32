// The arguments of W8A8 products and of activation quantisation, as plain structs shared by the
// kernels and the loader (csrc/bindings/module.cpp). Plain C++: no CUDA and no torch header, so
// that the host compiler builds the loader alone. Strides count elements, sizes are logical,
// pointers are device pointers.
#pragma once

#include <cstdint>

namespace ostinato {

// y[m][n] = x_scale[m] * (w_scale[n] * sum_k (x[m][k] - x_zero_point[m]) w[n][k]) + bias[n]
struct W8A8GemmParams {
  const void* x;  // [m, k] 8-bit
  int64_t x_stride;
  const void* w;         // [n, k] 8-bit
  int64_t w_stride;      // 0: packed (packed.h)
  const float* x_scale;  // [m] with stride 1 (per token), or one element with stride 0
  int32_t x_scale_stride;
  const float* w_scale;  // [n] with stride 1 (per channel), or one element with stride 0
  int32_t w_scale_stride;
  const void* bias;             // [n] of the output dtype, or null
  const int32_t* x_zero_point;  // as x_scale; null: symmetric
  int32_t x_zero_point_stride;
  const int32_t* w_sum;  // [n] row sums of w; needed with x_zero_point
  // One element, or null: rows of x from here on are padding, and may be taken for zeros. Written
  // before the predecessor of the launch began.
  const int32_t* n_active;
  void* out;  // [m, n]
  int64_t out_stride;
  // Where rows of out are logits to be sampled from: the places (common/argmax_key.cuh) of the best
  // of each part of a row, or null. Rows with a temperature that is not above 0 and a penalty of 1
  // need no more: they may be left out of `out`. Written by the predecessor at the latest.
  uint64_t* best;  // [m, parts of a row]; how many is the kernel's choice
  int64_t best_stride;
  const float* temperature;         // [m], with best
  const float* repetition_penalty;  // [m], or null: all are 1
  int32_t m, n, k;
  // How the tiled kernel cuts the output; 0 leaves the choice to the launch.
  int32_t tile_channels;  // channels of a CTA's tile, at most those compiled; a multiple of 16
  int32_t tile_tokens;    // tokens of a tile, at most those compiled
  int32_t cluster;        // CTAs that share what they copy: 1 or 2
  int32_t share_weights;  // 1: they are of neighbouring tokens and share their weights, not tokens
  int32_t split_k;        // 2: the CTAs of a cluster share K of tiles that would leave SMs idle
  int32_t band;           // tiles of channels that are walked side by side
  int32_t pdl;            // 1: launched with programmatic stream serialization
};

// Rows of x -> 8-bit rows and their scales.
struct QuantizeParams {
  const void* x;  // [m, k]; silu_mul: [m, 2k] = gate | up
  int64_t x_stride;
  const void* residual;  // [m, k] added to x before the norm (rms_norm only), or null
  int64_t residual_stride;
  void* residual_out;  // [m, k] the sum (rms_norm only), or null
  int64_t residual_out_stride;
  const void* norm_weight;  // [k] (rms_norm only)
  float eps;
  const float* static_scale;  // one element; null: dynamic per token
  const int32_t* zero_point;  // one element, with static_scale; null: symmetric
  void* out;                  // [m, k] 8-bit
  int64_t out_stride;
  float* scale_out;  // [m] (dynamic only)
  int32_t m, k;
  int32_t pdl;
};

}  // namespace ostinato
