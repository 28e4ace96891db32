// Features of the target GPU. A library is compiled for a single target, which its host code (that
// plans launches) and its device code share.
#pragma once

namespace ostinato {

// Targets in the notation of __CUDA_ARCH__, ascending: 900 is sm_90.
inline constexpr int kTargets[] = {__CUDA_ARCH_LIST__};
static_assert(sizeof(kTargets) == sizeof(int), "a library is compiled for one target");

inline constexpr bool kHasProgrammaticLaunch = kTargets[0] >= 900;
inline constexpr bool kHasClusters = kTargets[0] >= 900;
inline constexpr bool kHasE4m3Rounding = kTargets[0] >= 890;

}  // namespace ostinato
