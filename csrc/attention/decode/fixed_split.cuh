// Who works on what if the bits of a sequence's result are to depend on that sequence alone: every
// segment is cut at multiples of a fixed number of tiles, counted from its first visible one.
//
// What lies between two cuts is a unit, with a result of its own. All units lie on lines, segment
// by segment, and each CTA takes neighbours, as many as the others or one more. So CTAs decide who
// does a unit and when, and neither what it is nor the order in which the units of a segment are
// added up.
#pragma once

#include "static_scheduler.cuh"

namespace ostinato::decode {

struct FixedSplit {
  int tiles;  // of a unit

  // Of a segment.
  __host__ __device__ int units(int segment_tiles) const { return ceil_div(segment_tiles, tiles); }
};

struct UnitShares {
  int least;  // units of a CTA
  int extra;  // the first CTAs, which have one more

  UnitShares() = default;
  __host__ __device__ UnitShares(int units, int ctas, const Divisor& by_ctas)
      : least(by_ctas.divide(units)), extra(units - least * ctas) {}

  __host__ __device__ int first_of(int cta) const {
    return cta * least + (cta < extra ? cta : extra);
  }
  __host__ __device__ Places places_of(int cta) const {
    return Places(first_of(cta), first_of(cta + 1));
  }
  __host__ __device__ int cta_of(int unit) const {
    const int rest = unit - extra * (least + 1);
    return rest < 0 ? divide(unit, least + 1) : extra + divide(rest, least);
  }
};

struct Unit {
  int sequence, head;
  int begin, end;    // tiles, counted from the first visible one
  int place;         // on the line
  int index, count;  // of the segment's units

  __host__ __device__ bool whole() const { return count == 1; }
};

// The CTAs that share the units of a segment.
struct UnitPeers {
  int first_cta, ctas;
  bool ends;  // the unit is the last one of the segment that its CTA has

  __host__ __device__ UnitPeers(const Unit& unit, const UnitShares& shares, int cta) {
    const int start = unit.place - unit.index;
    first_cta = shares.cta_of(start);
    ctas = shares.cta_of(start + unit.count - 1) - first_cta + 1;
    ends = unit.index + 1 == unit.count || unit.place + 1 == shares.first_of(cta + 1);
  }
};

// The units of a CTA, in order. A table has, by sequence, tiles(b) and start(b), the units (of one
// KV head) before it.
template <class Table>
class UnitWalk {
 public:
  UnitWalk() = default;
  // `sequence` is that of the first place.
  __host__ __device__ UnitWalk(const Table& table, const LineHeads& heads, const FixedSplit& split,
                               const Places& places, int sequence)
      : heads_(heads), split_(split), place_(places.begin), end_(places.end) {
    if (places.empty()) {
      return;
    }
    sequence_ = sequence;
    count_ = split.units(table.tiles(sequence));
    const int before = place_ - table.start(sequence) * heads.count;
    const int head = divide(before, count_);
    head_ = heads.first + head * heads.step;
    index_ = before - head * count_;
  }

  // The next unit; false at the end.
  __host__ __device__ bool next(const Table& table, Unit* unit) {
    if (place_ == end_) {
      return false;
    }
    const int begin = index_ * split_.tiles, tiles = table.tiles(sequence_);
    const int end = tiles - begin < split_.tiles ? tiles : begin + split_.tiles;
    *unit = Unit{sequence_, head_, begin, end, place_, index_, count_};
    ++index_;
    if (++place_ < end_ && index_ == count_) {
      advance(table);
    }
    return true;
  }

 private:
  // To the segment of the next place.
  __host__ __device__ void advance(const Table& table) {
    index_ = 0;
    if (heads_.advance(&head_)) {
      do {
        count_ = split_.units(table.tiles(++sequence_));
      } while (count_ == 0);
    }
  }

  LineHeads heads_;
  FixedSplit split_;
  int place_, end_;
  int sequence_ = 0, head_ = 0, index_ = 0, count_ = 0;
};

}  // namespace ostinato::decode
