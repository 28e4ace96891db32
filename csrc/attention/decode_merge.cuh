// Where CTAs share a segment, the last to arrive adds up the parts, in the order of the CTAs; warp
// by warp, each what it owns.
#pragma once

#include "decode_sum_parts.cuh"

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

// Counts a warp at its counter, among those of the CTAs that share a segment; by one lane. Returns
// whether it is the last. The count goes back to zero by itself.
__device__ __forceinline__ bool arrive_last(const Arguments& params, int first_cta, int ctas,
                                            int warp) {
  uint32_t* const counter = static_cast<uint32_t*>(params.workspace) + first_cta * kWarps + warp;
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
  __device__ __forceinline__ float4* place(const Arguments& params, const Lengths& /*lengths*/,
                                           const Shares& shares, const Piece& piece) {
    if (piece.whole()) {
      return nullptr;
    }
    const OnLine own = on_line(params);
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
  __device__ __forceinline__ void merge(SharedStorage& shared, const Arguments& params,
                                        const Lengths& lengths) const {
    if (ended_.ctas() == 0 && begun_.ctas() == 0) {
      return;
    }
    OSTINATO_DELAY(decode_part_store, warp_index() == 3);
    uint32_t last = arrive(params), parity = 0;
    SharedSegment segment = last & 1 ? ended_ : begun_;
#pragma unroll 1
    for (; last != 0; last &= last - 1) {
      // What a CTA begins is behind what it ends.
      sum_parts(shared, params, Rows(params, lengths, segment.sequence(), segment.head()),
                part_of(params, segment.first_cta(), false, warp_index()), kPartVectors,
                2 * kPartVectors, segment.ctas(), &parity);
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
    const int first = on_line(params).line * lengths.start(params.batch) * params.line_heads;
    return unit.whole() ? nullptr : part_of_unit(params, first + unit.place, warp_index());
  }

  // At the warp's end: for each segment of which this CTA has a unit, merges its units if this warp
  // is the last to come. (Between two units there are no registers to do it.)
  __device__ __forceinline__ void merge(SharedStorage& shared, const Arguments& params,
                                        const Lengths& lengths) const {
    const int lane = threadIdx.x % 32, warp = warp_index();
    OSTINATO_DELAY(decode_part_store, warp == 3);
    const OnLine own = on_line(params);
    // Chosen once more, for the same reason.
    const int all = lengths.start(params.batch) * params.line_heads;
    const UnitShares shares(all, params.line_ctas, params.by.line_ctas);
    UnitWalk<Lengths> walk = walk_places<FixedCuts>(params, lengths, shares);
    Unit unit;
    uint32_t parity = 0;
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
        sum_parts(shared, params, Rows(params, lengths, unit.sequence, unit.head), first, 0,
                  kPartVectors, unit.count, &parity);
      }
    }
  }
};

using Parts = std::conditional_t<kFixedCuts, FixedParts, FreeParts>;

// The outputs of sequences without a token to see, by all CTAs.
__device__ __forceinline__ void write_empty(const Arguments& params, const Lengths& lengths) {
  constexpr int kPairs = kDim / 2;
  for (int b = blockIdx.x; b < params.batch; b += gridDim.x) {
    if (lengths.length(b) > 0) {
      continue;
    }
    for (int head = 0; head < params.heads_kv; ++head) {
      const Rows rows(params, lengths, b, head);
      for (int i = threadIdx.x; i < rows.count * kPairs; i += kThreads) {
        const FinalRow row(params, rows, i / kPairs, {kNothing, 0});
        reinterpret_cast<uint32_t*>(row.out(params))[i % kPairs] = 0;
        if (i % kPairs == 0) {
          row.write_lse(params);
        }
      }
    }
  }
}

}  // namespace ostinato::decode
