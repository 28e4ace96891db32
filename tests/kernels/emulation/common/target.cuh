// The GPU that is emulated has clusters; what it lacks is done by other instructions.
#pragma once

namespace ostinato {

inline constexpr int kTargets[] = {900};
inline constexpr bool kHasProgrammaticLaunch = true;
inline constexpr bool kHasClusters = true;
inline constexpr bool kHasE4m3Rounding = false;

}  // namespace ostinato
