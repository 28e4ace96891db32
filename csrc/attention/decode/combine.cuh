// Combine: where several CTAs share a work tile, the last one to finish adds up the partial
// results, in the order of the CTAs. Each warp combines the steps of the head dim that it owns.
#pragma once

#include "epilogue.cuh"

namespace ostinato::decode {

// A work tile that this CTA shares with others. There are few registers while it waits.
class SharedWorkTile {
 public:
  SharedWorkTile() = default;
  // `line_cta`: the first CTA of the line.
  __device__ SharedWorkTile(const Split& split, const Shares& shares, int line_cta)
      : what_(split.head * kMaxBatch + split.sequence) {
    const int first = divide(split.start, shares.quota);
    const int ctas = divide(split.start + split.tiles - 1, shares.quota) - first + 1;
    who_ = (line_cta + first) << 16 | ctas;
  }

  __device__ __forceinline__ int sequence() const { return what_ % kMaxBatch; }
  __device__ __forceinline__ int head() const { return what_ / kMaxBatch; }
  __device__ __forceinline__ int first_cta() const { return who_ >> 16; }
  __device__ __forceinline__ int ctas() const { return who_ & 0xffff; }

 private:
  int what_, who_ = 0;
};

// Where this warp's regions of a work tile's partials are. `kStride` leads from one to the next,
// and the first one is `kFirst` behind its place.
struct CtaPartials {
  static constexpr int kStride = 2 * kPartialVectors;
  static constexpr int kFirst = kPartialVectors;  // what a CTA begins is behind what it ends
  const float4* at;
  int count;
};

struct FixedSplitPartials {
  static constexpr int kStride = kPartialVectors;
  static constexpr int kFirst = 0;
  const float4* at;
  int count;
};

// Adds up the partials of a work tile that this warp's peers have stored; by the one that arrived
// last.
template <class Partials>
__device__ __forceinline__ void combine_partials(const Arguments& params, const Rows& rows,
                                                 const Partials& partials) {
  constexpr int kPartialBatch = 16, kGroup = 4;  // partials read at a time, and used at a time
  constexpr int kStride = Partials::kStride;
  const int lane = threadIdx.x % 32;
  const int pairs = count_pairs(rows);
#pragma unroll 1
  for (int i = lane; i < pairs * kRankVectors; i += 32) {
    const int pair = i / kRankVectors;
    PairOutputs sum;
    PairWeights weights{{{kNothing, 0}, {kNothing, 0}}};
    const float4* values_at = partials.at + i;
    const float4* raw_at = partials.at + weights_at(pair);
    int begun = Partials::kFirst;
#pragma unroll 1
    for (int left = partials.count; left > 0; left -= kPartialBatch) {
      // All loads before all else. Past the L1 cache, which other SMs' stores do not reach. The
      // partials come in groups: a branch for each part would wait for each part.
      float4 values[kPartialBatch], raw[kPartialBatch];
#pragma unroll
      for (int group = 0; group < kPartialBatch; group += kGroup) {
        if (group < left) {
#pragma unroll
          for (int j = group; j < group + kGroup; ++j) {
            values[j] = make_float4(0, 0, 0, 0);
            raw[j] = make_float4(kNothing, 0, kNothing, 0);
            if (j < left) {
              values[j] = __ldcg(values_at + j * kStride + (j == 0 ? begun : 0));
              raw[j] = __ldcg(raw_at + j * kStride + (j == 0 ? begun : 0));
            }
          }
        }
      }
      values_at += kPartialBatch * kStride;
      raw_at += kPartialBatch * kStride;
      begun = 0;
      Combiner combiner;
      combiner.see(weights);
#pragma unroll
      for (int group = 0; group < kPartialBatch; group += kGroup) {
        if (group < left) {
#pragma unroll
          for (int j = group; j < group + kGroup; ++j) {
            combiner.see(PairWeights::of(raw[j]));
          }
        }
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float fade = combiner.factor(weights, e);
        weights.columns[e] = {combiner.highest[e], weights.columns[e].sum * fade};
        sum.values[e] *= fade;
        sum.values[e + 2] *= fade;
      }
#pragma unroll
      for (int group = 0; group < kPartialBatch; group += kGroup) {
        if (group < left) {
#pragma unroll
          for (int j = group; j < group + kGroup; ++j) {
            const PairWeights other = PairWeights::of(raw[j]);
            const float factors[2] = {combiner.factor(other, 0), combiner.factor(other, 1)};
            sum.add(values[j], factors[0], factors[1]);
            weights.add(other, factors);
          }
        }
      }
    }
    write_pair(params, PairRows(params, rows, pair), i % kRankVectors, sum, weights);
  }
}

// Counts a warp at its counter, among those of the CTAs that share a work tile; by one lane.
// Returns whether it is the last. The count goes back to zero by itself.
__device__ __forceinline__ bool arrive_last(const Arguments& params, int first_cta, int ctas,
                                            int warp) {
  uint32_t* const counter = params.counters + first_cta * kClusterCtas * kWarps + region_of(warp);
  uint32_t before;
  // Releases what the lanes have stored, and acquires what others have.
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(ctas - 1)
               : "memory");
  return static_cast<int>(before) == ctas - 1;
}

