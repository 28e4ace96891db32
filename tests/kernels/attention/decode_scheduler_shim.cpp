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

// The sequence at a position on the line, as the device finds it.
int find_sequence(const Table& table, int batch, int heads, int line_index) {
  int sequence = 0;
  for (int b = 0; b < batch; ++b) {
    if (table.starts[b] <= line_index / heads) {
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

// Writes the splits of all CTAs, 6 numbers each: the CTA, counted line by line, sequence, head,
// first tile, last + 1, whether it is a whole work tile. Returns how many there are, -1 for more
// than `capacity`.
extern "C" int schedule(const int* tiles, int batch, int heads_kv, int rows, int grid, int* splits,
                        int capacity) {
  const Lines lines(grid, batch, heads_kv);
  Table table{{}, std::vector<int>(tiles, tiles + batch)};
  Load load{lines.heads, rows, 256, 0, 0, 0};
  for (const int n : table.lengths) {
    load.live += n > 0;
    load.tiles += n;
    load.longest = n > load.longest ? n : load.longest;
  }
  if (load.live == 0) {
    return 0;
  }
  const Shares shares = share_out(load, lines.ctas, Divisor(lines.ctas));
  int positions = 0;
  for (const int n : table.lengths) {
    table.starts.push_back(positions);
    positions += n == 0 ? 0 : shares.room > 0 ? shares.room : n;
  }
  table.starts.push_back(positions);
  int count = 0;
  for (int cta = 0; cta < grid; ++cta) {
    const OnLine on(cta, lines.count, lines.by_count);
    const LineRange own(positions * lines.heads, shares, on.cta);
    const int sequence = find_sequence(table, batch, lines.heads, own.begin);
    Walk<Table> walk(table, batch, lines.heads_of(on.line), shares, own, sequence);
    for (Split part; walk.next(table, &part); ++count) {
      if (count == capacity) {
        return -1;
      }
      const int found[6] = {on.line * lines.ctas + on.cta,
                            part.sequence,
                            part.head,
                            part.begin,
                            part.end,
                            part.whole()};
      for (int i = 0; i < 6; ++i) {
        splits[count * 6 + i] = found[i];
      }
    }
  }
  return count;
}

// The same with splits at multiples of `split` tiles, 10 numbers for each split: the CTA, sequence,
// head, first tile, last + 1, its position, counted line by line, whether it is a whole work tile,
// whether it is the CTA's last one of its work tile, the first CTA of the work tile and how many
// there are.
extern "C" int fixed_schedule(const int* tiles, int batch, int heads_kv, int grid, int split,
                              int* splits, int capacity) {
  const Lines lines(grid, batch, heads_kv);
  Table table{{}, std::vector<int>(tiles, tiles + batch)};
  const FixedSplitSize size{split};
  int positions = 0;
  for (const int n : table.lengths) {
    table.starts.push_back(positions);
    positions += size.splits(n);
  }
  table.starts.push_back(positions);
  const FixedShares shares(positions * lines.heads, lines.ctas, Divisor(lines.ctas));
  int count = 0;
  for (int cta = 0; cta < lines.ctas * lines.count; ++cta) {
    const OnLine on(cta, lines.count, lines.by_count);
    const LineRange own = shares.range_of(on.cta);
    const int sequence = find_sequence(table, batch, lines.heads, own.begin);
    FixedSplitWalk<Table> walk(table, lines.heads_of(on.line), size, own, sequence);
    for (FixedSplit part; walk.next(table, &part); ++count) {
      if (count == capacity) {
        return -1;
      }
      const FixedSplitPeers peers(part, shares, on.cta);
      const int first_cta = on.line * lines.ctas, first_index = on.line * positions * lines.heads;
      const int found[10] = {first_cta + on.cta, part.sequence, part.head,
                             part.begin,         part.end,      first_index + part.line_index,
                             part.whole(),       peers.ends,    first_cta + peers.first_cta,
                             peers.ctas};
      for (int i = 0; i < 10; ++i) {
        splits[count * 10 + i] = found[i];
      }
    }
  }
  return count;
}
