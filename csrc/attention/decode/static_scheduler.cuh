// The static scheduler of balanced splits: assigns tiles to CTAs as a pure function of the sequence
// lengths, which every CTA evaluates for itself.
//
// A work tile is all tiles of one sequence that one KV head reads. Work tiles lie on lines,
// sequence by sequence; CTA i of a line takes the tiles at positions [i * quota, (i + 1) * quota).
// Each line has some of the KV heads, one if possible, and all lines have equally many CTAs: so all
// heads of a page, which are adjacent in memory, are read at about the same time. If lengths are
// similar, each work tile gets the same room on its line, a whole number of quotas (or a quota is a
// whole number of work tiles): no CTA has splits of two work tiles, as few CTAs as possible share
// one, and empty positions cost nothing. If lengths differ, empty positions would cost time: work
// tiles lie without gaps, and a CTA may end one, process others whole, and begin another.
#pragma once

#include <cstdint>

#include "common/sizes.cuh"

namespace ostinato::decode {

// Division of a number below 2^30 by a divisor known on the host: n / d = n m >> shift, where m is
// 2^shift / d, rounded up. Exact for 2^shift >= 2^30 d.
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

// The divisors that all CTAs use. Divisions form a dependent chain at kernel start, so their
// latency matters.
struct Divisors {
  Divisor lines, line_ctas, line_heads, group, page_size, batch;
};

// Number of lines: one if a work tile gets several CTAs, else the largest number that leaves few
// CTAs without a line.
inline int count_lines(int grid, int batch, int heads_kv) {
  int lines = batch * heads_kv > grid ? heads_kv : 1;
  while (heads_kv % lines != 0 || lines > grid || grid % lines * 25 > grid) {
    --lines;
  }
  return lines;
}

// A CTA's line and its index on that line; neighbouring CTAs are on different lines.
struct OnLine {
  int line, cta;

  __host__ __device__ OnLine(int cta, int lines, const Divisor& by_lines)
      : line(cta - by_lines.divide(cta) * lines), cta(by_lines.divide(cta)) {}
};

// n / d for numbers below 2^30 known only on the device, for quotients below 2^21: an approximation
// that is wrong by at most 1, then corrected.
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
  int quota;  // positions per CTA
  int room;   // positions per work tile with tiles; 0: as many as it has tiles
};

// Input of share_out(), the same in all CTAs.
struct Load {
  int heads;             // KV heads per line
  int rows;              // per work tile: queries times query heads of a KV head
  int row_bytes;         // of a token's keys in one head
  int live;              // sequences with tiles
  int tiles;             // of all sequences, per KV head
  int longest;           // tiles of the longest sequence
  int shortest = 0;      // tiles (never splits) of the shortest sequence that has some
  bool dynamic = false;  // whether work tiles may be scheduled dynamically where none is shared
};

// Costs of sharing a work tile among CTAs, measured on an H200.
struct Costs {
  int sharing;  // fixed cost, in 16ths of the time of a tile in a CTA alone on its SM
  int row;      // cost of each split per row, in 32nds of that time
};
// Crowded: two CTAs per SM. Quiet: at most half of the CTA slots are used; CTAs then disturb each
// other less, and the next kernel's CTAs are resident and have planned before this one ends.
__host__ __device__ constexpr Costs crowded_costs() { return {88, 2}; }
__host__ __device__ constexpr Costs quiet_costs() { return {56, 1}; }

// The smallest quota worth a split: near the minimum of the sum of n tiles and tiles / n splits. A
// power of two divides more of the lengths that occur together.
__host__ __device__ __forceinline__ int least_quota(int tiles, int rows, const Costs& costs) {
  const float square = static_cast<float>(tiles) * static_cast<float>(rows * costs.row) / 32;
  int quota = 1;
  while (static_cast<float>(4 * quota * quota) <= square) {
    quota *= 2;
  }
  return quota;
}

// Whether each CTA should get whole work tiles (or whole equal parts of one), not an equal share of
// a line without gaps. The busiest CTA then has `more` tiles than `equal`, the share of each CTA on
// such a line, where sharing a work tile costs `sharing`, in the units of Costs.
__host__ __device__ __forceinline__ bool prefers_whole(const Load& load, int more, int equal,
                                                       int sharing) {
  if (load.dynamic) {  // the dynamic scheduler gives the busiest less
    constexpr int kFew = 8;
    return more <= kFew || more <= equal / 5;
  }
  // A tile of fewer bytes takes less time, so sharing costs more of them: of half, 2.5 times.
  constexpr int kMeasuredBytes = 256;
  const bool fewer = load.row_bytes < kMeasuredBytes;
  const int cost = fewer ? sharing * 5 * kMeasuredBytes / (4 * load.row_bytes) : sharing;
  // Two CTAs of an SM take twice as long for a tile as one alone: 32 sixteenths.
  return 32 * more <= cost || more <= equal / 16;
}

