// Segments that CTAs take as they come to them, where there are many and nobody shares one.
//
// SMs read at speeds that differ by a sixth, by where they are on the chip. With equal shares the
// first CTAs end a fifth of a launch before the last ones, which alone cannot keep memory busy. So
// a CTA has two segments that are its own, and claims another whenever it begins one: the next that
// nobody has, by a counter in the workspace. A segment's bits do not depend on who works on it.
// Where halves of the L2 are known (l2_partition.cuh), each has a counter of its own.
#pragma once

#include "common/debug.cuh"
#include "split_kv.cuh"

namespace ostinato::decode {

// By one warp for its CTA, while the others are at most a piece behind.
template <bool kUsed>
class ClaimsOf {
 public:
  static constexpr int kOwn = 2;  // turns that need no claim: a piece is loaded before it is used
  static constexpr int kNone = -1;

  // By all threads, once, before a barrier of the CTA.
  __device__ ClaimsOf(SharedStorage& shared, const Arguments& params, const Lengths& lengths)
      : ring_(shared.claims), params_(params), lengths_(lengths) {
    if (warp_index() == 0 && elect_lane()) {
#pragma unroll
      for (int slot = 0; slot < kTurns; ++slot) {
        init_barrier(&ring_.published[slot], 1);
      }
    }
  }

  // `room`: of a segment on its line.
  __device__ __forceinline__ void begin(int segments, int room) {
    segments_ = segments;
    room_ = room;
    half_ = by_halves(params_) ? lengths_.own_half() : 0;
  }
  // Whether any are claimed: or else everybody has a share of his own.
  __device__ __forceinline__ bool used() const { return segments_ > 0; }

  // At the beginning of every piece, by all warps.
  __device__ __forceinline__ void ask() {
    if (segments_ > 0 && warp_index() == 0) {
      if (threadIdx.x == 0) {
        // Not atomicAdd(): for that the compiler adds up what a warp's threads add, and waits for
        // the number here, a microsecond. This one is awaited where it is used.
        asked_ = atomicInc(&params_.claims[half_], INT32_MAX);
      }
      waits_ = true;
    }
  }

  // In the second tile of a piece, or when it is asked for: it waits for what has not come back.
  __device__ __forceinline__ void publish() {
    if (!waits_) {
      return;
    }
    waits_ = false;
    const int found = find(__shfl_sync(0xffffffff, asked_, 0));
    OSTINATO_DELAY(decode_claim_store, true);
    if (threadIdx.x == 0) {
      const int slot = published_ % kTurns;
      ring_.segment[slot] = found;
      arrive(&ring_.published[slot]);
    }
    ++published_;
  }

  // The segment of a turn, or kNone past the last: in a piece's turn, of no later one than the next
  // but one.
  __device__ __forceinline__ int take(int turn) {
    if (turn < kOwn) {
      return locate(turn * gridDim.x + lengths_.number());
    }
    publish();
    const int claim = turn - kOwn, slot = claim % kTurns;
    wait(&ring_.published[slot], claim / kTurns % 2);
    OSTINATO_DELAY(decode_claim_load, warp_index() == 2);
    return ring_.segment[slot];
  }
  // Of what take() returns.
  static __device__ __forceinline__ int sequence_of(int segment) { return segment % kMaxBatch; }
  static __device__ __forceinline__ int head_of(int segment) { return segment / kMaxBatch; }

  // In the last piece, once its claim has been published: counts the CTA among those that ask no
  // more. The number comes back while the piece is worked on.
  __device__ __forceinline__ void leave() {
    if (segments_ > 0 && threadIdx.x == 0) {
      asked_ = atomicInc(&params_.claims[kLeft], gridDim.x - 1);
    }
  }
  // At the end of the launch. The last that has left has the counter of claims as it was.
  __device__ __forceinline__ void end() const {
    if (segments_ > 0 && threadIdx.x == 0 && asked_ == gridDim.x - 1) {
      params_.claims[0] = 0;
      params_.claims[1] = 0;
    }
  }

