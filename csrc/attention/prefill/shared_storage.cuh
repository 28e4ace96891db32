// Shared memory of a CTA, and its named barriers.
#pragma once

#include "common/mbarrier.cuh"
#include "work_tile.cuh"

namespace ostinato::prefill {

// Tags: keys and values have rings of different types, and so have 8-bit values before they are
// transposed.
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

// A sequence: rows of q and out, and keys.
struct Sequence {
  int first_row, queries, first_key, seqlen;
};

// A lane's box of a page: tokens from `slot` on.
struct Boxes {
  int page, slot;  // page -1: none
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
  uint64_t work_tile_wanted;  // arrived at by the warp that copies keys (producer.cuh)
  WorkTile work_tiles[kWorkTiles];
  Boxes first_boxes[kHandsOverBoxes ? kWorkTiles : 1]
                   [kHandsOverBoxes ? 32 : 1];  // of each work tile
  // By rank: sequences with long work tiles come first.
  Sequence sequences[kMaxBatch];
  int start[kMaxBatch + 1];  // work tiles of all sequences before it
  int weight[kMaxBatch];     // by sequence
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

// Buffer in which a warpgroup writes its output rows, given its query buffer.
__device__ __forceinline__ uint8_t* output_of(SharedStorage& shared, int buffer, int warpgroup) {
  if constexpr (kShareOutput) {
    return shared.queries[buffer][warpgroup];
  } else {
    return shared.output[warpgroup];
  }
}

// Offset of a row of 16-bit values in its tile.
__device__ __forceinline__ constexpr int value_row(int row) {
  return kSideBySide ? row / kGroup * kValueGroupStep + row % kGroup * kStripBytes
                     : row * kStripBytes;
}

// Warp index, in a form that the compiler knows to be warp-uniform. Called by all lanes.
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
}

// Named barriers; 0 is __syncthreads.
__device__ __forceinline__ int turn_barrier(int warpgroup) { return 1 + warpgroup; }
__device__ __forceinline__ void sync_warpgroup(int warpgroup) {
  sync_named(1 + kConsumers + warpgroup, kWarpgroup);
}

}  // namespace ostinato::prefill
