// Selects between balanced and fixed splits behind one interface (Splits), and fills the tables of
// sequence lengths that each of them needs.
#pragma once

#include "seqlens.cuh"

namespace ostinato::decode {

__device__ __forceinline__ OnLine on_line(const Arguments& params, const Seqlens& seqlens) {
  return OnLine(seqlens.number(), params.lines, params.by.lines);
}
__device__ __forceinline__ LineHeads heads_of(const Arguments& params, const OnLine& own) {
  return {own.line, params.lines, params.heads_kv, params.line_heads};
}

struct BalancedSplits {
  using Shares = decode::Shares;
  using Split = decode::Split;
  using Walk = decode::Walk<Seqlens>;

  // How much a sequence with `tiles` tiles counts on the line.
  static __device__ __forceinline__ int count(int tiles) { return tiles; }
  static __device__ __forceinline__ Shares share(const Arguments& params, const Load& load) {
    return load.live == 0 ? Shares{1, 1} : share_out(load, params.line_ctas, params.by.line_ctas);
  }
  // Where a sequence starts on the line.
  static __device__ __forceinline__ int start(const Shares& shares, const Before& before) {
    return shares.room > 0 ? before.live * shares.room : before.tiles;
  }
  // The range of a CTA among `all` positions of the line.
  static __device__ __forceinline__ LineRange line_range(const Arguments& /*params*/, int all,
                                                         const Shares& shares, int cta) {
    return LineRange(all, shares, cta);
  }
  // Whether no work tile would be shared, so that work tiles may be scheduled dynamically.
  static __device__ __forceinline__ bool whole(const Load& /*load*/, const Shares& shares) {
    return shares.room > 0;
  }
  // With dynamic scheduling: positions between two work tiles of a head.
  static __device__ __forceinline__ int room(const Shares& shares) { return shares.room; }
  static __device__ __forceinline__ Split whole_split(const Seqlens& seqlens, int sequence,
                                                      int head) {
    const int tiles = seqlens.tiles(sequence);
    return {sequence, head, 0, tiles, 0, tiles};
  }
  // Whether more CTAs have work than there are SMs, given `all` positions on the line.
  static __device__ __forceinline__ bool crowded(const Arguments& params, int all,
                                                 const Shares& shares) {
    return all > params.line_ctas / kCtasPerSm * shares.quota;
  }
  static __device__ __forceinline__ Walk walk(const Arguments& params, const Seqlens& seqlens,
                                              const LineHeads& heads, const Shares& shares,
                                              const LineRange& line_range, int sequence) {
    return Walk(seqlens, params.batch, heads, shares, line_range, sequence);
  }
};

struct FixedSplits {
  using Shares = FixedShares;
  using Split = FixedSplit;
  using Walk = FixedSplitWalk<Seqlens>;

