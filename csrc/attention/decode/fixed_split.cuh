// Fixed splits: every work tile is split at multiples of a fixed number of tiles, counted from its
// first visible one, so that the bits of a sequence's result depend on that sequence alone.
//
// Each split has a partial result of its own. All splits lie on lines, work tile by work tile, and
// each CTA takes neighbouring ones, as many as the other CTAs or one more. The load decides which
// CTA processes a split and when; it changes neither the split nor the order in which the partials
// of a work tile are combined.
#pragma once

#include "static_scheduler.cuh"

namespace ostinato::decode {

struct FixedSplitSize {
  int tiles;  // of a split

  // Of a work tile.
  __host__ __device__ int splits(int work_tile_tiles) const {
    return ceil_div(work_tile_tiles, tiles);
  }
};

struct FixedShares {
  int least;  // splits of a CTA
  int extra;  // the first CTAs, which have one more

  FixedShares() = default;
  __host__ __device__ FixedShares(int splits, int ctas, const Divisor& by_ctas)
      : least(by_ctas.divide(splits)), extra(splits - least * ctas) {}

  __host__ __device__ int first_of(int cta) const {
    return cta * least + (cta < extra ? cta : extra);
  }
  __host__ __device__ LineRange range_of(int cta) const {
    return LineRange(first_of(cta), first_of(cta + 1));
  }
  __host__ __device__ int cta_of(int split) const {
    const int rest = split - extra * (least + 1);
    return rest < 0 ? divide(split, least + 1) : extra + divide(rest, least);
  }
};

struct FixedSplit {
  int sequence, head;
  int begin, end;    // tiles, counted from the first visible one
  int line_index;    // on the line
  int index, count;  // of the work tile's splits

  __host__ __device__ bool whole() const { return count == 1; }
};

// The CTAs that share the splits of a work tile.
struct FixedSplitPeers {
  int first_cta, ctas;
  bool ends;  // the split is the last one of the work tile that its CTA has

  __host__ __device__ FixedSplitPeers(const FixedSplit& split, const FixedShares& shares, int cta) {
    const int start = split.line_index - split.index;
    first_cta = shares.cta_of(start);
    ctas = shares.cta_of(start + split.count - 1) - first_cta + 1;
    ends = split.index + 1 == split.count || split.line_index + 1 == shares.first_of(cta + 1);
  }
};

// The splits of a CTA, in order. A table has, by sequence, tiles(b) and start(b), the splits (of
// one KV head) before it.
template <class Table>
class FixedSplitWalk {
 public:
  FixedSplitWalk() = default;
  // `sequence` is that of the first place.
  __host__ __device__ FixedSplitWalk(const Table& table, const LineHeads& heads,
                                     const FixedSplitSize& size, const LineRange& line_range,
                                     int sequence)
      : heads_(heads), size_(size), line_index_(line_range.begin), end_(line_range.end) {
    if (line_range.empty()) {
      return;
    }
    sequence_ = sequence;
    count_ = size.splits(table.tiles(sequence));
    const int before = line_index_ - table.start(sequence) * heads.count;
    const int head = divide(before, count_);
    head_ = heads.first + head * heads.step;
    index_ = before - head * count_;
  }

  // The next split; false at the end.
  __host__ __device__ bool next(const Table& table, FixedSplit* split) {
    if (line_index_ == end_) {
      return false;
    }
    const int begin = index_ * size_.tiles, tiles = table.tiles(sequence_);
    const int end = tiles - begin < size_.tiles ? tiles : begin + size_.tiles;
    *split = FixedSplit{sequence_, head_, begin, end, line_index_, index_, count_};
    ++index_;
    if (++line_index_ < end_ && index_ == count_) {
      advance(table);
    }
    return true;
  }

 private:
  // To the work tile of the next place.
  __host__ __device__ void advance(const Table& table) {
    index_ = 0;
    if (heads_.advance(&head_)) {
      do {
        count_ = size_.splits(table.tiles(++sequence_));
      } while (count_ == 0);
    }
  }

  LineHeads heads_;
  FixedSplitSize size_;
  int line_index_, end_;
  int sequence_ = 0, head_ = 0, index_ = 0, count_ = 0;
};

}  // namespace ostinato::decode
