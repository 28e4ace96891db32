// Where CTAs share a segment, the last to arrive adds up the parts, in the order of the CTAs; warp
// by warp, each what it owns.
#pragma once

#include "epilogue.cuh"

namespace ostinato::decode {

// A segment that this CTA shares with others. There are few registers while it waits.
class SharedSegment {
 public:
  SharedSegment() = default;
  // `line_cta`: the first CTA of the line.
  __device__ SharedSegment(const Piece& piece, const Shares& shares, int line_cta)
      : what_(piece.head * kMaxBatch + piece.sequence) {
    const int first = divide(piece.start, shares.quota);
    const int ctas = divide(piece.start + piece.tiles - 1, shares.quota) - first + 1;
    who_ = (line_cta + first) << 16 | ctas;
  }

  __device__ __forceinline__ int sequence() const { return what_ % kMaxBatch; }
  __device__ __forceinline__ int head() const { return what_ / kMaxBatch; }
  __device__ __forceinline__ int first_cta() const { return who_ >> 16; }
  __device__ __forceinline__ int ctas() const { return who_ & 0xffff; }

 private:
  int what_, who_ = 0;
};

// Where this warp's regions of a segment's parts are. `kStride` leads from one to the next, and the
// first one is `kFirst` behind its place.
struct CtaParts {
  static constexpr int kStride = 2 * kPartVectors;
  static constexpr int kFirst = kPartVectors;  // what a CTA begins is behind what it ends
  const float4* at;
  int count;
};

struct UnitParts {
  static constexpr int kStride = kPartVectors;
  static constexpr int kFirst = 0;
  const float4* at;
  int count;
};

// Adds up the parts of a segment that this warp's peers have stored; by the one that arrived last.
template <class Parts>
__device__ __forceinline__ void merge_parts(const Arguments& params, const Rows& rows,
                                            const Parts& parts) {
  constexpr int kPartBatch = 16, kGroup = 4;  // parts read at a time, and used at a time
  constexpr int kStride = Parts::kStride;
  const int lane = threadIdx.x % 32;
  const int pairs = count_pairs(rows);
#pragma unroll 1
  for (int i = lane; i < pairs * kRankVectors; i += 32) {
    const int pair = i / kRankVectors;
    PairOutputs sum;
    PairWeights weights{{{kNothing, 0}, {kNothing, 0}}};
    const float4* values_at = parts.at + i;
    const float4* raw_at = parts.at + weights_at(pair);
    int begun = Parts::kFirst;
#pragma unroll 1
    for (int left = parts.count; left > 0; left -= kPartBatch) {
      // All loads before all else. Past the L1 cache, which other SMs' stores do not reach. The
      // parts come in groups: a branch for each part would wait for each part.
      float4 values[kPartBatch], raw[kPartBatch];
#pragma unroll
      for (int group = 0; group < kPartBatch; group += kGroup) {
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
      values_at += kPartBatch * kStride;
      raw_at += kPartBatch * kStride;
      begun = 0;
      Merger merger;
      merger.see(weights);
#pragma unroll
      for (int group = 0; group < kPartBatch; group += kGroup) {
        if (group < left) {
#pragma unroll
          for (int j = group; j < group + kGroup; ++j) {
            merger.see(PairWeights::of(raw[j]));
          }
        }
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float fade = merger.factor(weights, e);
        weights.columns[e] = {merger.highest[e], weights.columns[e].sum * fade};
        sum.values[e] *= fade;
        sum.values[e + 2] *= fade;
      }
#pragma unroll
      for (int group = 0; group < kPartBatch; group += kGroup) {
        if (group < left) {
#pragma unroll
          for (int j = group; j < group + kGroup; ++j) {
            const PairWeights other = PairWeights::of(raw[j]);
            const float factors[2] = {merger.factor(other, 0), merger.factor(other, 1)};
            sum.add(values[j], factors[0], factors[1]);
            weights.add(other, factors);
          }
        }
      }
    }
    write_pair(params, PairPlaces(params, rows, pair), i % kRankVectors, sum, weights);
  }
}

// Counts a warp at its counter, among those of the CTAs that share a segment; by one lane. Returns
// whether it is the last. The count goes back to zero by itself.
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

// Of the segments that a CTA may share: the one that it ends or passes, and the one that it begins.
class FreeParts {
 public:
  // Where this warp is to store its part of a piece; null if the piece is a whole segment.
  __device__ __forceinline__ float4* place(const Arguments& params, const Lengths& lengths,
                                           const Shares& shares, const Piece& piece) {
    if (piece.whole()) {
      return nullptr;
    }
    const OnLine own = on_line(params, lengths);
    const int line_cta = own.line * params.line_ctas;
    const SharedSegment segment(piece, shares, line_cta);
    const bool begins = piece.begin == 0;
    if (begins) {
      begun_ = segment;
    } else {
      ended_ = segment;
    }
    return part_of(params, line_cta + own.cta, begins, warp_index());
  }

  // At the warp's end: merges the segments that it is the last to leave.
  __device__ __forceinline__ void merge(const Arguments& params, const Lengths& lengths) const {
    if (ended_.ctas() == 0 && begun_.ctas() == 0) {
      return;
    }
    OSTINATO_DELAY(decode_part_store, warp_index() == 3);
    uint32_t last = arrive(params);
    SharedSegment segment = last & 1 ? ended_ : begun_;
#pragma unroll 1
    for (; last != 0; last &= last - 1) {
      const CtaParts parts{part_of(params, segment.first_cta(), false, warp_index()),
                           segment.ctas()};
      merge_parts(params, Rows(params, lengths, segment.sequence(), segment.head()), parts);
      segment = begun_;
    }
  }

 private:
  // Counts this warp among the warps of its two segments that own the same part of the output.
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
    const uint32_t segments_ended = __ballot_sync(0xffffffff, last);
    __syncwarp();  // what two lanes have acquired, all may read
    return segments_ended;
  }

  SharedSegment ended_, begun_;
};

// Of units, one for each.
class FixedParts {
 public:
  __device__ __forceinline__ float4* place(const Arguments& params, const Lengths& lengths,
                                           const UnitShares& /*shares*/, const Unit& unit) {
    has_parts_ |= !unit.whole();
    const int first =
        on_line(params, lengths).line * lengths.start(params.batch) * params.line_heads;
    return unit.whole() ? nullptr : part_of_unit(params, first + unit.place, warp_index());
  }

