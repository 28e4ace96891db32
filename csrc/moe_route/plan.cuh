// The rows of each expert, from the ids of all slots. A slot's row follows from how many slots
// before it have its expert: in its chunk of 32, in the chunks before, and in the segments before,
// of which every CTA has one. Counts are integers: the order in which they are added is none of the
// result's.
#pragma once

#include <cstdint>

#include "common/sizes.cuh"
#include "params.h"

namespace ostinato::route {

inline constexpr int kChunkSlots = 32;

// Tokens of each segment but the last, and their slots.
__host__ __device__ inline int segment_tokens(const MoeRouteParams& p) {
  return ceil_div(p.tokens, p.segments);
}
__host__ __device__ inline int segment_slots(const MoeRouteParams& p) {
  return segment_tokens(p) * p.top_k;
}

// Shared memory of a plan.
struct PlanMemory {
  int2* of_warps;  // [warps], rows and tiles of each warp's experts
  // [experts + 1], slots of each expert; then the row of the next one, of slots without an expert,
  // too.
  int* counts;
  int* before;         // [experts], slots in the segments before
  uint8_t* of_chunks;  // of a round: slots of each expert in each chunk

  __host__ __device__ static int chunks(int slots) { return ceil_div(slots, kChunkSlots); }
  // Bytes of a chunk's counts, whole words.
  __host__ __device__ static int chunk_bytes(int experts) { return (experts + 4) / 4 * 4; }
  __host__ __device__ static int bytes(int experts, int warps, int round_slots) {
    return 8 * warps + 4 * (2 * experts + 1) + chunks(round_slots) * chunk_bytes(experts);
  }

  __device__ PlanMemory(uint8_t* memory, int experts, int warps) {
    of_warps = reinterpret_cast<int2*>(memory);
    counts = reinterpret_cast<int*>(of_warps + warps);
    before = counts + experts + 1;
    of_chunks = reinterpret_cast<uint8_t*>(before + experts);
  }
};

// Plans the slots of a segment. All functions are called by all threads, of which there are kWarps
// warps and as many as experts or more; kRoundSlots slots are planned at once.
template <int kWarps, int kRoundSlots>
class Planner {
 public:
  // `ids`: those of the segment's slots, once `run` is called.
  __device__ Planner(const MoeRouteParams& params, int segment, const int* ids, uint8_t* memory)
      : params_(params),
        ids_(ids),
        memory_(memory, params.experts, kWarps),
        segment_(segment),
        first_slot_(segment * segment_slots(params)),
        slots_(min(segment_slots(params), params.tokens * params.top_k - first_slot_)),
        chunk_bytes_(PlanMemory::chunk_bytes(params.experts)),
        thread_(static_cast<int>(threadIdx.x)),
        lane_(thread_ % 32),
        warp_(thread_ / 32) {}

  // Slots of each expert, which a CTA that chooses the experts of all tokens counts.
  __device__ __forceinline__ int* counts() const { return memory_.counts; }

  // Clears what is counted; nothing that another kernel writes is touched.
  __device__ __forceinline__ void begin() const {
    for (int i = thread_; i <= params_.experts; i += kWarps * 32) {
      memory_.counts[i] = 0;
      if (i < params_.experts) {
        memory_.before[i] = 0;
      }
    }
    clear_chunks(0);
  }

  // Writes the rows of the segment, and its share of offsets and tiles; the ids are there, and in
  // shared memory or, of several segments, in params.counts how many slots each expert has.
  __device__ __forceinline__ void run() {
    __syncthreads();
    int ranks[kChunksOfWarp];  // of this lane's slots in their chunks
    count_chunks(0, ranks);
    if (params_.segments > 1) {
      add_segments();
    }
    __syncthreads();
    store_sizes_and_tiles();
    __syncthreads();
    store_rows(0, ranks);
    for (int first = kRoundSlots; first < slots_; first += kRoundSlots) {
      __syncthreads();
      advance();
      __syncthreads();
      clear_chunks(first);
      __syncthreads();
      count_chunks(first, ranks);
      __syncthreads();
      store_rows(first, ranks);
    }
  }

 private:
  static constexpr int kChunks = kRoundSlots / kChunkSlots;
  static constexpr int kChunksOfWarp = (kChunks + kWarps - 1) / kWarps;
  static_assert(kRoundSlots % kChunkSlots == 0, "rounds have whole chunks");

  __device__ __forceinline__ int chunks_from(int first) const {
    return PlanMemory::chunks(min(slots_ - first, kRoundSlots));
  }

  __device__ __forceinline__ void clear_chunks(int first) const {
    uint32_t* const words = reinterpret_cast<uint32_t*>(memory_.of_chunks);
    const int count = chunks_from(first) * chunk_bytes_ / 4;
    for (int i = thread_; i < count; i += kWarps * 32) {
      words[i] = 0;
    }
  }

  // The expert of a slot of the segment, params.experts if it has none; -1 beyond the last slot.
  __device__ __forceinline__ int expert_of(int slot) const {
    const int id = slot < slots_ ? ids_[slot] : -1;
    return slot >= slots_ ? -1 : id < 0 ? params_.experts : id;
  }