  static __device__ __forceinline__ FixedSplitSize split_size() { return {kSplitTiles}; }
  static __device__ __forceinline__ int count(int tiles) { return split_size().splits(tiles); }
  static __device__ __forceinline__ Shares share(const Arguments& params, const Load& load) {
    return FixedShares(load.tiles * load.heads, params.line_ctas, params.by.line_ctas);
  }
  static __device__ __forceinline__ int start(const Shares& /*shares*/, const Before& before) {
    return before.tiles;
  }
  static __device__ __forceinline__ LineRange line_range(const Arguments& params, int /*all*/,
                                                         const Shares& shares, int cta) {
    return cta < params.line_ctas ? shares.range_of(cta) : LineRange(0, 0);
  }
  static __device__ __forceinline__ bool whole(const Load& load, const Shares& /*shares*/) {
    return load.tiles == load.live;
  }
  static __device__ __forceinline__ int room(const Shares& /*shares*/) { return 1; }
  static __device__ __forceinline__ Split whole_split(const Seqlens& seqlens, int sequence,
                                                      int head) {
    return {sequence, head, 0, seqlens.tiles(sequence), 0, 0, 1};
  }
  static __device__ __forceinline__ bool crowded(const Arguments& params, int all,
                                                 const Shares& /*shares*/) {
    return all > params.line_ctas / kCtasPerSm;
  }
  static __device__ __forceinline__ Walk walk(const Arguments& /*params*/, const Seqlens& seqlens,
                                              const LineHeads& heads, const Shares& /*shares*/,
                                              const LineRange& line_range, int sequence) {
    return Walk(seqlens, heads, split_size(), line_range, sequence);
  }
};

using Splits = std::conditional_t<kFixedSplits, FixedSplits, BalancedSplits>;

// The splits of this CTA. Called by all lanes of a warp.
template <class SomeSplits>
__device__ __forceinline__ typename SomeSplits::Walk walk_line(
    const Arguments& params, const Seqlens& seqlens, const typename SomeSplits::Shares& shares) {
  const OnLine own = on_line(params, seqlens);
  const int all = seqlens.start(params.batch) * params.line_heads;
  const LineRange line_range = SomeSplits::line_range(params, all, shares, own.cta);
  const int sequence =
      find_sequence(seqlens, params.batch, params.by.line_heads.divide(line_range.begin));
  return SomeSplits::walk(params, seqlens, heads_of(params, own), shares, line_range, sequence);
}

struct CtaPlan {
  Splits::Shares shares;
  int dynamic;  // number of work tiles (of all lines) that are scheduled dynamically; 0: none
};

// Up to kFewSequences sequences: each warp has its own tables, so no CTA barrier is needed.
__device__ __forceinline__ CtaPlan read_few_seqlens(Seqlens& seqlens, const Arguments& params,
                                                    bool early) {
  const int lane = threadIdx.x % 32;
  int tiles = 0;
  if (lane < params.batch) {
    seqlens.seqlen(lane) = seqlens.read_seqlen(params, lane, early);
    tiles = Splits::count(seqlens.tiles(lane));
  }
  const int sum = add_lower_lanes(tiles);
  const uint32_t live = __ballot_sync(0xffffffff, tiles > 0);
  const Load load{
      params.line_heads, params.group * params.max_seqlen_q, kRowBytes,
      __popc(live),      __shfl_sync(0xffffffff, sum, 31),   __reduce_max_sync(0xffffffff, tiles)};
  const Splits::Shares shares = Splits::share(params, load);
  seqlens.start(lane) = Splits::start(shares, {__popc(live & ((1u << lane) - 1)), sum - tiles});
  if (lane == 31) {
    seqlens.start(32) = Splits::start(shares, {load.live, sum});
  }
  __syncwarp();
  return {shares, 0};
}

// Any number of sequences: each thread sums a run of consecutive ones.
__device__ __forceinline__ CtaPlan read_many_seqlens(SharedStorage& shared, Seqlens& seqlens,
                                                     const Arguments& params, bool early) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (kMayScheduleDynamically) {
    seqlens.set(params, seqlens.read(params, early));
  } else {
#pragma unroll 1
    for (int b = threadIdx.x; b < params.batch; b += kThreads) {
      seqlens.seqlen(b) = seqlens.read_seqlen(params, b, early);
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
    const int tiles = seqlens.tiles(b), counted = Splits::count(tiles);
    own = {own.live + (tiles > 0), own.tiles + counted};
    longest = max(longest, counted);
    shortest = tiles > 0 ? min(shortest, tiles) : shortest;
  }
  const Before sum{add_lower_lanes(own.live), add_lower_lanes(own.tiles)};
  longest = __reduce_max_sync(0xffffffff, longest);
  shortest = kMayScheduleDynamically ? __reduce_min_sync(0xffffffff, shortest) : 0;
  if (lane == 31) {
    shared.load[warp] = make_int4(sum.live, sum.tiles, longest, shortest);
  }
  __syncthreads();
  Load load{params.line_heads, params.group * params.max_seqlen_q, kRowBytes, 0, 0, 0, 1 << 30};
  Before before{sum.live - own.live, sum.tiles - own.tiles};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int4 warp_load = shared.load[w];
    if (w < warp) {
      before = {before.live + warp_load.x, before.tiles + warp_load.y};
    }
    load.live += warp_load.x;
    load.tiles += warp_load.y;
    load.longest = max(load.longest, warp_load.z);
    load.shortest = min(load.shortest, warp_load.w);
  }
  const int work_tiles = load.live * params.heads_kv;
  load.dynamic = kMayScheduleDynamically && params.left < 0 &&
                 load.shortest >= kLeastDynamicTiles &&
                 work_tiles >= kLeastDynamic * static_cast<int>(gridDim.x);
  const Splits::Shares shares = Splits::share(params, load);
#pragma unroll 1
  for (int b = begin; b < end; ++b) {
    const int tiles = Splits::count(seqlens.tiles(b));
    seqlens.start(b) = Splits::start(shares, before);
    before = {before.live + (tiles > 0), before.tiles + tiles};
  }
  if (threadIdx.x == 0) {
    seqlens.start(params.batch) = Splits::start(shares, {load.live, load.tiles});
  }
  __syncthreads();
  return {shares, load.dynamic && Splits::whole(load, shares) ? work_tiles : 0};
}

// Fills the tables and computes the shares.
__device__ __forceinline__ CtaPlan read_seqlens(SharedStorage& shared, Seqlens& seqlens,
                                                const Arguments& params, bool early) {
  return params.batch <= Seqlens::kFew ? read_few_seqlens(seqlens, params, early)
                                       : read_many_seqlens(shared, seqlens, params, early);
}

}  // namespace ostinato::decode
