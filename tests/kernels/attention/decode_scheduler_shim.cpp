// The schedule of decode attention, compiled for the host: what every CTA finds out for itself.
#define __host__
#define __device__
#define __forceinline__ inline
#include <cstdint>
#include <vector>

#include "attention/decode/fixed_split.cuh"

namespace {

using namespace ostinato::decode;

struct Table {
  std::vector<int> starts, lengths;
  int start(int b) const { return starts[b]; }
  int tiles(int b) const { return lengths[b]; }
};

// The sequence of a place on the line, as the device finds it.
int find_sequence(const Table& table, int batch, int heads, int place) {
  int sequence = 0;
  for (int b = 0; b < batch; ++b) {
    if (table.starts[b] <= place / heads) {
      sequence = b;
    }
  }
  return sequence;
}

struct Lines {
  int count, ctas, heads;
  Divisor by_count;

  Lines(int grid, int batch, int heads_kv)
      : count(count_lines(grid, batch, heads_kv)),
        ctas(grid / count),
        heads(heads_kv / count),
        by_count(count) {}

  LineHeads heads_of(int line) const { return {line, count, heads * count, heads}; }
};

}  // namespace

// Writes how many lines there are, and of how many CTAs each.
extern "C" void lines(int grid, int batch, int heads_kv, int* found) {
  const Lines lines(grid, batch, heads_kv);
  found[0] = lines.count;
  found[1] = lines.ctas;
}

// Writes the pieces of all CTAs, 6 numbers each: the CTA, counted line by line, sequence, head,
// first tile, last + 1, whether it is a whole segment. Returns how many there are, -1 for more than
// `capacity`.
extern "C" int schedule(const int* tiles, int batch, int heads_kv, int rows, int grid, int* pieces,
                        int capacity) {
  const Lines lines(grid, batch, heads_kv);
  Table table{{}, std::vector<int>(tiles, tiles + batch)};
  Load load{lines.heads, rows, 0, 0, 0};
  for (const int n : table.lengths) {
    load.live += n > 0;
    load.tiles += n;
    load.longest = n > load.longest ? n : load.longest;
  }
  if (load.live == 0) {
    return 0;
  }
  const Shares shares = share_out(load, lines.ctas, Divisor(lines.ctas));
  int places = 0;
  for (const int n : table.lengths) {
    table.starts.push_back(places);
    places += n == 0 ? 0 : shares.room > 0 ? shares.room : n;
  }
  table.starts.push_back(places);
  int count = 0;
  for (int cta = 0; cta < grid; ++cta) {
    const OnLine on(cta, lines.count, lines.by_count);
    const Places own(places * lines.heads, shares, on.cta);
    const int sequence = find_sequence(table, batch, lines.heads, own.begin);
    Walk<Table> walk(table, batch, lines.heads_of(on.line), shares, own, sequence);
    for (Piece piece; walk.next(table, &piece); ++count) {
      if (count == capacity) {
        return -1;
      }
      const int found[6] = {on.line * lines.ctas + on.cta,
                            piece.sequence,
                            piece.head,
                            piece.begin,
                            piece.end,
                            piece.whole()};
      for (int i = 0; i < 6; ++i) {
        pieces[count * 6 + i] = found[i];
      }
    }
  }
  return count;
}

// The same with cuts at multiples of `split` tiles, 10 numbers for each unit: the CTA, sequence,
// head, first tile, last + 1, its place, counted line by line, whether it is a whole segment,
// whether it is the CTA's last one of its segment, the first CTA of the segment and how many there
// are.
extern "C" int fixed_schedule(const int* tiles, int batch, int heads_kv, int grid, int split,
                              int* units, int capacity) {
  const Lines lines(grid, batch, heads_kv);
  Table table{{}, std::vector<int>(tiles, tiles + batch)};
  const FixedSplit cuts{split};
  int places = 0;
  for (const int n : table.lengths) {
    table.starts.push_back(places);
    places += cuts.units(n);
  }
  table.starts.push_back(places);
  const UnitShares shares(places * lines.heads, lines.ctas, Divisor(lines.ctas));
  int count = 0;
  for (int cta = 0; cta < lines.ctas * lines.count; ++cta) {
    const OnLine on(cta, lines.count, lines.by_count);
    const Places own = shares.places_of(on.cta);
    const int sequence = find_sequence(table, batch, lines.heads, own.begin);
    UnitWalk<Table> walk(table, lines.heads_of(on.line), cuts, own, sequence);
    for (Unit unit; walk.next(table, &unit); ++count) {
      if (count == capacity) {
        return -1;
      }
      const UnitPeers peers(unit, shares, on.cta);
      const int first_cta = on.line * lines.ctas, first_place = on.line * places * lines.heads;
      const int found[10] = {first_cta + on.cta, unit.sequence, unit.head,
                             unit.begin,         unit.end,      first_place + unit.place,
                             unit.whole(),       peers.ends,    first_cta + peers.first_cta,
                             peers.ctas};
      for (int i = 0; i < 10; ++i) {
        units[count * 10 + i] = found[i];
      }
    }
  }
  return count;
}
