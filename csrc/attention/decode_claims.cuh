// Segments that CTAs take as they come to them, where there are many and nobody shares one.
//
// SMs read at speeds that differ by a sixth, by where they are on the chip. With equal shares the
// first CTAs end a fifth of a launch before the last ones, which alone cannot keep memory busy. So
// a CTA has two segments that are its own, and claims another whenever it begins one: the next that
// nobody has, by a counter in the workspace. A segment's bits do not depend on who works on it.
#pragma once

#include "common/debug.cuh"
#include "decode_cuts.cuh"

namespace ostinato::decode {

// By one warp for its CTA, while the others are at most a piece behind.
template <bool kUsed>
class ClaimsOf {
 public:
  static constexpr int kOwn = 2;  // turns that need no claim: a piece is loaded before it is used

  // By all threads, once, before a barrier of the CTA.
  __device__ ClaimsOf(SharedStorage& shared, const Arguments& params)
      : ring_(shared.claims), counters_(params.claims) {
    if (warp_index() == 0 && elect_lane()) {
#pragma unroll
      for (int slot = 0; slot < kTurns; ++slot) {
        init_barrier(&ring_.published[slot], 1);
      }
    }
  }

  __device__ __forceinline__ void begin(int segments) { segments_ = segments; }
  // 0: everybody has a share of his own.
  __device__ __forceinline__ int segments() const { return segments_; }

  // At the beginning of every piece, by all warps.
  __device__ __forceinline__ void ask() {
    if (segments_ > 0 && warp_index() == 0) {
      if (threadIdx.x == 0) {
        asked_ = static_cast<int>(atomicAdd(&counters_[0], 1u) + kOwn * gridDim.x);
      }
      waits_ = true;
    }
  }

  // What was asked for has come back before the warp's second tile, or it waits.
  __device__ __forceinline__ void publish() {
    if (!waits_) {
      return;
    }
    waits_ = false;
    OSTINATO_DELAY(decode_claim_store, true);
    if (threadIdx.x == 0) {
      const int slot = published_ % kTurns;
      ring_.segment[slot] = asked_;
      arrive(&ring_.published[slot]);
    }
    ++published_;
  }

  // The segment of a turn, of all that there are or past them: in a piece's turn, of no later one
  // than the next but one.
  __device__ __forceinline__ int take(int turn) {
    if (turn < kOwn) {
      return turn * gridDim.x + blockIdx.x;
    }
    publish();
    const int claim = turn - kOwn, slot = claim % kTurns;
    wait(&ring_.published[slot], claim / kTurns % 2);
    OSTINATO_DELAY(decode_claim_load, warp_index() == 2);
    return ring_.segment[slot];
  }

  // At the end of the launch. The last CTA has the counters as they were.
  __device__ __forceinline__ void end() const {
    if (segments_ > 0 && threadIdx.x == 0 &&
        atomicInc(&counters_[1], gridDim.x - 1) == gridDim.x - 1) {
      counters_[0] = 0;
    }
  }

 private:
  ClaimRing<kUsed>& ring_;
  uint32_t* counters_;
  int segments_ = 0;
  int asked_ = 0;       // of lane 0: the segment
  bool waits_ = false;  // whether it has not been published
  int published_ = 0;
};

template <>
class ClaimsOf<false> {
 public:
  __device__ ClaimsOf(SharedStorage& /*shared*/, const Arguments& /*params*/) {}
  __device__ __forceinline__ void begin(int /*segments*/) {}
  __device__ __forceinline__ int segments() const { return 0; }
  __device__ __forceinline__ void ask() {}
  __device__ __forceinline__ void publish() {}
  __device__ __forceinline__ int take(int turn) { return turn; }
  __device__ __forceinline__ void end() const {}
};

using Claims = ClaimsOf<kMayClaim>;

// The pieces of a CTA, in order: those of its share, or of what it claims, turn by turn.
class ClaimedTurns {
 public:
  ClaimedTurns() = default;
  __device__ ClaimedTurns(const Claims& claims, const Arguments& params, const Lengths& lengths,
                          const Cuts::Shares& shares)
      : shares_(shares) {
    walk_ = claims.segments() > 0
                ? Cuts::walk(params, lengths, heads_of(params, on_line(params)), shares, {0, 0}, 0)
                : walk_places<Cuts>(params, lengths, shares);
  }

  // The next piece; false at the end. By all lanes of a warp.
  __device__ __forceinline__ bool next(Claims& claims, const Arguments& params,
                                       const Lengths& lengths, Cuts::Piece* piece) {
    while (!walk_.next(lengths, piece)) {
      if (claims.segments() == 0 || ended_) {
        return false;
      }
      const int segment = claims.take(turn_++);
      if (segment >= claims.segments()) {
        ended_ = true;
        return false;
      }
      const OnLine on(segment, params.lines, params.by.lines);
      const Places places = Cuts::places_of_segment(shares_, on.cta);
      const int sequence =
          find_sequence(lengths, params.batch, params.by.line_heads.divide(places.begin));
      walk_ = Cuts::walk(params, lengths, heads_of(params, on), shares_, places, sequence);
    }
    return true;
  }

 private:
  Cuts::Walk walk_;
  Cuts::Shares shares_;
  int turn_ = 0;
  bool ended_ = false;
};

// Where nothing is claimed. (Not the same with parts of it unused: kernels that have no register
// left would have other ones to spare, and spill.)
class OwnTurns {
 public:
  OwnTurns() = default;
  __device__ OwnTurns(const Claims& /*claims*/, const Arguments& params, const Lengths& lengths,
                      const Cuts::Shares& shares)
      : walk_(walk_places<Cuts>(params, lengths, shares)) {}

  __device__ __forceinline__ bool next(Claims& /*claims*/, const Arguments& /*params*/,
                                       const Lengths& lengths, Cuts::Piece* piece) {
    return walk_.next(lengths, piece);
  }

 private:
  Cuts::Walk walk_;
};

using Turns = std::conditional_t<kMayClaim, ClaimedTurns, OwnTurns>;

}  // namespace ostinato::decode
