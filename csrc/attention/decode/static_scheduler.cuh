// The static scheduler of balanced splits: which tiles each CTA reads, a pure function of the
// sequence lengths that every CTA computes for itself.
//
// A work tile is all tiles of one sequence that one KV head reads. Work tiles lie on lines,
// sequence by sequence; CTA i of a line takes the tiles at positions [i * quota, (i + 1) * quota).
// Each line has some of the KV heads, one if possible, and all lines have equally many CTAs: then
// all heads of a page are read at about the same time, which is how they lie in memory. Where
// lengths are similar, each work tile gets the same room on the line, a whole number of quotas (or
// a quota is a whole number of work tiles): then no CTA has splits of two work tiles, fewest CTAs
// share one, and empty positions cost nothing. Where lengths differ, empty positions would cost
// time: the work tiles lie without gaps, and a CTA may end one, process others whole, and begin
// another.
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
  Divisor lines, line_ctas, line_heads, group, page_size, batch;
};

// How many lines: one if work tiles get several CTAs, else the most that leave few CTAs without
// one.
inline int count_lines(int grid, int batch, int heads_kv) {
  int lines = batch * heads_kv > grid ? heads_kv : 1;
  while (heads_kv % lines != 0 || lines > grid || grid % lines * 25 > grid) {
    --lines;
  }
  return lines;
}

// A CTA's line, and its number there; neighbours are on different lines.
struct OnLine {
  int line, cta;

  __host__ __device__ OnLine(int cta, int lines, const Divisor& by_lines)
      : line(cta - by_lines.divide(cta) * lines), cta(by_lines.divide(cta)) {}
};

// n / d of numbers below 2^30 that only the device knows, if it is below 2^21: a guess, wrong by at
// most 1.
__host__ __device__ __forceinline__ int divide(int n, int d) {
#ifdef __CUDA_ARCH__
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(static_cast<float>(d)));
  const int quotient = static_cast<int>(static_cast<float>(n) * reciprocal);
  const int rest = n - quotient * d;
  return quotient + (rest >= d) - (rest < 0);
#else
  return n / d;
#endif
}

__host__ __device__ __forceinline__ int divide_up(int n, int d) { return divide(n + d - 1, d); }

struct Shares {
  int quota;  // places of a CTA
  int room;   // places of every work tile with tiles; 0: as many as it has tiles
};

// What the choice depends on. All CTAs have the same.
struct Load {
  int heads;         // KV heads of a line
  int rows;          // of a work tile: queries times heads of the group
  int live;          // sequences with tiles
  int tiles;         // of all sequences, for one KV head
  int longest;       // tiles of the longest sequence
  int shortest = 0;  // of those that have some: tiles, whatever is counted above
};

// Costs, measured on an H200, of sharing a work tile.
struct Costs {
  int sharing;  // at all: in sixteenths of the time of a tile in a CTA that has its SM to itself
  int row;      // and each part of it per row: in 32nds
};
// With two CTAs on an SM, or with half of the SMs' places free: then CTAs disturb each other less,
// and those of the next kernel are there, and have made their plans, before this one has ended.
__host__ __device__ constexpr Costs crowded_costs() { return {88, 2}; }
__host__ __device__ constexpr Costs quiet_costs() { return {56, 1}; }

// The fewest tiles of a CTA that are worth a part: about where the sum of both, n tiles and
// tiles / n splits, is least. A power of two divides more lengths that are alike.
__host__ __device__ __forceinline__ int least_quota(int tiles, int rows, const Costs& costs) {
  const float square = static_cast<float>(tiles) * static_cast<float>(rows * costs.row) / 32;
  int quota = 1;
  while (static_cast<float>(4 * quota * quota) <= square) {
    quota *= 2;
  }
  return quota;
}

__host__ __device__ inline Shares share_out(const Load& load, int ctas, const Divisor& by_ctas) {
  const int total = load.tiles * load.heads;
  const int fair = by_ctas.divide(total + ctas - 1);
  const int least = least_quota(load.longest, load.rows, crowded_costs());
  const int equal = fair > least ? fair : least;
  const int work_tiles = load.live * load.heads;
  int aligned, room;
  if (work_tiles <= ctas) {
    // As few as do it, each with as many tiles as the others.
    int most = divide(ctas, work_tiles);
    int wanted = divide_up(load.longest, least);
    Costs costs = crowded_costs();
    const int most_quiet = divide(ctas / 2, work_tiles);
    if ((most < wanted ? most : wanted) <= most_quiet) {
      costs = quiet_costs();
      most = most_quiet;
      wanted = divide_up(load.longest, least_quota(load.longest, load.rows, costs));
    }
    const int splits = most < wanted ? most : wanted;
    aligned = divide_up(load.longest, splits);
    if (splits > 1 &&
        16 * (load.longest - aligned) <= costs.sharing + splits * load.rows * costs.row / 2) {
      return Shares{load.longest, load.longest};  // nobody shares anything
    }
    room = splits * aligned;
  } else {
    aligned = by_ctas.divide(work_tiles + ctas - 1) * load.longest;
    room = load.longest;
  }
  // Memory is shared: when the CTAs with less to do have ended, the others are faster, at most
  // about four times. And places that lie close are shared by more CTAs.
  const bool even = aligned <= equal + equal / 4 || 2 * aligned <= 5 * fair;
  return even ? Shares{aligned, room} : Shares{equal, 0};
}

