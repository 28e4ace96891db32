// The producer: finds items, and copies their queries and tiles of keys and values.
//
// Packed rows are copied by the copy engine; pages too, since a page is a copy (or one for each
// strip), unless it holds whole tiles; slots of pages of any size by the threads of a warpgroup.
// For three warpgroups (kHasFinder) one warp finds items, one copies keys and one values.
// Otherwise the first warp finds the items, and copies: packed keys and values alone, those of
// pages beside another for keys and two for values, slots with three others.
#pragma once

#include "qkv_loader.cuh"
#include "tile_scheduler.cuh"

namespace ostinato::prefill {

// The producer warpgroup's other warps turn 8-bit values (transpose_v.cuh).
inline constexpr int kTurningWarps = kFp8 ? 4 - kProducerWarps : 0;

class Producer : Copier {
 public:
  using Copier::Copier;

  __device__ __forceinline__ void run() {
    if (warp_ == 0) {
      find_items();
    } else {
      follow_items();
    }
  }

 private:
  __device__ __forceinline__ void find_items() {
    RingPosition position;
    uint32_t wanted = 0;
    int place = static_cast<int>(blockIdx.x);
    publish_item(position, place);
    while (true) {
      // Read from shared memory, since a producer has few registers.
      const Item& item = shared_.items[position.slot];
      if (item.is_last()) {
        break;
      }
      if constexpr (kHasFinder) {
        if (item.tiles() > 0) {
          copy_queries(item);
        }
        wait(&shared_.item_wanted, wanted);
        wanted ^= 1;
      }
      const int next = lane_ == 0 ? next_place(args_, place) : 0;
      position.advance(kItems);
      const auto publish_next = [&] {
        place = __shfl_sync(0xffffffff, next, 0);
        publish_item(position, place);
      };
      if constexpr (kHasFinder) {
        publish_next();
      } else {
        copy_item(item, publish_next);
      }
    }
    if (lane_ == 0) {
      leave_counter(args_);
    }
  }

  __device__ __forceinline__ void publish_item(const RingPosition& position, int place) {
    wait(&shared_.item_empty[position.slot], position.parity ^ 1);
    find_item(shared_, args_, place, shared_.items[position.slot]);
    if constexpr (kHandsOverBoxes) {
      hand_over_boxes(position.slot);
    }
    if (lane_ == 0) {
      OSTINATO_DELAY(prefill_item_publish, true);
      arrive(&shared_.item_full[position.slot]);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void hand_over_boxes(int slot) {
    __syncwarp();
    const Item& item = shared_.items[slot];
    if (!item.is_last()) {
      shared_.first_boxes[slot][lane_] = read_boxes(item, 0);
    }
    __syncwarp();
  }
  __device__ __forceinline__ Boxes first_boxes(const Item& item) const {
    if constexpr (kHandsOverBoxes) {
      return shared_.first_boxes[&item - shared_.items][lane_];
    } else {
      return read_boxes(item, 0);
    }
  }

  // The other warps that copy.
  __device__ __forceinline__ void follow_items() {
    RingPosition position;
    while (true) {
      wait(&shared_.item_full[position.slot], position.parity);
      const Item& item = shared_.items[position.slot];
      if (item.is_last()) {
        break;
      }
      copy_item(item, [&] {
        if (kHasFinder && copies_keys() && lane_ == 0) {
          arrive(&shared_.item_wanted);
        }
      });
      __syncwarp();
      if (lane_ == 0) {
        arrive(&shared_.item_empty[position.slot]);
      }
      position.advance(kItems);
    }
  }

  __device__ __forceinline__ bool copies_keys() const {
    return kHasFinder ? warp_ == 1 : warp_ < kProducerWarps / 2;
  }

  // Calls `then` when the next item is to be found, which is known before this one's tiles are all
  // copied. A CTA that claims its next item long before leaves others without work at the end.
  template <class Then>
  __device__ __forceinline__ void copy_item(const Item& item, Then then) {
    if (item.tiles() == 0) {
      then();
      return;
    }
    if (!kHasFinder && warp_ == 0) {
      copy_queries(item);
    }
    if constexpr (kHasFinder || kSource == Source::Pages) {
      if (copies_keys()) {
        copy_ring<Keys>(item, keys_, then);
      } else {
        copy_ring<Values>(item, values_, [] {});
      }
    } else {
      copy_tiles(item, then);
    }
  }

  // Before which tile of keys; or, where that is the number of tiles, after the last.
  static constexpr int kFindingTiles = 4;
  __device__ __forceinline__ static int tile_of_next(int tiles) {
    return kHasFinder ? max(tiles - kFindingTiles, 0) : min(tiles, 2);
  }

  template <class What, class Then>
  __device__ __forceinline__ void copy_ring(const Item& item, RingPosition& position, Then then) {
    if constexpr (kSource == Source::Pages) {
      copy_pages<What>(item, position, then);
    } else {
      const int tiles = item.tiles(), due = tile_of_next(tiles);
      for (int n = 0; n < tiles; ++n) {
        if (n == due) {
          then();
        }
        copy_tile<What>(item, item.tile(n), Place{}, position);
      }
    }
  }

  template <class Then>
  __device__ __forceinline__ void copy_tiles(const Item& item, Then then) {
    // Ids of pages are read one tile ahead.
    Place place = find_slot(item, item.tile(0)), before = place;
    for (int n = 0; n <= item.tiles(); ++n) {
      const Place ahead = n + 1 < item.tiles() ? find_slot(item, item.tile(n + 1)) : place;
      if (n < item.tiles()) {
        copy_tile<Keys>(item, item.tile(n), place, keys_);
      }
      if (n > 0) {
        copy_tile<CopiedValues>(item, item.tile(n - 1), before, values_);
      }
      if (n == 1) {
        then();
      }
      before = place;
      place = ahead;
    }
  }

  template <class What, class Then>
  __device__ __forceinline__ void copy_pages(const Item& item, RingPosition& position, Then then) {
    if (has_whole_tiles(args_) && warp_ % kPageWarps > 0) {
      return;
    }
    const int tiles = item.tiles(), due = tile_of_next(tiles), head = item.kv_head;
    Boxes boxes = first_boxes(item), ahead = {};
    int first = 0;  // of the tile
    for (int n = 0; n < tiles; ++n) {
      if (n == due) {
        then();
      }
      copy_boxes<What>(head, boxes, first, position);
      if (first == 0 && n + args_.tiles_ahead < tiles) {
        ahead = read_boxes(item, n + args_.tiles_ahead);
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
