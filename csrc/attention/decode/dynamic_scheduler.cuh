// The dynamic scheduler: CTAs request whole work tiles one by one from a counter in the workspace.
// Used if there are many work tiles and none is split.
//
// SMs read memory at speeds that differ by a sixth, by their position on the chip. With equal
// shares the fastest CTAs would end a fifth of the launch before the slowest, which alone cannot
// saturate memory. So each CTA starts with two work tiles and requests another one whenever it
// begins one. The bits of a work tile do not depend on the CTA that processes it. If L2 partitions
// are known (l2_partition.cuh), each partition has its own counter.
#pragma once

#include "common/debug.cuh"
#include "split_kv.cuh"

namespace ostinato::decode {

// Requests are made by warp 0 for its CTA; the other warps are at most one split behind.
template <bool kUsed>
class DynamicSchedulerOf {
 public:
  static constexpr int kOwn = 2;  // work tiles that a CTA has without a request
  static constexpr int kNone = -1;

  // Called by all threads once, before a barrier of the CTA.
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

  // `room`: positions between two work tiles of a head on the line.
  __device__ __forceinline__ void begin(int work_tiles, int room) {
    work_tiles_ = work_tiles;
    room_ = room;
    partition_ = by_l2_partition(params_) ? seqlens_.own_partition() : 0;
  }
  // Whether work tiles are scheduled dynamically. Otherwise each CTA has a static share.
  __device__ __forceinline__ bool used() const { return work_tiles_ > 0; }

  // Requests a work tile. Called by all warps at the beginning of every split.
  __device__ __forceinline__ void request() {
    if (work_tiles_ > 0 && warp_index() == 0) {
      if (threadIdx.x == 0) {
        // Not atomicAdd(): the compiler aggregates it over the warp and waits for the result here,
        // which takes a microsecond. The result of this instruction is awaited at its first use.
        reply_ = atomicInc(&params_.scheduler_counters[partition_], INT32_MAX);
      }
      pending_ = true;
    }
  }

  // Hands the requested work tile to the other warps. Called in the second tile of a split, or by
  // take(), which then waits for the atomic.
  __device__ __forceinline__ void publish() {
    if (!pending_) {
      return;
    }
    pending_ = false;
    const int found = find(__shfl_sync(0xffffffff, reply_, 0));
    OSTINATO_DELAY(decode_schedule_store, true);
    if (threadIdx.x == 0) {
      const int slot = published_ % kScheduledAhead;
      ring_.work_tile[slot] = found;
      arrive(&ring_.published[slot]);
    }
    ++published_;
  }

  // The work tile with this index in the CTA's sequence, or kNone past the last one. During a split
  // at most the work tile after the next may be asked for.
  __device__ __forceinline__ int take(int index) {
    if (index < kOwn) {
      return locate(index * gridDim.x + seqlens_.number());
    }
    publish();
    const int request = index - kOwn, slot = request % kScheduledAhead;
    wait(&ring_.published[slot], request / kScheduledAhead % 2);
    OSTINATO_DELAY(decode_schedule_load, warp_index() == 2);
    return ring_.work_tile[slot];
  }
  // Parts of the result of take().
  static __device__ __forceinline__ int sequence_of(int work_tile) { return work_tile % kMaxBatch; }
  static __device__ __forceinline__ int head_of(int work_tile) { return work_tile / kMaxBatch; }

  // Called in the last split, after its request was published: counts this CTA among those that
  // make no more requests. The result of the atomic arrives while the split is processed.
  __device__ __forceinline__ void leave() {
    if (work_tiles_ > 0 && threadIdx.x == 0) {
      reply_ = atomicInc(&params_.scheduler_counters[kLeft], gridDim.x - 1);
    }
  }
  // Called at the end of the launch. The last CTA to leave resets the request counters.
  __device__ __forceinline__ void end() const {
    if (work_tiles_ > 0 && threadIdx.x == 0 && reply_ == gridDim.x - 1) {
      params_.scheduler_counters[0] = 0;
      params_.scheduler_counters[1] = 0;
    }
  }

 private:
  // Counters 0 and 1 count requests per L2 partition (0 alone without partitions); 2 counts CTAs
  // that have left.
  static constexpr int kLeft = 2;

  // The work tile of a request: of this L2 partition, then, once those are used up, of the other.
  __device__ __forceinline__ int find(uint32_t request) {
    const int own = kOwn * gridDim.x;
    if (!by_l2_partition(params_)) {
      return locate(own + request);
    }
    int found = locate(own + 2 * request + partition_);
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

  // Called by all lanes of a warp. Done once here, since searching and dividing by every warp would
  // slow the end of every split.
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
  uint32_t reply_ = 0;      // thread 0: result of the last atomic
  bool pending_ = false;    // a request has not been published yet
  uint32_t partition_ = 0;  // L2 partition whose counter is used: at first that of the SM
  bool crossed_ = false;    // the partition's own work tiles are used up
  int published_ = 0;
};

template <>
class DynamicSchedulerOf<false> {
 public:
  __device__ DynamicSchedulerOf(SharedStorage& /*shared*/, const Arguments& /*params*/,
                                const Seqlens& /*seqlens*/) {}
  __device__ __forceinline__ void begin(int /*work_tiles*/, int /*room*/) {}
  __device__ __forceinline__ void request() {}
  __device__ __forceinline__ void publish() {}
  __device__ __forceinline__ void leave() {}
  __device__ __forceinline__ void end() const {}
};

using DynamicScheduler = DynamicSchedulerOf<kMayScheduleDynamically>;

// The splits of a CTA in order: static ones, or those that it requests one by one.
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
    const int work_tile = ended_ ? SomeScheduler::kNone : scheduler.take(index_++);
    ended_ = work_tile == SomeScheduler::kNone;
    if (!ended_) {
      *split = Splits::whole_split(seqlens, SomeScheduler::sequence_of(work_tile),
                                   SomeScheduler::head_of(work_tile));
    }
    return !ended_;
  }

 private:
  Splits::Walk walk_;
  int index_ = 0;
  bool ended_ = false;
};

// For kernels without a dynamic scheduler. A class of its own: with DynamicSplits and its unused
// members, kernels without spare registers would spill.
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