  // At the warp's end: for each segment of which this CTA has a unit, merges its units if this warp
  // is the last to come. (Between two units there are no registers to do it.)
  __device__ __forceinline__ void merge(const Arguments& params, const Lengths& lengths) const {
    if (!has_parts_) {
      return;  // to see that of 8 units takes 3 us at the end of a launch
    }
    const int lane = threadIdx.x % 32, warp = warp_index();
    OSTINATO_DELAY(decode_part_store, warp == 3);
    const OnLine own = on_line(params, lengths);
    // Chosen once more, for the same reason.
    const int all = lengths.start(params.batch) * params.line_heads;
    const UnitShares shares(all, params.line_ctas, params.by.line_ctas);
    UnitWalk<Lengths> walk = walk_places<FixedCuts>(params, lengths, shares);
    Unit unit;
#pragma unroll 1
    while (walk.next(lengths, &unit)) {
      const UnitPeers peers(unit, shares, own.cta);
      if (unit.whole() || !peers.ends) {
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
            part_of_unit(params, own.line * all + unit.place - unit.index, warp);
        const int head = lengths.head(unit.sequence, unit.head);
        merge_parts(params, Rows(params, lengths, unit.sequence, head),
                    UnitParts{first, unit.count});
      }
    }
  }

 private:
  bool has_parts_ = false;  // whether any unit was a part of its segment only
};

using Parts = std::conditional_t<kFixedCuts, FixedParts, FreeParts>;

// The outputs of sequences without a token to see, by all CTAs, the last ones first: where few have
// work, the last have none, and those that have need not write zeros after it.
__device__ __forceinline__ void write_empty(const Arguments& params, const Lengths& lengths) {
  constexpr int kPairs = kDim / 2;
  for (int b = gridDim.x - 1 - blockIdx.x; b < params.batch; b += gridDim.x) {
    if (lengths.length(b) > 0) {
      continue;
    }
    for (int head = 0; head < params.heads_kv; ++head) {
      const Rows rows(params, lengths, b, head);
      for (int i = threadIdx.x; i < rows.count * kPairs; i += kThreads) {
        const RowPlace place(params, rows, i / kPairs);
        const FinalRow row(params, place, {kNothing, 0});
        reinterpret_cast<uint32_t*>(place.out)[i % kPairs] = 0;
        if (i % kPairs == 0) {
          row.write_lse(params);
        }
      }
    }
  }
}

}  // namespace ostinato::decode
