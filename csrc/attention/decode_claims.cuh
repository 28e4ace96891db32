// Segments that CTAs take as they come to them, where there are many and nobody shares one.
//
// SMs read at speeds that differ by a sixth, by where they are on the chip. With equal shares the
// first CTAs end a fifth of a launch before the last ones, which alone cannot keep memory busy. So
// a CTA has two segments that are its own, and claims another whenever it begins one: the next that
// nobody has, by a counter in the workspace. A segment's bits do not depend on who works on it.
// Where halves of the L2 are known (decode_halves.cuh), each has a counter of its own.
#pragma once

#include "common/debug.cuh"
#include "decode_cuts.cuh"
#include "warp_instructions.cuh"

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
    by_halves_ = knows_halves(params) && params.batch > Lengths::kFew && gridDim.x % 2 == 0;
    if (by_halves_ && threadIdx.x == kThreads - 1) {
      take_ticket();
    }
  }

  // `room`: of a segment on its line.
  __device__ __forceinline__ void begin(int segments, int room) {
    segments_ = segments;
    room_ = room;
    if (by_halves_ && segments > 0) {
      half_ = ring_.half;
      begins_ = HalfTickets::place(half_, HalfTickets::rank(ring_.taken, half_), places());
    }
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
      return by_halves_ ? locate(turn * places() + begins_.rank, begins_.half)
                        : locate(turn * gridDim.x + blockIdx.x);
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
  // Counters: of claims, one for each half or the first for all; of CTAs that have left; of
  // tickets.
  static constexpr int kLeft = 2, kTickets = 3;
  static_assert(kTickets < kClaimCounters, "the workspace has them all");

  // The CTAs that begin in a half, if not more SMs are in one than in the other.
  __device__ __forceinline__ int places() const { return static_cast<int>(gridDim.x / 2); }

  // Before the predecessor has ended, by one thread of every CTA. The last one has the counter as
  // it was: no successor starts before it has come back from here.
  __device__ __forceinline__ void take_ticket() {
    const uint32_t sm = sm_index();
    ring_.half =
        sm < 32 * Halves::kSmWords ? params_.halves.sms[sm / 32] >> (sm % 32) & 1 : uint32_t{0};
    uint32_t* const counter = &params_.claims[kTickets];
    ring_.taken = atomicAdd(counter, HalfTickets::step(ring_.half));
    if (HalfTickets::count(ring_.taken) == gridDim.x - 1) {
      *counter = 0;
      __threadfence();
    }
  }

  // The segment of a claim: of the half, and once those are gone of the other.
  __device__ __forceinline__ int find(uint32_t claim) {
    if (!by_halves_) {
      return locate(claim + kOwn * gridDim.x);
    }
    int found = locate(kOwn * places() + claim, half_);
    if (found == kNone && !crossed_) {
      crossed_ = true;
      half_ ^= 1;
      uint32_t other = 0;
      if (threadIdx.x == 0) {
        other = atomicInc(&params_.claims[half_], INT32_MAX);
      }
      found = locate(kOwn * places() + __shfl_sync(0xffffffff, other, 0), half_);
    }
    return found;
  }

  // Of those of a half.
  __device__ __forceinline__ int locate(int segment, uint32_t half) const {
    if (segment >= segments_ / 2) {
      return kNone;
    }
    const int live = params_.by.half_heads.divide(segment);
    const int index = segment - live * (params_.heads_kv / 2);
    const int sequence = live_sequence(live);
    const int head = head_in_half(params_.halves, index, lengths_.half(sequence), half);
    return head * kMaxBatch + sequence;
  }

  // By all lanes of a warp. Here and once, since to search and divide is felt at every end.
  __device__ __forceinline__ int locate(int segment) const {
    if (segment >= segments_) {
      return kNone;
    }
    const OnLine on(segment, params_.lines, params_.by.lines);
    const int live = params_.by.line_heads.divide(on.cta);  // sequences before it
    const int head = on.line + (on.cta - live * params_.line_heads) * params_.lines;
    return head * kMaxBatch + live_sequence(live);
  }
  // With `live` sequences that have tiles before it.
  __device__ __forceinline__ int live_sequence(int live) const {
    const bool all = segments_ == params_.batch * params_.heads_kv;
    return all ? live : find_sequence(lengths_, params_.batch, live * room_);
  }

  ClaimRing<kUsed>& ring_;
  const Arguments& params_;
  const Lengths& lengths_;
  int segments_ = 0, room_ = 0;
  uint32_t asked_ = 0;  // of thread 0: what a counter was
  bool waits_ = false;  // whether it has not been published
  bool by_halves_ = false;
  uint32_t half_ = 0;     // whose segments are claimed: first the SM's
  bool crossed_ = false;  // it is the other
  HalfPlace begins_ = {};
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
      return walk_.next(lengths, piece);
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
