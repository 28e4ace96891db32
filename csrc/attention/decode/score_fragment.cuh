// What a warp has of a block's scores and of their columns, as an MMA accumulates them: columns are
// queries times heads of the group, a lane's 8 t + 2 (lane % 4) and the next one; tokens are its
// lane / 4 and the one 8 later.
#pragma once

#include <limits>

#include "config.cuh"

namespace ostinato::decode {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kNothing = -std::numeric_limits<float>::max();  // the maximum of no scores

struct Scores {
  float values[kColumnTiles][4];
};

// Of a lane's two columns of a tile.
struct Columns {
  float of[2];
};

// The highest score of each column of a tile.
__device__ __forceinline__ Columns highest(const float (&scores)[4]) {
  Columns tops;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float top = fmaxf(scores[e], scores[e + 2]);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, step));
    }
    tops.of[e] = top;
  }
  return tops;
}

}  // namespace ostinato::decode