__host__ __device__ inline Shares share_out(const Load& load, int ctas, const Divisor& by_ctas) {
  const int total = load.tiles * load.heads;
  const int fair = by_ctas.divide(total + ctas - 1);
  const int least = least_quota(load.longest, load.rows, crowded_costs());
  const int equal = fair > least ? fair : least;
  const int work_tiles = load.live * load.heads;
  Costs costs = crowded_costs();
  int aligned, room, splits = 1;
  if (work_tiles <= ctas) {
    // As few splits as needed, of equal size.
    int most = divide(ctas, work_tiles);
    int wanted = divide_up(load.longest, least);
    const int most_quiet = divide(ctas / 2, work_tiles);
    if ((most < wanted ? most : wanted) <= most_quiet) {
      costs = quiet_costs();
      most = most_quiet;
      wanted = divide_up(load.longest, least_quota(load.longest, load.rows, costs));
    }
    splits = most < wanted ? most : wanted;
    aligned = divide_up(load.longest, splits);
    if (splits > 1 &&
        16 * (load.longest - aligned) <= costs.sharing + splits * load.rows * costs.row / 2) {
      return Shares{load.longest, load.longest};  // one CTA per work tile: no work tile is shared
    }
    room = splits * aligned;
  } else {
    aligned = by_ctas.divide(work_tiles + ctas - 1) * load.longest;
    room = load.longest;
  }
  // Parts of work tiles are added up in any case: sharing costs less beside that.
  const int sharing = (costs.sharing + load.rows * costs.row / 2) / (splits > 1 ? 2 : 1);
  return prefers_whole(load, aligned - equal, equal, sharing) ? Shares{aligned, room}
                                                              : Shares{equal, 0};
}

// The tokens of a sequence that any of its queries attends to, and the tiles that hold them.
struct Visible {
  int begin, end;

  __host__ __device__ Visible(int seqlen, int queries, int left)
      : begin(0), end(queries > 0 ? seqlen : 0) {
    // The first query is at seqlen - queries and attends to `left` tokens before it.
    if (left >= 0 && seqlen - queries > left) {
      begin = seqlen - queries - left;
    }
  }

  // The first visible tile; tile ranges begin at a multiple of `multiple` tokens.
  __host__ __device__ int first_tile(int tile_tokens, int multiple) const {
    return begin / multiple * (multiple / tile_tokens);
  }
  __host__ __device__ int tiles(int tile_tokens, int multiple) const {
    return end <= 0 ? 0 : (end - 1) / tile_tokens + 1 - first_tile(tile_tokens, multiple);
  }
};

// The part of a work tile that one CTA processes.
struct Split {
  int sequence, head;
  int begin, end;  // tiles, counted from the first visible one
  int start;       // the work tile's first position on the line
  int tiles;       // of the work tile

  __host__ __device__ bool whole() const { return begin == 0 && end == tiles; }
};

// The range of positions of a CTA on its line.
struct LineRange {
  int begin, end;

  LineRange() = default;
  __host__ __device__ LineRange(int begin, int end) : begin(begin), end(end) {}
  // The share of CTA `cta` of `all` positions.
  __host__ __device__ LineRange(int all, const Shares& shares, int cta) {
    // 64 bits: for a CTA past the last position, the product may exceed 2^31.
    const int64_t first = static_cast<int64_t>(cta) * shares.quota;
    begin = static_cast<int>(first < all ? first : all);
    end = all - begin < shares.quota ? all : begin + shares.quota;
  }

  __host__ __device__ bool empty() const { return begin == end; }
};

// The KV heads of a line: every `step`-th one.
struct LineHeads {
  int first, step, all;
  int count;  // on the line

  // Moves to the next head; returns whether it wrapped around to the first.
  __host__ __device__ bool advance(int* head) const {
    *head += step;
    const bool again = *head >= all;
    *head -= again ? all : 0;  // `all` is a multiple of `step`
    return again;
  }
};

// Iterates over the splits of a CTA in order. A Table has, per sequence b, tiles(b) and start(b),
// the number of positions (of one KV head) before it.
template <class Table>
class Walk {
 public:
  Walk() = default;
  // `sequence`: the sequence at the first position.
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