// Of the work tiles that a CTA may share: the one that it ends or passes, and the one that it
// begins.
class BalancedPartials {
 public:
  // Where this warp is to store its part of a split; null if the split is a whole work tile.
  __device__ __forceinline__ float4* target(const Arguments& params, const Seqlens& seqlens,
                                            const Shares& shares, const Split& split) {
    if (split.whole()) {
      return nullptr;
    }
    const OnLine own = on_line(params, seqlens);
    const int line_cta = own.line * params.line_ctas;
    const SharedWorkTile work_tile(split, shares, line_cta);
    const bool begins = split.begin == 0;
    if (begins) {
      begun_ = work_tile;
    } else {
      ended_ = work_tile;
    }
    return partial_of(params, line_cta + own.cta, begins, warp_index());
  }

  // At the warp's end: combines the work tiles that it is the last to leave.
  __device__ __forceinline__ void combine(const Arguments& params, const Seqlens& seqlens) const {
    if (ended_.ctas() == 0 && begun_.ctas() == 0) {
      return;
    }
    OSTINATO_DELAY(decode_partial_store, warp_index() == 3);
    uint32_t last = arrive(params);
    SharedWorkTile work_tile = last & 1 ? ended_ : begun_;
#pragma unroll 1
    for (; last != 0; last &= last - 1) {
      const CtaPartials partials{partial_of(params, work_tile.first_cta(), false, warp_index()),
                                 work_tile.ctas()};
      combine_partials(params, Rows(params, seqlens, work_tile.sequence(), work_tile.head()),
                       partials);
      work_tile = begun_;
    }
  }

 private:
  // Counts this warp among the warps of its two work tiles that own the same part of the output.
  // Returns, by a bit for each, of which it is the last.
  __device__ __forceinline__ uint32_t arrive(const Arguments& params) const {
    const int lane = threadIdx.x % 32, warp = warp_index();
    const int ctas = lane == 0 ? ended_.ctas() : begun_.ctas();
    const int first_cta = lane == 0 ? ended_.first_cta() : begun_.first_cta();
    bool last = false;
    __syncwarp();
    if (lane < 2 && ctas > 0) {
      last = arrive_last(params, first_cta, ctas, warp);
    }
    const uint32_t work_tiles_ended = __ballot_sync(0xffffffff, last);
    __syncwarp();  // what two lanes have acquired, all may read
    return work_tiles_ended;
  }

  SharedWorkTile ended_, begun_;
};

// Of splits, one for each.
class FixedPartials {
 public:
  __device__ __forceinline__ float4* target(const Arguments& params, const Seqlens& seqlens,
                                            const FixedShares& /*shares*/,
                                            const FixedSplit& split) {
    has_partials_ |= !split.whole();
    const int first =
        on_line(params, seqlens).line * seqlens.start(params.batch) * params.line_heads;
    return split.whole() ? nullptr
                         : partial_of_split(params, first + split.line_index, warp_index());
  }

  // At the warp's end: for each work tile of which this CTA has a split, combines its splits if
  // this warp is the last to come. (Between two splits there are no registers to do it.)
  __device__ __forceinline__ void combine(const Arguments& params, const Seqlens& seqlens) const {
    if (!has_partials_) {
      return;  // to see that of 8 splits takes 3 us at the end of a launch
    }
    const int lane = threadIdx.x % 32, warp = warp_index();
    OSTINATO_DELAY(decode_partial_store, warp == 3);
    const OnLine own = on_line(params, seqlens);
    // Chosen once more, for the same reason.
    const int all = seqlens.start(params.batch) * params.line_heads;
    const FixedShares shares(all, params.line_ctas, params.by.line_ctas);
    FixedSplitWalk<Seqlens> walk = walk_line<FixedSplits>(params, seqlens, shares);
    FixedSplit split;
#pragma unroll 1
    while (walk.next(seqlens, &split)) {
      const FixedSplitPeers peers(split, shares, own.cta);
      if (split.whole() || !peers.ends) {
        continue;
      }
      __syncwarp();
      bool last = peers.ctas == 1;
      if (!last && lane == 0) {
        last = arrive_last(params, own.line * params.line_ctas + peers.first_cta, peers.ctas, warp);
      }
      last = __any_sync(0xffffffff, last);
      __syncwarp();  // what one lane has acquired, all may read
      if (last) {
        const float4* const first =
            partial_of_split(params, own.line * all + split.line_index - split.index, warp);
        const int head = seqlens.head(split.sequence, split.head);
        combine_partials(params, Rows(params, seqlens, split.sequence, head),
                         FixedSplitPartials{first, split.count});
      }
    }
  }

 private:
  bool has_partials_ = false;  // whether any split was a part of its work tile only
};

using Partials = std::conditional_t<kFixedSplits, FixedPartials, BalancedPartials>;

// The outputs of sequences without a token to see, by all CTAs, the last ones first: where few have
// work, the last have none, and those that have need not write zeros after it.
__device__ __forceinline__ void write_empty(const Arguments& params, const Seqlens& seqlens) {
  constexpr int kPairs = kDim / 2;
  for (int b = gridDim.x - 1 - blockIdx.x; b < params.batch; b += gridDim.x) {
    if (seqlens.seqlen(b) > 0) {
      continue;
    }
    for (int head = 0; head < params.heads_kv; ++head) {
      const Rows rows(params, seqlens, b, head);
      for (int i = threadIdx.x; i < rows.count * kPairs; i += kThreads) {
        const RowTarget target(params, rows, i / kPairs);
        const FinalRow row(params, target, {kNothing, 0});
        reinterpret_cast<uint32_t*>(target.out)[i % kPairs] = 0;
        if (i % kPairs == 0) {
          row.write_lse(params);
        }
      }
    }
  }
}

}  // namespace ostinato::decode
