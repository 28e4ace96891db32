// The two ways of cutting segments, as it suits the load or after a fixed number of tiles, and the
// tables that each needs.
#pragma once

#include "seqlens.cuh"

namespace ostinato::decode {

__device__ __forceinline__ OnLine on_line(const Arguments& params, const Lengths& lengths) {
  return OnLine(lengths.number(), params.lines, params.by.lines);
}
__device__ __forceinline__ LineHeads heads_of(const Arguments& params, const OnLine& own) {
  return {own.line, params.lines, params.heads_kv, params.line_heads};
}

struct FreeCuts {
  using Shares = decode::Shares;
  using Piece = decode::Piece;
  using Walk = decode::Walk<Lengths>;

  // What is counted of a sequence of so many tiles.
  static __device__ __forceinline__ int count(int tiles) { return tiles; }
  static __device__ __forceinline__ Shares share(const Arguments& params, const Load& load) {
    return load.live == 0 ? Shares{1, 1} : share_out(load, params.line_ctas, params.by.line_ctas);
  }
  // Where a sequence starts on the line.
  static __device__ __forceinline__ int start(const Shares& shares, const Before& before) {
    return shares.room > 0 ? before.live * shares.room : before.tiles;
  }
  // Of `all` on the line.
  static __device__ __forceinline__ Places places(const Arguments& /*params*/, int all,
                                                  const Shares& shares, int cta) {
    return Places(all, shares, cta);
  }
  // Whether nobody would share a segment: they may be claimed.
  static __device__ __forceinline__ bool whole(const Load& /*load*/, const Shares& shares) {
    return shares.room > 0;
  }
  // From one segment of a head to the next, then.
  static __device__ __forceinline__ int room(const Shares& shares) { return shares.room; }
  static __device__ __forceinline__ Piece whole_piece(const Lengths& lengths, int sequence,
                                                      int head) {
    const int tiles = lengths.tiles(sequence);
    return {sequence, head, 0, tiles, 0, tiles};
  }
  // Whether more CTAs than there are SMs have some of `all` on the line.
  static __device__ __forceinline__ bool crowded(const Arguments& params, int all,
                                                 const Shares& shares) {
    return all > params.line_ctas / kCtasPerSm * shares.quota;
  }
  static __device__ __forceinline__ Walk walk(const Arguments& params, const Lengths& lengths,
                                              const LineHeads& heads, const Shares& shares,
                                              const Places& places, int sequence) {
    return Walk(lengths, params.batch, heads, shares, places, sequence);
  }
};

struct FixedCuts {
  using Shares = UnitShares;
  using Piece = Unit;
  using Walk = UnitWalk<Lengths>;