// The tokens of a sequence that any of its queries sees, and the tiles that hold them.
struct Visible {
  int begin, end;

  __host__ __device__ Visible(int seqlen, int queries, int left)
      : begin(0), end(queries > 0 ? seqlen : 0) {
    // The first query is at length - queries, and sees `left` tokens before it.
    if (left >= 0 && seqlen - queries > left) {
      begin = seqlen - queries - left;
    }
  }

  // The first one begins at a multiple of so many tokens.
  __host__ __device__ int first_tile(int tile_tokens, int multiple) const {
    return begin / multiple * (multiple / tile_tokens);
  }
  __host__ __device__ int tiles(int tile_tokens, int multiple) const {
    return end <= 0 ? 0 : (end - 1) / tile_tokens + 1 - first_tile(tile_tokens, multiple);
  }
};

// A part of a work tile that one CTA works on.
struct Split {
  int sequence, head;
  int begin, end;  // tiles, counted from the first visible one
  int start;       // the work tile's first place
  int tiles;       // of the work tile

  __host__ __device__ bool whole() const { return begin == 0 && end == tiles; }
};

// The places of a CTA.
struct LineRange {
  int begin, end;

  LineRange() = default;
  __host__ __device__ LineRange(int begin, int end) : begin(begin), end(end) {}
  // Of the places that there are for all.
  __host__ __device__ LineRange(int all, const Shares& shares, int cta) {
    // 64 bits: a CTA past the last place may be past 2^31, too.
    const int64_t first = static_cast<int64_t>(cta) * shares.quota;
    begin = static_cast<int>(first < all ? first : all);
    end = all - begin < shares.quota ? all : begin + shares.quota;
  }

  __host__ __device__ bool empty() const { return begin == end; }
};

// The KV heads of a line: every so many.
struct LineHeads {
  int first, step, all;
  int count;  // of the line

  // Goes to the next; whether it is the first again.
  __host__ __device__ bool advance(int* head) const {
    *head += step;
    const bool again = *head >= all;
    *head -= again ? all : 0;  // all are a multiple of a step
    return again;
  }
};

// The splits of a CTA, in order. A table has, by sequence, tiles(b) and start(b), the places (of
// one KV head) before it.
template <class Table>
class Walk {
 public:
  Walk() = default;
  // `sequence` is that of the first place.
  __host__ __device__ Walk(const Table& table, int batch, const LineHeads& heads,
                           const Shares& shares, const LineRange& line_range, int sequence)
      : batch_(batch), heads_(heads), room_(shares.room), line_range_(line_range) {
    if (line_range.empty()) {
      start_ = line_range.end;
      return;
    }
    sequence_ = sequence;
    tiles_ = table.tiles(sequence);
    const int before = table.start(sequence) * heads.count;
    const int head = divide(line_range.begin - before, work_tile_room());
    head_ = heads.first + head * heads.step;
    start_ = before + head * work_tile_room();
  }

  // The next split; false at the end.
  __host__ __device__ bool next(const Table& table, Split* split) {
    while (start_ < line_range_.end) {
      const int first = line_range_.begin > start_ ? line_range_.begin - start_ : 0;
      const int last = line_range_.end - start_ < tiles_ ? line_range_.end - start_ : tiles_;
      *split = Split{sequence_, head_, first, last, start_, tiles_};
      advance(table);
      if (first < last) {
        return true;
      }
    }
    return false;
  }

 private:
  __host__ __device__ int work_tile_room() const { return room_ > 0 ? room_ : tiles_; }

  __host__ __device__ void advance(const Table& table) {
    start_ += work_tile_room();
    if (heads_.advance(&head_)) {
      do {
        ++sequence_;
        tiles_ = sequence_ < batch_ ? table.tiles(sequence_) : 1;
      } while (tiles_ == 0);
    }
  }

  int batch_;
  LineHeads heads_;
  int room_;
  LineRange line_range_;
  int sequence_ = 0, head_ = 0, start_ = 0, tiles_ = 1;
};

}  // namespace ostinato::decode
