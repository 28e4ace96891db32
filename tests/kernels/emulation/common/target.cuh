// The host has no instructions of sm_90, but stands in for its clusters and launches.
#pragma once

namespace ostinato {

inline constexpr int kTargets[] = {900};
inline constexpr bool kHasProgrammaticLaunch = true;
inline constexpr bool kHasClusters = true;
inline constexpr bool kHasE4m3Rounding = false;

}  // namespace ostinato
