// The arguments of scaling rows. Strides count elements, pointers are device pointers.
#pragma once

#include "common/fields.h"

namespace ostinato {

// out[i][j] = x[i][j] * scale[i]
struct ScaleRowsParams {
  OSTINATO_FIELDS_BEGIN(ScaleRowsParams);
  OSTINATO_FIELD(const void*, x);  // [rows, dim]
  OSTINATO_FIELD(int64_t, x_stride);
  OSTINATO_FIELD(const float*, scale);  // [rows]
  OSTINATO_FIELD(void*, out);           // [rows, dim], dense
  OSTINATO_FIELD(int32_t, rows);
  OSTINATO_FIELD(int32_t, dim);
  OSTINATO_OPTIONAL(int32_t, pdl);  // 1: launched with programmatic stream serialization
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
