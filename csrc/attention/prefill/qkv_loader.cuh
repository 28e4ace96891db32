// The QKV loader: copies that producer warps issue, of a work tile's queries and of tiles of keys
// or values from packed rows, pages or slots.
#pragma once

#include "attention/common/ptx.cuh"
#include "common/ring.cuh"
#include "common/tma.cuh"
#include "shared_storage.cuh"

namespace ostinato::prefill {

inline constexpr int kProducerWarps = kHasFinder ? 3 : kSource == Source::Packed ? 1 : 4;
// Warps that copy keys; as many copy values.
inline constexpr int kPageWarps = kSource == Source::Pages && !kHasFinder ? 2 : 1;
// Whether every tile lies in one page.
__device__ __forceinline__ bool has_whole_tiles(const Arguments& args) {
  return kSource == Source::Pages && args.box_tokens == kKeys;
}
// Arrivals per copied tile: of each warp that issues TMA copies, or of each thread of cp.async.
__device__ __forceinline__ int full_arrivals(const Arguments& args) {
  return kSource == Source::Slots ? kWarpgroup : has_whole_tiles(args) ? 1 : kPageWarps;
}

struct Maps {
  CUtensorMap queries;  // dim, heads, tokens
  CUtensorMap keys;     // strips of 128 bytes, slots or rows, strips (or 1), heads, pages (or 1)
  CUtensorMap values;
  CUtensorMap out;  // value dim, heads, tokens
};

class QkvLoader {
 public:
  __device__ QkvLoader(SharedStorage& shared, const Arguments& args, const Maps& maps)
      : shared_(shared),
        args_(args),
        maps_(maps),
        warp_(warp_index() - kConsumerThreads / 32),
        lane_(threadIdx.x % 32) {}

 protected:
  __device__ __forceinline__ void copy_queries(const WorkTile& work_tile) {
    const int rows = args_.warpgroup_tokens * args_.pack;
    for (int warpgroup = 0; warpgroup < kConsumers; ++warpgroup) {
      wait(&shared_.queries_empty[queries_.slot][warpgroup], queries_.parity ^ 1);
      if (elect_lane()) {
        uint64_t* const full = &shared_.queries_full[queries_.slot][warpgroup];
        OSTINATO_DELAY(prefill_queries_load, true);
        arrive_expecting(full, kStrips * rows * kStripBytes);
#pragma unroll
        for (int strip = 0; strip < kStrips; ++strip) {
          tma_load(shared_.queries[queries_.slot][warpgroup] + strip * kRowStrip, maps_.queries,
                   strip * kStripDim, work_tile.first_head,
                   work_tile.first_row + warpgroup * args_.warpgroup_tokens, full);
        }
      }
      __syncwarp();
    }
    queries_.advance(kQueryBuffers);
  }

  // Page and slot of a key, and whether it is to be copied.
  struct KvSlot {
    int page, slot;
    bool visible;
  };

  __device__ __forceinline__ void find_page(const WorkTile& work_tile, int key,
                                            KvSlot& kv_slot) const {
    const int index = args_.page_of(key);
    kv_slot.slot = key - index * args_.params.page_size;
    kv_slot.page =
        args_.params.page_table[work_tile.first_key * args_.params.page_table_stride + index];
  }

  // The thread's slot of a tile.
  __device__ __forceinline__ KvSlot find_slot(const WorkTile& work_tile, int tile) const {
    KvSlot kv_slot = {};
    if constexpr (kSource == Source::Slots) {
      const int in_tile = warp_ * 32 + lane_, key = tile * kKeys + in_tile;
      kv_slot.visible =
          in_tile < kKeys && key < work_tile.visible_end && key >= work_tile.visible_begin;
      if (kv_slot.visible) {
        find_page(work_tile, key, kv_slot);
      }
    }
    return kv_slot;
  }

  template <class What>
  __device__ __forceinline__ void copy_tile(const WorkTile& work_tile, int tile,
                                            const KvSlot& kv_slot, RingPosition& position) {
    RingBarriers<What>& barriers = barriers_of<What>(shared_);
    uint8_t* const to = ring_of<What>(shared_).tiles[position.slot];
    uint64_t* const full = &barriers.full[position.slot];
    wait(&barriers.empty[position.slot], position.parity ^ 1);
    if constexpr (kSource == Source::Packed) {
      copy_rows<What>(work_tile, tile, to, full);
    } else {
      gather_slots<What>(work_tile, kv_slot, to, full);
    }
    position.advance(kStagesOf<What>);
  }

  template <class What>
  __device__ __forceinline__ const CUtensorMap& map_of() const {
    return std::is_same_v<What, Keys> ? maps_.keys : maps_.values;
  }
  template <class What>
  static constexpr int kStripsOf = std::is_same_v<What, Keys> ? kStrips : kValueStrips;
  template <class What>
  static constexpr bool kAreWhole = std::is_same_v<What, Keys> ? kWholeStrips : kWholeValueStrips;

  // Copies one strip of a box.
  template <class What>
  __device__ __forceinline__ void copy_strip(uint8_t* to, int strip, int slot, int head, int page,
                                             uint64_t* full) const {
    const int x = kAreWhole<What> ? 0 : strip * kStripDim;
    const int of_map = kAreWhole<What> ? strip : 0;
    tma_load(to, map_of<What>(), {x, slot, of_map, head, page}, full);
  }

