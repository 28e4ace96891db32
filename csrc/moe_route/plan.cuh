// The rows of each expert, from the ids of many slots, by a CTA of each: counted in shared memory,
// then listed in the order of slots. Counts are integers: the order in which they are added is none
// of the result's.
#pragma once

#include <cstdint>

#include "params.h"

namespace ostinato::route {

// Writes the tiles of an expert's rows, from `first` to `stop`, as the list's from `tile` on: those
// of every `step`-th thread.
__device__ __forceinline__ void store_tiles(const MoeRouteParams& params, int expert, int first,
                                            int stop, int tile, int thread, int step) {
  const int count = (stop - first + params.tile_tokens - 1) / params.tile_tokens;
  int4* const tiles = reinterpret_cast<int4*>(params.tiles) + tile;
  for (int i = thread; i < count; i += step) {
    const int row = first + i * params.tile_tokens;
    tiles[i] = make_int4(expert, row, min(row + params.tile_tokens, stop), 0);
  }
}

// Shared memory of a plan: an element of each expert and one more, for slots without an expert; and
// the ids of all slots, if there is room for them.
struct PlanMemory {
  unsigned* counts;  // [experts + 1]
  int* offsets;      // [experts + 2], the first row of each
  int* tiles;        // [experts + 1], the first tile of each
  int* of_warps;     // [warps], rows of one expert that each warp has found
  short4* ids;       // [slots / 4, rounded up]; -1 for none

  __host__ __device__ static int bytes(int experts, int warps, int copied_slots) {
    const int words = (3 * (experts + 2) + warps + 1) / 2 * 2;
    return words * static_cast<int>(sizeof(int)) + (copied_slots + 3) / 4 * 8;
  }

  __device__ PlanMemory(uint8_t* memory, int experts, int warps) {
    counts = reinterpret_cast<unsigned*>(memory);
    offsets = reinterpret_cast<int*>(memory) + experts + 2;
    tiles = offsets + experts + 2;
    of_warps = tiles + experts + 2;
    ids = reinterpret_cast<short4*>(memory + bytes(experts, warps, 0));
  }
};

class Planner {
 public:
  // `copies_ids`: the memory has room for the ids of all slots, which every warp reads again.
  __device__ Planner(const MoeRouteParams& params, uint8_t* memory, int warps, bool copies_ids)
      : params_(params),
        memory_(memory, params.experts, warps),
        copies_ids_(copies_ids),
        slots_(params.tokens * params.top_k),
        thread_(static_cast<int>(threadIdx.x)),
        lane_(thread_ % 32),
        warp_(thread_ / 32) {}

  // Counts the rows of all experts; by all threads. `threads` is their number.
  __device__ __forceinline__ void count(int threads) {
    const int experts = params_.experts;
    for (int i = thread_; i <= experts; i += threads) {
      memory_.counts[i] = 0;
    }
    __syncthreads();
    // Several loads of a thread are in flight at once.
    const int fours = (slots_ + 3) / 4;
#pragma unroll 4
    for (int i = thread_; i < fours; i += threads) {
      const int4 four = ids_at(i);
      count_slot(four.x);
      count_slot(four.y);
      count_slot(four.z);
      count_slot(four.w);
      if (copies_ids_) {
        memory_.ids[i] = make_short4(static_cast<int16_t>(four.x), static_cast<int16_t>(four.y),
                                     static_cast<int16_t>(four.z), static_cast<int16_t>(four.w));
      }
    }
    __syncthreads();
    if (warp_ == 0) {
      scan();
    }
    __syncthreads();
  }

  // Writes offsets and the number of tiles; by all threads.
  __device__ __forceinline__ void store_sizes(int threads) const {
    for (int i = thread_; i <= params_.experts; i += threads) {
      params_.offsets[i] = memory_.offsets[i];
    }
    if (thread_ == 0) {
      *params_.n_tiles = memory_.tiles[params_.experts];
    }
  }

