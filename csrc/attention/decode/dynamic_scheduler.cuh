// The dynamic scheduler: CTAs take whole work tiles one by one from a counter in the workspace,
// where there are many and none is split.
//
// SMs read at speeds that differ by a sixth, by their position on the chip. With equal shares the
// first CTAs end a fifth of a launch before the last ones, which alone cannot keep memory busy. So
// each CTA has two work tiles of its own, and requests the next free one whenever it begins one.
// The bits of a work tile do not depend on the CTA that processes it. Where L2 partitions are known
// (l2_partition.cuh), each partition has its own counter.
#pragma once

#include "common/debug.cuh"
#include "split_kv.cuh"

namespace ostinato::decode {

// By one warp for its CTA, while the others are at most a split behind.
template <bool kUsed>
class DynamicSchedulerOf {
 public:
  static constexpr int kOwn = 2;  // work tiles of a CTA that need no request
  static constexpr int kNone = -1;

  // By all threads, once, before a barrier of the CTA.
  __device__ DynamicSchedulerOf(SharedStorage& shared, const Arguments& params,
                                const Seqlens& seqlens)
      : ring_(shared.scheduler), params_(params), seqlens_(seqlens) {
    if (warp_index() == 0 && elect_lane()) {
#pragma unroll
      for (int slot = 0; slot < kScheduledAhead; ++slot) {
        init_barrier(&ring_.published[slot], 1);
      }
    }
  }

  // `room`: of a work tile on its line.
  __device__ __forceinline__ void begin(int work_tiles, int room) {
    work_tiles_ = work_tiles;
    room_ = room;
    partition_ = by_l2_partition(params_) ? seqlens_.own_partition() : 0;
  }
  // Whether any are scheduled dynamically: or else everybody has a share of his own.
  __device__ __forceinline__ bool used() const { return work_tiles_ > 0; }

  // At the beginning of every split, by all warps.
  __device__ __forceinline__ void ask() {
    if (work_tiles_ > 0 && warp_index() == 0) {
      if (threadIdx.x == 0) {
        // Not atomicAdd(): for that the compiler adds up what a warp's threads add, and waits for
        // the number here, a microsecond. This one is awaited where it is used.
        asked_ = atomicInc(&params_.scheduler_counters[partition_], INT32_MAX);
      }
      waits_ = true;
    }
  }

  // In the second tile of a split, or when it is asked for: it waits for what has not come back.
  __device__ __forceinline__ void publish() {
    if (!waits_) {
      return;
    }
    waits_ = false;
    const int found = find(__shfl_sync(0xffffffff, asked_, 0));
    OSTINATO_DELAY(decode_schedule_store, true);
    if (threadIdx.x == 0) {
      const int slot = published_ % kScheduledAhead;
      ring_.work_tile[slot] = found;
      arrive(&ring_.published[slot]);
    }
    ++published_;
  }

  // The work tile of a turn, or kNone past the last: in a split's turn, of no later one than the
  // next but one.
  __device__ __forceinline__ int take(int turn) {
    if (turn < kOwn) {
      return locate(turn * gridDim.x + seqlens_.number());
    }
    publish();
    const int claim = turn - kOwn, slot = claim % kScheduledAhead;
    wait(&ring_.published[slot], claim / kScheduledAhead % 2);
    OSTINATO_DELAY(decode_schedule_load, warp_index() == 2);
    return ring_.work_tile[slot];
  }
  // Of what take() returns.
  static __device__ __forceinline__ int sequence_of(int work_tile) { return work_tile % kMaxBatch; }
  static __device__ __forceinline__ int head_of(int work_tile) { return work_tile / kMaxBatch; }

  // In the last split, once its request has been published: counts the CTA among those that
  // request no more. The number comes back while the split is worked on.
  __device__ __forceinline__ void leave() {
    if (work_tiles_ > 0 && threadIdx.x == 0) {
      asked_ = atomicInc(&params_.scheduler_counters[kLeft], gridDim.x - 1);
    }
  }
  // At the end of the launch. The last CTA to leave resets the request counters.
  __device__ __forceinline__ void end() const {
    if (work_tiles_ > 0 && threadIdx.x == 0 && asked_ == gridDim.x - 1) {
      params_.scheduler_counters[0] = 0;
      params_.scheduler_counters[1] = 0;
    }
  }

 private:
  // Counters: of requests, one per L2 partition or the first for all; of CTAs that have left.
  static constexpr int kLeft = 2;