  template <class What>
  __device__ __forceinline__ void copy_rows(const WorkTile& work_tile, int tile, uint8_t* to,
                                            uint64_t* full) const {
    if (elect_lane()) {
      OSTINATO_DELAY(prefill_tile_load, (std::is_same_v<What, Keys>));
      arrive_expecting(full, kTileBytes<What>);
      const int row = work_tile.first_key + tile * kKeys;
      if constexpr (kAreWhole<What>) {
        tma_load(to, map_of<What>(), {0, row, 0, work_tile.kv_head, 0}, full);
      } else {  // TMA fills bytes past the end of the row with zeros
#pragma unroll
        for (int strip = 0; strip < kStripsOf<What>; ++strip) {
          copy_strip<What>(to + strip * kKeyStrip, strip, row, work_tile.kv_head, 0, full);
        }
      }
    }
    __syncwarp();
  }

  // The boxes that this warp copies of the work tile's n-th tile and the following ones, one per
  // lane. Page ids are read long before their tiles are copied, since a stage becomes free only
  // shortly before it is needed.
  __device__ __forceinline__ Boxes read_boxes(const WorkTile& work_tile, int n) const {
    const int tile = lane_ / args_.boxes;
    const int in_tile = box_in_tile(lane_ - tile * args_.boxes) * args_.box_tokens;
    KvSlot kv_slot = {};
    if (tile < args_.tiles_ahead && n + tile < work_tile.tiles() && in_tile < kKeys) {
      const int key = work_tile.tile(n + tile) * kKeys + in_tile;
      kv_slot.visible =
          key < work_tile.visible_end && key + args_.box_tokens > work_tile.visible_begin;
      if (kv_slot.visible) {
        find_page(work_tile, key, kv_slot);
      }
    }
    return {kv_slot.visible ? kv_slot.page : -1, kv_slot.slot};
  }
  // Boxes of a tile are distributed round-robin over the warps.
  __device__ __forceinline__ int box_in_tile(int own) const {
    return own * kPageWarps + warp_ % kPageWarps;
  }

  // Copies the boxes of a tile, which the lanes from `first` on hold.
  template <class What>
  __device__ __forceinline__ void copy_boxes(int head, const Boxes& boxes, int first,
                                             RingPosition& position) {
    RingBarriers<What>& barriers = barriers_of<What>(shared_);
    uint8_t* const to = ring_of<What>(shared_).tiles[position.slot];
    uint64_t* const full = &barriers.full[position.slot];
    const int box_bytes = args_.box_tokens * kStripBytes;
    const uint32_t visible =
        __ballot_sync(0xffffffff, boxes.page >= 0) >> first & ((1u << args_.boxes) - 1);
    wait(&barriers.empty[position.slot], position.parity ^ 1);
    if (elect_lane()) {
      OSTINATO_DELAY(prefill_tile_load, (std::is_same_v<What, Keys>));
      arrive_expecting(full, __popc(visible) * kStripsOf<What> * box_bytes);
    }
    __syncwarp();
    // Each lane copies its own box: the compiler serialises the lanes, which takes fewer
    // instructions than moving the boxes to one lane, and none before a stage is free.
    const int own = lane_ - first;
    if (own >= 0 && own < args_.boxes && (visible >> own & 1) != 0) {
      copy_box<What>(to, box_in_tile(own) * box_bytes, boxes.slot, head, boxes.page, full);
    }
    __syncwarp();
    position.advance(kStagesOf<What>);
  }

  // Copies a box of a page to an offset of `before` bytes per strip.
  template <class What>
  __device__ __forceinline__ void copy_box(uint8_t* to, int before, int slot, int head, int page,
                                           uint64_t* full) const {
    if constexpr (kSideBySide) {
      const int strips = std::is_same_v<What, Keys> ? args_.key_head : args_.value_head;
      tma_load(to + before * kStripsOf<What>, map_of<What>(),
               {0, 0, head * strips, slot / kGroup, page}, full);
    } else if (kAreWhole<What> && has_whole_tiles(args_)) {
      copy_strip<What>(to, 0, slot, head, page, full);
    } else {
#pragma unroll
      for (int strip = 0; strip < kStripsOf<What>; ++strip) {
        copy_strip<What>(to + strip * kKeyStrip + before, strip, slot, head, page, full);
      }
    }
  }

  // Copies slots with cp.async; each warp copies 32 rows.
  template <class What>
  __device__ __forceinline__ void gather_slots(const WorkTile& work_tile, const KvSlot& kv_slot,
                                               uint8_t* to, uint64_t* full) const {
    static_assert(kSource != Source::Slots || kKeys <= kWarpgroup, "a key for each thread");
    constexpr bool kIsKeys = std::is_same_v<What, Keys>;
    constexpr int kVectors = (kIsKeys ? kDim : kValueDim) * kElement / 16;
    const Params& p = args_.params;
    const Slots& slots = kIsKeys ? p.k : p.v;
    const Type* const from = static_cast<const Type*>(slots.data) +
                             work_tile.kv_head * slots.head_stride +
                             kv_slot.page * slots.page_stride + kv_slot.slot * slots.stride;
    OSTINATO_DELAY(prefill_tile_load, kIsKeys && warp_ == 2);
#pragma unroll 2
    for (int i = 0; i < kVectors; ++i) {
      const int of_warp = (i * 32 + lane_) / kVectors, vector = (i * 32 + lane_) % kVectors;
      const bool visible = __shfl_sync(0xffffffff, kv_slot.visible, of_warp);
      const Type* const row_from = reinterpret_cast<const Type*>(
          __shfl_sync(0xffffffff, reinterpret_cast<uint64_t>(from), of_warp));
      const int row = warp_ * 32 + of_warp;
      if (visible) {
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
  RingPosition queries_;
};

}  // namespace ostinato::prefill