  // Lists the rows and tiles of an expert, or of none (params.experts); by `warps` warps, all of
  // the CTA.
  __device__ __forceinline__ void list_by_cta(int expert, int warps) const {
    const int share = (slots_ + warps * 32 - 1) / (warps * 32) * 32;
    const int first = min(warp_ * share, slots_), stop = min(first + share, slots_);
    int found = 0;
    for (int slot = first + lane_; slot - lane_ < stop; slot += 32) {
      const bool mine = slot < stop && belongs(slot, expert);
      found += __popc(__ballot_sync(0xffffffff, mine));
    }
    if (lane_ == 0) {
      memory_.of_warps[warp_] = found;
    }
    __syncthreads();
    int row = memory_.offsets[expert];
    for (int i = 0; i < warp_; ++i) {
      row += memory_.of_warps[i];
    }
    list(expert, first, stop, row);
    if (expert < params_.experts) {
      store_tiles(params_, expert, memory_.offsets[expert], memory_.offsets[expert + 1],
                  memory_.tiles[expert], thread_, warps * 32);
    }
  }

 private:
  static constexpr int kNoSlot = -2;

  // The ids of four slots, kNoSlot behind the last one.
  __device__ __forceinline__ int4 ids_at(int i) const {
    if (4 * i + 3 < slots_) {
      return reinterpret_cast<const int4*>(params_.ids)[i];
    }
    const auto id = [&](int slot) { return slot < slots_ ? params_.ids[slot] : kNoSlot; };
    return make_int4(id(4 * i), id(4 * i + 1), id(4 * i + 2), id(4 * i + 3));
  }

  __device__ __forceinline__ void count_slot(int id) const {
    if (id != kNoSlot) {
      atomicAdd(&memory_.counts[id < 0 ? params_.experts : id], 1U);
    }
  }

  __device__ __forceinline__ bool belongs(int slot, int expert) const {
    const int id =
        copies_ids_ ? reinterpret_cast<const int16_t*>(memory_.ids)[slot] : params_.ids[slot];
    return expert == params_.experts ? id < 0 : id == expert;
  }

  // Sums up counts and tiles of the experts before each; by one warp.
  __device__ __forceinline__ void scan() const {
    int rows = 0, tiles = 0;
    for (int first = 0; first <= params_.experts; first += 32) {
      const int expert = first + lane_;
      const int count = expert <= params_.experts ? static_cast<int>(memory_.counts[expert]) : 0;
      const int count_tiles =
          expert < params_.experts ? (count + params_.tile_tokens - 1) / params_.tile_tokens : 0;
      int row_sum = count, tile_sum = count_tiles;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int row_before = __shfl_up_sync(0xffffffff, row_sum, distance);
        const int tile_before = __shfl_up_sync(0xffffffff, tile_sum, distance);
        row_sum += lane_ >= distance ? row_before : 0;
        tile_sum += lane_ >= distance ? tile_before : 0;
      }
      if (expert <= params_.experts) {
        memory_.offsets[expert] = rows + row_sum - count;
        memory_.tiles[expert] = tiles + tile_sum - count_tiles;
      }
      rows += __shfl_sync(0xffffffff, row_sum, 31);
      tiles += __shfl_sync(0xffffffff, tile_sum, 31);
    }
    if (lane_ == 0) {
      memory_.offsets[params_.experts + 1] = rows;
    }
  }

  // Writes the slots of an expert from `first` to `stop` as rows from `row` on; by one warp.
  __device__ __forceinline__ void list(int expert, int first, int stop, int row) const {
    for (int slot = first + lane_; slot - lane_ < stop; slot += 32) {
      const bool mine = slot < stop && belongs(slot, expert);
      const unsigned found = __ballot_sync(0xffffffff, mine);
      if (mine) {
        params_.rows[row + __popc(found & ((1U << lane_) - 1U))] = slot;
      }
      row += __popc(found);
    }
  }

  const MoeRouteParams& params_;
  PlanMemory memory_;
  bool copies_ids_;
  int slots_, thread_, lane_, warp_;
};

}  // namespace ostinato::route
