// The KV loader: each warp copies its blocks (16 tokens of each tile) ahead of use, by TMA or
// cp.async. Page ids are read in batches of up to 32, one batch ahead of use (also across splits),
// since reading a page id has the same latency as reading a block.
#pragma once

#include "attention/common/ptx.cuh"
#include "common/debug.cuh"
#include "dynamic_scheduler.cuh"
#include "tma_ops.cuh"

namespace ostinato::decode {

// Tensor maps of the caches: bytes of a 128-byte strip, slots, strips (or 1), heads, pages.
struct CacheMaps {
  CUtensorMap keys, values;
};

// The tiles of a split in which a team has a visible token.
struct TileRange {
  int begin, end;

  // `first` and `last`: tiles of the split, counted from the first visible tile.
  __device__ TileRange(const Visible& visible, int first, int last, int team) {
    const int first_tile = visible.first_tile(kTileTokens, kFirstTileTokens);
    const int block = team * kTeamWarps;  // the team's first
    begin = first_tile + first;
    end = first_tile + last;
    // End of the team's last block, within the first tile.
    const int first_end = block_offset(block + kTeamWarps - 1) + kBlockTokens;
    if constexpr (kFirstTileTokens > kTileTokens) {  // some tiles may end before the first token
      begin = visible.begin < first_end ? begin
                                        : max(begin, (visible.begin - first_end) / kTileTokens + 1);
    } else if (begin * kTileTokens + first_end <= visible.begin) {
      ++begin;
    }
    if ((end - 1) * kTileTokens + block_offset(block) >= visible.end) {
      --end;
    }
  }
};

// Arrivals per phase of a full barrier: one from each warp that expects TMA bytes, and one from
// each thread that copies with cp.async.
template <class What>
__device__ __forceinline__ int count_arrivals(const Arguments& params) {
  constexpr bool kKeys = std::is_same_v<What, Keys>;
  const int threads = !kCopyPages || (kKeys && has_token_scales(params)) ? 32 : 0;
  return kArrivalWarps * ((kCopyPages ? 1 : 0) + threads);
}

// Initialises a team's barriers; by the first of the warps that share them.
__device__ __forceinline__ void init_team(SharedStorage& shared, const Arguments& params) {
  const int warp = warp_index();
  if (warp % kArrivalWarps == 0 && elect_lane()) {
    const int i = arrival_of(warp);
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(&shared.keys_arrived.full[stage][i], count_arrivals<Keys>(params));
      init_barrier(&shared.values_arrived.full[stage][i], count_arrivals<Values>(params));
    }
    fence_barrier_init();
  }
  sync_team(warp);
}

class KvLoader {
 public:
  __device__ KvLoader(SharedStorage& shared, const Arguments& params, const CacheMaps& maps,
                      const Seqlens& seqlens, DynamicScheduler& scheduler)
      : shared_(shared),
        params_(params),
        maps_(maps),
        seqlens_(seqlens),
        scheduler_(scheduler),
        warp_(warp_index()),
        lane_(threadIdx.x % 32) {}

