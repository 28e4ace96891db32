// Where CTAs share a segment, the last to arrive adds up the parts, in the order of the CTAs; warp
// by warp, each what it owns.
#pragma once

#include "decode_output.cuh"

namespace ostinato::decode {

// A segment that this CTA shares with others.
struct SharedSegment {
  int sequence, head;
  int first_cta, ctas = 0;

  SharedSegment() = default;
  __device__ SharedSegment(const Piece& piece, const Shares& shares)
      : sequence(piece.sequence),
        head(piece.head),
        first_cta(divide(piece.start, shares.quota)),
        ctas(divide(piece.start + piece.tiles - 1, shares.quota) - first_cta + 1) {}
};

// Adds up the parts of a segment that this warp's peers have stored; by the one that arrived last.
__device__ __forceinline__ void merge_parts(const Arguments& params, const Rows& rows,
                                            const SharedSegment& segment) {
  constexpr int kPartBatch = 16, kGroup = 4;  // parts read at a time, and used at a time
  constexpr int kStride = 2 * kPartVectors;   // from a CTA's to the next one's
  const int lane = threadIdx.x % 32, warp = warp_index();
  const int first_column = Attention::first_column();
  const int first_step = team_of(warp) * kOwnedSteps;
  const int pairs = ceil_div(min(rows.count - first_column, kWarpColumns), 2);
  const float4* const parts = part_of(params, segment.first_cta, false, warp);
#pragma unroll 1
  for (int i = lane; i < pairs * kPairVectors; i += 32) {
    const int pair = i / kPairVectors, step = first_step + i / 8 % kOwnedSteps;
    if (kSteps != kTeams * kOwnedSteps && step >= kSteps) {
      continue;
    }
    PairOutputs sum;
    PairWeights weights{{{kNothing, 0}, {kNothing, 0}}};
    const float4* values_at = parts + i;
    const float4* raw_at = parts + weights_at(pair);
    int begun = kPartVectors;  // where the first CTA has what it begins
#pragma unroll 1
    for (int left = segment.ctas; left > 0; left -= kPartBatch) {
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
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              weights.columns[e].sum =
                  fmaf(other.columns[e].sum, factors[e], weights.columns[e].sum);
            }
          }
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = first_column + pair * 2 + e;
      if (column < rows.count) {
        const FinalRow row(params, rows, column, weights.columns[e]);
        write_out(params, row, step, i % 8, sum.values[e], sum.values[e + 2]);
        if (step == 0 && i % 8 == 0) {
          row.write_lse(params);
        }
      }
    }
  }
}

// The segments that a CTA may share: the one that it ends or passes, and the one that it begins.
struct SharedSegments {
  SharedSegment ended, begun;
};

// Counts this warp among the warps of its two segments that own the same part of the output.
// Returns, by a bit for each, of which it is the last. The counts go back to zero by themselves.
__device__ __forceinline__ uint32_t arrive_last(const Arguments& params,
                                                const SharedSegments& segments) {
  const int lane = threadIdx.x % 32, warp = warp_index();
  const int ctas = lane == 0 ? segments.ended.ctas : segments.begun.ctas;
  const int first_cta = lane == 0 ? segments.ended.first_cta : segments.begun.first_cta;
  bool last = false;
  __syncwarp();
  if (lane < 2 && ctas > 0) {
    uint32_t* const counter = static_cast<uint32_t*>(params.workspace) + first_cta * kWarps + warp;
    uint32_t before;
    // Releases what the lanes have stored, and acquires what others have.
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(ctas - 1)
                 : "memory");
    last = static_cast<int>(before) == ctas - 1;
  }
  const uint32_t segments_ended = __ballot_sync(0xffffffff, last);
  __syncwarp();  // what two lanes have acquired, all may read
  return segments_ended;
}

// At the warp's end: merges the segments that it is the last to leave.
__device__ __forceinline__ void merge_segments(const Arguments& params, const Lengths& lengths,
                                               const SharedSegments& segments) {
  if (segments.ended.ctas == 0 && segments.begun.ctas == 0) {
    return;
  }
  OSTINATO_DELAY(decode_part_store, warp_index() == 3);
  uint32_t last = arrive_last(params, segments);
  SharedSegment segment = last & 1 ? segments.ended : segments.begun;
#pragma unroll 1
  for (; last != 0; last &= last - 1) {
    merge_parts(params, Rows(params, lengths, segment.sequence, segment.head), segment);
    segment = segments.begun;
  }
}

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