 private:
  // Counters: of claims, one for each half of the L2 or the first for all; of CTAs that have left.
  static constexpr int kLeft = 2;

  // The segment of a claim: of the half, and once those are gone of the other.
  __device__ __forceinline__ int find(uint32_t claim) {
    const int own = kOwn * gridDim.x;
    if (!by_halves(params_)) {
      return locate(own + claim);
    }
    int found = locate(own + 2 * claim + half_);
    if (found == kNone && !crossed_) {
      crossed_ = true;
      half_ ^= 1;
      uint32_t other = 0;
      if (threadIdx.x == 0) {
        other = atomicInc(&params_.claims[half_], INT32_MAX);
      }
      found = locate(own + 2 * __shfl_sync(0xffffffff, other, 0) + half_);
    }
    return found;
  }

  // By all lanes of a warp. Here and once, since to search and divide is felt at every end.
  __device__ __forceinline__ int locate(int segment) const {
    if (segment >= segments_) {
      return kNone;
    }
    const OnLine on(segment, params_.lines, params_.by.lines);
    const int live = params_.by.line_heads.divide(on.cta);  // sequences before it
    const int head = on.line + (on.cta - live * params_.line_heads) * params_.lines;
    const bool all = segments_ == params_.batch * params_.heads_kv;
    const int sequence = all ? live : find_sequence(lengths_, params_.batch, live * room_);
    return lengths_.head(sequence, head) * kMaxBatch + sequence;
  }

  ClaimRing<kUsed>& ring_;
  const Arguments& params_;
  const Lengths& lengths_;
  int segments_ = 0, room_ = 0;
  uint32_t asked_ = 0;    // of thread 0: what a counter was
  bool waits_ = false;    // whether it has not been published
  uint32_t half_ = 0;     // whose segments are claimed: first those of the SM's half
  bool crossed_ = false;  // now they are the other's
  int published_ = 0;
};

template <>
class ClaimsOf<false> {
 public:
  __device__ ClaimsOf(SharedStorage& /*shared*/, const Arguments& /*params*/,
                      const Lengths& /*lengths*/) {}
  __device__ __forceinline__ void begin(int /*segments*/, int /*room*/) {}
  __device__ __forceinline__ void ask() {}
  __device__ __forceinline__ void publish() {}
  __device__ __forceinline__ void leave() {}
  __device__ __forceinline__ void end() const {}
};

using Claims = ClaimsOf<kMayClaim>;

// The pieces of a CTA, in order: those of its share, or of what it claims, turn by turn.
template <class SomeClaims>
class ClaimedTurns {
 public:
  ClaimedTurns() = default;
  __device__ ClaimedTurns(const SomeClaims& claims, const Arguments& params, const Lengths& lengths,
                          const Cuts::Shares& shares) {
    if (!claims.used()) {
      walk_ = walk_places<Cuts>(params, lengths, shares);
    }
  }

  // The next piece; false at the end. By all lanes of a warp.
  __device__ __forceinline__ bool next(SomeClaims& claims, const Lengths& lengths,
                                       Cuts::Piece* piece) {
    if (!claims.used()) {
      const bool more = walk_.next(lengths, piece);
      if (more) {
        piece->head = lengths.head(piece->sequence, piece->head);
      }
      return more;
    }
    const int segment = ended_ ? SomeClaims::kNone : claims.take(turn_++);
    ended_ = segment == SomeClaims::kNone;
    if (!ended_) {
      *piece = Cuts::whole_piece(lengths, SomeClaims::sequence_of(segment),
                                 SomeClaims::head_of(segment));
    }
    return !ended_;
  }

 private:
  Cuts::Walk walk_;
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

  __device__ __forceinline__ bool next(Claims& /*claims*/, const Lengths& lengths,
                                       Cuts::Piece* piece) {
    return walk_.next(lengths, piece);
  }

 private:
  Cuts::Walk walk_;
};

using Turns = std::conditional_t<kMayClaim, ClaimedTurns<Claims>, OwnTurns>;

}  // namespace ostinato::decode
