// What a launch of quantize.cu is given: a header beside params.h, which products include, so that
// they do not depend on it.
#pragma once

#include <cstdint>

#include "gemm_w8a8/params.h"

namespace ostinato {

// QuantizeParams of rows of which the last may be padding. Kernels whose results are not quantised
// store rows of x's dtype in `out`, and are given neither scales nor zero points.
struct PaddedQuantizeParams : QuantizeParams {
  // One element, or null: rows from here on are padding, and are not written. Written before the
  // predecessor of the launch began.
  const int32_t* n_active;
  // Not 0: nobody reads x after this, and silu_mul may destroy what it has read of it.
  int32_t discard_x;
};

}  // namespace ostinato
