// The schedule of decode attention, compiled for the host: what every CTA finds out for itself.
#define __host__
#define __device__
#define __forceinline__ inline
#include <cstdint>
#include <vector>

#include "attention/decode_schedule.cuh"

namespace {

using namespace ostinato::decode;

struct Table {
  std::vector<int> starts, lengths;
  int start(int b) const { return starts[b]; }
  int tiles(int b) const { return lengths[b]; }
};

}  // namespace

// Writes the pieces of all CTAs, 6 numbers each: CTA, sequence, head, first tile, last + 1, whether
// it is a whole segment. Returns how many there are, -1 for more than `capacity`.
extern "C" int schedule(const int* tiles, int batch, int heads_kv, int rows, int grid,
                        int max_splits, int* pieces, int capacity) {
  Table table{{}, std::vector<int>(tiles, tiles + batch)};
  Load load{heads_kv, rows, 0, 0, 0};
  for (const int n : table.lengths) {
    load.live += n > 0;
    load.tiles += n;
    load.longest = n > load.longest ? n : load.longest;
  }
  if (load.live == 0) {
    return 0;
  }
  const Shares shares = share_out(load, grid, Divisor(grid), max_splits);
  int places = 0;
  for (const int n : table.lengths) {
    table.starts.push_back(places);
    places += n == 0 ? 0 : shares.room > 0 ? shares.room : n;
  }
  table.starts.push_back(places);
  int count = 0;
  for (int cta = 0; cta < grid; ++cta) {
    const Places own(places * heads_kv, shares, cta);
    int sequence = 0;
    for (int b = 0; b < batch; ++b) {
      if (table.starts[b] <= own.begin / heads_kv) {
        sequence = b;
      }
    }
    Walk<Table> walk(table, batch, heads_kv, shares, own, sequence);
    for (Piece piece; walk.next(table, &piece); ++count) {
      if (count == capacity) {
        return -1;
      }
      const int found[6] = {cta, piece.sequence, piece.head, piece.begin, piece.end, piece.whole()};
      for (int i = 0; i < 6; ++i) {
        pieces[count * 6 + i] = found[i];
      }
    }
  }
  return count;
}
