// Arguments of the grouped GEMM of a mixture of experts, in plain C++. Strides count elements,
// sizes are logical, pointers are device pointers.
#pragma once

#include "common/fields.h"

namespace ostinato {

// Row r of the plan is slot rows[r], which is that of token rows[r] / top_k, and belongs to the
// expert of its tile. With x_row = token and out_row = r (to_experts), or x_row = r and out_row =
// slot,
//   y[c] = x_scale[x_row] * (w_scale[expert][c] * sum_k x[x_row][k] w[expert][c][k])
//   out[out_row][c] = y[c], or gated, of half as many channels, silu(y[c]) * y[n / 2 + c].
// With operands of 16 bits there are no scales. With block scales a group is 128 of K, s is 8 or
// 128, and
//   y[c] = sum_group x_scale[group][x_row] * w_scale[expert][group][c / s] * sum_k x w.
// Kernels for x of 16 bits and weights of 8 quantise x, with the bits of gemm_w8a8/quantize.
struct MoeLinearParams {
  OSTINATO_FIELDS_BEGIN(MoeLinearParams);
  OSTINATO_FIELD(const void*, x);  // rows of k elements, aligned to 16 bytes
  OSTINATO_FIELD(int64_t, x_stride);
  OSTINATO_FIELD(const void*, w);           // packed experts (runtime/ops/moe/packed_experts.py)
  OSTINATO_FIELD(const float*, x_scale);    // null for x of 16 bits
  OSTINATO_FIELD(int64_t, x_scale_stride);  // of groups
  // Of an expert behind another, dense; null for 16-bit operands.
  OSTINATO_FIELD(const float*, w_scale);
  OSTINATO_FIELD(const int32_t*, rows);
  OSTINATO_FIELD(const int32_t*, tiles);  // [max_tiles, 4]: expert, first row, row behind the last
  OSTINATO_FIELD(const int32_t*, n_tiles);
  OSTINATO_FIELD(void*, out);
  OSTINATO_FIELD(int64_t, out_stride);
  OSTINATO_FIELD(int32_t, experts);
  OSTINATO_FIELD(int32_t, n);  // channels of an expert, those of gate and up together
  OSTINATO_FIELD(int32_t, k);
  OSTINATO_FIELD(int32_t, top_k);
  OSTINATO_FIELD(int32_t, max_tiles);
  OSTINATO_FIELD(int32_t, to_experts);
  OSTINATO_FIELD(int32_t, gated);
  // Channels of a CTA's tile, at most those compiled; a multiple of kTileStep. 0: those compiled.
  OSTINATO_OPTIONAL(int32_t, tile_channels);
  // 1: two CTAs are a cluster and share weights, of kernels for tiles of 128 rows; 0: none are.
  OSTINATO_OPTIONAL(int32_t, pairs);
  // 1: x has 16 bits, and scales of its groups are rounded up to powers of two.
  OSTINATO_OPTIONAL(int32_t, power_of_two);
  // 1: the preceding kernel does not write rows, tiles and n_tiles, and began when they were
  // written; they, weights and w_scale are read before it has ended.
  OSTINATO_OPTIONAL(int32_t, early);
  OSTINATO_OPTIONAL(int32_t, pdl);  // 1: launched with programmatic stream serialization
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
