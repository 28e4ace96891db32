// A warp's fragment of a block's scores, as an MMA accumulates them. Columns are queries times
// query heads of a KV head: a lane has columns 8 t + 2 (lane % 4) and the next one. Rows are
// tokens: lane / 4 and lane / 4 + 8.
#pragma once

#include <limits>

#include "config.cuh"

namespace ostinato::decode {

inline constexpr float kLog2E = 1.4426950408889634f;
// maximum of an empty set of scores
inline constexpr float kNothing = -std::numeric_limits<float>::max();

struct Scores {
  float values[kColumnTiles][4];
};

// One value for each of a lane's two columns of a tile.
struct Columns {
  float of[2];
};

// The maximum score of each column of a tile, over the block's tokens.
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
