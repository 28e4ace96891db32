// The producer: finds items, and copies their queries and tiles of keys and values.
//
// Packed rows are copied by the copy engine, by one warp; pages too, by four, since a page is a
// copy for each strip, unless it holds whole tiles; slots of pages of any size by the threads of a
// warpgroup. The first warp finds the items.
#pragma once

#include "common/ring.cuh"
#include "common/tma.cuh"
#include "prefill_schedule.cuh"
#include "warp_instructions.cuh"

namespace ostinato::prefill {

inline constexpr int kProducerWarps = kSource == Source::Packed ? 1 : 4;
// Whether a tile lies in one page.
__device__ __forceinline__ bool has_whole_tiles(const Arguments& args) {
  return kSource == Source::Pages && args.box_tokens == kKeys;
}
// Arrivals for a tile that is copied: of each warp that has copies made, or of each thread that
// copies.
__device__ __forceinline__ int filling(const Arguments& args) {
  return kSource == Source::Slots ? kWarpgroup : has_whole_tiles(args) ? 1 : kProducerWarps;
}
// The producer warpgroup's other warps turn 8-bit values (prefill_transpose.cuh).
inline constexpr int kTurningWarps = kFp8 ? 4 - kProducerWarps : 0;

struct Maps {
  CUtensorMap queries;  // dim, heads, tokens
  CUtensorMap keys;     // strips of 128 bytes, slots or rows, strips (or 1), heads, pages (or 1)
  CUtensorMap values;
  CUtensorMap out;  // value dim, heads, tokens
};

class Producer {
 public:
  __device__ Producer(SharedStorage& shared, const Arguments& args, const Maps& maps)
      : shared_(shared),
        args_(args),
        maps_(maps),
        warp_(warp_index() - kConsumerThreads / 32),
        lane_(threadIdx.x % 32) {}

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
    int place = static_cast<int>(blockIdx.x);
    publish_item(position, place);
    while (true) {
      // Read from shared memory, since a producer has few registers.
      const Item& item = shared_.items[position.slot];
      if (item.is_last()) {
        break;
      }
      const int next = lane_ == 0 ? next_place(args_, place) : 0;
      position.advance(kItems);
      // The next item is known before this one's tiles are all copied, but after its first.
      copy_item(item, [&] {
        place = __shfl_sync(0xffffffff, next, 0);
        publish_item(position, place);
      });
    }
    if (lane_ == 0) {
      leave_counter(args_);
    }
  }

