// The throttle: delays the copies of warps that are ahead of the mean, in launches where each CTA
// has equally many tiles, and many of them, in few splits or in long ones.
//
// SMs read memory at speeds that differ by a fifth, by their position on the chip and the load of
// their neighbours, so with equal shares the slowest SMs finish alone. Memory bandwidth is shared
// and its queues are long: if a fast warp delays a request, a slow warp's request completes
// earlier. Every few tiles, warps increment a common counter, and a warp ahead of the mean waits.
// This changes only when a block is requested.
#pragma once

#include "split_kv.cuh"

namespace ostinato::decode {

template <bool kUsed>
class ThrottleOf {
 public:
  // Called by whole warps once the lengths are known.
  template <class Shares>
  __device__ ThrottleOf(const Arguments& params, const Seqlens& seqlens, const Shares& shares)
      : counter_(params.scheduler_counters) {
    const int share = shares.quota, line_length = seqlens.start(params.batch);  // of one KV head
    const bool few_or_long = share <= kFewSplits * shares.room || shares.room >= kLongSplit;
    if (share < kLeastTiles || !few_or_long || !are_filled(params, seqlens, line_length)) {
      return;
    }
    const int grid = gridDim.x;
    // CTAs that have work. Idle CTAs count as finished from the start.
    const int clusters = divide_up(line_length * params.line_heads, share) * params.lines;
    const int ctas = min(clusters * kClusterCtas, grid);
    const int idle = (grid - ctas) * kWarps;
    counts_ = share / kEvery;
    last_ = grid * kWarps * counts_ - 1;
    by_count_ = __fdividef(kEvery * kClocks, static_cast<float>(ctas * kWarps));
    head_start_ = static_cast<float>(idle * counts_) * by_count_ - kAllowed * kClocks;
  }

  __device__ __forceinline__ bool used() const { return counts_ > 0; }

  // Called by whole warps after each tile, before its stage is loaded again.
  __device__ __forceinline__ void pass() {
    ++passed_;
    const int after = passed_ % kEvery;
    if ((after != 0 && after != kAwaited) || passed_ < kEvery ||
        counts_made() * kEvery + after != passed_) {
      return;
    }
    if (threadIdx.x % 32 == 0) {
      if (after == 0) {
        counted_ = atomicInc(counter_, last_);
      } else {
        wait_for_mean();
      }
    }
    __syncwarp();
  }

  // At the end of the launch: adds the counts that this warp still owes. Every warp, idle or not,
  // counts equally often, so that the counter wraps to zero.
  __device__ __forceinline__ void end() const {
    if (!used()) {
      return;
    }
#pragma unroll 1
    for (int i = counts_made() + static_cast<int>(threadIdx.x) % 32; i < counts_; i += 32) {
      atomicInc(counter_, last_);
    }
  }

 private:
  // minimum tiles per CTA: shorter launches end before the throttle acts
  static constexpr int kLeastTiles = 48;
  // At the end of a split warps wait for each other, so that delaying one delays all. With more
  // splits than these, each of fewer tiles than these, the throttle costs more than it gains.
  static constexpr int kFewSplits = 2, kLongSplit = 64;
  static constexpr int kEvery = 8;    // tiles between two counts
  static constexpr int kAwaited = 2;  // tiles after which the result of the atomic has arrived
  // Tiles that a warp may be ahead of the mean. Warps in step appear a few tiles ahead, since the
  // mean is taken over completed counts.
  static constexpr int kAllowed = 4;
  // clocks per tile, and the longest delay
  static constexpr float kClocks = 5700, kMostClocks = 22800;

  // Whether nearly all positions of the line hold tiles. Otherwise some CTAs have less work, and
  // their warps are not really ahead.
  static __device__ __forceinline__ bool are_filled(const Arguments& params, const Seqlens& seqlens,
                                                    int line_length) {
    int tiles = 0;
#pragma unroll 1
    for (int b = threadIdx.x % 32; b < params.batch; b += 32) {
      tiles += seqlens.tiles(b);
    }
    return line_length - __reduce_add_sync(0xffffffff, tiles) <= line_length / 16;
  }

  // Counts made so far. The last one is left to end(), where no warp should wait.
  __device__ __forceinline__ int counts_made() const { return min(passed_ / kEvery, counts_ - 1); }

  // Called by one lane.
  __device__ __forceinline__ void wait_for_mean() const {
    const float ahead = static_cast<float>(passed_ - kAwaited) * kClocks -
                        static_cast<float>(static_cast<int>(counted_)) * by_count_;
    const int clocks = static_cast<int>(fminf(ahead + head_start_, kMostClocks));
    const int begin = static_cast<int>(clock());
    while (static_cast<int>(clock()) - begin < clocks) {
      __nanosleep(40);
    }
  }

  uint32_t* counter_;
  int counts_ = 0;  // per warp and launch
  int passed_ = 0;  // tiles processed
  uint32_t last_ = 0, counted_ = 0;
  float by_count_ = 0, head_start_ = 0;  // clocks
};

template <>
class ThrottleOf<false> {
 public:
  template <class Shares>
  __device__ ThrottleOf(const Arguments& /*params*/, const Seqlens& /*seqlens*/,
                        const Shares& /*shares*/) {}
  __device__ __forceinline__ bool used() const { return false; }
  __device__ __forceinline__ void pass() {}
  __device__ __forceinline__ void end() const {}
};

using Throttle = ThrottleOf<kMayThrottle>;

}  // namespace ostinato::decode
