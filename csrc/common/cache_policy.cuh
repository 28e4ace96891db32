// How long what a copy reads should stay in the L2 cache. Only for what one CTA alone reads: on the
// H200 copies with a policy made here, "evict_normal" too, are not coalesced where several CTAs ask
// for the same lines at about the same time, and took up to 1.5 times as long.
// Names and semantics: PTX ISA, "createpolicy".
#pragma once

#include <cstdint>

namespace ostinato {

__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace ostinato
