// How long what a copy reads should stay in the L2 cache.
// Names: PTX ISA, "createpolicy"; the number: CUTLASS, cute/arch/copy_sm90_desc.hpp.
#pragma once

#include <cstdint>

namespace ostinato {

// What is not read again before much else is: it leaves first, and the L2 keeps what kernels hand
// to each other. A number, not what createpolicy makes at run time: that takes registers, and on
// the H200 copies with such a policy, "evict_normal" too, are not merged where several CTAs ask for
// the same lines at about the same time, and took up to 1.5 times as long (docs/gemm_tiled.md, v7).
inline constexpr uint64_t kEvictFirst = 0x12F0000000000000;

}  // namespace ostinato
