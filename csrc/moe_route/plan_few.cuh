// The rows of each expert, from the ids of few slots, by one CTA: a slot's row follows from how
// many slots before it have its expert, in its chunk of 32 and in the chunks before.
#pragma once

#include <cstdint>

#include "params.h"
#include "plan.cuh"

namespace ostinato::route {

inline constexpr int kChunkSlots = 32;

// Shared memory: slots and first rows of experts, with one element more for slots without an
// expert; rows and tiles that the experts of each warp have; slots of each expert in each chunk.
struct FewMemory {
  unsigned* counts;  // [experts + 1]
  int* offsets;      // [experts + 1]
  int2* of_warps;    // [warps]
  uint8_t* of_chunks;

  __host__ __device__ static int chunks(int slots) {
    return (slots + kChunkSlots - 1) / kChunkSlots;
  }
  // Bytes of a chunk's counts, whole words.
  __host__ __device__ static int chunk_bytes(int experts) { return (experts + 4) / 4 * 4; }
  __host__ __device__ static int bytes(int experts, int warps, int slots) {
    return 8 * warps + 8 * (experts + 1) + chunks(slots) * chunk_bytes(experts);
  }

  __device__ FewMemory(uint8_t* memory, int experts, int warps) {
    of_warps = reinterpret_cast<int2*>(memory);
    counts = reinterpret_cast<unsigned*>(of_warps + warps);
    offsets = reinterpret_cast<int*>(counts + experts + 1);
    of_chunks = reinterpret_cast<uint8_t*>(offsets + experts + 1);
  }
};

// All functions are called by all threads, of which there are kWarps warps, as many as experts or
// more.
template <int kWarps, int kMostSlots>
class FewPlanner {
 public:
  // `ids`: those of all slots, once `run` is called.
  __device__ FewPlanner(const MoeRouteParams& params, const int* ids, uint8_t* memory)
      : params_(params),
        ids_(ids),
        memory_(memory, params.experts, kWarps),
        slots_(params.tokens * params.top_k),
        chunk_bytes_(FewMemory::chunk_bytes(params.experts)),
        thread_(static_cast<int>(threadIdx.x)),
        lane_(thread_ % 32),
        warp_(thread_ / 32) {}

  // Clears all counts; what routing writes is not touched.
  __device__ __forceinline__ void begin() const {
    for (int i = thread_; i <= params_.experts; i += kWarps * 32) {
      memory_.counts[i] = 0;
    }
    uint32_t* const words = reinterpret_cast<uint32_t*>(memory_.of_chunks);
    const int count = FewMemory::chunks(slots_) * chunk_bytes_ / 4;
    for (int i = thread_; i < count; i += kWarps * 32) {
      words[i] = 0;
    }
  }

  // Writes rows, offsets and tiles; the ids are there.
  __device__ __forceinline__ void run() {
    __syncthreads();
    int ranks[kRounds];  // of this lane's slots in their chunks
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      ranks[round] = count_chunk(round * kWarps + warp_);
    }
    __syncthreads();
    store_sizes_and_tiles();
    __syncthreads();
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      store_rows(round * kWarps + warp_, ranks[round]);
    }
  }

 private:
  static constexpr int kRounds = (kMostSlots / kChunkSlots + kWarps - 1) / kWarps;

  // The expert of a slot, -1 beyond the last slot.
  __device__ __forceinline__ int expert_of(int slot) const {
    const int id = slot < slots_ ? ids_[slot] : -1;
    return slot >= slots_ ? -1 : id < 0 ? params_.experts : id;
  }

  // Counts a chunk's slots of each expert, and returns how many before this lane's have its expert.
  __device__ __forceinline__ int count_chunk(int chunk) const {
    if (chunk * kChunkSlots >= slots_) {
      return 0;
    }
    const int expert = expert_of(chunk * kChunkSlots + lane_);
    const unsigned same = __match_any_sync(0xffffffff, expert);
    const int rank = __popc(same & ((1U << lane_) - 1U));
    if (expert >= 0 && rank == 0) {
      const unsigned count = __popc(same);
      memory_.of_chunks[chunk * chunk_bytes_ + expert] = static_cast<uint8_t>(count);
      atomicAdd(&memory_.counts[expert], count);
    }
    return rank;
  }

  __device__ __forceinline__ void store_rows(int chunk, int rank) const {
    const int slot = chunk * kChunkSlots + lane_;
    const int expert = expert_of(slot);
    if (expert < 0) {
      return;
    }
    int row = memory_.offsets[expert] + rank;
#pragma unroll 4
    for (int i = 0; i < chunk; ++i) {
      row += memory_.of_chunks[i * chunk_bytes_ + expert];
    }
    params_.rows[row] = slot;
  }

  // A thread has an expert: sums up rows and tiles of the experts before it.
  __device__ __forceinline__ void store_sizes_and_tiles() const {
    const int expert = thread_, experts = params_.experts;
    const int count = expert < experts ? static_cast<int>(memory_.counts[expert]) : 0;
    const int tiles = (count + params_.tile_tokens - 1) / params_.tile_tokens;
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
    const int first = rows_to - count;
    if (expert < experts) {
      memory_.offsets[expert] = first;
      params_.offsets[expert] = first;
      store_tiles(params_, expert, first, rows_to, tiles_to - tiles, 0, 1);
    }
    if (expert == experts - 1) {
      memory_.offsets[experts] = rows_to;
      params_.offsets[experts] = rows_to;
      *params_.n_tiles = tiles_to;
    }
  }

  const MoeRouteParams& params_;
  const int* ids_;
  FewMemory memory_;
  int slots_, chunk_bytes_, thread_, lane_, warp_;
};

}  // namespace ostinato::route