  static __device__ __forceinline__ FixedSplit split() { return {kUnitTiles}; }
  static __device__ __forceinline__ int count(int tiles) { return split().units(tiles); }
  static __device__ __forceinline__ Shares share(const Arguments& params, const Load& load) {
    return UnitShares(load.tiles * load.heads, params.line_ctas, params.by.line_ctas);
  }
  static __device__ __forceinline__ int start(const Shares& /*shares*/, const Before& before) {
    return before.tiles;
  }
  static __device__ __forceinline__ Places places(const Arguments& params, int /*all*/,
                                                  const Shares& shares, int cta) {
    return cta < params.line_ctas ? shares.places_of(cta) : Places(0, 0);
  }
  static __device__ __forceinline__ bool whole(const Load& load, const Shares& /*shares*/) {
    return load.tiles == load.live;
  }
  static __device__ __forceinline__ int room(const Shares& /*shares*/) { return 1; }
  static __device__ __forceinline__ Piece whole_piece(const Lengths& lengths, int sequence,
                                                      int head) {
    return {sequence, head, 0, lengths.tiles(sequence), 0, 0, 1};
  }
  static __device__ __forceinline__ bool crowded(const Arguments& params, int all,
                                                 const Shares& /*shares*/) {
    return all > params.line_ctas / kCtasPerSm;
  }
  static __device__ __forceinline__ Walk walk(const Arguments& /*params*/, const Lengths& lengths,
                                              const LineHeads& heads, const Shares& /*shares*/,
                                              const Places& places, int sequence) {
    return Walk(lengths, heads, split(), places, sequence);
  }
};

using Cuts = std::conditional_t<kFixedCuts, FixedCuts, FreeCuts>;

// What a CTA has to do. By all lanes of a warp.
template <class SomeCuts>
__device__ __forceinline__ typename SomeCuts::Walk walk_places(
    const Arguments& params, const Lengths& lengths, const typename SomeCuts::Shares& shares) {
  const OnLine own = on_line(params, lengths);
  const int all = lengths.start(params.batch) * params.line_heads;
  const Places places = SomeCuts::places(params, all, shares, own.cta);
  const int sequence =
      find_sequence(lengths, params.batch, params.by.line_heads.divide(places.begin));
  return SomeCuts::walk(params, lengths, heads_of(params, own), shares, places, sequence);
}

struct CtaPlan {
  Cuts::Shares shares;
  int claimed;  // segments that are claimed: of all lines, or none
};

// Each warp has tables of its own, so no barrier of the CTA is needed.
__device__ __forceinline__ CtaPlan read_few_lengths(Lengths& lengths, const Arguments& params,
                                                    bool early) {
  const int lane = threadIdx.x % 32;
  int tiles = 0;
  if (lane < params.batch) {
    lengths.length(lane) = lengths.read_length(params, lane, early);
    tiles = Cuts::count(lengths.tiles(lane));
  }
  const int sum = add_lower_lanes(tiles);
  const uint32_t live = __ballot_sync(0xffffffff, tiles > 0);
  const Load load{params.line_heads, params.group * params.max_seqlen_q, __popc(live),
                  __shfl_sync(0xffffffff, sum, 31), __reduce_max_sync(0xffffffff, tiles)};
  const Cuts::Shares shares = Cuts::share(params, load);
  lengths.start(lane) = Cuts::start(shares, {__popc(live & ((1u << lane) - 1)), sum - tiles});
  if (lane == 31) {
    lengths.start(32) = Cuts::start(shares, {load.live, sum});
  }
  __syncwarp();
  return {shares, 0};
}

// Any number of sequences, a run of them by each thread.
__device__ __forceinline__ CtaPlan read_many_lengths(SharedStorage& shared, Lengths& lengths,
                                                     const Arguments& params, bool early) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (kMayClaim) {
    lengths.set(params, lengths.read(params, early));
  } else {
#pragma unroll 1
    for (int b = threadIdx.x; b < params.batch; b += kThreads) {
      lengths.length(b) = lengths.read_length(params, b, early);
    }
  }
  __syncthreads();
  const int run = ceil_div(params.batch, kThreads);
  const int begin = min(static_cast<int>(threadIdx.x) * run, params.batch);
  const int end = min(begin + run, params.batch);
  Before own{0, 0};
  int longest = 0, shortest = 1 << 30;
#pragma unroll 1
  for (int b = begin; b < end; ++b) {
    const int tiles = lengths.tiles(b), counted = Cuts::count(tiles);
    own = {own.live + (tiles > 0), own.tiles + counted};
    longest = max(longest, counted);
    shortest = tiles > 0 ? min(shortest, tiles) : shortest;
  }
  const Before sum{add_lower_lanes(own.live), add_lower_lanes(own.tiles)};
  longest = __reduce_max_sync(0xffffffff, longest);
  shortest = kMayClaim ? __reduce_min_sync(0xffffffff, shortest) : 0;
  if (lane == 31) {
    shared.load[warp] = make_int4(sum.live, sum.tiles, longest, shortest);
  }
  __syncthreads();
  Load load{params.line_heads, params.group * params.max_seqlen_q, 0, 0, 0, 1 << 30};
  Before before{sum.live - own.live, sum.tiles - own.tiles};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int4 part = shared.load[w];
    if (w < warp) {
      before = {before.live + part.x, before.tiles + part.y};
    }
    load.live += part.x;
    load.tiles += part.y;
    load.longest = max(load.longest, part.z);
    load.shortest = min(load.shortest, part.w);
  }
  const Cuts::Shares shares = Cuts::share(params, load);
#pragma unroll 1
  for (int b = begin; b < end; ++b) {
    const int tiles = Cuts::count(lengths.tiles(b));
    lengths.start(b) = Cuts::start(shares, before);
    before = {before.live + (tiles > 0), before.tiles + tiles};
  }
  if (threadIdx.x == 0) {
    lengths.start(params.batch) = Cuts::start(shares, {load.live, load.tiles});
  }
  __syncthreads();
  const int segments = load.live * params.heads_kv;
  const bool claimed = kMayClaim && params.left < 0 && load.shortest >= kLeastClaimedTiles &&
                       segments >= kLeastClaimed * static_cast<int>(gridDim.x) &&
                       Cuts::whole(load, shares);
  return {shares, claimed ? segments : 0};
}

// Fills the tables and chooses the shares.
__device__ __forceinline__ CtaPlan read_lengths(SharedStorage& shared, Lengths& lengths,
                                                const Arguments& params, bool early) {
  return params.batch <= Lengths::kFew ? read_few_lengths(lengths, params, early)
                                       : read_many_lengths(shared, lengths, params, early);
}

}  // namespace ostinato::decode