  __device__ __forceinline__ void publish_item(const RingPosition& position, int place) {
    wait(&shared_.item_empty[position.slot], position.parity ^ 1);
    find_item(shared_, args_, place, shared_.items[position.slot]);
    if (lane_ == 0) {
      OSTINATO_DELAY(prefill_item_publish, true);
      arrive(&shared_.item_full[position.slot]);
    }
    __syncwarp();
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
      copy_item(item, [] {});
      __syncwarp();
      if (lane_ == 0) {
        arrive(&shared_.item_empty[position.slot]);
      }
      position.advance(kItems);
    }
  }

  // Calls `then` once the first copies are on their way.
  template <class Then>
  __device__ __forceinline__ void copy_item(const Item& item, Then then) {
    const int tiles = item.tiles();
    if (tiles == 0) {
      then();
      return;
    }
    if (warp_ == 0) {
      copy_queries(item);
    }
    if (has_whole_tiles(args_) && warp_ > 0) {
      return;
    }
    // Ids of pages are read one tile ahead.
    Pages pages = read_pages(item, item.tile(0)), before = pages;
    for (int n = 0; n <= tiles; ++n) {
      const Pages ahead = n + 1 < tiles ? read_pages(item, item.tile(n + 1)) : pages;
      if (n < tiles) {
        copy_tile<Keys>(item, item.tile(n), pages, keys_);
      }
      if (n > 0) {
        copy_tile<CopiedValues>(item, item.tile(n - 1), before, values_);
      }
      if (n == 1) {
        then();
      }
      before = pages;
      pages = ahead;
    }
  }

  __device__ __forceinline__ void copy_queries(const Item& item) {
    const int rows = args_.half_tokens * args_.pack;
    for (int warpgroup = 0; warpgroup < kConsumers; ++warpgroup) {
      wait(&shared_.queries_empty[queries_.slot][warpgroup], queries_.parity ^ 1);
      if (elect_lane()) {
        uint64_t* const full = &shared_.queries_full[queries_.slot][warpgroup];
        OSTINATO_DELAY(prefill_queries_load, true);
        arrive_expecting(full, kStrips * rows * kStripBytes);
#pragma unroll
        for (int strip = 0; strip < kStrips; ++strip) {
          tma_load(shared_.queries[queries_.slot][warpgroup] + strip * kRowStrip, maps_.queries,
                   strip * kStripDim, item.first_head,
                   item.first_row + warpgroup * args_.half_tokens, full);
        }
      }
      __syncwarp();
    }
    queries_.advance(kQueryBuffers);
  }

  // Of a tile, the page and the slot where the lane's box begins, or the lane's key is, if it is to
  // be copied.
  struct Pages {
    int page, slot;
    bool seen;
  };

  __device__ __forceinline__ Pages read_pages(const Item& item, int tile) const {
    Pages pages = {};
    if constexpr (kSource != Source::Packed) {
      const int box = kSource == Source::Pages ? args_.box_tokens : 1;
      const int in_tile = (kSource == Source::Pages ? lane_ : warp_ * 32 + lane_) * box;
      const int key = tile * kKeys + in_tile;
      pages.seen = in_tile < kKeys && key < item.visible_end && key + box > item.visible_begin;
      if (pages.seen) {
        const int index =
            args_.page_shift >= 0 ? key >> args_.page_shift : key / args_.params.page_size;
        pages.slot = key - index * args_.params.page_size;
        pages.page =
            args_.params.page_table[item.first_key * args_.params.page_table_stride + index];
      }
    }
    return pages;
  }

  template <class What>
  __device__ __forceinline__ void copy_tile(const Item& item, int tile, const Pages& pages,
                                            RingPosition& position) {
    RingBarriers<What>& barriers = barriers_of<What>(shared_);
    uint8_t* const to = ring_of<What>(shared_).tiles[position.slot];
    uint64_t* const full = &barriers.full[position.slot];
    wait(&barriers.empty[position.slot], position.parity ^ 1);
    if constexpr (kSource == Source::Packed) {
      copy_rows<What>(item, tile, to, full);
    } else if constexpr (kSource == Source::Pages) {
      copy_boxes<What>(item, pages, to, full);
    } else {
      gather_slots<What>(item, pages, to, full);
    }
    position.advance(kStages);
  }

  template <class What>
  __device__ __forceinline__ const CUtensorMap& map_of() const {
    return std::is_same_v<What, Keys> ? maps_.keys : maps_.values;
  }
  template <class What>
  static constexpr int kStripsOf = std::is_same_v<What, Keys> ? kStrips : kValueStrips;
  template <class What>
  static constexpr bool kAreWhole = std::is_same_v<What, Keys> ? kWholeStrips : kWholeValueStrips;

  // One strip of a box.
  template <class What>
  __device__ __forceinline__ void copy_box(uint8_t* to, int strip, int slot, int head, int page,
                                           uint64_t* full) const {
    const int x = kAreWhole<What> ? 0 : strip * kStripDim;
    const int of_map = kAreWhole<What> ? strip : 0;
    tma_load(to, map_of<What>(), {x, slot, of_map, head, page}, full);
  }

  template <class What>
  __device__ __forceinline__ void copy_rows(const Item& item, int tile, uint8_t* to,
                                            uint64_t* full) const {
    if (elect_lane()) {
      OSTINATO_DELAY(prefill_tile_load, (std::is_same_v<What, Keys>));
      arrive_expecting(full, kTileBytes<What>);
      const int row = item.first_key + tile * kKeys;
      if constexpr (kAreWhole<What>) {
        tma_load(to, map_of<What>(), {0, row, 0, item.kv_head, 0}, full);
      } else {  // past the end of the row it reads zeros
#pragma unroll
        for (int strip = 0; strip < kStripsOf<What>; ++strip) {
          copy_box<What>(to + strip * kKeyStrip, strip, row, item.kv_head, 0, full);
        }
      }
    }
    __syncwarp();
  }

  // A tile in one page, whose lane is the first.
  template <class What>
  __device__ __forceinline__ void copy_page(const Item& item, const Pages& pages, uint8_t* to,
                                            uint64_t* full) const {
    const int page = __shfl_sync(0xffffffff, pages.page, 0);
    const int slot = __shfl_sync(0xffffffff, pages.slot, 0);
    if (elect_lane()) {
      OSTINATO_DELAY(prefill_tile_load, (std::is_same_v<What, Keys>));
      arrive_expecting(full, kTileBytes<What>);
      if constexpr (kAreWhole<What>) {
        copy_box<What>(to, 0, slot, item.kv_head, page, full);
      } else {
#pragma unroll
        for (int strip = 0; strip < kStripsOf<What>; ++strip) {
          copy_box<What>(to + strip * kKeyStrip, strip, slot, item.kv_head, page, full);
        }
      }
    }
    __syncwarp();
  }

  template <class What>
  __device__ __forceinline__ void copy_boxes(const Item& item, const Pages& pages, uint8_t* to,
                                             uint64_t* full) const {
    if (has_whole_tiles(args_)) {
      copy_page<What>(item, pages, to, full);
      return;
    }
    constexpr uint32_t kOwn = 0x11111111;  // boxes go round the warps
    const int box_bytes = args_.box_tokens * kStripBytes;
    const uint32_t boxes = __ballot_sync(0xffffffff, pages.seen) & kOwn << warp_;
    if (elect_lane()) {
      OSTINATO_DELAY(prefill_tile_load, (std::is_same_v<What, Keys>));
      arrive_expecting(full, __popc(boxes) * kStripsOf<What> * box_bytes);
    }
    __syncwarp();
#pragma unroll 1
    for (uint32_t left = boxes; left != 0; left &= left - 1) {
      const int box = __ffs(static_cast<int>(left)) - 1;
      const int page = __shfl_sync(0xffffffff, pages.page, box);
      const int slot = __shfl_sync(0xffffffff, pages.slot, box);
      if (elect_lane()) {
#pragma unroll
        for (int strip = 0; strip < kStripsOf<What>; ++strip) {
          copy_box<What>(to + strip * kKeyStrip + box * box_bytes, strip, slot, item.kv_head, page,
                         full);
        }
      }
      __syncwarp();
    }
  }

  // Each warp copies 32 rows.
  template <class What>
  __device__ __forceinline__ void gather_slots(const Item& item, const Pages& pages, uint8_t* to,
                                               uint64_t* full) const {
    static_assert(kSource != Source::Slots || kKeys <= kWarpgroup, "a key for each thread");
    constexpr bool kIsKeys = std::is_same_v<What, Keys>;
    constexpr int kVectors = (kIsKeys ? kDim : kValueDim) * kElement / 16;
    const Params& p = args_.params;
    const Slots& slots = kIsKeys ? p.k : p.v;
    const Type* const from = static_cast<const Type*>(slots.data) +
                             item.kv_head * slots.head_stride + pages.page * slots.page_stride +
                             pages.slot * slots.stride;
    OSTINATO_DELAY(prefill_tile_load, kIsKeys && warp_ == 2);
#pragma unroll 2
    for (int i = 0; i < kVectors; ++i) {
      const int of_warp = (i * 32 + lane_) / kVectors, vector = (i * 32 + lane_) % kVectors;
      const bool seen = __shfl_sync(0xffffffff, pages.seen, of_warp);
      const Type* const row_from = reinterpret_cast<const Type*>(
          __shfl_sync(0xffffffff, reinterpret_cast<uint64_t>(from), of_warp));
      const int row = warp_ * 32 + of_warp;
      if (seen) {
        copy_vector(shared_address(to + vector / 8 * kKeyStrip + row * kStripBytes +
                                   (vector % 8 ^ row % 8) * 16),
                    row_from + vector * 8);
      }
    }
    arrive_when_copied(full);
  }

  SharedStorage& shared_;
  const Arguments& args_;
  const Maps& maps_;
  const int warp_, lane_;
  RingPosition keys_, values_, queries_;
};

}  // namespace ostinato::prefill
