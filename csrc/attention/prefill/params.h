// What a launch of prefill_sm90.cu is given: a header beside params.h, which kernels of other
// attention include, so that they do not depend on it.
#pragma once

#include <cstdint>

#include "attention/common/params.h"

namespace ostinato {

// PrefillParams, and of 8-bit q, k and v fp32 factors: of all (stride 0) or of each KV head
// (stride 1), otherwise null. The workspace has ostinato_workspace_bytes() bytes, and may not be
// null where that is more than a counter.
struct ScaledPrefillParams : PrefillParams {
  const float* q_scale;
  const float* k_scale;
  const float* v_scale;
  int32_t q_scale_stride, k_scale_stride, v_scale_stride;
};

}  // namespace ostinato