  // Reads the first two batches of page ids.
  __device__ __forceinline__ void begin(const CtaSplits& cta_splits, bool early) {
    cta_splits_ = cta_splits;
    tile_ = end_ = 0;
    next_ = Batch();
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      current_ = next_;
      find_next(early);
    }
  }

  // Prefetches the first block into L2. (Prefetching more blocks costs more than it gains.)
  __device__ __forceinline__ void prefetch() const {
    if (kCopyPages && current_.left > 0) {
      const int page = __shfl_sync(0xffffffff, current_.page, 0);
      const int slot = __shfl_sync(0xffffffff, current_.slot, 0);
      if (elect_lane()) {
        prefetch_box(maps_.keys, page, slot);
        prefetch_box(maps_.values, page, slot);
      }
    }
  }

  // The page ids that begin() has read, and the current ones.
  struct Ids {
    int known[2], found[2];

    __device__ __forceinline__ bool differ() const {
      return known[0] != found[0] || known[1] != found[1];
    }
  };
  __device__ __forceinline__ Ids read_again() const {
    Ids ids = {};
    if (current_.left > 0) {
      ids.known[0] = current_.page;
      ids.found[0] = *current_.entry;
    }
    if (next_.left > 0) {
      ids.known[1] = next_.page;
      ids.found[1] = *next_.entry;
    }
    return ids;
  }

  // Loads the first stage.
  __device__ __forceinline__ void start() {
    if (current_.left > 0) {
      load_next(0);
      loaded_ = 1;
    }
  }

  // Loads the other stages.
  __device__ __forceinline__ void fill() {
#pragma unroll 1
    for (int stage = 1; stage < kStages && load(stage); ++stage) {
      ++loaded_;
    }
  }

  // Waits for the copies of start() and fill(), and resets the barriers.
  __device__ __forceinline__ void drop() {
    const int arrival = arrival_of(warp_);
#pragma unroll 1
    for (int stage = 0; stage < loaded_; ++stage) {
      wait(&shared_.keys_arrived.full[stage][arrival], 0);
      wait(&shared_.values_arrived.full[stage][arrival], 0);
    }
    sync_team(warp_);
    if (warp_ % kArrivalWarps == 0 && elect_lane()) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        retire_barrier(&shared_.keys_arrived.full[stage][arrival]);
        retire_barrier(&shared_.values_arrived.full[stage][arrival]);
      }
    }
    init_team(shared_, params_);
    loaded_ = 0;
  }

  // Loads the next block's keys and values, if there is one, into a stage that the team has
  // released.
  __device__ __forceinline__ bool load(int stage) {
    if constexpr (kMayScheduleDynamically) {
      const bool goes_on = current_.left > 0;
      if (!goes_on) {
        if (next_.left == 0) {
          return false;
        }
        current_ = next_;
      }
      load_next(stage);
      if (!goes_on) {
        find_next(false);  // after the copy, since it takes long at the end of every work tile
      }
    } else {
      if (current_.left == 0 && next_.left > 0) {
        current_ = next_;
        find_next(false);
      }
      if (current_.left == 0) {
        return false;
      }
      load_next(stage);
    }
    return true;
  }

 private:
  static constexpr int kLanesPerBlock = kCopyPages ? 1 : kBlockTokens;
  static constexpr int kBatch = 32 / kLanesPerBlock;  // tiles
  static constexpr int kNoSlot = kEndsWithLast ? -kBlockTokens : -1;

  struct Batch {
    int left = 0;  // tiles that remain
    int index = 0;
    int head;
    // Of this lane's block (its first row: Mask::first_row) or token; kNoSlot: masked.
    int page, slot;
    const int* entry;  // the page table's entry
  };

  __device__ __forceinline__ void load_next(int stage) {
    if constexpr (kCopyPages) {
      copy_block(stage);
    } else {
      if (has_token_scales(params_)) {
        copy_scales(stage);
      }
      gather_block<Keys>(stage);
      gather_block<Values>(stage);
    }
    ++current_.index;
    --current_.left;
  }

  template <class What>
  __device__ __forceinline__ uint8_t* block_of(int stage) const {
    return ring_of<What>(shared_).blocks[stage][warp_];
  }

  template <class What>
  __device__ __forceinline__ uint64_t* barrier_of(int stage) const {
    return &arrivals_of<What>(shared_).full[stage][arrival_of(warp_)];
  }

  // Prefetches a split's queries into L2, so that the start of the split does not wait for them.
  __device__ __forceinline__ void prefetch_queries(const Splits::Split& split) const {
    constexpr int kLineBytes = 128;
    constexpr int kLines = ceil_div(kDim * static_cast<int>(sizeof(Type)), kLineBytes);
    const int group = params_.group;
    const int64_t first_row = seqlens_.first_row(split.sequence);
    for (int i = lane_; i < seqlens_.queries(split.sequence) * group * kLines; i += 32) {
      const int row = i / kLines, query = params_.by.group.divide(row);
      const Type* const q = static_cast<const Type*>(params_.q.data) +
                            (first_row + query) * params_.q.stride +
                            (split.head * group + row - query * group) * params_.q.head_stride;
      prefetch_line(reinterpret_cast<const uint8_t*>(q) + i % kLines * kLineBytes);
    }
  }

  // Reads the next batch of page ids.
  __device__ __forceinline__ void find_next(bool early) {
    next_.left = 0;
    Splits::Split ahead{-1};
    while (tile_ >= end_) {
      if (!cta_splits_.next(scheduler_, seqlens_, &split_)) {
        return;
      }
      const Visible visible = seqlens_.visible(split_.sequence);
      const TileRange range(visible, split_.begin, split_.end, team_of(warp_));
      tile_ = range.begin;
      end_ = range.end;
      first_token_ = visible.begin;
      end_token_ = visible.end;
      page_table_ = params_.page_table + split_.sequence * params_.page_table_stride;
      ahead = split_;
    }
    next_.head = split_.head;
    next_.left = min(end_ - tile_, kBatch);
    next_.index = 0;
    const int block = (tile_ + lane_ / kLanesPerBlock) * kTileTokens + block_offset(warp_);
    const int token = block + lane_ % kLanesPerBlock;
    const int last = kCopyPages ? token + kBlockTokens - 1 : token;
    const bool visible =
        token < end_token_ && last >= first_token_ && lane_ / kLanesPerBlock < next_.left;
    // Every lane loads an id, if not its own, so that the load is unconditional and not awaited.
    const int known = visible ? token : end_token_ - 1;
    const int page = params_.by.page_size.divide(known);
    const int behind_last = kEndsWithLast ? max(token + kBlockTokens - end_token_, 0) : 0;
    next_.slot = visible ? known - page * params_.page_size - behind_last : kNoSlot;
    next_.entry = page_table_ + page;
    next_.page = read_table(next_.entry, early);
    tile_ += next_.left;
    // By the last warp, since the first one runs the dynamic scheduler.
    if (warp_ == (kMayScheduleDynamically ? kWarps - 1 : 0) && ahead.sequence >= 0) {
      prefetch_queries(ahead);
    }
  }

  __device__ __forceinline__ void copy_block(int stage) {
    const int page = __shfl_sync(0xffffffff, current_.page, current_.index);
    const int slot = __shfl_sync(0xffffffff, current_.slot, current_.index);
    // In a tile, some warps of a team may have visible tokens while this one has none.
    const bool visible = kTeamWarps == 1 || slot > kNoSlot;
    if (kQuantized && has_token_scales(params_)) {
      copy_scales(stage);
      arrive_when_copied(barrier_of<Keys>(stage));
    }
    if (elect_lane()) {
      copy_box<Keys>(stage, maps_.keys, visible, page, slot);
      copy_box<Values>(stage, maps_.values, visible, page, slot);
    }
  }

  // Called by one lane.
  __device__ __forceinline__ void prefetch_box(const CUtensorMap& map, int page, int slot) const {
    if constexpr (kWholeStrips) {
      tma_prefetch(map, {0, slot, 0, current_.head, page});
    } else {
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        tma_prefetch(map, {strip * kStripBytes, slot, 0, current_.head, page});
      }
    }
  }

  // Called by one lane.
  template <class What>
  __device__ __forceinline__ void copy_box(int stage, const CUtensorMap& map, bool visible,
                                           int page, int slot) {
    uint8_t* const block = block_of<What>(stage);
    uint64_t* const full = barrier_of<What>(stage);
    if (!visible) {
      arrive(full);
      return;
    }
    arrive_expecting(full, kBlockBytes);
    if constexpr (kWholeStrips) {
      tma_load_once(block, map, {0, slot, 0, current_.head, page}, full);
    } else {  // TMA fills bytes past the end of the row with zeros
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        tma_load_once(block + strip * kStripBytes * kBlockTokens, map,
                      {strip * kStripBytes, slot, 0, current_.head, page}, full);
      }
    }
  }

  // Copies the scales of the block's keys and values, one per lane.
  __device__ __forceinline__ void copy_scales(int stage) {
    float* const scales = shared_.scales[stage][warp_];
    const int token = lane_ % kBlockTokens;
    const int source = current_.index * kLanesPerBlock + (kCopyPages ? 0 : token);
    const int64_t page = __shfl_sync(0xffffffff, current_.page, source);
    const int first_slot = __shfl_sync(0xffffffff, current_.slot, source);
    const int slot = first_slot + (kCopyPages ? token : 0);
    if ((kEndsWithLast ? slot : first_slot) < 0) {
      return;
    }
    const bool keys = lane_ < kBlockTokens;
    const Slots &of_keys = params_.k_scale, &of_values = params_.v_scale;
    const float* const all = static_cast<const float*>(keys ? of_keys.data : of_values.data);
    const int64_t page_stride = keys ? of_keys.page_stride : of_values.page_stride;
    const int64_t slot_stride = keys ? of_keys.stride : of_values.stride;
    const int64_t head_stride = keys ? of_keys.head_stride : of_values.head_stride;
    copy_word(&scales[lane_],
              all + page * page_stride + slot * slot_stride + current_.head * head_stride);
  }

  template <class What>
  __device__ __forceinline__ void gather_block(int stage) {
    constexpr int kVectors = kRowBytes / 16;
    constexpr bool kKeys = std::is_same_v<What, Keys>;
    const Slots& cache = kKeys ? params_.k_cache : params_.v_cache;
    const uint8_t* const head =
        static_cast<const uint8_t*>(cache.data) + current_.head * cache.head_stride * kElementBytes;
    const uint32_t shared = shared_address(block_of<What>(stage));
#pragma unroll
    for (int i = 0; i < ceil_div(kBlockTokens * kVectors, 32); ++i) {
      const int row = (i * 32 + lane_) / kVectors;
      const int vector = (i * 32 + lane_) % kVectors;
      const int source = current_.index * kBlockTokens + row % kBlockTokens;
      const int64_t page = __shfl_sync(0xffffffff, current_.page, source);
      const int slot = __shfl_sync(0xffffffff, current_.slot, source);
      if (slot >= 0 && row < kBlockTokens) {
        const uint8_t* const from =
            head + (page * cache.page_stride + slot * cache.stride) * kElementBytes;
        copy_vector(shared + vector / 8 * (kStripBytes * kBlockTokens) + row * kStripBytes +
                        (vector % 8 ^ row % 8) * 16,
                    from + vector * 16);
      }
    }
    arrive_when_copied(barrier_of<What>(stage));
  }

  SharedStorage& shared_;
  const Arguments& params_;
  const CacheMaps& maps_;
  const Seqlens& seqlens_;
  DynamicScheduler& scheduler_;
  CtaSplits cta_splits_;
  Splits::Split split_;  // the split whose page ids are read
  int warp_, lane_;
  Batch current_, next_;
  const int* page_table_ = nullptr;
  int tile_ = 0, end_ = 0;
  int first_token_ = 0, end_token_ = 0;
  int loaded_ = 0;  // stages loaded by start() and fill()
};

}  // namespace ostinato::decode
