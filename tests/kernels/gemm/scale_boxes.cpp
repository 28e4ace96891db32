// What TMA asks of the copies of block scales, for one variant and every way to cut its tiles. It
// prints the first thing that is wrong, and then returns 1.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#include "gemm_w8a8/tiled/config.cuh"

namespace {

using namespace ostinato;
using namespace ostinato::tiled;

constexpr int kSharedBytes = 128;  // of the address of a copy in shared memory
constexpr int kMostTiles = 300;
constexpr int kLargestBox = 256;

void require(bool right, const char* what, int tile, int index) {
  if (!right) {
    std::printf("%s (tile of %d, index %d)\n", what, tile, index);
    std::exit(1);
  }
}

// The coordinate of a copy, as Hopper has it, and the scales of a tile in what is copied.
void check_tile(int first, int count, int box, int tile, int index) {
  const int start = scale_box_start(first), place = place_in_scale_box(first);
  require(start * sizeof(float) % kTmaBytes == 0, "a copy begins within 16 bytes", tile, index);
  require(start + place == first, "a tile begins at another scale", tile, index);
  require(place + count <= box, "a tile ends behind its box", tile, index);
}

void check_addresses() {
  static FixedStorage fixed;
  const auto at = [&](const void* member) {
    return static_cast<int>(static_cast<const char*>(member) -
                            reinterpret_cast<const char*>(&fixed));
  };
  for (int slot = 0; slot < kMaxStages; ++slot) {
    require(at(&fixed.w_scales[slot]) % kSharedBytes == 0, "w_scales are not aligned", 0, slot);
    require(at(&fixed.x_scales[slot]) % kSharedBytes == 0, "x_scales are not aligned", 0, slot);
  }
  require(at(&fixed.epilogue) % kTmaBytes == 0, "the epilogue's storage is not aligned", 0, 0);
  require(kRingOffset % 1024 == 0 && kRingOffset < kSmemLimit / 4, "the ring", 0, kRingOffset);
}

}  // namespace

int main() {
  require(kWeightScales * sizeof(float) % kTmaBytes == 0 && kWeightScales <= kLargestBox &&
              kTokenScales * sizeof(float) % kTmaBytes == 0 && kTokenScales <= kLargestBox,
          "the rows of a box", kWeightScales, kTokenScales);
  require(sizeof(BlockScaleStorage::w_scales[0]) >= kWeightScaleBytes &&
              sizeof(BlockScaleStorage::x_scales[0]) >= kTokenScaleBytes,
          "a stage has no room for its boxes", kWeightScaleBytes, kTokenScaleBytes);
  check_addresses();
  for (int index = 0; index < kMostTiles; ++index) {
    for (int channels = 16; channels <= kChannels; channels += 16) {
      const int first = channels * index;
      const int end = first + kChannels;
      check_tile(first / kScaleChannels, ceil_div(end, kScaleChannels) - first / kScaleChannels,
                 kWeightScales, channels, index);
    }
    for (int tokens = 1; tokens <= kTokens; ++tokens) {
      check_tile(tokens * index, kTokens, kTokenScales, tokens, index);
    }
  }
  return 0;
}
