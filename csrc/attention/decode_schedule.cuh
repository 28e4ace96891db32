// Who works on what: a pure function of the lengths, computed by every CTA for itself.
//
// A segment is the tiles of one sequence that one KV head reads. All segments are laid on one line,
// sequence by sequence and head by head, and CTA i takes the places [i * quota, (i + 1) * quota).
// Where lengths are alike, each segment gets the same room on the line, a whole number of quotas
// (or a quota is a whole number of segments): then no CTA has parts of two segments, fewest CTAs
// share one, and the places that stay empty cost nothing. Where they differ, room would be time:
// the segments lie close, and a CTA may end one, do others whole, and begin another.
#pragma once

#include <cstdint>

#include "common/sizes.cuh"

namespace ostinato::decode {

// Division of a number below 2^30 by one that the host knows: n / d = n m >> shift, where m is
// 2^shift / d, rounded up. That is exact for 2^shift >= 2^30 d.
struct Divisor {
  uint32_t multiplier, shift;

  Divisor() = default;
  explicit Divisor(uint32_t d) : shift(30) {
    while ((uint64_t{1} << (shift - 30)) < d) {
      ++shift;
    }
    multiplier = static_cast<uint32_t>(((uint64_t{1} << shift) + d - 1) / d);
  }

  __host__ __device__ __forceinline__ int divide(int n) const {
    return static_cast<int>((static_cast<uint64_t>(static_cast<uint32_t>(n)) * multiplier) >>
                            shift);
  }
};

// What all CTAs divide by; the length of the chain of divisions at the start is felt.
struct Divisors {
  Divisor grid, heads_kv, group, page_size;
};

struct Shares {
  int quota;  // places of a CTA
  int room;   // places of every segment with tiles; 0: as many as it has tiles
};

// What the choice depends on. All CTAs have the same.
struct Load {
  int heads_kv;
  int live;     // sequences with tiles
  int tiles;    // of all sequences, for one KV head
  int longest;  // tiles of the longest sequence
};

// At the end of a segment one CTA adds up the parts, at a cost that grows with their number and
// size; a tile takes about 8 times as long as the part of 8 columns. So the sum of both is least
// near sqrt(8 * tiles) parts: 16 of a sequence of 2048 tokens.
__host__ __device__ inline int best_splits(int tiles, int columns) {
  const int best = static_cast<int>(sqrtf(64.0f * static_cast<float>(tiles) / columns) + 0.5f);
  return best < 1 ? 1 : best;
}

__host__ __device__ inline Shares share_out(const Load& load, int columns, int grid,
                                            const Divisor& by_grid, int max_splits) {
  const int splits = max_splits > 0 ? max_splits : best_splits(load.longest, columns);
  const int total = load.tiles * load.heads_kv;
  const int least = ceil_div(load.longest, splits);
  const int fair = by_grid.divide(total + grid - 1);
  const int equal = fair > least ? fair : least;
  const int segments = load.live * load.heads_kv;
  int aligned, room;
  if (segments <= grid) {
    const int most = grid / segments;
    const int parts = most < splits ? most : splits;
    aligned = ceil_div(load.longest, parts);
    room = parts * aligned;
  } else {
    aligned = by_grid.divide(segments + grid - 1) * load.longest;
    room = load.longest;
  }
  // Memory is shared: when the CTAs with less to do have ended, the others are faster.
  return 4 * static_cast<int64_t>(aligned) <= 5 * static_cast<int64_t>(equal)
             ? Shares{aligned, room}
             : Shares{equal, 0};
}

// The tokens of a sequence that any of its queries sees, and the tiles that hold them.
struct Visible {
  int begin, end;

  __host__ __device__ Visible(int length, int queries, int left)
      : begin(0), end(queries > 0 ? length : 0) {
    // The first query is at length - queries, and sees `left` tokens before it.
    if (left >= 0 && static_cast<int64_t>(length) - queries - left > 0) {
      begin = length - queries - left;
    }
  }

  __host__ __device__ int first_tile(int tile_tokens) const { return begin / tile_tokens; }
  __host__ __device__ int tiles(int tile_tokens) const {
    return end <= 0 ? 0 : (end - 1) / tile_tokens + 1 - first_tile(tile_tokens);
  }
};

// A part of a segment that one CTA works on.
struct Piece {
  int sequence, head;
  int begin, end;  // tiles, counted from the first visible one
  int start;       // the segment's first place
  int tiles;       // of the segment

  // The CTAs that have pieces of the segment, and how many they are.
  __host__ __device__ int first_cta(int quota) const { return start / quota; }
  __host__ __device__ int ctas(int quota) const {
    return (start + tiles - 1) / quota - start / quota + 1;
  }
  __host__ __device__ bool whole() const { return begin == 0 && end == tiles; }
};

// The pieces of a CTA, in order. A table has, by sequence, tiles(b) and start(b), the places (of
// one KV head) before it; start(batch) is the number of all.
template <class Table>
class Walk {
 public:
  __host__ __device__ Walk(const Table& table, int batch, int heads_kv, const Divisor& by_heads_kv,
                           const Shares& shares, int cta)
      : batch_(batch), heads_kv_(heads_kv), room_(shares.room) {
    // 64 bits: a CTA past the last place may be past 2^31, too.
    const int64_t places = static_cast<int64_t>(table.start(batch)) * heads_kv;
    const int64_t first = static_cast<int64_t>(cta) * shares.quota;
    begin_ = static_cast<int>(first < places ? first : places);
    end_ = static_cast<int>(places - begin_ < shares.quota ? places : begin_ + shares.quota);
    if (begin_ == end_) {
      return;
    }
    const int place = by_heads_kv.divide(begin_);
    int low = 0, high = batch;  // start(low) <= place < start(high)
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (table.start(middle) <= place) {
        low = middle;
      } else {
        high = middle;
      }
    }
    sequence_ = low;
    tiles_ = table.tiles(low);
    const int before = table.start(low) * heads_kv;
    head_ = (begin_ - before) / segment_room();
    start_ = before + head_ * segment_room();
  }

  // The next piece; false at the end.
  __host__ __device__ bool next(const Table& table, Piece* piece) {
    while (start_ < end_) {
      const int first = begin_ > start_ ? begin_ - start_ : 0;
      const int last = end_ - start_ < tiles_ ? end_ - start_ : tiles_;
      *piece = Piece{sequence_, head_, first, last, start_, tiles_};
      advance(table);
      if (first < last) {
        return true;
      }
    }
    return false;
  }

 private:
  __host__ __device__ int segment_room() const { return room_ > 0 ? room_ : tiles_; }

  __host__ __device__ void advance(const Table& table) {
    start_ += segment_room();
    if (++head_ == heads_kv_) {
      head_ = 0;
      do {
        ++sequence_;
        tiles_ = sequence_ < batch_ ? table.tiles(sequence_) : 1;
      } while (tiles_ == 0);
    }
  }

  int batch_, heads_kv_, room_;
  int begin_, end_;  // the CTA's places
  int sequence_ = 0, head_ = 0, start_ = 0, tiles_ = 1;
};

}  // namespace ostinato::decode