  // Counts the slots of each chunk by expert; `ranks`: how many before this lane's have its expert.
  __device__ __forceinline__ void count_chunks(int first, int (&ranks)[kChunksOfWarp]) const {
#pragma unroll
    for (int round = 0; round < kChunksOfWarp; ++round) {
      const int chunk = round * kWarps + warp_;
      if (chunk >= kChunks || first + chunk * kChunkSlots >= slots_) {
        break;
      }
      const int expert = expert_of(first + chunk * kChunkSlots + lane_);
      const unsigned same = __match_any_sync(0xffffffff, expert);
      ranks[round] = __popc(same & ((1U << lane_) - 1U));
      if (expert >= 0 && ranks[round] == 0) {
        memory_.of_chunks[chunk * chunk_bytes_ + expert] = static_cast<uint8_t>(__popc(same));
      }
    }
  }

  // Adds up what all segments have of each expert, and what those before this one have. Two experts
  // make a word; threads divide the segments.
  __device__ __forceinline__ void add_segments() const {
    const int words = (params_.experts + 1) / 2;
    const int groups = kWarps * 32 / words;
    const int word = thread_ % words, group = thread_ / words;
    if (group >= groups) {
      return;
    }
    const uint32_t* const counts = reinterpret_cast<const uint32_t*>(params_.counts) + word;
    int all[2] = {}, before[2] = {};
#pragma unroll 8
    for (int segment = group; segment < params_.segments; segment += groups) {
      const uint32_t two = counts[int64_t(segment) * words];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int count = static_cast<int>(two >> (16 * i) & 0xffffU);
        all[i] += count;
        before[i] += segment < segment_ ? count : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int expert = 2 * word + i;
      if (expert < params_.experts) {
        atomicAdd(&memory_.counts[expert], all[i]);
        atomicAdd(&memory_.before[expert], before[i]);
        atomicSub(&memory_.counts[params_.experts], before[i]);
      }
    }
  }

  // A thread has an expert: sums up rows and tiles of the experts before it, leaves the row of the
  // segment's next slot in place of the count, and writes offsets and tiles.
  __device__ __forceinline__ void store_sizes_and_tiles() const {
    const int expert = thread_, experts = params_.experts;
    const int count = expert < experts ? memory_.counts[expert] : 0;
    const int before = expert < experts ? memory_.before[expert] : 0;
    const int tiles = ceil_div(count, params_.tile_tokens);
    int rows_to = count, tiles_to = tiles;  // those of this expert included
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int rows_before = __shfl_up_sync(0xffffffff, rows_to, distance);
      const int tiles_before = __shfl_up_sync(0xffffffff, tiles_to, distance);
      rows_to += lane_ >= distance ? rows_before : 0;
      tiles_to += lane_ >= distance ? tiles_before : 0;
    }
    if (lane_ == 31) {
      memory_.of_warps[warp_] = make_int2(rows_to, tiles_to);
    }
    __syncthreads();
    const int2 of_warp = lane_ < warp_ ? memory_.of_warps[lane_] : make_int2(0, 0);
    rows_to += __reduce_add_sync(0xffffffff, of_warp.x);
    tiles_to += __reduce_add_sync(0xffffffff, of_warp.y);
    if (expert >= experts) {
      return;
    }
    const int first = rows_to - count;
    memory_.counts[expert] = first + before;
    if (expert == experts - 1) {
      // Slots without an expert lie behind all rows; what the segments before have of them.
      memory_.counts[experts] += rows_to + first_slot_;
    }
    if (segment_ == 0) {
      params_.offsets[expert] = first;
      if (expert == experts - 1) {
        params_.offsets[experts] = rows_to;
        *params_.n_tiles = tiles_to;
      }
    }
    if (expert % params_.segments == segment_) {
      store_tiles(expert, first, rows_to, tiles_to - tiles);
    }
  }

  // Writes the tiles of an expert's rows, as the list's from `tile` on.
  __device__ __forceinline__ void store_tiles(int expert, int first, int stop, int tile) const {
    int4* const tiles = reinterpret_cast<int4*>(params_.tiles) + tile;
    for (int i = 0, row = first; row < stop; ++i, row += params_.tile_tokens) {
      tiles[i] = make_int4(expert, row, min(row + params_.tile_tokens, stop), 0);
    }
  }

  __device__ __forceinline__ void store_rows(int first, const int (&ranks)[kChunksOfWarp]) const {
#pragma unroll
    for (int round = 0; round < kChunksOfWarp; ++round) {
      const int chunk = round * kWarps + warp_;
      const int slot = first + chunk * kChunkSlots + lane_;
      const int expert = chunk < kChunks ? expert_of(slot) : -1;
      if (expert < 0) {
        continue;
      }
      int row = memory_.counts[expert] + ranks[round];
#pragma unroll 4
      for (int i = 0; i < chunk; ++i) {
        row += memory_.of_chunks[i * chunk_bytes_ + expert];
      }
      params_.rows[row] = first_slot_ + slot;
    }
  }

  // Goes on to the next round: each expert's next row.
  __device__ __forceinline__ void advance() const {
    for (int expert = thread_; expert <= params_.experts; expert += kWarps * 32) {
      int count = 0;
#pragma unroll 8
      for (int i = 0; i < kChunks; ++i) {
        count += memory_.of_chunks[i * chunk_bytes_ + expert];
      }
      memory_.counts[expert] += count;
    }
  }

  const MoeRouteParams& params_;
  const int* ids_;
  PlanMemory memory_;
  int segment_, first_slot_, slots_, chunk_bytes_, thread_, lane_, warp_;
};

}  // namespace ostinato::route
