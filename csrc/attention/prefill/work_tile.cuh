// Work tiles of prefill: a tile of queries, the tiles of keys that it reads, and their order.
#pragma once

#include "config.cuh"
#include "mask.cuh"

namespace ostinato::prefill {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ int clamp(int value, int low, int high) {
  return min(max(value, low), high);
}

// Kernel arguments.
struct Arguments {
  Params params;
  float logit_scale;     // multiplies scores: gives logit * log2(e), or the argument of the cap
  int direct;            // 1: without a cap, so that a greater score is a greater logit
  float factor;          // multiplies maxima of scores: logit_scale if direct, else 1
  int group;             // query heads of a KV head
  int pack;              // how many of them share tiles
  int reciprocal;        // 2^16 / pack, rounded up, to divide rows by pack
  int warpgroup_tokens;  // queries of a warpgroup
  int tile_tokens;
  int from_first;   // 1: tiles begin at multiples of tile_tokens, counted from the first query
  int packs;        // packs of query heads: query heads / pack
  int box_tokens;   // tokens of one copy from a page
  int boxes;        // boxes of a tile that one warp copies, at most
  int tiles_ahead;  // tiles whose page ids a warp holds at once
  // 2^(29 + page_shift) / page_size, rounded up, for the least page_shift with 2^page_shift >=
  // page_size.
  uint32_t page_reciprocal;
  int page_shift;
  int key_head, value_head;  // distance of heads in a page, in strips

  // The index of a key's page in its sequence, for keys below 2^29.
  __device__ __forceinline__ int page_of(int key) const {
    return static_cast<int>(__umulhi(static_cast<uint32_t>(key) << 3, page_reciprocal) >>
                            page_shift);
  }
};

// Tiles of keys that a work tile reads, counted from the sequence's first key. What consumers need
// at the start of a work tile is read from shared memory in 16-byte vectors: while tensor cores
// read operands from shared memory, each such load takes some hundred clocks.
struct alignas(16) Tiles {
  int begin,
      end;                     // tiles visible to some query; end < 0: no work tile is left
  int whole_begin, whole_end;  // of them, the tiles wholly visible to all queries

  __device__ __forceinline__ bool is_last() const { return end < 0; }
  __device__ __forceinline__ int tiles() const { return end - begin; }
  // Number of tiles with a masked key. They are processed first, so that the effects of masked
  // non-finite values on the output (nonfinite_repair.cuh) are repaired before other tiles are
  // added.
  __device__ __forceinline__ int masked_tiles() const {
    return tiles() - (whole_end - whole_begin);
  }
  // The n-th tile in processing order.
  __device__ __forceinline__ int tile(int n) const {
    const int after = end - whole_end;
    if (n < after) {
      return end - 1 - n;
    }
    return n < masked_tiles() ? begin + n - after : whole_end - 1 - (n - masked_tiles());
  }
};

struct alignas(16) Queries {
  int position;  // position of the first query among the keys
  int queries;
  int seqlen;  // keys of the sequence
  int marks;   // result of mark()

  // Whether some tiles contain keys that are masked for all queries.
  __device__ __forceinline__ bool is_ragged() const { return marks < 0; }
  // Number of leading tiles of the work tile that are masked for the whole warpgroup.
  __device__ __forceinline__ int skipped(int warpgroup) const {
    return kSkipsTiles ? marks >> 8 * warpgroup & 0xf : 0;
  }
  // Number of tiles with masked keys that are nevertheless wholly visible to the warpgroup.
  __device__ __forceinline__ int unmasked(int warpgroup) const {
    return kSkipsTiles ? marks >> (8 * warpgroup + 4) & 0xf : 0;
  }
};

struct WorkTile : Tiles, Queries {
  int visible_begin, visible_end;  // keys visible to some query
  int first_row;                   // of q and out
  int first_head, kv_head;
  int first_key;  // packed: row of k and v; paged: row of the page table
};

// Tiles that each warpgroup can skip or need not mask, four bits per number.
__device__ __forceinline__ int mark(const Mask& mask, int warpgroup_tokens,
                                    const WorkTile& work_tile) {
  int marks =
      work_tile.visible_begin % kKeys != 0 || work_tile.visible_end % kKeys != 0 ? INT32_MIN : 0;
  const int last = work_tile.position + work_tile.queries - 1;
  const bool reaches_first = mask.first(last) <= work_tile.begin * kKeys;
#pragma unroll
  for (int warpgroup = 0; kSkipsTiles && warpgroup < kConsumers; ++warpgroup) {
    const int first = work_tile.position + warpgroup * warpgroup_tokens;
    const int stop = mask.stop(min(first + warpgroup_tokens - 1, last));
    // At least one tile remains, so that rows without visible keys are written.
    const int skipped = work_tile.end - max(ceil_div(stop, kKeys), work_tile.begin + 1);
    const int unmasked =
        reaches_first ? mask.stop(min(first, last)) / kKeys - work_tile.whole_end : 0;
    marks |= clamp(skipped, 0, 15) << 8 * warpgroup;
    marks |= clamp(min(unmasked, work_tile.end - work_tile.whole_end), 0, 15)
             << (8 * warpgroup + 4);
  }
  return marks;
}

// Computes the keys that the work tile's queries attend to.
__device__ __forceinline__ void find_visible(const Mask& mask, int warpgroup_tokens,
                                             WorkTile& work_tile) {
  const int last = work_tile.position + work_tile.queries - 1;
  work_tile.visible_begin = mask.first(work_tile.position);
  work_tile.visible_end = mask.stop(last);
  if (work_tile.visible_begin >= work_tile.visible_end) {
    work_tile.begin = work_tile.end = work_tile.whole_begin = work_tile.whole_end =
        work_tile.marks = 0;
    return;
  }
  work_tile.begin = work_tile.visible_begin / kKeys;
  work_tile.end = ceil_div(work_tile.visible_end, kKeys);
  work_tile.whole_begin = max(ceil_div(mask.first(last), kKeys), work_tile.begin);
  work_tile.whole_end = min(mask.stop(work_tile.position) / kKeys, work_tile.end);
  if (work_tile.whole_begin >= work_tile.whole_end) {
    work_tile.whole_begin = work_tile.whole_end = work_tile.begin;
  }
  work_tile.marks = mark(mask, warpgroup_tokens, work_tile);
}

}  // namespace ostinato::prefill
