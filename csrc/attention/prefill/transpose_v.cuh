// Transposes tiles of 8-bit values: wgmma needs keys along the row, and copies have a row per key.
//
// ldmatrix transposes pairs of bytes, byte permutations those within a pair, and stmatrix writes
// them. The keys of 16 lie in the order of the weights (consumer_fp8.cuh): byte 4c + 2h + e of a
// group holds key 8h + 2c + e, so that a thread's scores are already the operand. Values that no
// query of the work tile sees become 0.
#pragma once

#include "common/ring.cuh"
#include "common/tma.cuh"
#include "fp8_ptx.cuh"
#include "producer.cuh"

namespace ostinato::prefill {

class Transposer {
 public:
  __device__ Transposer(SharedStorage& shared)
      : shared_(shared),
        warp_(warp_index() - kConsumerThreads / 32 - kProducerWarps),
        lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    RingPosition position;
    while (true) {
      wait(&shared_.work_tile_full[position.slot], position.parity);
      const WorkTile& work_tile = shared_.work_tiles[position.slot];
      if (work_tile.is_last()) {
        break;
      }
      for (int n = 0; n < work_tile.tiles(); ++n) {
        transpose_tile(work_tile, work_tile.tile(n) * kKeys);
      }
      __syncwarp();
      if (lane_ == 0) {
        arrive(&shared_.work_tile_empty[position.slot]);
      }
      position.advance(kWorkTiles);
    }
  }

 private:
  static constexpr int kGroups = kKeys / 32;      // of keys, that a warp turns at a time
  static constexpr int kBlocks = kValueDim / 16;  // of the value dim
  static constexpr int kBlocksOfStrip = kStripBytes / 16;

  // The tile whose first key is given. Each warp turns some blocks of the value dim.
  __device__ __forceinline__ void transpose_tile(const WorkTile& work_tile, int first) {
    RingBarriers<ValuesToTranspose>& from_barriers = barriers_of<ValuesToTranspose>(shared_);
    RingBarriers<Values>& to_barriers = barriers_of<Values>(shared_);
    wait(&from_barriers.full[from_.slot], from_.parity);
    wait(&to_barriers.empty[to_.slot], to_.parity ^ 1);
    const uint8_t* const from = ring_of<ValuesToTranspose>(shared_).tiles[from_.slot];
    uint8_t* const to = ring_of<Values>(shared_).tiles[to_.slot];
    if (first >= work_tile.visible_begin && first + kKeys <= work_tile.visible_end) {
      transpose_blocks<false>(from, to, first, work_tile);
    } else {
      transpose_blocks<true>(from, to, first, work_tile);
    }
    fence_shared_for_tma();  // written by threads, read by tensor cores
    OSTINATO_DELAY(prefill_transpose, warp_ == 1);
    __syncwarp();
    if (lane_ == 0) {
      arrive(&from_barriers.empty[from_.slot]);
      arrive(&to_barriers.full[to_.slot]);
    }
    from_.advance(kStagesOf<ValuesToTranspose>);
    to_.advance(kStagesOf<Values>);
  }

  // `kClears`: where no query of the work tile sees a key.
  template <bool kClears>
  __device__ __forceinline__ void transpose_blocks(const uint8_t* from, uint8_t* to, int first,
                                                   const WorkTile& work_tile) const {
    // Which row the lane names: of what is read, key `lane_` of 32; of what is written, one of the
    // 16 columns. Lanes of the lower and of the upper half of a warp swap the two bytes of a pair,
    // so that 8 rows written at once lie in different banks.
    const int row = lane_ % 8, matrix = lane_ / 8;
    const uint32_t low = lane_ < 16 ? 0x6420 : 0x7531, high = low ^ (0x6420 ^ 0x7531);
    const int column = 2 * row + ((row >= 4 ? 1 : 0) ^ matrix % 2);
    const int swizzle = matrix / 2 ^ (kValueRowBytes == 128 ? column % 8 : column / 2 % 4);
    from += lane_ * kStripBytes;
    to += column * kValueRowBytes;
#pragma unroll 1
    for (int block = warp_; block < kBlocks; block += kTransposeWarps) {
      const uint8_t* const block_from =
          from + block / kBlocksOfStrip * kKeyStrip + (block % kBlocksOfStrip ^ row) * 16;
      uint8_t* const block_to = to + block * 16 * kValueRowBytes;
      if constexpr (kClears) {
#pragma unroll 1
        for (int group = 0; group < kGroups; ++group) {
          uint32_t pairs[4];
          load_transposed(block_from + group * 32 * kStripBytes, pairs);
          clear(first + group * 32 + lane_ % 4 * 2, work_tile, pairs);
          store_keys(block_to + (group * 2 ^ swizzle) * 16, pairs, low, high);
        }
      } else {
        uint32_t pairs[kGroups][4];
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          load_transposed(block_from + group * 32 * kStripBytes, pairs[group]);
        }
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          store_keys(block_to + (group * 2 ^ swizzle) * 16, pairs[group], low, high);
        }
      }
    }
  }

  // Of 32 keys and 16 columns.
  __device__ __forceinline__ static void store_keys(uint8_t* to, const uint32_t (&pairs)[4],
                                                    uint32_t low, uint32_t high) {
    const uint32_t words[4] = {
        __byte_perm(pairs[0], pairs[1], low), __byte_perm(pairs[0], pairs[1], high),
        __byte_perm(pairs[2], pairs[3], low), __byte_perm(pairs[2], pairs[3], high)};
    store_matrices(to, words);
  }

  // Word m holds keys 8m and 8m + 1 from `key` on.
  __device__ __forceinline__ static void clear(int key, const WorkTile& work_tile,
                                               uint32_t (&words)[4]) {
    const auto seen = [&](int k) {
      return k >= work_tile.visible_begin && k < work_tile.visible_end;
    };
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const uint32_t first = seen(key + 8 * m) ? 0x0000ffff : 0;
      const uint32_t second = seen(key + 8 * m + 1) ? 0xffff0000 : 0;
      words[m] &= first | second;
    }
  }

  SharedStorage& shared_;
  const int warp_, lane_;
  RingPosition from_, to_;
};

}  // namespace ostinato::prefill
