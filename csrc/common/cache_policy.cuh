// L2 cache policies of copies.
// Names: PTX ISA, "createpolicy"; the number: CUTLASS, cute/arch/copy_sm90_desc.hpp.
#pragma once

#include <cstdint>

namespace ostinato {

// Evict-first, for data that is not read again soon, so that L2 keeps what kernels pass to each
// other. A constant instead of createpolicy's run-time result, which takes registers. On H200,
// copies with a policy (even "evict_normal") are not merged when several CTAs request the same
// lines at about the same time, and took up to 1.5 times as long (docs/notebooks/gemm_tiled.md,
// v7).
inline constexpr uint64_t kEvictFirst = 0x12F0000000000000;

}  // namespace ostinato
