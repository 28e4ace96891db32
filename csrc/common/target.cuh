// What the GPU that a library is compiled for has. A library is compiled for one: its host code,
// which plans launches, and its device code see the same.
#pragma once

namespace ostinato {

// Targets as __CUDA_ARCH__ counts them, rising: 900 is sm_90.
inline constexpr int kTargets[] = {__CUDA_ARCH_LIST__};
static_assert(sizeof(kTargets) == sizeof(int), "a library is compiled for one target");

inline constexpr bool kHasProgrammaticLaunch = kTargets[0] >= 900;
inline constexpr bool kHasClusters = kTargets[0] >= 900;
inline constexpr bool kHasE4m3Rounding = kTargets[0] >= 890;

}  // namespace ostinato
