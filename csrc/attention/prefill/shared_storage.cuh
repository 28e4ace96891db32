// The shared memory of a CTA.
#pragma once

#include "common/mbarrier.cuh"
#include "work_tile.cuh"

namespace ostinato::prefill {

// Keys and values have rings of different types; so have values that are copied in one form and
// multiplied in another.
struct Keys {};
struct Values {};
struct ValuesToTranspose {};
using CopiedValues = std::conditional_t<kFp8, ValuesToTranspose, Values>;

template <class What>
inline constexpr int kTileBytes = std::is_same_v<What, Keys>     ? kKeyBytes
                                  : std::is_same_v<What, Values> ? kValueBytes
                                                                 : kCopiedValueBytes;

template <class What>
inline constexpr int kStagesOf = std::is_same_v<What, Values> ? kValueStages
                                 : std::is_same_v<What, Keys> ? kKeyStages
                                                              : kStages;

template <class What>
struct Ring {
  alignas(1024) uint8_t tiles[kStagesOf<What>][kTileBytes<What>];
};

template <class What>
struct RingBarriers {
  uint64_t full[kStagesOf<What>];
  uint64_t empty[kStagesOf<What>];
};

// A sequence with what is counted before it on the line of work tiles.
struct Sequence {
  int first_row, queries, first_key, seqlen;
};

// Of a page, what a lane has copied: tokens from `slot` on.
struct Boxes {
  int page, slot;  // page -1: nothing
};

struct TransposeStorage {
  Ring<ValuesToTranspose> values_to_transpose;
  RingBarriers<ValuesToTranspose> values_to_transpose_barriers;
};
struct NoStorage {};

struct SharedStorage : std::conditional_t<kFp8, TransposeStorage, NoStorage> {
  alignas(1024) uint8_t queries[kQueryBuffers][kConsumers][kQueryBytes];
  Ring<Keys> keys;
  Ring<Values> values;
  alignas(1024) uint8_t output[kShareOutput ? 1 : kConsumers][kShareOutput ? 16 : kOutputBytes];
  RingBarriers<Keys> keys_barriers;
  RingBarriers<Values> values_barriers;
  uint64_t queries_full[kQueryBuffers][kConsumers];
  uint64_t queries_empty[kQueryBuffers][kConsumers];
  uint64_t work_tile_full[kWorkTiles];
  uint64_t work_tile_empty[kWorkTiles];
  uint64_t work_tile_wanted;  // by the warp that copies keys (producer.cuh)
  WorkTile work_tiles[kWorkTiles];
  Boxes first_boxes[kHandsOverBoxes ? kWorkTiles : 1]
                   [kHandsOverBoxes ? 32 : 1];  // of each work tile
  // By rank: sequences with long tiles come first.
  Sequence sequences[kMaxBatch];
  int start[kMaxBatch + 1];  // work tiles of all sequences before
  int weight[kMaxBatch];     // by number
};
static_assert(sizeof(SharedStorage) <= 227 * 1024, "an SM has 227 KB for a CTA");

template <class What, class Storage>
__device__ __forceinline__ Ring<What>& ring_of(Storage& shared) {
  if constexpr (std::is_same_v<What, Keys>) {
    return shared.keys;
  } else if constexpr (std::is_same_v<What, Values>) {
    return shared.values;
  } else {
    return shared.values_to_transpose;
  }
}

template <class What, class Storage>
__device__ __forceinline__ RingBarriers<What>& barriers_of(Storage& shared) {
  if constexpr (std::is_same_v<What, Keys>) {
    return shared.keys_barriers;
  } else if constexpr (std::is_same_v<What, Values>) {
    return shared.values_barriers;
  } else {
    return shared.values_to_transpose_barriers;
  }
}

// Where a warpgroup turns its output into rows, if its queries lie in that buffer.
__device__ __forceinline__ uint8_t* output_of(SharedStorage& shared, int buffer, int warpgroup) {
  if constexpr (kShareOutput) {
    return shared.queries[buffer][warpgroup];
  } else {
    return shared.output[warpgroup];
  }
}

// Where a value's row begins in its tile, of 16 bits.
__device__ __forceinline__ constexpr int value_row(int row) {
  return kSideBySide ? row / kGroup * kValueGroupStep + row % kGroup * kStripBytes
                     : row * kStripBytes;
}

// As a value that the compiler knows to be the warp's. By all lanes.
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
}

// Barriers by number: 0 is __syncthreads.
__device__ __forceinline__ int turn_barrier(int warpgroup) { return 1 + warpgroup; }
__device__ __forceinline__ void sync_warpgroup(int warpgroup) {
  sync_named(1 + kConsumers + warpgroup, kWarpgroup);
}

}  // namespace ostinato::prefill
