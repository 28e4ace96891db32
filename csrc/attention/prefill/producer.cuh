// The producer warpgroup: finds work tiles, and copies their queries and tiles of keys and values.
//
// TMA copies packed rows and pages: one box per page (or per page and strip) unless a page holds
// whole tiles. Pages of any size are copied by the threads of a warpgroup with cp.async. For three
// consumer warpgroups (kHasFinder), one warp finds work tiles, one copies keys and one values.
// Otherwise the first warp finds the work tiles and also copies: packed keys and values alone;
// pages with one other warp for keys and two for values; slots with three others.
#pragma once

#include "qkv_loader.cuh"
#include "tile_scheduler.cuh"

namespace ostinato::prefill {

// The other warps of the producer warpgroup transpose 8-bit values (transpose_v.cuh).
inline constexpr int kTransposeWarps = kFp8 ? 4 - kProducerWarps : 0;

class Producer : QkvLoader {
 public:
  using QkvLoader::QkvLoader;

  __device__ __forceinline__ void run() {
    if (warp_ == 0) {
      find_work_tiles();
    } else {
      follow_work_tiles();
    }
  }

 private:
  __device__ __forceinline__ void find_work_tiles() {
    RingPosition position;
    uint32_t wanted = 0;
    int index = static_cast<int>(blockIdx.x);
    publish_work_tile(position, index);
    while (true) {
      // Kept in shared memory, since a producer has few registers.
      const WorkTile& work_tile = shared_.work_tiles[position.slot];
      if (work_tile.is_last()) {
        break;
      }
      if constexpr (kHasFinder) {
        if (work_tile.tiles() > 0) {
          copy_queries(work_tile);
        }
        wait(&shared_.work_tile_wanted, wanted);
        wanted ^= 1;
      }
      const int next = lane_ == 0 ? next_index(args_, index) : 0;
      position.advance(kWorkTiles);
      const auto publish_next = [&] {
        index = __shfl_sync(0xffffffff, next, 0);
        publish_work_tile(position, index);
      };
      if constexpr (kHasFinder) {
        publish_next();
      } else {
        copy_work_tile(work_tile, publish_next);
      }
    }
    if (lane_ == 0) {
      leave_counter(args_);
    }
  }

  __device__ __forceinline__ void publish_work_tile(const RingPosition& position, int index) {
    wait(&shared_.work_tile_empty[position.slot], position.parity ^ 1);
    find_work_tile(shared_, args_, index, shared_.work_tiles[position.slot]);
    if constexpr (kHandsOverBoxes) {
      hand_over_boxes(position.slot);
    }
    if (lane_ == 0) {
      OSTINATO_DELAY(prefill_work_tile_publish, true);
      arrive(&shared_.work_tile_full[position.slot]);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void hand_over_boxes(int slot) {
    __syncwarp();
    const WorkTile& work_tile = shared_.work_tiles[slot];
    if (!work_tile.is_last()) {
      shared_.first_boxes[slot][lane_] = read_boxes(work_tile, 0);
    }
    __syncwarp();
  }
  __device__ __forceinline__ Boxes first_boxes(const WorkTile& work_tile) const {
    if constexpr (kHandsOverBoxes) {
      return shared_.first_boxes[&work_tile - shared_.work_tiles][lane_];
    } else {
      return read_boxes(work_tile, 0);
    }
  }

  // The loop of the other copying warps.
  __device__ __forceinline__ void follow_work_tiles() {
    RingPosition position;
    while (true) {
      wait(&shared_.work_tile_full[position.slot], position.parity);
      const WorkTile& work_tile = shared_.work_tiles[position.slot];
      if (work_tile.is_last()) {
        break;
      }
      copy_work_tile(work_tile, [&] {
        if (kHasFinder && copies_keys() && lane_ == 0) {
          arrive(&shared_.work_tile_wanted);
        }
      });
      __syncwarp();
      if (lane_ == 0) {
        arrive(&shared_.work_tile_empty[position.slot]);
      }
      position.advance(kWorkTiles);
    }
  }

  __device__ __forceinline__ bool copies_keys() const {
    return kHasFinder ? warp_ == 1 : warp_ < kProducerWarps / 2;
  }

  // Calls `then` when the next work tile should be found, shortly before this one's tiles are all
  // copied. A CTA that takes its next work tile too early leaves others idle at the end.
  template <class Then>
  __device__ __forceinline__ void copy_work_tile(const WorkTile& work_tile, Then then) {
    if (work_tile.tiles() == 0) {
      then();
      return;
    }
    if (!kHasFinder && warp_ == 0) {
      copy_queries(work_tile);
    }
    if constexpr (kHasFinder || kSource == Source::Pages) {
      if (copies_keys()) {
        copy_ring<Keys>(work_tile, keys_, then);
      } else {
        copy_ring<Values>(work_tile, values_, [] {});
      }
    } else {
      copy_tiles(work_tile, then);
    }
  }

  // The tile of keys before which the next work tile is found (the number of tiles: after the
  // last).
  static constexpr int kFindingTiles = 4;
  __device__ __forceinline__ static int tile_of_next(int tiles) {
    return kHasFinder ? max(tiles - kFindingTiles, 0) : min(tiles, 2);
  }

  template <class What, class Then>
  __device__ __forceinline__ void copy_ring(const WorkTile& work_tile, RingPosition& position,
                                            Then then) {
    if constexpr (kSource == Source::Pages) {
      copy_pages<What>(work_tile, position, then);
    } else {
      const int tiles = work_tile.tiles(), due = tile_of_next(tiles);
      for (int n = 0; n < tiles; ++n) {
        if (n == due) {
          then();
        }
        copy_tile<What>(work_tile, work_tile.tile(n), KvSlot{}, position);
      }
    }
  }

  template <class Then>
  __device__ __forceinline__ void copy_tiles(const WorkTile& work_tile, Then then) {
    // Page ids are read one tile ahead.
    KvSlot kv_slot = find_slot(work_tile, work_tile.tile(0)), before = kv_slot;
    for (int n = 0; n <= work_tile.tiles(); ++n) {
      const KvSlot ahead =
          n + 1 < work_tile.tiles() ? find_slot(work_tile, work_tile.tile(n + 1)) : kv_slot;
      if (n < work_tile.tiles()) {
        copy_tile<Keys>(work_tile, work_tile.tile(n), kv_slot, keys_);
      }
      if (n > 0) {
        copy_tile<CopiedValues>(work_tile, work_tile.tile(n - 1), before, values_);
      }
      if (n == 1) {
        then();
      }
      before = kv_slot;
      kv_slot = ahead;
    }
  }

  template <class What, class Then>
  __device__ __forceinline__ void copy_pages(const WorkTile& work_tile, RingPosition& position,
                                             Then then) {
    if (has_whole_tiles(args_) && warp_ % kPageWarps > 0) {
      return;
    }
    const int tiles = work_tile.tiles(), due = tile_of_next(tiles), head = work_tile.kv_head;
    Boxes boxes = first_boxes(work_tile), ahead = {};
    int first = 0;  // first lane of the tile's boxes
    for (int n = 0; n < tiles; ++n) {
      if (n == due) {
        then();
      }
      copy_boxes<What>(head, boxes, first, position);
      if (first == 0 && n + args_.tiles_ahead < tiles) {
        ahead = read_boxes(work_tile, n + args_.tiles_ahead);
      }
      first += args_.boxes;
      if (first == args_.boxes * args_.tiles_ahead) {
        first = 0;
        boxes = ahead;
      }
    }
    if (due == tiles) {
      then();
    }
  }

  RingPosition keys_, values_;
};

}  // namespace ostinato::prefill
