// The boxes of block scales that TMA copies to a stage, and where a tile's scales are in them.
//
// A copy begins at a multiple of 16 bytes of a row of the tensor: with another first coordinate
// Hopper ends the kernel with "illegal instruction". Tiles begin at any token and at every 16th
// channel, so that a box begins up to 3 scales before its tile's, and has room for as many more.
#pragma once

#include "common/sizes.cuh"

namespace ostinato::tiled {

inline constexpr int kTmaBytes = 16;  // of addresses and of a box's rows
inline constexpr int kScaleStep = kTmaBytes / sizeof(float);

// The scales of a box that holds `count` scales of a tile, whichever its first one is.
__host__ __device__ constexpr int scale_box(int count) {
  return round_up(count, kScaleStep) + kScaleStep;
}

// Of a tile's first scale in a row of the tensor: the coordinate of the box, and its place there.
__host__ __device__ constexpr int scale_box_start(int first) {
  return first / kScaleStep * kScaleStep;
}
__host__ __device__ constexpr int place_in_scale_box(int first) { return first % kScaleStep; }

}  // namespace ostinato::tiled
