// A work tile: a tile of queries, the tiles of keys that it reads, and their order.
#pragma once

#include "config.cuh"

namespace ostinato::prefill {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ int clamp(int value, int low, int high) {
  return min(max(value, low), high);
}

// What the launch is given.
struct Arguments {
  Params params;
  float logit_scale;     // of a score: the logit times log2(e), or what is capped
  int direct;            // whether there is no cap, and a greater score is a greater logit
  float factor;          // of what maxima are compared with: logit_scale where direct, otherwise 1
  int group;             // query heads of a KV head
  int pack;              // of them, those that share tiles
  int reciprocal;        // 2^16 / pack, rounded up, with which rows are divided by pack
  int warpgroup_tokens;  // queries of a warpgroup
  int tile_tokens;
  int from_first;   // whether they begin at multiples of that, wherever the queries end
  int units;        // tiles side by side: query heads / pack
  int box_tokens;   // that one copy from a page takes
  int boxes;        // of a tile that a warp copies, at most
  int tiles_ahead;  // whose pages it has at once
  // 2^(29 + page_shift) / page_size, rounded up, where 2^page_shift is not less than page_size.
  uint32_t page_reciprocal;
  int page_shift;
  int key_head, value_head;  // from head to head of a page, in strips

  // In which page of its sequence a key is, of less than 2^29.
  __device__ __forceinline__ int page_of(int key) const {
    return static_cast<int>(__umulhi(static_cast<uint32_t>(key) << 3, page_reciprocal) >>
                            page_shift);
  }
};

// Tiles of keys that an work tile reads, counted from the sequence's first key. What consumers ask
// of an work tile when they begin it is read from shared memory 16 bytes at a time: while tensor
// cores read their operands there, every answer takes some hundred clocks.
struct alignas(16) Tiles {
  int begin,
      end;                     // that some query sees; end < 0: no work tile is left
  int whole_begin, whole_end;  // of them, those that all queries see wholly

  __device__ __forceinline__ bool is_last() const { return end < 0; }
  __device__ __forceinline__ int tiles() const { return end - begin; }
  // Tiles of which some query does not see some key. They come first, so that what a hidden value
  // may have done to the output (nonfinite_repair.cuh) is found and undone before other tiles add
  // to it.
  __device__ __forceinline__ int hiding_tiles() const {
    return tiles() - (whole_end - whole_begin);
  }
  // The n-th to be read.
  __device__ __forceinline__ int tile(int n) const {
    const int after = end - whole_end;
    if (n < after) {
      return end - 1 - n;
    }
    return n < hiding_tiles() ? begin + n - after : whole_end - 1 - (n - hiding_tiles());
  }
};

struct alignas(16) Queries {
  int position;  // of the first, among the keys
  int queries;
  int seqlen;  // keys of the sequence
  int marks;   // what mark() has found

  // Whether tiles have keys that no query sees.
  __device__ __forceinline__ bool is_ragged() const { return marks < 0; }
  // Of the work tile's tiles, those at the front of which the warpgroup sees nothing.
  __device__ __forceinline__ int unseen(int warpgroup) const {
    return kLeavesOut ? marks >> 8 * warpgroup & 0xf : 0;
  }
  // Of the tiles that hide some key from some query, those that the warpgroup sees wholly.
  __device__ __forceinline__ int seen(int warpgroup) const {
    return kLeavesOut ? marks >> (8 * warpgroup + 4) & 0xf : 0;
  }
};

struct WorkTile : Tiles, Queries {
  int visible_begin, visible_end;  // keys that some query sees
  int first_row;                   // of q and out
  int first_head, kv_head;
  int first_key;  // packed: row of k and v; paged: row of the page table
};

// Of the queries at these positions in a sequence, as far as there are any.
struct Mask {
  int left, right;  // -1: no limit
  int seqlen;

  __device__ __forceinline__ int first(int position) const {
    return left < 0 ? 0 : min(max(position - left, 0), seqlen);
  }
  __device__ __forceinline__ int stop(int position) const {
    return right < 0 ? seqlen : min(max(position + right + 1, 0), seqlen);
  }
};

// What each warpgroup need not look at, four bits a number.
__device__ __forceinline__ int mark(const Mask& mask, int warpgroup_tokens,
                                    const WorkTile& work_tile) {
  int marks =
      work_tile.visible_begin % kKeys != 0 || work_tile.visible_end % kKeys != 0 ? INT32_MIN : 0;
  const int last = work_tile.position + work_tile.queries - 1;
  const bool sees_first = mask.first(last) <= work_tile.begin * kKeys;
#pragma unroll
  for (int warpgroup = 0; kLeavesOut && warpgroup < kConsumers; ++warpgroup) {
    const int first = work_tile.position + warpgroup * warpgroup_tokens;
    const int stop = mask.stop(min(first + warpgroup_tokens - 1, last));
    // One tile is left for what is written of rows that see nothing.
    const int unseen = work_tile.end - max(ceil_div(stop, kKeys), work_tile.begin + 1);
    const int seen = sees_first ? mask.stop(min(first, last)) / kKeys - work_tile.whole_end : 0;
    marks |= clamp(unseen, 0, 15) << 8 * warpgroup;
    marks |= clamp(min(seen, work_tile.end - work_tile.whole_end), 0, 15) << (8 * warpgroup + 4);
  }
  return marks;
}

// Fills in which keys the work tile's queries see.
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

// The keys that the thread's rows see.
struct Seen {
  int first[2];
  uint32_t count[2];

  __device__ __forceinline__ bool sees(int half, int key) const {
    return static_cast<uint32_t>(key - first[half]) < count[half];
  }
};

}  // namespace ostinato::prefill