  // The work tile of a request: of this L2 partition, and once those are gone of the other.
  __device__ __forceinline__ int find(uint32_t claim) {
    const int own = kOwn * gridDim.x;
    if (!by_l2_partition(params_)) {
      return locate(own + claim);
    }
    int found = locate(own + 2 * claim + partition_);
    if (found == kNone && !crossed_) {
      crossed_ = true;
      partition_ ^= 1;
      uint32_t other = 0;
      if (threadIdx.x == 0) {
        other = atomicInc(&params_.scheduler_counters[partition_], INT32_MAX);
      }
      found = locate(own + 2 * __shfl_sync(0xffffffff, other, 0) + partition_);
    }
    return found;
  }

  // By all lanes of a warp. Here and once, since to search and divide is felt at every end.
  __device__ __forceinline__ int locate(int work_tile) const {
    if (work_tile >= work_tiles_) {
      return kNone;
    }
    const OnLine on(work_tile, params_.lines, params_.by.lines);
    const int live = params_.by.line_heads.divide(on.cta);  // sequences before it
    const int head = on.line + (on.cta - live * params_.line_heads) * params_.lines;
    const bool all = work_tiles_ == params_.batch * params_.heads_kv;
    const int sequence = all ? live : find_sequence(seqlens_, params_.batch, live * room_);
    return seqlens_.head(sequence, head) * kMaxBatch + sequence;
  }

  SchedulerRing<kUsed>& ring_;
  const Arguments& params_;
  const Seqlens& seqlens_;
  int work_tiles_ = 0, room_ = 0;
  uint32_t asked_ = 0;  // of thread 0: what a counter was
  bool waits_ = false;  // whether it has not been published
  uint32_t partition_ =
      0;  // whose work tiles are scheduled dynamically: first those of the SM's half
  bool crossed_ = false;  // now they are the other's
  int published_ = 0;
};

template <>
class DynamicSchedulerOf<false> {
 public:
  __device__ DynamicSchedulerOf(SharedStorage& /*shared*/, const Arguments& /*params*/,
                                const Seqlens& /*seqlens*/) {}
  __device__ __forceinline__ void begin(int /*work_tiles*/, int /*room*/) {}
  __device__ __forceinline__ void ask() {}
  __device__ __forceinline__ void publish() {}
  __device__ __forceinline__ void leave() {}
  __device__ __forceinline__ void end() const {}
};

using DynamicScheduler = DynamicSchedulerOf<kMayScheduleDynamically>;

// The splits of a CTA, in order: static ones, or those that it requests one by one.
template <class SomeScheduler>
class DynamicSplits {
 public:
  DynamicSplits() = default;
  __device__ DynamicSplits(const SomeScheduler& scheduler, const Arguments& params,
                           const Seqlens& seqlens, const Splits::Shares& shares) {
    if (!scheduler.used()) {
      walk_ = walk_line<Splits>(params, seqlens, shares);
    }
  }

  // The next split; false at the end. By all lanes of a warp.
  __device__ __forceinline__ bool next(SomeScheduler& scheduler, const Seqlens& seqlens,
                                       Splits::Split* split) {
    if (!scheduler.used()) {
      const bool more = walk_.next(seqlens, split);
      if (more) {
        split->head = seqlens.head(split->sequence, split->head);
      }
      return more;
    }
    const int work_tile = ended_ ? SomeScheduler::kNone : scheduler.take(turn_++);
    ended_ = work_tile == SomeScheduler::kNone;
    if (!ended_) {
      *split = Splits::whole_split(seqlens, SomeScheduler::sequence_of(work_tile),
                                   SomeScheduler::head_of(work_tile));
    }
    return !ended_;
  }

 private:
  Splits::Walk walk_;
  int turn_ = 0;
  bool ended_ = false;
};

// Where nothing is scheduled dynamically. (Not the same with partials of it unused: kernels that
// have no register left would have other ones to spare, and spill.)
class StaticSplits {
 public:
  StaticSplits() = default;
  __device__ StaticSplits(const DynamicScheduler& /*scheduler*/, const Arguments& params,
                          const Seqlens& seqlens, const Splits::Shares& shares)
      : walk_(walk_line<Splits>(params, seqlens, shares)) {}

  __device__ __forceinline__ bool next(DynamicScheduler& /*scheduler*/, const Seqlens& seqlens,
                                       Splits::Split* split) {
    return walk_.next(seqlens, split);
  }

 private:
  Splits::Walk walk_;
};

using CtaSplits =
    std::conditional_t<kMayScheduleDynamically, DynamicSplits<DynamicScheduler>, StaticSplits>;

}  // namespace ostinato::decode
