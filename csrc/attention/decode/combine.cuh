// Combine: if several CTAs share a work tile, the last one to finish adds their partials, in the
// order of the CTAs. Each warp combines the steps of the head dim that it owns.
#pragma once

#include "epilogue.cuh"

namespace ostinato::decode {

// A work tile shared with other CTAs, packed into few registers: it stays live to the end.
class SharedWorkTile {
 public:
  SharedWorkTile() = default;
  // `line_cta`: the first CTA of the line.
  __device__ SharedWorkTile(const Split& split, const Shares& shares, int line_cta)
      : packed_tile_(split.head * kMaxBatch + split.sequence) {
    const int first = divide(split.start, shares.quota);
    const int ctas = divide(split.start + split.tiles - 1, shares.quota) - first + 1;
    packed_ctas_ = (line_cta + first) << 16 | ctas;
  }

  __device__ __forceinline__ int sequence() const { return packed_tile_ % kMaxBatch; }
  __device__ __forceinline__ int head() const { return packed_tile_ / kMaxBatch; }
  __device__ __forceinline__ int first_cta() const { return packed_ctas_ >> 16; }
  __device__ __forceinline__ int ctas() const { return packed_ctas_ & 0xffff; }

 private:
  int packed_tile_, packed_ctas_ = 0;
};

// This warp's regions of the partials of a work tile: `kStride` apart, the first one at an offset
// of `kFirst`.
struct CtaPartials {
  static constexpr int kStride = 2 * kPartialVectors;
  // partial of the work tile that the CTA begins; it follows that of the one it continues
  static constexpr int kFirst = kPartialVectors;
  const float4* at;
  int count;
};

struct FixedSplitPartials {
  static constexpr int kStride = kPartialVectors;
  static constexpr int kFirst = 0;
  const float4* at;
  int count;
};

// Adds the partials of a work tile. Called by the warp that arrived last.
template <class Partials>
__device__ __forceinline__ void combine_partials(const Arguments& params, const Rows& rows,
                                                 const Partials& partials) {
  constexpr int kPartialBatch = 16, kGroup = 4;  // partials loaded at a time, and per branch
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
      // All loads come first, and bypass L1, which is not coherent with other SMs' stores. Partials
      // are loaded in groups: a branch for each partial would wait for each load.
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
      combiner.include(weights);
#pragma unroll
      for (int group = 0; group < kPartialBatch; group += kGroup) {
        if (group < left) {
#pragma unroll
          for (int j = group; j < group + kGroup; ++j) {
            combiner.include(PairWeights::of(raw[j]));
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

// Increments this warp's counter among the CTAs that share a work tile. Called by one lane. Returns
// whether it is the last to arrive; the counter then wraps to zero.
__device__ __forceinline__ bool arrive_last(const Arguments& params, int first_cta, int ctas,
                                            int warp) {
  uint32_t* const counter = params.counters + first_cta * kClusterCtas * kWarps + region_of(warp);
  uint32_t before;
  // Releases the stores of this warp's lanes, and acquires those of the other CTAs.
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(ctas - 1)
               : "memory");
  return static_cast<int>(before) == ctas - 1;
}

// Balanced splits: a CTA shares at most two work tiles, one that it continues and one that it
// begins.
class BalancedPartials {
 public:
  // Where this warp stores its part of a split; null if the split is a whole work tile.
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

  // Called at the warp's end: combines the work tiles at which this warp arrives last.
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
  // Arrives at the counters of both work tiles, among the warps that own the same steps. Returns a
  // bit mask of the work tiles at which this warp is the last.
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
    __syncwarp();  // the stores that two lanes have acquired become visible to all
    return work_tiles_ended;
  }

  SharedWorkTile ended_, begun_;
};

// Fixed splits: one partial per split.
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

  // Called at the warp's end: for each work tile with a split in this CTA, combines its partials if
  // this warp is the last to arrive. (Between two splits there are no registers for it.)
  __device__ __forceinline__ void combine(const Arguments& params, const Seqlens& seqlens) const {
    if (!has_partials_) {
      return;  // walking over 8 splits to find this out takes 3 us at the end of a launch
    }
    const int lane = threadIdx.x % 32, warp = warp_index();
    OSTINATO_DELAY(decode_partial_store, warp == 3);
    const OnLine own = on_line(params, seqlens);
    // Computed again, to save registers.
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
      __syncwarp();  // the stores that one lane has acquired become visible to all
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
  bool has_partials_ = false;  // whether any split is not a whole work tile
};

using Partials = std::conditional_t<kFixedSplits, FixedPartials, BalancedPartials>;

// Writes zeros for sequences without visible tokens. CTAs start from the last: with few CTAs at
// work, the last ones are idle.
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
